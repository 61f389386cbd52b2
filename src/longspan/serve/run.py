"""Runs a server until a signal: starts the API server, then the engine core, and drains both at the end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from longspan.args import EngineArgs
from longspan.errors import ParameterError
from longspan.serve.app import make_app
from longspan.serve.client import EngineClient, abandon
from longspan.serve.errors import error_response
from longspan.serve.messages import EngineSetup
from longspan.serve.middleware import CONNECTIONS_LOG, HttpProtocol, Intake, RequestContext, path_of
from longspan.serve.server import Server, WorkerPool
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import InputProcessor
from longspan.text.tokenizer import import_tokenizers, tokenizer_in

if TYPE_CHECKING:
    from longspan.serve.request_recorder import RequestRecorder

_log = logging.getLogger("longspan")
_POLL_S = 0.05
_MAX_MS = 2**31 - 1
"""Longest timeout of a socket, in milliseconds: the system counts them in 32 bits."""
_BACKLOG = 2048
_ACCEPTED_AT_ONCE = 16
"""Connections that are accepted before they are counted. A larger number could exhaust the open files."""
_MAX_FILES, _OTHER_FILES = 16_384, 128
"""The limit of open files that the server requests, and the part that is not for connections."""
_CLOSE_TIMEOUT_S = 2
"""Seconds in which the last responses may reach slow clients."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Http(uvicorn.Server):
    """Does not handle signals: while the server drains, new requests are still answered, with 503."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class RareLines(logging.Filter):
    """Drops lines that begin with `words` for a minute after one of them."""

    def __init__(self, words: str = "") -> None:
        super().__init__()
        self._words, self._quiet_until_s = words, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for a dropped line."""
        if not str(record.msg).startswith(self._words):
            return True
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            return False
        self._quiet_until_s = now_s + 60
        return True


@contextlib.contextmanager
def _quiet_connections() -> Iterator[None]:
    """Bound the log lines that a client causes by opening many connections."""
    filters = {CONNECTIONS_LOG: RareLines(), "asyncio": RareLines("socket.accept() out of system resource")}
    for name, lines in filters.items():
        logging.getLogger(name).addFilter(lines)
    try:
        yield
    finally:
        for name, lines in filters.items():
            logging.getLogger(name).removeFilter(lines)


class _Signals:
    """SIGINT and SIGTERM: the first starts draining, the second stops at once. Later signals change nothing."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first, self.second = asyncio.Event(), asyncio.Event()

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        before = [signal.getsignal(number) for number in _SIGNALS]
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number, handler in zip(_SIGNALS, before, strict=True):
                loop.remove_signal_handler(number)  # this installs Python's own handler
                signal.signal(number, handler)

    def _take(self, number: int) -> None:
        self.numbers.append(number)
        (self.second if self.first.is_set() else self.first).set()


async def serve(setup: EngineSetup, settings: ServerSettings) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit code, which is 0 if all open requests were answered.

    Raises:
        ValueError: the setup is wrong, or the address is not free.
        EngineLostError: the engine does not start, or cannot be kept alive.
    """
    signals, app = _Signals(), StartingApp(settings.root_path, logs_access=settings.access_log)
    recorder = None if settings.record is None else open_recorder(Path(settings.record), setup.engine)
    listening = listening_socket(settings.host, settings.port, settings.reader_timeout_s)
    address = listening.getsockname()[:2]
    _log.info("loading %s; until it serves, http://%s:%d answers 503", setup.engine.model, *address)
    engine = EngineClient(setup, recorder)
    with signals.caught():
        try:
            async with _answering(app, listening, settings, signals):
                server = await _first_of(_start(engine, settings, setup.engine), signals.first.wait())
                if not isinstance(server, Server):
                    return 128 + signals.numbers[0]
                app.app = make_app(server)
                _log.info("serving %s on http://%s:%d", settings.model_names[0], *address)
                return await _serve_until_stopped(server, signals)
        finally:
            listening.close()
            await engine.close(signals.second)
            if recorder is not None:
                await asyncio.to_thread(recorder.close)


def open_recorder(path: Path, given: EngineArgs) -> RequestRecorder:
    """Open a recording of requests. Raise ParameterError if its file cannot be written."""
    from longspan.serve.request_recorder import RequestRecorder, layout_of  # noqa: PLC0415 - few servers record

    return RequestRecorder(path, layout_of(given))


