"""State that the routes of the API server share: how it reads bodies, answers requests, and keeps the event loop free.

Whoever leaves is noticed, and their work is cancelled.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longspan.policy import PolicySettings
from longspan.serve.answers import Assembler, prepared
from longspan.serve.client import EngineClient, Output, OutputQueue
from longspan.serve.convert import ServedModel, grammar_kind, grammar_of, read_request
from longspan.serve.errors import (
    ClientGoneError,
    DeadlineError,
    EngineLostError,
    QueueFullError,
    RequestFailedError,
    WireError,
    blaming,
    cut,
    error_body,
)
from longspan.serve.messages import StepOutputs
from longspan.serve.metrics import Metrics
from longspan.serve.middleware import Tally
from longspan.serve.requests import ChatCompletionRequest, CompletionRequest, PolicyUpdate
from longspan.serve.responses import ModelCard, ModelList
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import EngineRequest, InputProcessor

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")
_log = logging.getLogger("longspan")
_LARGE_BYTES = 128 * 1024
"""Of a body. Below this, reading or tokenizing it takes less than about a tenth of a second."""
_MOST_GRAMMARS = 32
"""That wait to be checked, which takes seconds for some."""
_KEEP_ALIVE = b": still working\n\n"
_END = b"data: [DONE]\n\n"


class Server:
    """The engine client, the model and the limits that routes share.

    Attributes:
        draining: whether the server is about to stop and takes nothing new.
    """

    def __init__(self, engine: EngineClient, input_processor: InputProcessor, settings: ServerSettings) -> None:
        assert engine.started is not None, "the engine was started"
        names, created, max_model_len = settings.model_names, int(time.time()), input_processor.max_model_len
        self.engine, self.settings = engine, settings
        self.served = ServedModel(input_processor=input_processor, names=names, limits=settings.limits)
        self.draining = False
        self.models = ModelList(
            data=[ModelCard(id=name, created=created, root=names[0], max_model_len=max_model_len) for name in names]
        )
        if input_processor.tokenizer is not None:
            _ = input_processor.max_prompt_chars  # now, and not while a request waits for it
        self.tally = Tally()
        self.metrics = Metrics(
            settings.metrics_prefix,
            names[0],
            num_instances=engine.started.num_instances,
            num_kv_blocks=engine.started.num_kv_blocks,
        )
        engine.on_step, engine.on_loss = self.metrics.take_step, self.metrics.take_loss
        if engine.stats is not None:  # sent before
            self.metrics.take_step(StepOutputs(stats=engine.stats))
        self._quick = WorkerPool("requests", 2)
        # Large things go one by one, which bounds the memory that they take.
        self._bodies, self._texts = WorkerPool("large bodies", 1), WorkerPool("large texts", 1)
        self.grammars = WorkerPool("grammars", 2, max_waiting=_MOST_GRAMMARS)

    def retry_after_s(self) -> int:
        """Return the whole seconds after which a queue that is full now has probably some room again."""
        stats = self.engine.stats
        return min(60, 1 + (0 if stats is None else stats.num_waiting) // 50)

    def check_open(self) -> None:
        """Raise an EngineLostError when nothing new is taken."""
        if self.draining:
            raise EngineLostError("the server is shutting down")

    async def parse(self, request: Request, model: type[ModelT]) -> ModelT:
        """Read the body as `model`, beside the event loop."""
        _check_content_type(request.headers.get("content-type"))
        body = await request.body()
        pool = self._bodies if len(body) > _LARGE_BYTES else self._quick
        return await self._watched(request, partial(pool.run, read_request, model, body, self.settings.limits))

    async def in_thread(self, request: Request, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Render, tokenize or the like beside the event loop, as long as the client is there.

        Raises:
            ClientGoneError, DeadlineError: see `Watch`.
        """
        return await self._watched(request, partial((await self._texts_pool(request)).run, function, *arguments))

    async def answer(self, request: Request, body: CompletionRequest | ChatCompletionRequest) -> Response:
        """Serve a request for text, whole or as a stream.

        Raises:
            QueueFullError: when there is no place in the queue.
            EngineLostError: when the engine cannot answer.
            ClientGoneError, DeadlineError: see `Watch`.
        """
        self.check_open()
        self.served.check_name(body.model)
        texts = await self._texts_pool(request)
        scores_prompts = body.prompt_logprobs is not None or (isinstance(body, CompletionRequest) and bool(body.echo))
        render = texts if scores_prompts else self._quick
        watch = Watch(request.receive, self._timeout_s(request))
        outputs: OutputQueue | None = None
        try:
            grammar = await watch.wait(self._grammar(body))
            engine_requests, assembler = await watch.wait(texts.run(self._prepared, request, body, grammar))
            self.check_open()
            outputs = await watch.wait(self.engine.submit(engine_requests))
            request.state.outputs = outputs  # for its span
            if body.stream:
                first: Sequence[Output] = ()
                with contextlib.suppress(TimeoutError):
                    first = await watch.wait(outputs.get(), self.settings.keep_alive_s)
                return EventStream(self.settings, outputs, assembler, watch, render, first)
            whole = await watch.wait(render.run(_whole, assembler, await watch.wait(outputs.get_all())))
            watch.close()
            return Response(whole, media_type="application/json")
        except BaseException:
            watch.close()
            if outputs is not None:
                outputs.close()
            raise

    async def update_policy(self, request: Request, body: PolicyUpdate) -> PolicySettings:
        """Change options of the policy and return its settings.

        Raises:
            WireError: when one cannot change, or not to that.
            EngineLostError: when the engine is lost before it says so.
        """
        if self.engine.policy is None:
            raise EngineLostError("the engine has not said what its policy is")
        options = body.options(self.engine.policy)
        with blaming(next(iter(options)) if len(options) == 1 else None):
            changed = await self._watched(request, partial(self.engine.update_policy, options))
        _log.info("policy %s has %s, by request %s", changed.name, options, request.state.request_id)
        return changed

    async def _watched(self, request: Request, begin: Callable[[], Awaitable[ResultT]]) -> ResultT:
        watch = Watch(request.receive, self._timeout_s(request))
        try:
            return await watch.wait(begin())
        finally:
            watch.close()

    async def _texts_pool(self, request: Request) -> WorkerPool:
        return self._texts if len(await request.body()) > _LARGE_BYTES else self._quick

    async def _grammar(self, body: CompletionRequest | ChatCompletionRequest) -> str:
        """Return the grammar that outputs must follow; requests without one do not wait for its check."""
        kind = grammar_kind(body)
        if kind == "text":
            return ""
        pool = self._quick if kind == "json_object" else self.grammars
        return await pool.run(grammar_of, body, self.served)

    def _prepared(
        self, request: Request, body: CompletionRequest | ChatCompletionRequest, grammar: str
    ) -> tuple[list[EngineRequest], Assembler]:
        engine_requests, assembler = prepared(
            body,
            self.served,
            request_id=request.state.request_id,
            model=body.model or self.served.names[0],
            grammar=grammar,
        )
        with blaming("prompt"):
            self.settings.check_queue(len(engine_requests), sum(len(one.token_ids) for one in engine_requests))
        return engine_requests, assembler

    def _timeout_s(self, request: Request) -> float | None:
        """Return the server's limit, or the client's `x-request-timeout` if that is shorter."""
        most, text = self.settings.request_timeout_s, request.headers.get("x-request-timeout")
        if text is None:
            return most
        try:
            wanted = float(text)
        except ValueError:
            wanted = 0.0
        if not 0 < wanted < float("inf"):
            raise WireError(f"x-request-timeout must be a number of seconds above 0, but {text[:100]!r} given")
        return wanted if most is None else min(wanted, most)


