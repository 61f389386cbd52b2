"""State that the routes of the API server share, and the worker pools for what takes long."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from longspan.policy.spec import PolicySettings
from longspan.serve.client import EngineClient
from longspan.serve.errors import WireError, blaming
from longspan.serve.messages import StepOutputs
from longspan.serve.metrics import Metrics
from longspan.serve.middleware import Tally
from longspan.serve.output_queue import EngineLostError, QueueFullError
from longspan.serve.respond import Call, Watch, respond
from longspan.serve.settings import ServerSettings
from longspan.serve.wire.answers import Assembler
from longspan.serve.wire.body import check_content_type, read_request
from longspan.serve.wire.convert import grammar_kind, grammar_of
from longspan.serve.wire.requests import ChatCompletionRequest, CompletionRequest, PolicyUpdate
from longspan.serve.wire.responses import ModelCard, ModelList
from longspan.text.input_processor import EngineRequest, InputProcessor

ModelT = TypeVar("ModelT", bound=BaseModel)
ResultT = TypeVar("ResultT")
_log = logging.getLogger("longspan")
_LARGE_BYTES = 128 * 1024
"""Of a body. Below this, reading or tokenizing it takes less than about a tenth of a second."""
_MOST_GRAMMARS = 32
"""That wait to be checked, which takes seconds for some."""


class Server:
    """The engine client, the model and the limits that routes share.

    Attributes:
        draining: whether the server is about to stop and takes nothing new.
    """

    def __init__(self, engine: EngineClient, input_processor: InputProcessor, settings: ServerSettings) -> None:
        assert engine.started is not None, "the engine was started"
        self.engine, self.input_processor = engine, input_processor
        self.settings, self.limits = settings, settings.limits
        self.draining = False
        self.models = self._models()
        if input_processor.tokenizer is not None:
            _ = input_processor.max_prompt_chars  # now, and not while a request waits for it
        self.tally = Tally()
        self.metrics = Metrics(settings.metrics_prefix, settings.model_names[0], engine.started)
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
        waiting = 0 if stats is None else stats.num_waiting
        return min(60, 1 + waiting // 50)

    def _models(self) -> ModelList:
        created, names = int(time.time()), self.settings.model_names
        return ModelList(
            data=[
                ModelCard(id=name, created=created, root=names[0], max_model_len=self.input_processor.max_model_len)
                for name in names
            ]
        )

    async def in_thread(self, request: Request, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Render, tokenize or the like beside the event loop, as long as the client is there.

        Raises:
            ClientGoneError, DeadlineError: see `Watch`.
        """
        texts = self._texts if await _is_large(request) else self._quick
        return await self._watched(request, partial(texts.run, function, *arguments))

    async def _watched(self, request: Request, begin: Callable[[], Awaitable[ResultT]]) -> ResultT:
        watch = Watch(request.receive, self._timeout_s(request))
        try:
            return await watch.wait(begin())
        finally:
            watch.close()

    async def parse(self, request: Request, model: type[ModelT]) -> ModelT:
        """Read the body as `model`, beside the event loop."""
        check_content_type(request.headers.get("content-type"))
        bodies = self._bodies if await _is_large(request) else self._quick
        body = await request.body()
        return await self._watched(request, partial(bodies.run, read_request, model, body, self.limits))

    def check_model(self, name: str | None) -> None:
        """Raise a WireError 404 when a request names another model."""
        if name is not None and name not in self.settings.model_names:
            known = ", ".join(self.settings.model_names)
            raise WireError(f"there is no model {name[:100]!r} here, but {known}", param="model", status=404)

    def check_open(self) -> None:
        """Raise an EngineLostError when nothing new is taken."""
        if self.draining:
            raise EngineLostError("the server is shutting down")

    async def answer(
        self,
        request: Request,
        body: CompletionRequest | ChatCompletionRequest,
        make_engine_requests: Callable[[str], Sequence[EngineRequest]],
        make_assembler: Callable[..., Assembler[Any]],
        prefix: str,
    ) -> Response:
        """Serve a request for text; `make_engine_requests` is given the grammar of the outputs."""
        self.check_open()
        self.check_model(body.model)
        is_large = await _is_large(request)
        texts = self._texts if is_large else self._quick

        def assembled(grammar: str) -> tuple[Sequence[EngineRequest], Assembler[Any]]:
            engine_requests = make_engine_requests(grammar)
            with blaming("prompt"):
                self.settings.check_queue(
                    len(engine_requests), sum(len(engine_request.token_ids) for engine_request in engine_requests)
                )
            return engine_requests, make_assembler(
                body,
                engine_requests,
                self.input_processor.tokenizer,
                response_id=f"{prefix}-{request.state.request_id}",
                model=body.model or self.settings.model_names[0],
                created=int(time.time()),
            )

        async def prepare() -> tuple[Sequence[EngineRequest], Assembler[Any]]:
            prepared = await texts.run(assembled, await self._grammar(body))
            self.check_open()
            return prepared

        call = Call(
            request=request,
            prepare=prepare,
            stream=bool(body.stream),
            timeout_s=self._timeout_s(request),
            keep_alive_s=self.settings.keep_alive_s,
            reader_timeout_s=self.settings.reader_timeout_s,
        )
        scores_prompts = bool(body.prompt_logprobs is not None or (isinstance(body, CompletionRequest) and body.echo))
        return await respond(self.engine, call, (texts if scores_prompts else self._quick).run)

    async def update_policy(self, request: Request, body: PolicyUpdate) -> PolicySettings:
        """Change options of the policy and return its settings.

        Raises:
            WireError: when one cannot change, or not to that.
            EngineLostError: when the engine is lost before it says so.
        """
        settings = self.engine.policy.settings
        if settings is None:
            raise EngineLostError("the engine has not said what its policy is")
        options = body.options(settings)
        with blaming(next(iter(options)) if len(options) == 1 else None):
            changed = await self._watched(request, partial(self.engine.update_policy, options))
        _log.info("policy %s has %s, by request %s", changed.name, options, request.state.request_id)
        return changed

    async def _grammar(self, body: CompletionRequest | ChatCompletionRequest) -> str:
        """Return the grammar that outputs must follow; requests without one do not wait for its check."""
        kind = grammar_kind(body)
        if kind == "free":
            return ""
        pool = self._quick if kind == "json_object" else self.grammars
        return await pool.run(grammar_of, body, self)

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


async def _is_large(request: Request) -> bool:
    """Return whether reading or tokenizing a body takes long."""
    return len(await request.body()) > _LARGE_BYTES


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
        """Returns the function's result.

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
    """Ends the process with this exit code if a worker pool is still at work, else returns.

    Such work cannot be interrupted. The interpreter would either wait for it, or go down under native code that comes
    back to it then. Exit functions run first.
    """
    if _busy_threads:
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does where it ends by os._exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
