"""HTTP answers of engine requests, whole or streamed. Whoever leaves is noticed, and their work is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longspan.serve.client import EngineClient
from longspan.serve.errors import error_body
from longspan.serve.output_queue import EngineLostError, Output, OutputQueue, QueueFullError, RequestFailedError
from longspan.serve.wire.answers import Assembler
from longspan.text.input_processor import EngineRequest

_KEEP_ALIVE = b": still working\n\n"
_END = b"data: [DONE]\n\n"
ResultT = TypeVar("ResultT")


class ClientGoneError(Exception):
    """Nobody waits for the answer: the client has disconnected."""


class DeadlineError(Exception):
    """The request took longer than it may."""


class InThread(Protocol):
    """Runs functions that take long beside the event loop."""

    async def __call__(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Return the function's result."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request for text, and how it is answered.

    Attributes:
        prepare: makes its engine requests, and what makes an answer of their outputs.
        stream: whether outputs are sent as they come.
        timeout_s: how long all may take; None for no limit.
        keep_alive_s, reader_timeout_s: see `ServerSettings`.
    """

    request: Request
    prepare: Callable[[], Awaitable[tuple[Sequence[EngineRequest], Assembler[Any]]]]
    stream: bool
    timeout_s: float | None
    keep_alive_s: float
    reader_timeout_s: float


class Watch:
    """Waits on behalf of a client, as long as it is there and its time is not up."""

    def __init__(self, receive: Receive, timeout_s: float | None) -> None:
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._deadline_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._timeout_s = timeout_s

    async def wait(self, what: Awaitable[ResultT], at_most_s: float = float("inf")) -> ResultT:
        """Return the result of `what`; cancel it when it does not come.

        Raises:
            ClientGoneError: when the client disconnects first.
            DeadlineError: when its time is up first.
            TimeoutError: when it has not come after `at_most_s`.
        """
        task = asyncio.ensure_future(what)
        left_s = self.left_s()
        wait_s = min(left_s, at_most_s)
        try:
            if not self._gone.done():
                await asyncio.wait(
                    {task, self._gone},
                    timeout=None if wait_s == float("inf") else wait_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            if task.done():
                return task.result()
            if self._gone.done():
                raise ClientGoneError
            if at_most_s < left_s:
                raise TimeoutError
            raise DeadlineError(f"the request was not done within {self._timeout_s:g} s")
        finally:
            task.cancel()

    def close(self) -> None:
        """Stop watching the client."""
        self._gone.cancel()

    def left_s(self) -> float:
        """Return the seconds until the client's time is up."""
        if self._deadline_s is None:
            return float("inf")
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(engine: EngineClient, call: Call, in_thread: InThread) -> Response:
    """Compute what is called for and answer.

    Raises:
        QueueFullError: when there is no place in the queue.
        EngineLostError: when the engine cannot answer.
        ClientGoneError, DeadlineError: see `Watch`.
    """
    watch = Watch(call.request.receive, call.timeout_s)
    outputs: OutputQueue | None = None
    try:
        engine_requests, assembler = await watch.wait(call.prepare())
        outputs = await watch.wait(engine.submit(engine_requests))
        call.request.state.outputs = outputs  # for its span
        if call.stream:
            first: Sequence[Output] = ()
            with contextlib.suppress(TimeoutError):
                first = await watch.wait(outputs.get(), call.keep_alive_s)
            return EventStream(call, outputs, assembler, watch, in_thread, first)
        body = await watch.wait(in_thread(_whole, assembler, await watch.wait(outputs.get_all())))
        watch.close()
        return Response(body, media_type="application/json")
    except BaseException:
        watch.close()
        if outputs is not None:
            outputs.close()
        raise


def _whole(assembler: Assembler[Any], outputs: Sequence[Output]) -> bytes:
    for index, delta in outputs:
        assembler.add(index, delta)
    return msgspec.json.encode(assembler.whole())


def event(body: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def json_response(body: dict[str, Any]) -> Response:
    """Return an answer in one piece."""
    return Response(msgspec.json.encode(body), media_type="application/json")


class EventStream(Response):
    """Sends events as they come, and stops at once when the client leaves or its time is up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        outputs: OutputQueue,
        assembler: Assembler[Any],
        watch: Watch,
        in_thread: InThread,
        first: Sequence[Output],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._call, self._outputs, self._assembler, self._watch = call, outputs, assembler, watch
        self._in_thread, self._first = in_thread, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the watch receives
        last = _END
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
        except (ClientGoneError, OSError):  # it left, or reads nothing
            return
        except RequestFailedError as error:
            last = event(error_body(error.status, str(error), param=error.param))
        except (DeadlineError, EngineLostError, QueueFullError) as error:
            last = event(error_body(504 if isinstance(error, DeadlineError) else 500, str(error)))
        finally:
            self._outputs.close()
            self._watch.close()
        with contextlib.suppress(OSError):
            await self._send(send, last, is_last=True)

    async def _send_events(self, send: Send) -> None:
        outputs = self._first or await self._next(send)
        while outputs:
            if data := b"".join(await self._events(outputs)):
                await self._send(send, data)
            outputs = await self._next(send)
        if data := b"".join(map(event, self._assembler.last_chunks())):
            await self._send(send, data)

    async def _next(self, send: Send) -> Sequence[Output]:
        """Return the next outputs, none when all were sent; send comments while waiting for them."""
        while True:
            try:
                return await self._watch.wait(self._outputs.get(), self._call.keep_alive_s)
            except TimeoutError:
                await self._send(send, _KEEP_ALIVE)

    async def _events(self, outputs: Sequence[Output]) -> list[bytes]:
        chunks = partial(_chunks, self._assembler, outputs)
        if any(delta.prompt_logprobs is not None for _, delta in outputs):
            return await self._watch.wait(self._in_thread(chunks))  # those of a long prompt take long
        return chunks()

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Wait for a slow reader, but not for ever; outputs that come meanwhile are then sent in one piece.

        Raises:
            TimeoutError: when the client reads nothing for too long, or until its time is up.
        """
        limit_s = self._call.reader_timeout_s
        async with asyncio.timeout(limit_s if is_last else min(limit_s, self._watch.left_s())):
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _chunks(assembler: Assembler[Any], outputs: Sequence[Output]) -> list[bytes]:
    return [event(chunk) for index, delta in outputs for chunk in assembler.chunks(index, delta)]