def _check_content_type(header: str | None) -> None:
    """Raise a WireError 415 unless a body says that it is JSON.

    This also keeps web pages from using a server on their reader's machine: to send JSON, browsers ask for leave first.
    """
    given = (header or "").partition(";")[0].strip().lower()
    if given != "application/json":
        said = f"is {cut(given)!r}" if given else "is missing"
        raise WireError(f"the content-type {said}: send the body with content-type: application/json", status=415)


class Watch:
    """Waits on behalf of a client, as long as it is there and its time is not up."""

    def __init__(self, receive: Receive, timeout_s: float | None) -> None:
        self._gone = asyncio.ensure_future(_disconnected(receive))
        self._timeout_s = float("inf") if timeout_s is None else timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s

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
                timeout_s = None if wait_s == float("inf") else wait_s
                await asyncio.wait({task, self._gone}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
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
        return max(0.0, self._deadline_s - asyncio.get_running_loop().time())


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come, and stops at once when the client leaves or its time is up."""

    media_type = "text/event-stream"

    def __init__(
        self,
        settings: ServerSettings,
        outputs: OutputQueue,
        assembler: Assembler,
        watch: Watch,
        pool: WorkerPool,
        first: Sequence[Output],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._settings, self._outputs, self._assembler = settings, outputs, assembler
        self._watch, self._pool, self._first = watch, pool, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the watch receives
        last = _END
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send)
        except (ClientGoneError, OSError):  # it left, or reads nothing
            return
        except RequestFailedError as error:
            last = _event(error_body(error.status, str(error), param=error.param))
        except (DeadlineError, EngineLostError, QueueFullError) as error:
            last = _event(error_body(504 if isinstance(error, DeadlineError) else 500, str(error)))
        finally:
            self._outputs.close()
            self._watch.close()
        with contextlib.suppress(OSError):
            await self._send(send, last, is_last=True)

    async def _send_events(self, send: Send) -> None:
        outputs = self._first or await self._next(send)
        while outputs:
            if any(delta.prompt_logprobs is not None for _, delta in outputs):  # those of a long prompt take long
                data = await self._watch.wait(self._pool.run(_chunks, self._assembler, outputs))
            else:
                data = _chunks(self._assembler, outputs)
            if data:
                await self._send(send, data)
            outputs = await self._next(send)
        if data := b"".join(map(_event, self._assembler.last_chunks())):
            await self._send(send, data)

    async def _next(self, send: Send) -> Sequence[Output]:
        """Return the next outputs, none when all were sent; send comments while waiting for them."""
        while True:
            try:
                return await self._watch.wait(self._outputs.get(), self._settings.keep_alive_s)
            except TimeoutError:
                await self._send(send, _KEEP_ALIVE)

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Wait for a slow reader, but not for ever; outputs that come meanwhile are then sent in one piece.

        Raises:
            TimeoutError: when the client reads nothing for too long, or until its time is up.
        """
        limit_s = self._settings.reader_timeout_s
        async with asyncio.timeout(limit_s if is_last else min(limit_s, self._watch.left_s())):
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})


