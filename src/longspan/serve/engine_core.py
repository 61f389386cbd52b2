"""The engine core of a server: `python -m longspan.serve.engine_core FOLDER`, its setup a line of JSON on stdin.

It ends when the API server tells it to, and when its standard input closes: with the API server, however that ends.
This module is light: the process that forks workers imports PyTorch while this one does, not afterwards.
"""

from __future__ import annotations

import gc
import logging
import shutil
import signal
import sys
import tempfile

from longspan.core.exports import uncollected
from longspan.runtime.child import end_with_parent
from longspan.runtime.executor.forkserver import start_server


def main() -> None:
    """Runs until told to quit; exits with 1 when it cannot start or workers do not come back."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the API server decides when to stop
    tempfile.tempdir = folder = sys.argv[1]  # what lies in it is removed with it, whoever of the two is killed
    line = sys.stdin.buffer.readline()
    if not line:  # the API server is gone already
        shutil.rmtree(folder, ignore_errors=True)
        return
    end_with_parent(sys.stdin.fileno(), remove=folder)  # and workers end with us
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("longspan").setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    start_server()
    with uncollected():
        from longspan.serve.engine_loop import serve  # noqa: PLC0415 - seconds of imports
    gc.freeze()

    sys.exit(serve(line, folder))


if __name__ == "__main__":
    main()
