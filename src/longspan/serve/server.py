"""The API server reads bodies and answers requests beside the event loop, and cancels the work of who leaves."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, TypeVar

import msgspec
from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longspan.core.options import PolicySettings
from longspan.serve.chat_requests import TextRequest
from longspan.serve.client import EngineClient, abandon
from longspan.serve.convert import ServedModel, grammar_kind, grammar_of, read_request
from longspan.serve.errors import (
    ClientGoneError,
    DeadlineError,
    NotServingError,
    QueueFullError,
    ServeError,
    WireError,
    as_wire_errors,
    error_body,
    shortened,
)
from longspan.serve.messages import StepOutputs
from longspan.serve.metrics import Metrics
from longspan.serve.middleware import LARGE_BODY_BYTES, Intake
from longspan.serve.output_queue import Output, OutputQueue
from longspan.serve.requests import CompletionRequest, Parallel, PolicyUpdate
from longspan.serve.responses import Assembler, prepared
from longspan.serve.schemas import ModelCard, ModelList
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import InputProcessor

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")
_log = logging.getLogger("longspan")
_MAX_GRAMMARS = 32
"""Grammars that wait to be checked, which takes seconds for some."""
_KEEP_ALIVE = b": still working\n\n"
_END = b"data: [DONE]\n\n"


class Server:
    """The engine client, the model and the limits that routes share.

    What it does raises a `ServeError` where a request cannot be answered.
    """

    def __init__(self, engine: EngineClient, input_processor: InputProcessor, settings: ServerSettings) -> None:
        assert engine.started is not None, "the engine was started"
        names, self._created = settings.model_names, int(time.time())
        self.engine, self.settings = engine, settings
        self.served = ServedModel(
            input_processor=input_processor,
            names=names,
            limits=settings.limits,
            tool_call_parser=settings.tool_call_parser,
            enable_auto_tool_choice=settings.enable_auto_tool_choice,
        )
        if input_processor.tokenizer is not None:
            _ = input_processor.max_prompt_chars  # now, and not while a request waits for it
        self.intake = Intake()
        self.metrics = Metrics(
            settings.metrics_prefix,
            names[0],
            num_instances=engine.started.num_instances,
            num_kv_blocks=engine.started.num_kv_blocks,
        )
        engine.on_step, engine.on_loss = self.metrics.take_step, self.metrics.take_loss
        engine.on_length = partial(setattr, input_processor, "max_model_len")
        if engine.stats is not None:  # sent before
            self.metrics.take_step(StepOutputs(stats=engine.stats))
        self._quick = WorkerPool("requests", 2)
        # Large things go one by one, which bounds the memory that they take.
        self._bodies, self._texts = WorkerPool("large bodies", 1), WorkerPool("large texts", 1)
        self.grammars = WorkerPool("grammars", 2, max_waiting=_MAX_GRAMMARS)

    @property
    def models(self) -> ModelList:
        """The names of the model, with the longest request at present."""
        names, length = self.served.names, self.served.input_processor.max_model_len
        cards = [ModelCard(id=one, created=self._created, root=names[0], max_model_len=length) for one in names]
        return ModelList(data=cards)

    def retry_after_s(self) -> int:
        """Returns the whole seconds after which a queue that is full now has probably some room again."""
        stats = self.engine.stats
        return min(60, 1 + (0 if stats is None else stats.num_waiting) // 50)

    def check_open(self) -> None:
        """Raises a NotServingError when nothing new is taken."""
        if self.intake.draining:
            raise NotServingError("the server is shutting down")

    def check_serving(self) -> None:
        """Raises a NotServingError also while the engine computes nothing."""
        self.check_open()
        if self.engine.state != "serving":
            raise NotServingError(f"the engine is {self.engine.state}")

    async def parse(self, request: Request, model: type[ModelT]) -> ModelT:
        """Reads the body as `model`, beside the event loop."""
        _check_content_type(request.headers.get("content-type"))
        body = await request.body()
        pool = self._bodies if len(body) > LARGE_BODY_BYTES else self._quick
        with self._watch(request).held():
            return await pool.run(read_request, model, body, self.settings.limits)

    async def in_thread(self, request: Request, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Renders, tokenizes or the like beside the event loop, as long as the client is there."""
        texts = await self._texts_pool(request)
        with self._watch(request).held():
            return await texts.run(function, *arguments)

    async def answer(self, request: Request, body: TextRequest) -> Response:
        """Serves a request for text, whole or as a stream."""
        self.check_open()
        self.served.check_name(body.model)
        texts = await self._texts_pool(request)
        scores_prompts = body.prompt_logprobs is not None or (isinstance(body, CompletionRequest) and bool(body.echo))
        render = texts if scores_prompts else self._quick
        watch = self._watch(request)
        with watch.held(), contextlib.ExitStack() as unfinished:
            grammar = await self._grammar(body)
            assembler = await texts.run(self._prepared, request, body, grammar)
            self.check_open()
            outputs = await self.engine.submit(assembler.engine_requests)
            unfinished.callback(outputs.close)
            request.state.outputs = outputs  # for its span
            if body.stream:
                first = await _within(self.settings.keep_alive_s, outputs)
                unfinished.pop_all()
                return EventStream(self.settings, outputs, assembler, watch, render, first)
            whole = await render.run(_whole, assembler, await outputs.get_all())
        return Response(whole, media_type="application/json")

    async def update_policy(self, request: Request, body: PolicyUpdate) -> PolicySettings:
        """Changes options of the policy and returns its settings."""
        options = body.options(self.engine.policy)
        with as_wire_errors(next(iter(options)) if len(options) == 1 else None), self._watch(request).held():
            changed = await self.engine.update_policy(options)
        _log.info("policy %s has %s, by request %s", changed.name, options, request.state.request_id)
        return changed

    async def reshard(self, request: Request, body: Parallel) -> Parallel:
        """Takes another parallel spec; returns that in force once it is done."""
        with as_wire_errors("parallel"), self._watch(request).held():
            parallel = await self.engine.reshard(body.parallel)
        _log.info("the parallel spec is %s, by request %s", parallel, request.state.request_id)
        return Parallel(parallel=parallel)

    async def _texts_pool(self, request: Request) -> WorkerPool:
        return self._texts if len(await request.body()) > LARGE_BODY_BYTES else self._quick

    async def _grammar(self, body: TextRequest) -> str:
        """Returns the grammar that outputs must follow; requests without one do not wait for its check."""
        kind = grammar_kind(body)
        if kind == "text":
            return ""
        pool = self._quick if kind == "json_object" else self.grammars
        return await pool.run(grammar_of, body, self.served)

    def _prepared(self, request: Request, body: TextRequest, grammar: str) -> Assembler:
        name = body.model or self.served.names[0]
        assembler = prepared(body, self.served, request_id=request.state.request_id, model=name, grammar=grammar)
        num_tokens = sum(len(one.token_ids) for one in assembler.engine_requests)
        with as_wire_errors("prompt"):
            self.settings.check_queue(len(assembler.engine_requests), num_tokens)
        return assembler

    def _watch(self, request: Request) -> ClientWatch:
        """Watches a client until the server's limit, or its own `x-request-timeout` if that is shorter."""
        timeout_s, text = self.settings.request_timeout_s or inf, request.headers.get("x-request-timeout")
        if text is not None:
            try:
                wanted_s = float(text)
            except ValueError:
                wanted_s = 0.0
            if not 0 < wanted_s < inf:
                raise WireError(f"x-request-timeout must be a number of seconds above 0, but {text[:100]!r} given")
            timeout_s = min(timeout_s, wanted_s)
        return ClientWatch(request.receive, timeout_s)


