"""A control group with a memory limit for processes of a test. Tests without the right to make one are skipped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_MOUNT = Path("/sys/fs/cgroup")
_REMOVE_TIMEOUT_S = 10.0


class MemoryGroup:
    """Added processes and their later children share its limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._is_v1 = folder, (folder / "memory.limit_in_bytes").exists()
        (folder / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(str(limit))
        if not self._is_v1:
            (folder / "memory.swap.max").write_text("0")

    def add(self, pid: int) -> None:
        (self._folder / "cgroup.procs").write_text(str(pid))

    @property
    def num_kills(self) -> int:
        """Processes that the kernel has ended since they used up the limit."""
        lines = (self._folder / ("memory.oom_control" if self._is_v1 else "memory.events")).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Make a group below the group of this process, so that all its limits hold too. Skip where that fails."""
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").exists() else []
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    parent = _MOUNT / "memory" / own["memory"].lstrip("/") if "memory" in own else _MOUNT / own.get("", "").lstrip("/")
    folder = parent / f"longspan-{time.monotonic_ns()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {parent}: {error.strerror}")
    try:
        try:
            group = MemoryGroup(folder, limit)
        except OSError as error:
            pytest.skip(f"{folder} takes no memory limit: {error.strerror}")
        yield group
    finally:
        deadline_s = time.monotonic() + _REMOVE_TIMEOUT_S
        while folder.exists() and time.monotonic() < deadline_s:
            with suppress(OSError):  # processes in it have ended, but the kernel still counts them
                folder.rmdir()
            time.sleep(0.05)
