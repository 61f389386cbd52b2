"""A longspan server with the default model, in a process of its own, for benchmarks of unmodified clients."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ADDRESS = re.compile(r"serving \S+ on (http://\S+)")


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[str]:
    """Start a server with these flags for the duration of the block, and yield its URL. Its log is in `folder`."""
    command = [sys.executable, "-m", "longspan", "serve", "--port", "0", *flags]
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        while (address := _ADDRESS.search(log.read_text())) is None:
            if process.poll() is not None:
                sys.exit(f"the server did not start:\n{log.read_text()}")
            time.sleep(0.1)
        yield address[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
