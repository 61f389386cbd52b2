"""Child processes that live for long: all are started here, and each ends when its standard input closes."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import IO, ParamSpec

_MAX_PARENT = 70
_log = logging.getLogger("longspan")
ParametersT = ParamSpec("ParametersT")


def start_child(
    module: str,
    *arguments: str,
    stdout: int | None = None,
    stderr: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` with a pipe as its standard input; keep that open for as long as it is wanted."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: no code from the current folder
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=stderr,
        env=env,
        start_new_session=True,  # signals to the terminal's group are the parent's to handle
    )


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


def make_run_dir() -> str:
    """Makes a private folder for sockets, whose paths may have some 100 characters: not below a long TMPDIR."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="longspan-", dir=parent if len(parent) < _MAX_PARENT else "/tmp")  # noqa: S108 - private
