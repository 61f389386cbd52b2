"""Child processes that live for long: all are started here, and each ends when its standard input closes."""

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

_MAX_PARENT = 70
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
    """Starts `python -m module` with a pipe as its standard input; keep that open for as long as it is wanted."""
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: no code from the current folder
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=True,  # signals to the terminal's group are the parent's to handle
    )
    _children[:] = [*(one for one in _children if one.returncode is None), child]
    return child


def end_all() -> None:
    """Kill all children and their own children, and remove the folders of `make_run_dir`: the process ends."""
    for child in _children:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    for folder in _run_dirs:
        shutil.rmtree(folder, ignore_errors=True)


def end_with_parent(descriptor: int, *, remove: str | None = None) -> None:
    """End this process when the other end of the pipe `descriptor` closes, and remove the folder `remove` before."""

    def wait() -> None:
        while os.read(descriptor, 1):  # not by sys.stdin, whose lock would be held when the process ends
            pass
        _log.warning("the parent process is gone")
        if remove is not None:
            shutil.rmtree(remove, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def unless_forked(function: Callable[ParametersT, None]) -> Callable[ParametersT, None]:
    """Wraps a clean-up so that it does nothing in a child forked later, which shares files and processes but owns none.

    Such a child also collects objects and exits.
    """
    owner = os.getpid()

    def call(*args: ParametersT.args, **kwargs: ParametersT.kwargs) -> None:
        if os.getpid() == owner:
            function(*args, **kwargs)

    return call


def how_ended(code: int) -> str:
    """Write an exit code as a part of a sentence; negative ones are signals."""
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with code {code}"


def lack_of_memory(code: int, num_oom_kills: int) -> str | None:
    """Say that the kernel ended a child for lack of memory, and what helps; None if it did not.

    Args:
        code: the exit code.
        num_oom_kills: `limits.num_oom_kills` when the child was started.
    """
    if code != -signal.SIGKILL or limits.num_oom_kills() <= num_oom_kills:
        return None
    memory = limits.memory()
    whose = "the memory limit of this container" if memory.is_limited else "the memory of this machine"
    return (
        f"{whose} ({memory.total / 2**30:.1f} GiB) was used up; allow less for KV (--kv-cache-memory-bytes, "
        "--host-kv-gib) or steps (--max-num-batched-tokens), or raise the limit"
    )


def make_run_dir() -> str:
    """Makes a private folder for sockets, whose paths may have some 100 characters: not below a long TMPDIR."""
    parent = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="longspan-", dir=parent if len(parent) < _MAX_PARENT else "/tmp")  # noqa: S108 - private
    _run_dirs[:] = [*filter(os.path.isdir, _run_dirs), folder]
    return folder
