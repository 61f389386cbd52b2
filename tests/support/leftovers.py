"""Traces of engines on a machine: processes, run folders and segments of shared memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_OTHERS = ("__KMP_", "sem.mp-")
"""Of foreign OpenMPs, and of process pools of other tests: engines have no such semaphores."""


def left_names() -> set[str]:
    """Lists run folders and shared-memory segments of this machine, but those of `_OTHERS`."""
    folders = {path.name for path in Path(tempfile.gettempdir()).glob("longspan-*")}
    return folders | {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(_OTHERS)}


def wait_until_gone(pids: Iterable[int], before: set[str]) -> None:
    """Wait until processes and new names are gone. Names of other tests may come and go meanwhile."""
    deadline = time.monotonic() + 60
    new = left_names() - before
    while True:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]
        new &= left_names()
        if not alive and not new:
            return
        assert time.monotonic() < deadline, (alive, new)
        time.sleep(0.1)