async def _start(engine: EngineClient, settings: ServerSettings, given: EngineArgs) -> Server:
    imports = WorkerPool("imports", 1)  # the end of the process does not wait for it
    concurrent = () if given.skip_tokenizer_init else (imports.run(import_tokenizers),)
    started, *_ = await asyncio.gather(engine.start(), *concurrent)
    tokenizer = None
    if started.tokenizer_dir is not None:  # tokenizers take long to load
        folder, trust = Path(started.tokenizer_dir), started.trust_remote_code
        load = partial(tokenizer_in, folder, started.name, trust_remote_code=trust)
        tokenizer = await imports.run(load)
        if settings.chat_template is not None:
            tokenizer.chat_template = settings.chat_template
    size = {"vocab_size": started.vocab_size, "max_model_len": started.max_model_len}
    return Server(engine, InputProcessor(tokenizer=tokenizer, **size), settings)


@contextlib.asynccontextmanager
async def _answering(
    app: StartingApp, listening: socket.socket, settings: ServerSettings, signals: _Signals
) -> AsyncIterator[None]:
    """Handle connections in the block. Close them at its end, when the last responses have been sent."""
    config = uvicorn.Config(
        app,
        http=HttpProtocol,  # it bounds headers
        ws="none",
        h11_max_incomplete_event_size=settings.max_header_bytes,
        lifespan="off",
        limit_concurrency=max_connections(raise_file_limit()) + 1,
        backlog=_ACCEPTED_AT_ONCE,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=settings.timeout_keep_alive_s,
        timeout_graceful_shutdown=_CLOSE_TIMEOUT_S,
    )
    http = _Http(config)
    serving = asyncio.create_task(http.serve(sockets=[listening]))
    with _quiet_connections():
        try:
            while not http.started and not serving.done():  # noqa: ASYNC110 - before that, `should_exit` has no effect
                await asyncio.sleep(0)
            listening.listen(_BACKLOG)  # longer than asyncio's backlog, see `_ACCEPTED_AT_ONCE`
            yield
        finally:
            http.should_exit = True
            await _first_of(asyncio.shield(serving), signals.second.wait())
            http.force_exit = signals.second.is_set()
            await serving


async def _serve_until_stopped(server: Server, signals: _Signals) -> int:
    await _first_of(signals.first.wait(), server.engine.down.wait())
    server.intake.drain()
    timeout_s = 0.0 if server.engine.down.is_set() else server.settings.shutdown_timeout_s
    _log.info("stopping; open requests have %g s", timeout_s)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while server.intake.open_requests and not signals.second.is_set():  # noqa: ASYNC110 - `open_requests` is no event
                await asyncio.sleep(_POLL_S)
    drained = not server.intake.open_requests
    server.engine.fail_all("the server is shutting down")
    if server.engine.down.is_set():
        return 1
    return 0 if drained else 128 + signals.numbers[-1]


async def _first_of(*waits: Awaitable[object]) -> object:
    """Return the result of the awaitable that is done first, and cancel the rest."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            abandon(task)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to `_MAX_FILES` or the hard limit, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < num_files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    return num_files


def max_connections(num_files: int) -> int:
    """Return the number of connections that fit in this number of open files."""
    return num_files - min(_OTHER_FILES, num_files // 2)


def listening_socket(host: str, port: int, reader_timeout_s: float) -> socket.socket:
    """Open the listening socket before the model is loaded, so that a port in use is an early error.

    Connections inherit its options. Without TCP_NODELAY, the body of a response would wait 40 ms for the client to
    acknowledge the head. The option is set here because asyncio sets it only for sockets whose protocol is TCP.

    On Linux, TCP_USER_TIMEOUT closes a connection whose client reads nothing for `reader_timeout_s`. Otherwise, closing
    would wait until the client reads the rest.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listening.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(min(_MAX_MS, reader_timeout_s * 1000))
            )
        return listening
    except (OSError, OverflowError) as error:
        is_host = isinstance(error, socket.gaierror) or getattr(error, "errno", None) == errno.EADDRNOTAVAIL
        problem = f"cannot be {host if is_host else port}, since the server cannot listen on {host}:{port} ({error})"
        raise ParameterError("host" if is_host else "port", f"{problem}: choose another one") from None


class StartingApp:
    """An ASGI app in place of `app`. Until `app` is set, `/live` is answered 200, everything else 503."""

    def __init__(self, root_path: str, *, logs_access: bool = True) -> None:
        self.app: ASGIApp = RequestContext(_starting, root_path, Intake(), logs_access=logs_access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def _starting(scope: Scope, receive: Receive, send: Send) -> None:
    if path_of(scope) == "/live":
        response = JSONResponse({"status": "ok"})
    else:
        response = error_response(503, "the engine is starting", retry_after_s=5)
    await response(scope, receive, send)
