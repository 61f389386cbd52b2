"""Starts and ends of long-lived child processes. A child ends when its standard input closes."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, ParamSpec

from longspan import limits

MAX_PARENT = 70  # characters of a folder for sockets
_log = logging.getLogger("longspan")
ParametersT = ParamSpec("ParametersT")
_children: list[subprocess.Popen[bytes]] = []
_run_dirs: list[str] = []


def start_child(
    module: str,
    *arguments: str,
    stdout: int | None = None,
    stderr: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start `python -m module` with a pipe as its standard input. The child runs while the pipe is open."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: no code from the current folder
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=True,  # only the parent handles signals to the terminal's process group
    )
    _children[:] = [*(other for other in _children if other.returncode is None), child]
    return child


def end_all() -> None:
    """Kill all children and their own children, and remove the folders of `make_run_dir`, before the process exits."""
    for child in _children:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    for folder in _run_dirs:
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent(descriptor: int, *, remove: str | None = None) -> None:
    """Exit when the other end of the pipe `descriptor` closes, after removing the folder `remove`."""

    def wait() -> None:
        while os.read(descriptor, 1):  # sys.stdin would hold its lock when the process exits
            pass
        _log.warning("the parent process has exited")
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def unless_forked(function: Callable[ParametersT, None]) -> Callable[ParametersT, None]:
    """Wrap a clean-up so that it does nothing in a process forked later.

    A forked process also runs finalizers, but the files and processes still belong to its parent.
    """
    owner = os.getpid()

    def call(*args: ParametersT.args, **kwargs: ParametersT.kwargs) -> None:
        if os.getpid() == owner:
            function(*args, **kwargs)

    return call


def how_ended(code: int) -> str:
    """Describe an exit code. Negative codes are signals."""
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with code {code}"


def lack_of_memory(code: int, num_oom_kills: int) -> str | None:
    """Return the error text and remedy if the kernel's OOM killer ended a child, else None.

    Args:
        code: the exit code.
        num_oom_kills: `limits.num_oom_kills` when the child was started.
    """
    if code != -signal.SIGKILL or limits.num_oom_kills() <= num_oom_kills:
        return None
    memory = limits.memory()
    exhausted = "the memory limit of this container" if memory.is_limited else "the memory of this machine"
    return (
        f"{exhausted} ({memory.total / 2**30:.1f} GiB) was used up: allow less for KV (--kv-cache-memory-bytes, "
        "--host-kv-gib) or steps (--max-num-batched-tokens), or raise the limit"
    )


def make_run_dir() -> str:
    """Create a private folder for sockets. Avoids a long TMPDIR: socket paths have at most about 100 characters."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="longspan-", dir=parent if len(parent) < MAX_PARENT else "/tmp")  # noqa: S108 - private
    _run_dirs[:] = [*filter(os.path.isdir, _run_dirs), folder]
    return folder
