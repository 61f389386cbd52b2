"""A whole server in one process: the API routes, the engine core and the workers are threads, the wire is real.

`EngineSetup` crosses a pipe as JSON and all other messages a socket as msgpack, as between real processes.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from engines import InOrderLauncher
from server_client import Reply, completion
from starlette.testclient import TestClient

from longspan.args import EngineArgs
from longspan.errors import WorkerLostError
from longspan.runtime.messages import Failed, WorkerConfig
from longspan.serve import core_process, engine_loop
from longspan.serve.app import make_app
from longspan.serve.client import EngineClient
from longspan.serve.engine_loop import EngineLoop
from longspan.serve.messages import EngineSetup
from longspan.serve.server import Server
from longspan.serve.settings import ServerSettings
from longspan.service import Service
from longspan.text.input_processor import InputProcessor

_KEY = "sesame"


class MortalLauncher(InOrderLauncher):
    """Starts workers that `lose` ends."""

    def lose(self, rank: int) -> None:
        """Report a failure of a worker, from any thread. The controller then ends all workers."""
        if not self.channel.context.closed:
            with self.channel.reporter() as socket:
                socket.send(msgspec.msgpack.encode(Failed(rank, "it was killed", peer=False)))


class CoreKilledError(Exception):
    """Ends the thread of an engine core."""


class ThreadCore:
    """An engine core in a thread, in place of the `Popen` of its process."""

    class Pipe(io.BytesIO):
        """Starts the core at the first flush."""

        core: ThreadCore

        def flush(self) -> None:
            self.core.begin(self.getvalue())

    def __init__(self, server: ThreadServer, folder: str) -> None:
        self.stdin = ThreadCore.Pipe()
        self.stdin.core = self
        self.is_killed = False
        self.launcher: MortalLauncher | None = None
        self.service: Service | None = None
        self._server, self._folder, self._code = server, folder, 1
        self._thread: threading.Thread | None = None

    def begin(self, setup_json: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(setup_json,), daemon=True)
            self._thread.start()

    def kill(self) -> None:
        """End the core as SIGKILL ends its process: with its workers, and without a message."""
        self.is_killed = True
        if self.launcher is not None and self._thread is not None and self._thread.is_alive():
            self.launcher.lose(0)

    def wait(self, timeout_s: float | None = None) -> int:
        assert self._thread is not None
        self._thread.join(timeout_s)
        return self._code

    def _run(self, setup_json: bytes) -> None:
        _here.core = self
        try:
            self._code = engine_loop.serve(setup_json, self._folder)
        except CoreKilledError:
            self._code = -9


_here = threading.local()


def _launcher(config: WorkerConfig) -> MortalLauncher:
    core: ThreadCore = _here.core
    core.launcher = MortalLauncher(config)
    return core.launcher


class _Service(Service):
    def __init__(self, given: EngineArgs, **options: Any) -> None:
        super().__init__(given, launcher=_launcher, **options)
        core: ThreadCore = _here.core
        core.service = self


class _Loop(EngineLoop):
    def _restart(self, error: WorkerLostError) -> None:
        if _here.core.is_killed:
            raise CoreKilledError
        super()._restart(error)


class ThreadServer:
    """Use `thread_server` to make one. It has the methods of a client of a real server."""

    def __init__(self, setup: EngineSetup, portal: BlockingPortal) -> None:
        self._portal, self.cores = portal, list[ThreadCore]()
        self._client: EngineClient = portal.call(partial(EngineClient), setup)

    def start(self) -> None:
        started = self._portal.call(self._client.start)
        size = {"vocab_size": started.vocab_size, "max_model_len": started.max_model_len}
        settings = ServerSettings(model_names=("tiny",), api_keys=(_KEY,))
        server = Server(self._client, InputProcessor(tokenizer=None, **size), settings)
        self._asking = TestClient(
            make_app(server), raise_server_exceptions=False, headers={"authorization": f"Bearer {_KEY}"}
        )
        self._asking.portal = self._portal  # requests share the event loop of the engine client

    def close(self) -> None:
        self._portal.call(self._client.close)
        assert not [core for core in self.cores if core.wait(30) not in {0, 1, -9}]

    def ask(self, method: str, path: str, body: object = None) -> Reply:
        reply = self._asking.request(method, path, json=body)
        return Reply(status=reply.status_code, headers=dict(reply.headers), data=reply.content)

    def complete(self, **fields: object) -> Reply:
        return self.ask("POST", "/v1/completions", completion(**fields))

    @property
    def service(self) -> Service:
        """The service of the latest engine core."""
        service = self.cores[-1].service
        assert service is not None
        return service

    def kill(self, what: str) -> None:
        """End a worker or the engine core, and wait until the server serves again."""
        core = self.cores[-1]
        assert core.launcher is not None
        executor = self.service.executor
        if what == "worker":
            core.launcher.lose(0)
        else:
            core.kill()
        deadline_s = time.monotonic() + 60
        while self._client.state != "serving" or self.service.executor is executor:
            assert self._client.state != "down" and time.monotonic() < deadline_s, f"the engine is {self._client.state}"
            time.sleep(0.01)
        self.complete(prompt=[5], max_tokens=1)  # its answer follows all reports of the loss


@contextmanager
def thread_server(given: EngineArgs, *, max_worker_restarts: int | None = None) -> Iterator[ThreadServer]:
    """Start a server with the options of an engine. It is closed at the end.

    Raises:
        ValueError: the engine core refuses the options.
    """
    setup = EngineSetup(
        engine=given, max_num_queued_reqs=100, max_num_queued_tokens=10**6, max_worker_restarts=max_worker_restarts
    )
    with start_blocking_portal() as portal, pytest.MonkeyPatch.context() as patch:
        server = ThreadServer(setup, portal)

        def start_core(_: str, folder: str) -> ThreadCore:
            server.cores.append(ThreadCore(server, folder))
            return server.cores[-1]

        patch.setattr(core_process, "start_child", start_core)
        patch.setattr(engine_loop, "Service", _Service)
        patch.setattr(engine_loop, "EngineLoop", _Loop)
        try:
            server.start()
            yield server
        finally:
            server.close()
