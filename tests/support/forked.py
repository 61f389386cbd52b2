"""Functions in processes that are forked from a process with PyTorch imported.

The parent process starts with the first function, has a single thread, and ends with this process.
"""

from __future__ import annotations

import multiprocessing.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path

multiprocessing.util.get_temp_dir()  # its socket is not to be in a folder that a test takes for temporary files
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch.distributed", "longspan.llm", "longspan.attn.check", "longspan.runtime.worker_process", "test_exchanges"]
)


class Forked:
    """A process that runs `function(*arguments)`. Its exit code is 1 if the function raises.

    Its environment is ours, updated by `environment`. With `own_group`, signals for our group do not reach it.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        own_group: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ls-forked-")
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        names = [str(path) for path in self._outputs]
        call = (function, arguments, {**os.environ, **(environment or {})}, own_group, names)
        self._process: ForkServerProcess = _context.Process(target=_run, args=call)
        self._process.start()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        assert pid is not None, "it was started"
        return pid

    @property
    def stdout(self) -> str:
        """Return its output so far."""
        return self._outputs[0].read_text() if self._outputs[0].exists() else ""

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Wait for its end. Kill it after the timeout.

        Raises:
            TimeoutError: when it does.
        """
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            self._process.join()
        out, err = (path.read_text() if path.exists() else "" for path in self._outputs)
        self._process.close()
        self._folder.cleanup()
        if code is None:
            raise TimeoutError(f"it still runs after {timeout_s} s: {out}{err}")
        return subprocess.CompletedProcess([], code, out, err)


def run_ranks(
    function: Callable[[str, int, int], object], store: Path, num_ranks: int, timeout_s: float = 60
) -> list[subprocess.CompletedProcess[str]]:
    """Call `function(store, num_ranks, rank)` in a process for each rank. Wait until all have ended."""
    ranks = [Forked(function, str(store), num_ranks, rank) for rank in range(num_ranks)]
    return [rank.wait(timeout_s) for rank in ranks]


def free_port() -> int:
    """Return an unused port of this machine."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return int(free.getsockname()[1])


def _run(
    function: Callable[..., object],
    arguments: Sequence[object],
    environment: Mapping[str, str],
    own_group: bool,
    outputs: Sequence[str],
) -> None:
    if own_group:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    multiprocessing.set_start_method("fork", force=True)  # as in any process on Linux
    for number, name in enumerate(outputs, start=1):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    function(*arguments)
