"""Memory and CPU cores that this process may use: all of the machine, or less in a container with limits.

Limits come from Linux control groups, version 1 and 2: the group of this process and all groups above it that
it sees. The number of cores also follows the affinity of the process, which the kernel keeps inside its cpuset.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

MAX_TEXT_BYTES = 64 * 2**20
"""Maximum bytes of a prompt or a file of options: about 16 million tokens, more than the context of any model."""
_ROOT = Path("/")
_UNIFIED = "cgroup2"
"""File system type of version 2, whose single hierarchy has all controllers."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of memory that this process may use, together with all processes that share its limit.

    Attributes:
        total: the memory of the machine, or the lowest limit.
        available: the part that is free or holds droppable copies of files.
        is_limited: whether a control group limits it to less than the machine's memory.
    """

    total: int
    available: int
    is_limited: bool


def memory(root: Path = _ROOT) -> Memory:
    """Return the memory that this process may use. `root` holds `proc` and the control groups."""
    import psutil  # noqa: PLC0415 - not needed by verbs without an engine

    machine = psutil.virtual_memory()
    total, available = machine.total, machine.available
    for group in _groups("memory", root):
        used, files = _memory_used(group)
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            limit = _number(group / name)
            if limit is not None:
                total, available = min(total, limit), min(available, limit - max(0, used - files))
    return Memory(total=total, available=max(0, available), is_limited=total < machine.total)


def cores(root: Path = _ROOT) -> int:
    """Return the number of CPU cores that this process may use, by its affinity or a lower quota.

    A quota of 2.5 cores counts as 2: with a third thread, the kernel pauses all threads when the quota is used up.
    """
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu", root):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is None:
            quota, period = (_as_number(word) for word in (*_words(group / "cpu.max"), "", "")[:2])
        if quota is not None and period and quota > 0:
            number = min(number, max(1, quota // period))
    return number


def num_oom_kills(root: Path = _ROOT) -> int:
    """Count the processes that the kernel has killed for lack of memory: in this control group, or on the machine.

    An increase between two calls explains a SIGKILL between them.
    """
    for group in _groups("memory", root):
        for name in ("memory.events", "memory.oom_control"):
            if (number := _fields(group / name).get("oom_kill")) is not None:
                return number
    return _fields(root / "proc/vmstat").get("oom_kill", 0)


def read_bytes(path: Path, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read a file of the user. Raise OSError if it is longer, as devices and pipes may be."""
    with path.open("rb") as file:
        return read_all(file, max_bytes)


def read_text(path: Path) -> str:
    """Read a text file of the user. Raise OSError if it is too long or not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise OSError(errno.EILSEQ, "it is no text") from None


def read_all(file: IO[bytes], max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Read the rest of an open file. Raise OSError if it is longer."""
    data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"it is longer than {max_bytes >> 20} MiB")
    return data


def _memory_used(group: Path) -> tuple[int, int]:
    """Return the bytes that a group uses, and the part that is copies of files."""
    fields = _fields(group / "memory.stat")
    if (used := _number(group / "memory.current")) is not None:
        return used, sum(fields.get(name, 0) for name in ("inactive_file", "active_file", "slab_reclaimable"))
    files = sum(fields.get(name, 0) for name in ("total_inactive_file", "total_active_file"))
    return _number(group / "memory.usage_in_bytes") or 0, files


# ---------------------------------------------------------------- control groups


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yield the folders of the groups that may limit this process, its own group before the groups above.

    A container may not see the folder that the kernel names. The mounted folder is then its own group or a group above.
    """
    paths = _paths(controller, root)
    mounts = [(paths[kind], top, point) for kind, top, point in _mounts(controller, root) if kind in paths]
    is_seen = any(_below(path, top) is not None for path, top, _ in mounts)
    for path, top, point in mounts:
        below = _below(path, top)
        if below is not None:
            yield from (point / part for part in (below, *below.parents))
        elif not is_seen:
            yield point


def _below(path: str, top: str) -> Path | None:
    """Return the path of a group below the top of a mount, or None if it is not below."""
    folder = Path(path)
    if ".." in folder.parts or not folder.is_relative_to(top):
        return None
    return folder.relative_to(top)


def _paths(controller: str, root: Path) -> dict[str, str]:
    """Return this process's groups, by `cgroup` for version 1 and `cgroup2`, from lines `4:cpu,cpuacct:/path`."""
    paths = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            paths[_UNIFIED] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    return paths


def _mounts(controller: str, root: Path) -> Iterator[tuple[str, str, Path]]:
    """Yield the type, the top and the mount point of each hierarchy that may have a controller.

    The mount of version 2 does not list its controllers. Files of controllers of version 1 are missing there.
    """
    for line in _lines(root / "proc/self/mountinfo"):
        front, _, back = line.partition(" - ")
        kind, _, options = (*back.split(" "), "", "")[:3]
        if kind == _UNIFIED or (kind == "cgroup" and controller in options.split(",")):
            top, point = (_unescaped(word) for word in front.split(" ")[3:5])
            yield kind, top, root / point.lstrip("/")


def _unescaped(text: str) -> str:
    r"""Decode a path of `mountinfo`, in which a space is `\040`."""
    for code in ("040", "011", "012", "134"):
        text = text.replace(f"\\{code}", chr(int(code, 8)))
    return text


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are a name and a number."""
    pairs = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number in a file. None for `max` or a missing file."""
    return _as_number(" ".join(_words(path)))


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _as_number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdecimal() else None


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, or an empty list if it is missing or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
