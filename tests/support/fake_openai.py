"""A server that streams tokens at given times and fails when told to; a transport for HTTPX, no socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from longspan.loadgen.client import Client
from longspan.loadgen.results import Run
from longspan.loadgen.runner import Load
from longspan.loadgen.target import Target
from longspan.loadgen.workload import Ask

DONE = b"data: [DONE]\n\n"


def event(found: object) -> bytes:
    return b"data: " + json.dumps(found).encode() + b"\n\n"


def chunk(text: str = "", finish_reason: str | None = None, num_tokens: int | None = None, **more: Any) -> bytes:
    """A chunk of a completion; `num_tokens` is the usage so far."""
    usage = None if num_tokens is None else {"prompt_tokens": 5, "completion_tokens": num_tokens, "total_tokens": 0}
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": usage, **more})


def usage(num_tokens: int, num_prompt_tokens: int = 5) -> bytes:
    counts = {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": 0}
    return event({"choices": [], "usage": counts})


def pieces_of(body: dict[str, Any], ttft_s: float, tbt_s: float) -> list[tuple[float, bytes]]:
    """A plain answer: a token per chunk, and how long to wait before each."""
    num = body["max_tokens"]
    tokens = [
        (tbt_s if index else ttft_s, chunk("x", "length" if index == num - 1 else None, index + 1))
        for index in range(num)
    ]
    return [*tokens, (0.0, usage(num, len(body["prompt"])) + DONE)]


class Stream(httpx2.AsyncByteStream):
    """Pieces after waits; an exception in the place of a piece is raised."""

    def __init__(self, pieces: Sequence[tuple[float, bytes | Exception]], closed: Callable[[], None]) -> None:
        self._pieces, self._closed = pieces, closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for wait_s, piece in self._pieces:
            await asyncio.sleep(wait_s)
            if isinstance(piece, Exception):
                raise piece
            yield piece

    async def aclose(self) -> None:
        self._closed()


@dataclass
class FakeServer:
    """Counts and keeps what it is asked; `answer` makes a response of a request's number and body."""

    ttft_s: float = 0.5
    tbt_s: float = 0.1
    answer: Callable[[int, dict[str, Any]], httpx2.Response | Sequence[tuple[float, bytes | Exception]]] | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.content)
        number = len(self.bodies)
        self.bodies.append(body)
        self.times_s.append(asyncio.get_running_loop().time())
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        found = pieces_of(body, self.ttft_s, self.tbt_s) if self.answer is None else self.answer(number, body)
        if isinstance(found, httpx2.Response):
            self._ended()
            return found
        return httpx2.Response(200, stream=Stream(found, self._ended))

    def _ended(self) -> None:
        self.num_running -= 1


async def load(server: FakeServer, asks: Sequence[Ask], *, timeout_s: float = 1e6, **options: Any) -> Run:
    """A run of these requests against the server."""
    target = Target(base_url="http://test", model="m", timeout_s=timeout_s)
    bodies = (json.dumps({"prompt": [1] * ask.input_len, "max_tokens": ask.output_len}).encode() for ask in asks)
    async with Client(target, transport=httpx2.MockTransport(server)) as client:
        return await Load(client, asks, bodies, **options).run()
