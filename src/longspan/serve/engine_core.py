"""The engine core of a server: `python -m longspan.serve.engine_core FOLDER`, with its setup as JSON on stdin.

It ends at a `Quit` message, and when its standard input closes, which happens however the API server ends.
This module imports little, so that the process that forks workers imports PyTorch concurrently with this process.
"""

from __future__ import annotations

import gc
import json
import shutil
import signal
import sys
import tempfile

from longspan import logs
from longspan.core.exports import uncollected
from longspan.runtime.child import end_with_parent
from longspan.runtime.executor.forkserver import start_server


def main() -> None:
    """Run until a `Quit` message. Exit with 1 if the engine cannot start or lost workers cannot be replaced."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the API server decides when to stop
    tempfile.tempdir = folder = sys.argv[1]  # both processes remove this folder at their end
    line = sys.stdin.buffer.readline()
    if not line:  # the API server is gone already
        shutil.rmtree(folder, ignore_errors=True)
        return
    end_with_parent(sys.stdin.fileno(), remove=folder)  # workers end with this process
    setup = json.loads(line)
    logs.configure(setup["log_level"], setup["log_format"])
    start_server()
    with uncollected():
        from longspan.serve.engine_loop import serve  # noqa: PLC0415 - seconds of imports
    gc.freeze()

    sys.exit(serve(line, folder))


if __name__ == "__main__":
    main()
