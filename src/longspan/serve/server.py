"""The API server: parses bodies and makes responses in threads, and cancels the work of disconnected clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any, Protocol, TypeVar

import msgspec
from anyio import CancelScope, CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from longspan.core.options import PolicySettings
from longspan.serve import messages
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
    shortened,
)
from longspan.serve.messages import StepOutputs
from longspan.serve.metrics import Metrics
from longspan.serve.middleware import LARGE_BODY_BYTES, Intake
from longspan.serve.output_queue import Output, OutputQueue
from longspan.serve.recent_items import RecentItems
from longspan.serve.requests import CompletionRequest, Parallel, PolicyUpdate, Recording
from longspan.serve.responses import Assembler, Body, ChatAssembler, prepared
from longspan.serve.schemas import ModelCard, ModelList
from longspan.serve.settings import ServerSettings
from longspan.text.input_processor import InputProcessor

ModelT = TypeVar("ModelT", bound=BaseModel)
BodyT = TypeVar("BodyT", bound="NamesModel")
ResultT = TypeVar("ResultT")
_log = logging.getLogger("longspan")
_MAX_GRAMMARS = 32
"""Grammars that may wait for their check, which can take seconds."""
_TIMELINE_S = 60.0


class NamesModel(Protocol):
    """A request body that may name the model."""

    @property
    def model(self) -> str | None:
        """A name of the served model, or None."""


class Server:
    """The engine client, the model and the limits that routes share.

    Methods raise a `ServeError` if a request cannot be answered.
    """

    def __init__(self, engine: EngineClient, input_processor: InputProcessor, settings: ServerSettings) -> None:
        assert engine.started is not None, "the engine was started"
        self.engine, self.settings, self._created = engine, settings, int(time.time())
        self.served = ServedModel(input_processor=input_processor, settings=settings)
        if input_processor.tokenizer is not None:
            _ = input_processor.max_prompt_chars  # computed before the first request
        self.intake = Intake()
        self.recent_items, started = RecentItems(), engine.started
        self.metrics = Metrics(settings.metrics_prefix, settings.model_names[0], started.stats, started.cache_config)
        engine.on_step, engine.on_loss = self.metrics.take_step, self.metrics.take_loss
        engine.on_length = partial(setattr, input_processor, "max_model_len")
        if engine.stats is not None:  # received before
            self.metrics.take_step(StepOutputs(stats=engine.stats))
        self._quick = WorkerPool("requests", 2)
        # Large bodies and texts are processed one by one, which bounds their memory.
        self._bodies, self._texts = WorkerPool("large bodies", 1), WorkerPool("large texts", 1)
        self.grammars = WorkerPool("grammars", 2, max_waiting=_MAX_GRAMMARS)

    @property
    def models(self) -> ModelList:
        """The names of the model, with the present maximum request length."""
        names, length = self.settings.model_names, self.served.input_processor.max_model_len
        cards = [ModelCard(id=name, created=self._created, root=names[0], max_model_len=length) for name in names]
        return ModelList(data=cards)

    def retry_after_s(self) -> int:
        """Estimate the whole seconds after which a full queue has capacity again."""
        stats = self.engine.stats
        return min(60, 1 + (0 if stats is None else stats.num_waiting) // 50)

    def check_open(self) -> None:
        """Raise a NotServingError if the server accepts no new requests."""
        if self.intake.draining:
            raise NotServingError("the server is shutting down")

    def check_serving(self) -> None:
        """Raise a NotServingError if the server accepts no new requests, or the engine computes nothing."""
        self.check_open()
        if self.engine.state != "serving":
            raise NotServingError(f"the engine is {self.engine.state}")

    async def parse(self, request: Request, model: type[ModelT]) -> ModelT:
        """Parse the body as `model` in a thread."""
        _check_content_type(request.headers.get("content-type"))
        body = await request.body()
        pool = self._bodies if len(body) > LARGE_BODY_BYTES else self._quick
        with self._watch(request).held():
            return await pool.run(read_request, model, body, self.settings.limits)

    async def in_thread(
        self, request: Request, function: Callable[[BodyT, ServedModel], ResultT], body: BodyT
    ) -> ResultT:
        """Run a function of a body and the model in a thread. Abandon it if the client disconnects."""
        self.served.check_name(body.model)
        texts = await self._texts_pool(request)
        with self._watch(request).held():
            return await texts.run(function, body, self.served)

    async def answer(
        self, request: Request, body: TextRequest, chat_form: Callable[..., ChatAssembler] | None = None
    ) -> Response:
        """Answer a request for text, whole or as a stream. `chat_form` makes the answers of another API."""
        self.check_open()
        self.served.check_name(body.model)
        texts = await self._texts_pool(request)
        scores_prompts = body.prompt_logprobs is not None or (isinstance(body, CompletionRequest) and bool(body.echo))
        render = texts if scores_prompts else self._quick
        watch = self._watch(request)
        with watch.held(), contextlib.ExitStack() as unfinished:
            grammar = await self._grammar(body)
            assembler = await texts.run(self._prepared, request, body, grammar, chat_form)
            self.check_open()
            outputs = await self.engine.submit(assembler.engine_requests)
            unfinished.callback(outputs.close)
            request.state.outputs = outputs  # for the request's span
            if body.stream:
                first = await _within(self.settings.keep_alive_s, outputs)
                unfinished.pop_all()
                return EventStream(self.settings, outputs, assembler, watch, render, first)
            whole = await render.run(_whole, assembler, await outputs.get_all())
        return Response(whole, media_type="application/json", headers=_expected(outputs))

    async def update_policy(self, request: Request, body: PolicyUpdate) -> PolicySettings:
        """Change options of the policy and return its settings."""
        options = body.options(self.engine.policy)
        with as_wire_errors(next(iter(options)) if len(options) == 1 else None), self._watch(request).held():
            changed = await self.engine.update_policy(options)
        _log.info("policy %s has %s, by request %s", changed.name, options, request.state.request_id)
        return changed

    async def reshard(self, request: Request, body: Parallel) -> Parallel:
        """Change the parallel spec. Return the spec in force when that is done."""
        with as_wire_errors("parallel"), self._watch(request).held():
            parallel = await self.engine.reshard(body.parallel)
        _log.info("the parallel spec is %s, by request %s", parallel, request.state.request_id)
        return Parallel(parallel=parallel)

    async def set_recording(self, request: Request, body: Recording) -> Recording:
        """Start or stop to record requests and steps."""
        with self._watch(request).held():
            await self.engine.command(lambda number: messages.SetRecording(number, body.recording))
        _log.info("recording is %s, by request %s", body.recording, request.state.request_id)
        return body

    async def timeline(self, request: Request) -> str:
        """Return a trace of the last seconds."""
        text = request.query_params.get("seconds", str(_TIMELINE_S))
        try:
            seconds = float(text)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < inf:
            raise WireError(f"seconds must be a number above 0, but {text[:100]!r} given", "seconds")
        with self._watch(request).held():
            reply = await self.engine.command(lambda number: messages.GetTimeline(number, seconds))
        assert isinstance(reply, messages.Timeline)
        if reply.trace is None:
            remedy = 'start the server with --trace FILE, or POST {"recording": true} to this route with a key'
            raise WireError(f"nothing is recorded: {remedy}", status=409)
        return reply.trace

    async def _texts_pool(self, request: Request) -> WorkerPool:
        return self._texts if len(await request.body()) > LARGE_BODY_BYTES else self._quick

    async def _grammar(self, body: TextRequest) -> str:
        """Return the grammar of outputs. Requests without a grammar do not wait for checks."""
        kind = grammar_kind(body)
        if kind == "text":
            return ""
        pool = self._quick if kind == "json_object" else self.grammars
        return await pool.run(grammar_of, body, self.served)

    def _prepared(
        self, request: Request, body: TextRequest, grammar: str, chat_form: Callable[..., ChatAssembler] | None
    ) -> Assembler:
        assembler = prepared(
            body,
            self.served,
            request_id=request.state.request_id,
            model=body.model or self.settings.model_names[0],
            grammar=grammar,
            chat_form=chat_form,
        )
        num_tokens = sum(len(engine_request.token_ids) for engine_request in assembler.engine_requests)
        with as_wire_errors("prompt"):
            self.settings.check_queue(len(assembler.engine_requests), num_tokens)
        return assembler

    def _watch(self, request: Request) -> ClientWatch:
        """Return a watch of the client, with the server's timeout or a shorter `x-request-timeout`."""
        timeout_s, text = self.settings.request_timeout_s or inf, request.headers.get("x-request-timeout")
        if text is not None:
            try:
                given_s = float(text)
            except ValueError:
                given_s = 0.0
            if not 0 < given_s < inf:
                raise WireError(f"x-request-timeout must be a number of seconds above 0, but {text[:100]!r} given")
            timeout_s = min(timeout_s, given_s)
        return ClientWatch(request.receive, timeout_s)