def _whole(assembler: Assembler, outputs: Sequence[Output]) -> bytes:
    for index, delta in outputs:
        assembler.add(index, delta)
    return msgspec.json.encode(assembler.whole())


def _chunks(assembler: Assembler, outputs: Sequence[Output]) -> bytes:
    return b"".join(_event(chunk) for index, delta in outputs for chunk in assembler.chunks(index, delta))


def _event(body: dict[str, Any]) -> bytes:
    """Encode one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


class WorkerPool:
    """Runs functions in threads, at most `num_threads` at once, in the order in which they come.

    A function that has begun keeps its place until it returns, even if its caller has given up: so no client can make
    more threads by leaving. One whose caller gives up earlier is dropped, with all that it refers to.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int | None = None) -> None:
        self._name, self._max_waiting = name, max_waiting
        self._limiter = CapacityLimiter(num_threads)

    @property
    def num_waiting(self) -> int:
        """Counts the calls of `run` that have not begun."""
        return self._limiter.statistics().tasks_waiting

    async def run(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Return the function's result.

        Raises:
            QueueFullError: when `max_waiting` others have not begun yet.
        """
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise QueueFullError(f"{self.num_waiting} {self._name} are waiting already")
        place = object()
        await self._limiter.acquire_on_behalf_of(place)
        work = asyncio.ensure_future(run_sync(partial(_run, function, arguments), limiter=CapacityLimiter(1)))
        work.add_done_callback(lambda _: self._limiter.release_on_behalf_of(place))
        return await asyncio.shield(work)


_busy_threads: set[int] = set()


def _run(function: Callable[..., ResultT], arguments: Sequence[object]) -> ResultT:
    _busy_threads.add(threading.get_ident())
    try:
        return function(*arguments)
    finally:
        _busy_threads.discard(threading.get_ident())


def end_process_if_busy(code: int) -> None:
    """End the process with this exit code if a worker pool is still at work, else return.

    Such work cannot be interrupted. The interpreter would either wait for it, or go down under native code that comes
    back to it then. Exit functions run first.
    """
    if _busy_threads:
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does where it ends by os._exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
