"""Long-lived child processes: each is to end when its standard input closes, so with its parent."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping

_MAX_PARENT = 70


def start_child(
    module: str, *arguments: str, stdout: int | None = None, env: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Starts `python -m module` with a pipe as its standard input; keep that open for as long as it is wanted."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],  # -P: no code from the current folder
        stdin=subprocess.PIPE,
        stdout=stdout,
        env=env,
        start_new_session=True,  # signals to the terminal's group are the parent's to handle
    )


def make_run_dir() -> str:
    """Makes a private folder for sockets, whose paths may have some 100 characters: not below a long TMPDIR."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="longspan-", dir=parent if len(parent) < _MAX_PARENT else "/tmp")  # noqa: S108 - private