def _check_content_type(header: str | None) -> None:
    """Raise a WireError 415 unless the content type is JSON.

    This also keeps web pages from using a server on their reader's machine, since browsers need a preflight for JSON.
    """
    given = (header or "").partition(";")[0].strip().lower()
    if given != "application/json":
        problem = f"is {shortened(given)!r}" if given else "is missing"
        raise WireError(f"the content-type {problem}: send the body with content-type: application/json", status=415)


class ClientWatch:
    """Cancels work for a client when it disconnects or its timeout, which begins now, expires."""

    def __init__(self, receive: Receive, timeout_s: float) -> None:
        self._receive, self._timeout_s = receive, timeout_s
        self._deadline_s = asyncio.get_running_loop().time() + timeout_s

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Cancel the block when its result is useless.

        Raises:
            ClientGoneError: the client disconnects first.
            DeadlineError: the timeout expires first.
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
    """Sends events as outputs arrive. Stops at once when the client disconnects or its timeout expires."""

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
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no", **_expected(outputs)})
        del self.headers["content-length"]
        self._settings, self._outputs, self._assembler = settings, outputs, assembler
        self._watch, self._pool, self._first = watch, pool, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the client watch receives
        last = self._assembler.end
        try:
            with self._watch.held():
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await self._send_events(send)
        except (ClientGoneError, OSError):  # the client has disconnected, or reads nothing
            return
        except ServeError as error:
            last = self._encoded(self._assembler.failure_chunks(error))
        finally:
            self._outputs.close()
        with contextlib.suppress(OSError):
            await self._send(send, last, is_last=True)

    async def _send_events(self, send: Send) -> None:
        await self._send(send, self._encoded(self._assembler.first_chunks()))
        outputs: Sequence[Output] | None = self._first
        while outputs is None or outputs:
            if outputs is None:
                progress = self._outputs.take_progress()
                pause = self._assembler.keep_alive
                await self._send(send, pause if progress is None else b": prefill %d/%d\n\n" % progress)
            elif any(delta.prompt_logprobs is not None for _, delta in outputs):  # slow for a long prompt
                await self._send(send, await self._pool.run(_chunks, self._assembler, outputs))
            else:
                await self._send(send, _chunks(self._assembler, outputs))
            outputs = await _within(self._settings.keep_alive_s, self._outputs)
        await self._send(send, self._encoded(self._assembler.last_chunks()))

    def _encoded(self, chunks: Sequence[Body]) -> bytes:
        return b"".join(map(self._assembler.encoded, chunks))

    async def _send(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        """Send bytes, waiting at most `reader_timeout_s` for a slow reader. Meanwhile, outputs collect for one send."""
        if data or is_last:
            async with asyncio.timeout(self._settings.reader_timeout_s):
                await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _within(timeout_s: float, outputs: OutputQueue) -> list[Output] | None:
    """Return the next outputs, an empty list at the end, or None for progress of prompts or after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):
            return await outputs.get()
    except TimeoutError:
        return None


def _expected(outputs: OutputQueue) -> dict[str, str]:
    """Return the header with the predicted time to the first token, in seconds, if there is a prediction."""
    return {} if outputs.expected_ttft_s is None else {"x-expected-ttft": f"{outputs.expected_ttft_s:.3f}"}


def _whole(assembler: Assembler, outputs: Sequence[Output]) -> bytes:
    for index, delta in outputs:
        assembler.add(index, delta)
    return msgspec.json.encode(assembler.whole())


def _chunks(assembler: Assembler, outputs: Sequence[Output]) -> bytes:
    return b"".join(assembler.encoded(chunk) for index, delta in outputs for chunk in assembler.chunks(index, delta))


class WorkerPool:
    """Runs functions in threads, at most `num_threads` at once, first in, first out.

    A function that has begun occupies its thread until it returns, even if its caller was cancelled. So disconnecting
    clients cannot cause more threads. A function that has not begun is dropped when its caller is cancelled.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int | None = None) -> None:
        self._name, self._max_waiting = name, max_waiting
        self._limiter = CapacityLimiter(num_threads)

    @property
    def num_waiting(self) -> int:
        """Number of calls of `run` that have not begun."""
        return self._limiter.statistics().tasks_waiting

    async def run(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Return the function's result. Raise a QueueFullError if `max_waiting` calls have not begun yet."""
        if self._max_waiting is not None and self.num_waiting >= self._max_waiting:
            raise QueueFullError(f"{self.num_waiting} {self._name} are waiting already")
        borrower = object()
        await self._limiter.acquire_on_behalf_of(borrower)
        work = asyncio.ensure_future(run_sync(partial(function, *arguments), limiter=CapacityLimiter(1)))
        work.add_done_callback(lambda _: self._limiter.release_on_behalf_of(borrower))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            work.add_done_callback(_log_unexpected)
            raise


def _log_unexpected(work: asyncio.Future[Any]) -> None:
    """Log an exception of work whose caller was cancelled, unless it is an error of the request."""
    error = None if work.cancelled() else work.exception()
    if error is not None and not isinstance(error, ServeError):
        _log.error("a request failed after its client had disconnected", exc_info=error)
