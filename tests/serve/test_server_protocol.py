"""Connections on which no request comes: they are not kept for ever. In-process, so that waiting is short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from longspan.serve.middleware import HttpProtocol

LIMIT_S = 0.4
GET = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Impatient(HttpProtocol):
    head_timeout_s = LIMIT_S


class Patient(HttpProtocol):
    head_timeout_s = 600.0
    crowded_timeout_s = LIMIT_S


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes longer for an answer than a head may take to come."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(1.5 * LIMIT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def listening(protocol: type[HttpProtocol], **config: Any) -> AsyncIterator[Callable[[], Awaitable[Client]]]:
    """A server, by a function that connects to it."""
    settings = uvicorn.Config(slow_app, http=protocol, ws="none", lifespan="off", log_config=None, **config)
    settings.load()
    state, clients = ServerState(), list[Client]()

    async def connect() -> Client:
        clients.append(await asyncio.open_connection(*server.sockets[0].getsockname()[:2]))
        return clients[-1]

    server = await asyncio.get_running_loop().create_server(lambda: protocol(settings, state, {}), "127.0.0.1", 0)
    async with server, asyncio.timeout(60):
        yield connect
        for _, writer in clients:
            writer.close()


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    async with listening(Impatient) as connect:
        yield await connect()


async def nothing(client: Client) -> None:
    del client


async def a_part(client: Client) -> None:
    client[1].write(GET[:10])


async def a_byte_at_a_time(client: Client) -> None:
    for byte in GET[:8]:
        client[1].write(bytes([byte]))
        await asyncio.sleep(LIMIT_S / 10)


async def a_part_of_the_second(client: Client) -> None:
    client[1].write(GET)
    assert (await client[0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    client[1].write(GET[:10])


@pytest.mark.parametrize("begin", [nothing, a_part, a_byte_at_a_time, a_part_of_the_second])
def test_a_head_that_does_not_come_ends_the_connection(begin: Callable[[Client], Awaitable[None]]) -> None:
    async def run() -> bytes:
        async with connected() as client:
            await begin(client)
            return await client[0].read()

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout"), head
    assert f"{LIMIT_S:g} s" in json.loads(body)["error"]["message"]


def test_a_body_may_take_longer_than_the_head() -> None:
    async def run() -> bytes:
        async with connected() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
            await asyncio.sleep(1.5 * LIMIT_S)
            writer.write(b"{}")
            return await reader.readuntil(b"ok")

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200")


def test_connections_over_the_limit_are_refused_after_idle_ones_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> tuple[list[bytes], list[bytes], bytes]:
        async with listening(Patient, limit_concurrency=5) as connect:
            idle = [await connect() for _ in range(4)]
            idle[0][1].write(GET[:10])
            refused = [await (await connect())[0].read() for _ in range(3)]
            closed = [await reader.read() for reader, _ in idle[:2]]  # half of them may stay
            reader, writer = await connect()
            writer.write(GET)
            return refused, closed, await reader.readuntil(b"ok")

    refused, closed, answer = asyncio.run(run())
    assert all(data.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 1\r\n" in data for data in refused)
    assert all(data.startswith(b"HTTP/1.1 408") for data in closed)
    assert answer.startswith(b"HTTP/1.1 200")
    assert "4 connections are open" in caplog.text


@pytest.mark.parametrize(("most", "stays"), [(2, False), (4, True)])
def test_between_requests_a_connection_stays_unless_many_are_open(most: int, stays: bool) -> None:
    async def run() -> bytes:
        async with listening(Patient, limit_concurrency=most + 1, timeout_keep_alive=600) as connect:
            reader, writer = await connect()
            (await connect())[1].write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
            writer.write(GET)
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            if not stays:
                return await reader.read()
            await asyncio.sleep(2 * LIMIT_S)
            writer.write(GET)
            return await reader.readuntil(b"ok")

    assert asyncio.run(run())[:12] == (b"HTTP/1.1 200" if stays else b"")
