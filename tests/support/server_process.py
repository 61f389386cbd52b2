"""A real `longspan serve` process. It must exit as expected, and leave nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
from server_client import Client

KEY = "sesame"
"""Without one, a server's policy would not be changed."""
MODEL, OTHER_NAME, MAX_MODEL_LEN = "tiny", "gpt-4o-mini", 4096
"""The name of the model of the shared server, and the length of its longest request."""

_VARIABLES = {"OMP_NUM_THREADS": "1", "LONGSPAN_DTYPE": "float32"}
_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 60.0
_LEAVE_TIMEOUT_S = 15.0
_POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")
_ADDRESS = re.compile(r"serving \S+ on http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
_LOSSES = ("new workers", "another engine core")
"""The log lines about lost processes."""


@contextmanager
def running(*arguments: str, log: Path, environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """Start `longspan serve` with these arguments, and wait until it answers. Close it at the end."""
    server = ServerProcess(arguments, log, environment or {})
    try:
        server.wait_until_healthy()
        yield server
        server.close()
    finally:
        server.destroy()


class ServerProcess:
    """Use `running` to have one.

    Attributes:
        process: the API server.
        client: asks it, with its API key if it has one.
        log: stdout and stderr of all its processes.
    """

    client: Client

    def __init__(self, arguments: tuple[str, ...], log: Path, environment: Mapping[str, str]) -> None:
        self.log = log
        self._folder = Path(tempfile.mkdtemp(prefix="ls-"))  # of temporary files, short for sockets
        self._api_key = environment.get("LONGSPAN_API_KEY")
        self._exit_code: int | None = None  # the expected one, once the process was ended
        self._is_hurt = self._is_closed = False
        self._others = set(_SHARED_MEMORY.iterdir())  # process ids come again: a name may be another's of before
        with log.open("wb") as file:
            self.process = psutil.Popen(
                [sys.executable, "-m", "longspan", "serve", *arguments, "--port", "0"],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, **_VARIABLES, "TMPDIR": str(self._folder), **environment},
            )
        self._seen: set[psutil.Process] = {self.process}

    def wait_until_healthy(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while (found := _ADDRESS.search(self.text())) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, f"it does not start:\n{self.text()}"
            time.sleep(_POLL_S)
        self.client = Client(port=int(found[1]), api_key=self._api_key)
        self.client.wait_for_health(200, 10)
        assert self.family

    def text(self) -> str:
        """The log so far."""
        return self.log.read_text(errors="replace")

    @property
    def family(self) -> list[psutil.Process]:
        """Its descendants: the engine core, the fork server, and the workers."""
        found = self.process.children(recursive=True)
        self._seen.update(found)
        return found

    def one(self, what: str) -> psutil.Process:
        """The descendant that is an `engine`, a `forkserver`, or a `worker`."""
        forker = next(child for child in self.family if "longspan.runtime.executor.forkserver_main" in child.cmdline())
        if what == "worker":
            return forker.children()[0]
        return forker if what == "forkserver" else forker.parent()

    def memory_bytes(self) -> int:
        """Resident memory of all its processes."""
        return sum(process.memory_info().rss for process in (self.process, *self.family))

    def terminate(self) -> None:
        """SIGTERM."""
        assert self.family
        self._exit_code = 0
        self.process.send_signal(signal.SIGTERM)

    def kill(self, what: str) -> None:
        """SIGKILL to one of its processes, `API server` included. From now on its log may have lines about losses."""
        self._is_hurt = True
        if what == "API server":
            assert self.family
            self._exit_code = -signal.SIGKILL
            self.process.kill()
        else:
            self.one(what).kill()

    def close(self, timeout_s: float = _STOP_TIMEOUT_S) -> None:
        """Stops it, unless a test has, and checks that it ends well and leaves nothing. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._exit_code is None:
            assert self.process.poll() is None, f"it has ended by itself:\n{self.text()}"
            self.terminate()
        assert self.process.wait(timeout_s) == self._exit_code, self.text()
        self._check_nothing_is_left()
        assert "Traceback" not in self.text(), self.text()
        assert self._is_hurt or not any(words in self.text() for words in _LOSSES), self.text()

    def destroy(self) -> None:
        """By force, whatever is left."""
        for process in self._seen:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        shutil.rmtree(self._folder)

    def _check_nothing_is_left(self) -> None:
        """Check that no process, folder, shared memory or listener is left."""
        _, alive = psutil.wait_procs(self._seen, timeout=_LEAVE_TIMEOUT_S)
        pids = {str(process.pid) for process in self._seen}
        new = set(_SHARED_MEMORY.iterdir()) - self._others
        segments = [path for path in new if not pids.isdisjoint(re.findall(r"\d+", path.name))]
        left = [*alive, *self._folder.iterdir(), *segments]
        assert not left, f"left behind: {left}"
        with closing(socket.create_server(("127.0.0.1", self.client.port))):
            pass  # raises if a process still listens
