"""Connections on which no request comes: they are not kept for ever. In-process, so that waiting is short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

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


async def slow_app(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes longer for an answer than a head may take to come."""
    assert scope["type"] == "http"
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(1.5 * LIMIT_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def connected() -> AsyncIterator[Client]:
    config = uvicorn.Config(slow_app, http=Impatient, ws="none", lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Impatient(config, state, {}), "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        yield reader, writer
        writer.close()
        await writer.wait_closed()


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
        async with connected() as client, asyncio.timeout(60):
            await begin(client)
            return await client[0].read()

    head, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 Request Timeout"), head
    assert f"{LIMIT_S:g} s" in json.loads(body)["error"]["message"]


def test_what_comes_after_the_head_may_take_longer() -> None:
    async def run() -> bytes:
        async with connected() as (reader, writer), asyncio.timeout(60):
            writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n")
            await asyncio.sleep(1.5 * LIMIT_S)
            writer.write(b"{}")
            return await reader.readuntil(b"ok")

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200")
