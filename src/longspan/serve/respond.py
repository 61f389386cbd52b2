"""From jobs to an HTTP answer, whole or streamed. Whoever leaves is noticed, and their work is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longspan.jobs import Job
from longspan.serve.client import Answer, EngineClient, EngineLostError
from longspan.serve.errors import error_body, error_response
from longspan.serve.updates import Update
from longspan.serve.wire import Assembler

_KEEP_ALIVE_S = 10.0
"""How long a stream may be silent. For so long its status is open, too: an early failure has a status of its own."""
_CLIENT_GONE = 499
_encoder = msgspec.json.Encoder()
ResultT = TypeVar("ResultT")
News = tuple[int, Update]


class ClientGoneError(Exception):
    """The client has disconnected."""


class DeadlineError(Exception):
    """The request took longer than it may."""


class Watch:
    """Waits for things on behalf of a client, as long as it is there and its time is not up."""

    def __init__(self, receive: Receive, timeout_s: float | None) -> None:
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        self._timeout_s = timeout_s

    async def wait(self, what: Awaitable[ResultT]) -> ResultT:
        """Its result.

        Raises:
            ClientGoneError: when the client disconnects first.
            DeadlineError: when its time is up first.
        """
        task = asyncio.ensure_future(what)
        left_s = None if self._deadline is None else max(0.0, self._deadline - asyncio.get_running_loop().time())
        try:
            await asyncio.wait({task, self._gone}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if self._gone.done():
                raise ClientGoneError
            raise DeadlineError(f"the request was not done within {self._timeout_s:g} s")
        finally:
            task.cancel()

    def close(self) -> None:
        """Watches no more."""
        self._gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def respond(
    request: Request,
    engine: EngineClient,
    jobs: Sequence[Job],
    assembler: Assembler,
    *,
    stream: bool,
    timeout_s: float | None,
) -> Response:
    """Computes `jobs` and answers.

    Raises:
        QueueFullError: when there is no place in the queue.
        EngineLostError: when the engine cannot answer.
    """
    watch = Watch(request.receive, timeout_s)
    answer: Answer | None = None
    try:
        answer = await watch.wait(engine.submit(jobs))
        request.state.answer = answer  # for its span
        if not stream:
            await watch.wait(_collect(answer, assembler))
            watch.close()
            return json_response(assembler.whole())
        updates = aiter(answer)
        first = asyncio.ensure_future(anext(updates))
        with contextlib.suppress(TimeoutError):
            await watch.wait(asyncio.wait_for(asyncio.shield(first), _KEEP_ALIVE_S))
        return EventStream(_events(answer, first, updates, assembler), watch, answer)
    except BaseException as error:
        watch.close()
        if answer is not None:
            answer.close()
        if isinstance(error, ClientGoneError):
            return Response(status_code=_CLIENT_GONE)
        if isinstance(error, DeadlineError):
            response = error_response(504, str(error))
            response.headers["x-should-retry"] = "false"
            return response
        raise


async def _collect(answer: Answer, assembler: Assembler) -> None:
    async for index, update in answer:
        assembler.add(index, update)


async def _events(
    answer: Answer, first: asyncio.Future[News], updates: AsyncIterator[News], assembler: Assembler
) -> AsyncIterator[bytes]:
    """Server-sent events; a comment when nothing has come for a while."""
    coming: asyncio.Future[News] = first
    try:
        while True:
            try:
                index, update = await asyncio.wait_for(asyncio.shield(coming), _KEEP_ALIVE_S)
            except TimeoutError:
                yield b": still working\n\n"
                continue
            except StopAsyncIteration:
                break
            coming = asyncio.ensure_future(anext(updates))
            for chunk in assembler.chunks(index, update):
                yield event(chunk)
        for chunk in assembler.last_chunks():
            yield event(chunk)
        yield b"data: [DONE]\n\n"
    finally:
        coming.cancel()
        answer.close()


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(body) + b"\n\n"


def json_response(body: dict[str, Any]) -> Response:
    """An answer in one piece."""
    return Response(_encoder.encode(body), media_type="application/json")


class EventStream(Response):
    """Sends events as they come, and stops at once when the client leaves or its time is up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], watch: Watch, answer: Answer) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._watch, self._answer = events, watch, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the watch receives
        """See ASGI."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            while (data := await self._watch.wait(anext(self._events, None))) is not None:
                # Waiting here is what slows a fast engine down to a slow reader; the reader may leave meanwhile.
                await self._watch.wait(send({"type": "http.response.body", "body": data, "more_body": True}))
        except (ClientGoneError, OSError):
            return
        except (DeadlineError, EngineLostError) as error:
            status = 504 if isinstance(error, DeadlineError) else 500
            body = event(error_body(status, str(error)))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        finally:
            self._answer.close()
            self._watch.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
