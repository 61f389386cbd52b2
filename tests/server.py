"""A real `longspan serve`: started, waited for, asked, stopped, and looked after: nothing of it may be left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil
from openai import OpenAI

_START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.1
_SERVING = re.compile(r"serving .* on (http://\S+)$", re.MULTILINE)


@dataclass(kw_only=True)
class RunningServer:
    """A server that answers.

    Attributes:
        log: the file with what it has written to stderr.
        folder: where it makes its temporary folders, and nobody else does.
    """

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    folder: Path

    def openai(self, api_key: str = "none", **options: object) -> OpenAI:
        """The official client, which tries nothing twice."""
        return OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, **options)  # type: ignore[arg-type]

    def family(self) -> list[psutil.Process]:
        """It, its engine process, and the workers."""
        process = psutil.Process(self.process.pid)
        return [process, *process.children(recursive=True)]

    def stop(self) -> int:
        """Asks it to stop, and returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_STOP_TIMEOUT_S)


@contextmanager
def running(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[RunningServer]:
    """Starts `longspan serve` with these arguments on a free port; at the end nothing may be left of it."""
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        folder = Path(name)
        server = _start(folder, arguments, environment or {})
        family: list[psutil.Process] = []
        try:
            _wait_until_healthy(server)
            family = server.family()
            yield server
            assert server.stop() == 0, server.log.read_text()
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()
        _check_nothing_is_left(server, family)


def _start(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> RunningServer:
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "longspan", "serve", *arguments, "--port", "0"],
            stdout=file,
            stderr=file,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **environment},
        )
    return RunningServer(process=process, url="", log=log, folder=folder)


def _wait_until_healthy(server: RunningServer) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        text = server.log.read_text()
        assert server.process.poll() is None, text
        if found := _SERVING.search(text):
            server.url = found[1]
            if httpx2.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        time.sleep(_POLL_S)
    raise AssertionError(f"the server did not start:\n{server.log.read_text()}")


def _check_nothing_is_left(server: RunningServer, family: Sequence[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive, f"processes are left: {alive}"
    assert list(server.folder.glob("longspan-*")) == []
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
