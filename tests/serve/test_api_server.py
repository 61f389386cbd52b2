"""The API server over an engine that computes nothing: clients that leave, stall or wait, deadlines, and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import (
    BEGIN,
    ENDS_AT_ONCE,
    FLOOD,
    NEVER_QUITS,
    NEVER_STARTS,
    PACED,
    SAY,
    SILENT,
    STARTS_LATE,
    STUCK,
    UNACCEPTED,
    WRONG,
)
from fake_engine_install import told, until
from forked import free_port
from server_client import Client, Reply, completion, post, send_completion

from longspan.args import EngineArgs
from longspan.serve import run
from longspan.serve.errors import EngineLostError
from longspan.serve.messages import EngineSetup
from longspan.serve.middleware import HttpProtocol
from longspan.serve.output_queue import OutputQueue
from longspan.serve.run import RareLines, listening_socket, max_connections, raise_file_limit, serve
from longspan.serve.settings import ServerSettings


class ApiServer:
    """A server in this process."""

    def __init__(self, port: int, running: asyncio.Task[int]) -> None:
        self.port, self.running = port, running

    async def complete(
        self, what: int, max_tokens: int = 3, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> Reply:
        body = completion(prompt=[what], max_tokens=max_tokens, **fields)
        return await ask(self.port, "/v1/completions", body, **headers or {})

    def send(self, what: int, max_tokens: int = 3, **fields: Any) -> socket.socket:
        return send_completion(self.port, prompt=[what], max_tokens=max_tokens, **fields)

    async def stopped(self, *numbers: int) -> int:
        """The exit code after these signals."""
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.3)
        return await asyncio.wait_for(self.running, 60)


@asynccontextmanager
async def serving(events: Path, **settings: Any) -> AsyncIterator[ApiServer]:
    """An API server that is up, and that leaves no task behind."""
    running = asyncio.create_task(serve_fake(events, **settings))
    try:
        api = ApiServer(await heard_port(), running)
        assert (await ask(api.port, "/health")).status == 200
        yield api
    finally:
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(running, 60)
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def serve_fake(events: Path, port: int = 0, **settings: Any) -> int:
    setup = EngineSetup(engine=EngineArgs(str(events)), max_num_queued_reqs=1024, max_num_queued_tokens=2**20)
    return await serve(setup, ServerSettings(model_names=("fake",), port=port, **settings))


async def heard_port() -> int:
    """Return the log of a server that starts in this process."""
    heard: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    handler = logging.Handler()
    handler.emit = lambda record: heard.set_result(record.args[2]) if record.msg.startswith("serving") else None
    log = logging.getLogger("longspan")
    before = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        return await asyncio.wait_for(heard, 60)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


async def ask(port: int, path: str, body: object = None, **headers: str) -> Reply:
    """In a thread, since the server runs in this event loop. The connection is closed after the answer."""
    method = "GET" if body is None else "POST"
    return await asyncio.to_thread(Client(port=port).ask, method, path, body, connection="close", **headers)


def test_connections_send_without_delay() -> None:
    with listening_socket("127.0.0.1", 0, 60.0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


INFINITY = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "raised", "num"),
    [
        ((1024, 1024), None, 896),
        ((1024, 4096), (4096, 4096), 3968),
        ((1024, 2**20), (16_384, 2**20), 16_256),
        ((1024, INFINITY), (16_384, INFINITY), 16_256),
        ((2**20, 2**20), None, 16_256),
        ((INFINITY, INFINITY), None, 16_256),
        ((100, 100), None, 50),
    ],
)
def test_open_files_are_asked_for_and_connections_leave_some(
    limits: tuple[int, int], raised: tuple[int, int] | None, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: asked.append(limits))
    assert max_connections(raise_file_limit()) == num
    assert asked == ([] if raised is None else [raised])


def test_idle_connections_do_not_stop_the_service(events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_MAX_FILES", 40)
    monkeypatch.setattr(HttpProtocol, "crowded_timeout_s", 0.5)

    async def check() -> None:
        async with serving(events) as api, asyncio.timeout(60):
            with contextlib.ExitStack() as idle:
                for _ in range(100):  # of which 20 fit
                    idle.enter_context(socket.create_connection(("127.0.0.1", api.port)))
                while True:
                    with contextlib.suppress(OSError):
                        reply = await api.complete(SAY)
                        if reply.status == 200:
                            return
                        assert reply.status == 503
                    await asyncio.sleep(0.1)

    asyncio.run(check())


def test_lines_that_anybody_can_cause_are_logged_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now_s[0])
    lines = RareLines("no room")

    def passes(text: str) -> bool:
        return lines.filter(logging.makeLogRecord({"msg": text}))

    assert [passes("no room\nfor 1"), passes("no room\nfor 2"), passes("other"), passes("other")] == [1, 0, 1, 1]
    now_s[0] += 61
    assert [passes("no room"), passes("no room")] == [1, 0]


async def received(connection: socket.socket, words: bytes) -> bytes:
    """Return the bytes of a connection until these words."""
    data = b""
    while words not in data:
        connection.settimeout(60)
        more = await asyncio.to_thread(connection.recv, 1 << 16)
        assert more, data
        data += more
    return data


def test_a_silent_stream_is_kept_alive_and_ends_at_its_deadline(events: Path) -> None:
    async def check() -> None:
        async with serving(events, keep_alive_s=0.2) as api:
            for what in (SILENT, BEGIN):
                start_s = time.monotonic()
                reply = await api.complete(what, stream=True, headers={"x-request-timeout": "1"})
                assert time.monotonic() - start_s > 0.9
                assert reply.status == 200
                assert 1 <= reply.data.count(b": still working\n\n") <= 5
                assert reply.events[-1]["error"]["type"] == "timeout_error"
                assert b"[DONE]" not in reply.data

    asyncio.run(check())
    assert len(told(events, "Cancel")) == 2


@pytest.mark.parametrize("what", [SILENT, UNACCEPTED])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("by_header", [False, True])
def test_a_deadline_before_the_first_token_is_a_504(events: Path, what: int, stream: bool, by_header: bool) -> None:
    async def check() -> None:
        async with serving(events, request_timeout_s=60 if by_header else 0.4) as api:
            headers = {"x-request-timeout": "0.4"} if by_header else {}
            reply = await api.complete(what, stream=stream, headers=headers)
            assert reply.status == 504
            assert reply.headers["x-should-retry"] == "false"
            assert "within 0.4 s" in reply.body["error"]["message"]
            assert (await api.complete(SAY)).token_ids == [7, 7, 7]

    asyncio.run(check())
    assert len(told(events, "Cancel")) == 1


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_deadline_that_makes_no_sense_is_refused(events: Path, text: str) -> None:
    async def check() -> None:
        async with serving(events) as api:
            reply = await api.complete(SAY, headers={"x-request-timeout": text})
            assert reply.status == 400
            assert "x-request-timeout" in reply.body["error"]["message"]

    asyncio.run(check())
    assert not told(events, "Add")


@pytest.mark.parametrize("what", [UNACCEPTED, SILENT, BEGIN])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_work(events: Path, what: int, stream: bool) -> None:
    async def check() -> None:
        async with serving(events) as api:
            await api.complete(SAY)
            await asyncio.sleep(0.1)
            before = asyncio.all_tasks()
            for number in range(5):
                with closing(api.send(what, stream=stream)):
                    await until(lambda number=number: len(told(events, "Add")) == 2 + number)
                    await asyncio.sleep(0.05)
            await until(lambda: len(told(events, "Cancel")) == 5)
            await until(lambda: asyncio.all_tasks() <= before)
            assert (await api.complete(SAY)).token_ids == [7, 7, 7]

    asyncio.run(check())
    assert {event["id"] for event in told(events, "Cancel")} == {1, 2, 3, 4, 5}


def test_a_client_that_reads_nothing_is_disconnected_and_delays_no_other(
    events: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: weakref.WeakSet[OutputQueue] = weakref.WeakSet()
    make = OutputQueue.__init__

    def made(self: OutputQueue, *given: Any) -> None:
        make(self, *given)
        kept.add(self)

    def all_gone() -> bool:
        gc.collect()
        return not kept

    monkeypatch.setattr(OutputQueue, "__init__", made)

    async def check() -> None:
        async with serving(events, reader_timeout_s=1.0) as api:
            await api.complete(SAY)
            await asyncio.sleep(0.1)
            before = asyncio.all_tasks()
            stalled = [api.send(FLOOD, 4000, stream=True) for _ in range(3)]
            start_s = time.monotonic()
            assert (await api.complete(SAY, stream=True)).token_ids == [7, 7, 7]
            assert time.monotonic() - start_s < 30
            await until(lambda: asyncio.all_tasks() == before)
            await until(all_gone)
            for connection in stalled:
                connection.close()

    asyncio.run(check())


def test_a_slow_reader_gets_everything(events: Path) -> None:
    async def check() -> None:
        async with serving(events, reader_timeout_s=10.0) as api:
            with closing(api.send(FLOOD, 2000, stream=True)) as connection:
                data = b""
                while b"[DONE]" not in data:
                    await asyncio.sleep(0.002)
                    piece = await asyncio.to_thread(connection.recv, 1 << 14)
                    assert piece, "the server has hung up"
                    data += piece
            assert data.count(b"x" * 1000) == 2000

    asyncio.run(check())


def test_requests_under_way_are_finished_and_new_ones_refused(events: Path) -> None:
    async def check() -> None:
        async with serving(events, shutdown_timeout_s=30) as api:
            under_way = [asyncio.create_task(api.complete(PACED, 90, stream=stream)) for stream in (False, True)]
            await until(lambda: len(told(events, "Add")) == 1)  # the other follows when this one is told
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.2)
            for reply in (await api.complete(SAY), await ask(api.port, "/health")):
                assert reply.status == 503
                assert int(reply.headers["retry-after"]) > 0
                assert "shutting down" in reply.body["error"]["message"]
            assert (await ask(api.port, "/live")).status == 200
            for reply in await asyncio.gather(*under_way):
                assert reply.token_ids == [7] * 90
            assert await asyncio.wait_for(api.running, 60) == 0

    asyncio.run(check())
    assert told(events, "Quit")


def test_half_a_body_does_not_delay_a_shutdown(events: Path) -> None:
    half = post(b" " * 100)[:-50]

    async def check() -> None:
        async with serving(events, shutdown_timeout_s=60) as api:
            with closing(socket.create_connection(("127.0.0.1", api.port))) as client:
                client.sendall(half)
                await asyncio.sleep(0.3)
                start_s = time.monotonic()
                assert await api.stopped(signal.SIGTERM) == 0
                assert time.monotonic() - start_s < 30
                data = await received(client, b"shutting down")
                assert data.startswith(b"HTTP/1.1 503") and b"connection: close" in data

    asyncio.run(check())


def test_when_the_time_is_up_streams_end_with_an_error(events: Path) -> None:
    async def check() -> None:
        async with serving(events, shutdown_timeout_s=0.5) as api:
            with closing(api.send(BEGIN, stream=True)) as stream, closing(api.send(SILENT)) as whole:
                await received(stream, b"data: ")
                await until(lambda: len(told(events, "Add")) == 2)
                start_s = time.monotonic()
                assert await api.stopped(signal.SIGTERM) == 128 + signal.SIGTERM
                assert time.monotonic() - start_s < 30
                assert b"shutting down" in await received(stream, b'"error"')
                assert b"HTTP/1.1 503" in await received(whole, b'"error"')

    asyncio.run(check())


def test_a_second_signal_ends_at_once(events: Path) -> None:
    async def check() -> None:
        async with serving(events, shutdown_timeout_s=60) as api:
            with closing(api.send(BEGIN, stream=True)) as stream, closing(api.send(FLOOD, 4000, stream=True)):
                await received(stream, b"data: ")
                start_s = time.monotonic()
                assert await api.stopped(signal.SIGTERM, signal.SIGINT) == 128 + signal.SIGINT
                assert time.monotonic() - start_s < 30
                assert b"shutting down" in await received(stream, b'"error"')

    asyncio.run(check())


def test_a_second_signal_ends_the_server_at_once(events: Path) -> None:
    async def check() -> None:
        async with serving(events.with_name(NEVER_QUITS)) as api:
            os.kill(os.getpid(), signal.SIGTERM)
            await until(lambda: bool(told(events.with_name(NEVER_QUITS), "Quit")))
            start_s = time.monotonic()
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
                await asyncio.sleep(0)
            assert await api.stopped() == 0
            assert time.monotonic() - start_s < 30
        assert not [child for child in psutil.Process().children() if "fake_engine" in child.cmdline()]

    asyncio.run(check())


def test_a_signal_while_the_engine_starts_ends_at_once(events: Path) -> None:
    async def check() -> None:
        running = asyncio.create_task(serve_fake(events.with_name(NEVER_STARTS), port := free_port()))
        await until_alive(port)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 60) == 128 + signal.SIGTERM
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_cannot_go_on_is_its_senders_mistake(events: Path, stream: bool) -> None:
    async def check() -> None:
        async with serving(events) as api:
            reply = await api.complete(STUCK, stream=stream)
            assert reply.status == (200 if stream else 400)
            error = (reply.events[-1] if stream else reply.body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "400")
            assert (error["param"], error["message"]) == ("structured_outputs", "too many items")
            assert b"[DONE]" not in reply.data

    asyncio.run(check())


def test_before_the_engine_has_started_only_the_api_server_is_alive(
    events: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="longspan")

    async def check() -> None:
        running = asyncio.create_task(serve_fake(events.with_name(STARTS_LATE), port := free_port()))
        await until_alive(port)
        assert f"until it serves, http://127.0.0.1:{port} answers 503" in caplog.text
        for path in ("/health", "/v1/models", "/metrics", "/version", "/nowhere"):
            reply = await ask(port, path, x_request_id="mine")
            assert (reply.status, reply.headers["x-request-id"]) == (503, "mine")
            assert int(reply.headers["retry-after"]) > 0
            assert reply.body["error"]["message"] == "the engine is starting"
        assert (await ask(port, "/v1/completions", completion(prompt=[SAY]))).status == 503
        async with asyncio.timeout(60):
            while (await ask(port, "/health")).status == 503:  # noqa: ASYNC110 - as a probe does
                await asyncio.sleep(0.05)
        assert (await ask(port, "/v1/completions", completion(prompt=[SAY], max_tokens=3))).token_ids == [7, 7, 7]
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 60) == 0

    asyncio.run(check())


@pytest.mark.parametrize(("name", "error"), [(WRONG, ValueError), (ENDS_AT_ONCE, EngineLostError)])
def test_a_server_whose_engine_does_not_start_ends_with_its_reason(
    events: Path, name: str, error: type[Exception]
) -> None:
    async def check() -> None:
        with pytest.raises(error):
            await serve_fake(events.with_name(name), port := free_port())
        with closing(socket.create_server(("127.0.0.1", port))):
            pass  # it is free
        await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})

    asyncio.run(check())


async def until_alive(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(OSError):
                assert (await ask(port, "/live")).body == {"status": "ok"}
                return
            await asyncio.sleep(0.05)
