"""Servers as processes, and just enough of a client to be rude to them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from longspan.serve import client as client_module


def install_fake_engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Engine processes are those of `fake_engine.py`; the folders that are shared with them lie in `folder`."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), path]))
    monkeypatch.setattr(client_module, "_ENGINE_MODULE", "fake_engine")


def told(events: Path, *kinds: str) -> list[dict[str, Any]]:
    """What fake engines were told, those kinds of it."""
    lines = map(json.loads, events.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["event"] in kinds]


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        return int(listening.getsockname()[1])


@dataclass(frozen=True, kw_only=True)
class Reply:
    """An answer to a request."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def body(self) -> Any:
        return json.loads(self.data)

    @property
    def events(self) -> list[Any]:
        """Of a stream: the JSON of all its events, without the last `[DONE]`."""
        lines = [line.removeprefix(b"data: ") for line in self.data.split(b"\n\n") if line.startswith(b"data: ")]
        return [json.loads(line) for line in lines if line != b"[DONE]"]

    @property
    def token_ids(self) -> list[int]:
        """Of the only choice of a completion that asked for them, streamed or not."""
        bodies = self.events if self.headers["content-type"].startswith("text/event-stream") else [self.body]
        return [token for body in bodies for choice in body["choices"] for token in choice["token_ids"]]


@dataclass(frozen=True, kw_only=True)
class Client:
    """Asks a server on this machine."""

    port: int

    def ask(self, method: str, path: str, body: object = None, *, timeout_s: float = 60, **headers: str) -> Reply:
        """Raises OSError or HTTPException when there is no whole answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)) as connection:
            data = None if body is None else json.dumps(body)
            sent = {"content-type": "application/json", **headers}
            connection.request(method, path, data, {name.replace("_", "-"): text for name, text in sent.items()})
            reply = connection.getresponse()
            found = {name.lower(): text for name, text in reply.getheaders()}
            return Reply(status=reply.status, headers=found, data=reply.read())

    def complete(self, *, timeout_s: float = 200, **fields: object) -> Reply:
        return self.ask("POST", "/v1/completions", completion(**fields), timeout_s=timeout_s)

    def leave_after(self, seconds: float, **fields: object) -> None:
        """Asks for a completion and disconnects, with or without an answer."""
        with closing(send_completion(self.port, **fields)):
            time.sleep(seconds)

    def metrics(self) -> dict[str, float]:
        """By name with labels, but without that of the model: `kv_blocks_used{instance="0"}`."""
        found = {}
        for line in self.ask("GET", "/metrics").data.decode().splitlines():
            if line.startswith("longspan:"):
                name, _, value = line.removeprefix("longspan:").rpartition(" ")
                found[re.sub(r',?model_name="[^"]*",?', "", name).removesuffix("{}")] = float(value)
        return found

    def wait_until_idle(self, timeout_s: float = 60) -> dict[str, float]:
        """Until nothing runs, waits, or holds a block; then the metrics."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            left = {name: value for name, value in metrics.items() if _OCCUPIED.match(name) and value}
            if not left:
                return metrics
            assert time.monotonic() < deadline_s, left
            time.sleep(0.1)

    def wait_for_health(self, status: int, timeout_s: float) -> float:
        """Until `/health` has that status; how long it took."""
        start_s = time.monotonic()
        while True:
            try:
                if self.ask("GET", "/health", timeout_s=5).status == status:
                    return time.monotonic() - start_s
            except OSError:
                pass  # it does not listen yet
            assert time.monotonic() - start_s < timeout_s, f"/health is not {status} after {timeout_s} s"
            time.sleep(0.05)


_OCCUPIED = re.compile(r"num_requests_(running|waiting)|kv_cache_usage_perc|instance_kv_blocks_used")


def completion(**fields: object) -> dict[str, object]:
    """A greedy completion of just so many tokens, told as token ids."""
    return {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **fields}