def _check_content_type(header: str | None) -> None:
    """Raises a WireError 415 unless a body says that it is JSON.

    This also keeps web pages from using a server on their reader's machine: to send JSON, browsers ask for leave first.
    """
    given = (header or "").partition(";")[0].strip().lower()
    if given != "application/json":
        said = f"is {shortened(given)!r}" if given else "is missing"
        raise WireError(f"the content-type {said}: send the body with content-type: application/json", status=415)


class ClientWatch:
    """Holds work for a client as long as it is there and its time, which begins now, is not up."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive, self._timeout_s = receive, timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Cancels the block when it is in vain.

        Raises:
            ClientGoneError: when the client disconnects first.
            DeadlineError: when its time is up first.
        """
        with CancelScope(deadline=self._deadline_s) as scope:
            gone = asyncio.ensure_future(_disconnected(self._receive))
            gone.add_done_callback(lambda task: None if task.cancelled() else scope.cancel())
            try:
                yield
            finally:
                abandon(gone)
        if scope.cancelled_caught and gone.done():
            raise ClientGoneError
        if scope.cancelled_caught:
            raise DeadlineError(f"the request was not done within {self._timeout_s:g} s")


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
        watch: ClientWatch,
        pool: WorkerPool,
        first: Sequence[Output] | None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._settings, self._outputs, self._assembler = settings, outputs, assembler
        self._watch, self._pool, self._first = watch, pool, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the watch receives
        last = _END
        try:
            with self._watch.held():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send)
        except (ClientGoneError, OSError):  # it left, or reads nothing
            return
        except ServeError as error:
            last = _event(error_body(error.status, str(error), param=error.param, code=error.code))
        finally:
            self._outputs.close()
        with contextlib.suppress(OSError):
            await self._send(send, last, is_last=True)

    async def _send_events(self, send: Send) -> None:
        outputs: Sequence[Output] | None = self._first
        while outputs is None or outputs:
            if outputs is None:
                await self._send(send, _KEEP_ALIVE)
            elif any(delta.prompt_logprobs is not None for _, delta in outputs):  # those of a long prompt take long
                await self._send(send, await self._pool.run(_chunks, self._assembler, outputs))
            else:
                await self._send(send, _chunks(self._assembler, outputs))
            outputs = await _within(self._settings.keep_alive_s, self._outputs)
        await self._send(send, b"".join(map(_event, self._assembler.last_chunks())))

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Waits for a slow reader, but not for ever; outputs that come meanwhile are then sent in one piece."""
        if data:
            async with asyncio.timeout(self._settings.reader_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _within(timeout_s: float, outputs: OutputQueue) -> list[Output] | None:
    """Returns the next outputs, none when all have come; None if there is nothing for so long."""
    try:
        async with asyncio.timeout(timeout_s):
            return await outputs.get()
    except TimeoutError:
        return None


def _whole(assembler: Assembler, outputs: Sequence[Output]) -> bytes:
    for index, delta in outputs:
        assembler.add(index, delta)
    return msgspec.json.encode(assembler.whole())


def _chunks(assembler: Assembler, outputs: Sequence[Output]) -> bytes:
    return b"".join(_event(chunk) for index, delta in outputs for chunk in assembler.chunks(index, delta))


def _event(body: dict[str, Any]) -> bytes:
    """Encodes one server-sent event."""
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
        """Returns the function's result; raises a QueueFullError when `max_waiting` others have not begun yet."""
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise QueueFullError(f"{self.num_waiting} {self._name} are waiting already")
        place = object()
        await self._limiter.acquire_on_behalf_of(place)
        work = asyncio.ensure_future(run_sync(partial(_run, function, arguments), limiter=CapacityLimiter(1)))
        work.add_done_callback(lambda _: self._limiter.release_on_behalf_of(place))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_unexpected)
            raise


def _log_unexpected(work: asyncio.Future[Any]) -> None:
    """Takes the exception of work whose caller was cancelled: an error of the request is dropped, others are logged."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, ServeError):
        _log.error("a request failed after its client had left", exc_info=error)


_busy_threads: set[int] = set()


def _run(function: Callable[..., ResultT], arguments: Sequence[object]) -> ResultT:
    _busy_threads.add(threading.get_ident())
    try:
        return function(*arguments)
    finally:
        _busy_threads.discard(threading.get_ident())


def end_process_if_busy(code: int) -> None:
    """Ends the process with this exit code if a worker pool is still at work, else returns.

    Such work cannot be interrupted. The interpreter would either wait for it, or go down under native code that comes
    back to it then. Exit functions run first.
    """
    if _busy_threads:
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does where it ends by os._exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