def send_completion(port: int, **fields: object) -> socket.socket:
    """A connection on which a completion has been asked for."""
    data = json.dumps(completion(**fields)).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    lines = ("host: x", "content-type: application/json", f"content-length: {len(data)}")
    head = "\r\n".join(("POST /v1/completions HTTP/1.1", *lines, "", ""))
    connection.sendall(head.encode() + data)
    return connection


async def ask_async(port: int, path: str, body: object = None, **headers: str) -> Reply:
    """The same for tests that run the server in their own event loop; the connection is closed after the answer."""
    return await asyncio.to_thread(
        Client(port=port).ask, "GET" if body is None else "POST", path, body, connection="close", **headers
    )


class ServerProcess:
    """`longspan serve`, as users start it."""

    def __init__(self, model: Path | str, log: Path, *flags: str) -> None:
        self.client = Client(port=free_port())
        self.log, self.folder = log, Path(tempfile.mkdtemp(prefix="ls-"))  # short: it is to hold sockets
        self.seen: set[psutil.Process] = set()
        command = [sys.executable, "-m", "longspan", "serve", str(model), "--port", str(self.client.port), *flags]
        with log.open("wb") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(self.folder)}
            self.process = psutil.Popen(command, stdout=file, stderr=file, env=environment)

    def wait_until_ready(self) -> None:
        try:
            self.client.wait_for_health(200, 90)
        except AssertionError:
            pytest.fail(f"the server does not start:\n{self.log.read_text()}")
        assert self.family

    @property
    def family(self) -> list[psutil.Process]:
        """Its descendants: the engine process, the one that forks workers, and these."""
        found = self.process.children(recursive=True)
        self.seen.update(found)
        return found

    def one(self, what: str) -> psutil.Process:
        """The descendant that is an `engine`, a `forkserver`, or a `worker`."""
        forker = next(child for child in self.family if "longspan.runtime.forkserver_main" in child.cmdline())
        if what == "worker":
            return forker.children()[0]
        return forker if what == "forkserver" else forker.parent()

    def stop(self, timeout_s: float = 60) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return int(self.process.wait(timeout_s))

    def kill(self, what: str) -> None:
        """SIGKILL to one of its processes, `face` included."""
        (psutil.Process(self.process.pid) if what == "face" else self.one(what)).kill()

    def memory_bytes(self) -> int:
        """Resident memory of all its processes."""
        return sum(process.memory_info().rss for process in (self.process, *self.family))

    def check_nothing_is_left(self) -> None:
        """Once it has ended: no process, no folder, no shared memory, nobody on its port."""
        _, alive = psutil.wait_procs(self.seen, timeout=15)
        for process in alive:
            process.kill()
        assert not alive, f"left behind: {alive}"
        assert not list(self.folder.iterdir())
        segments = [path.name for path in Path("/dev/shm").iterdir()]
        assert not [name for name in segments if any(str(process.pid) in name for process in self.seen)]
        with closing(socket.create_server(("127.0.0.1", self.client.port))):
            pass  # raises if somebody still listens


class Servers:
    """One server per set of flags: started when it is first asked for, and again when a test has ended it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._all: list[ServerProcess] = []
        self._latest: dict[tuple[str, ...], ServerProcess] = {}

    def get(self, model: Path | str, *flags: str) -> ServerProcess:
        """One that is ready."""
        key = (str(model), *flags)
        if key not in self._latest or self._latest[key].process.poll() is not None:
            self._latest[key] = server = ServerProcess(model, self._logs / f"{len(self._all)}.log", *flags)
            self._all.append(server)
            server.wait_until_ready()
        return self._latest[key]

    def close(self) -> None:
        """Ends them all; nothing is left of any, and each that still runs ends well."""
        codes = {}
        for server in self._all:
            if server.process.poll() is None:
                assert server.family
                codes[server.log] = server.stop()
        for server in self._all:
            server.check_nothing_is_left()
            server.folder.rmdir()
        assert not any(codes.values()), codes
