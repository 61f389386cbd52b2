"""Answers to the requests of a batch file: the bodies that HTTP would carry, without HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from longspan.serve.errors import WireError, error_body
from longspan.serve.messages import Delta
from longspan.serve.settings import RequestLimits
from longspan.serve.wire.answers import Assembler, ChatAssembler, CompletionAssembler
from longspan.serve.wire.body import read_request
from longspan.serve.wire.convert import chat_request, completion_requests
from longspan.serve.wire.requests import ChatCompletionRequest, CompletionRequest
from longspan.text.input_processor import EngineRequest, InputProcessor
from longspan.text.output_processor import RequestState

TagT = TypeVar("TagT")
Body = dict[str, Any]
_OK, _BAD_REQUEST, _NOT_FOUND = 200, 400, 404


class Runs(Protocol):
    """An `LLM`, which runs engine requests."""

    def finish_each(
        self, groups: Iterable[tuple[Any, Sequence[EngineRequest]]], *, most: int
    ) -> Iterator[tuple[Any, list[RequestState]]]:
        """Run groups of engine requests as `LLM.finish_each` does."""


@dataclass(frozen=True, kw_only=True)
class BatchModel:
    """The model and the limits that requests are checked against.

    Attributes:
        names: what requests may call the model; answers call it by the first.
    """

    input_processor: InputProcessor
    names: tuple[str, ...]
    limits: RequestLimits = field(default_factory=RequestLimits)


@dataclass(frozen=True, kw_only=True)
class BatchRequest(Generic[TagT]):
    """One request: `tag` is the caller's, `url` its route, `body` its JSON."""

    tag: TagT
    url: str
    body: bytes


@dataclass(frozen=True, kw_only=True)
class BatchAnswer(Generic[TagT]):
    """The answer to a request, as its HTTP status and body."""

    tag: TagT
    status: int
    body: Body


def answer_each(
    runs: Runs, model: BatchModel, requests: Iterable[BatchRequest[TagT]], *, most: int
) -> Iterator[BatchAnswer[TagT]]:
    """Answer requests together, `most` at once, each as soon as it is done; takes them from `requests` as it goes.

    A request that cannot be served gets the answer that an HTTP server would have given, and stops nobody.

    Raises:
        WorkerLostError: when a worker dies or raises.
    """
    groups = (_group(request, model) for request in requests)
    for plan, states in runs.finish_each(groups, most=most):
        if plan.assembler is None:
            yield BatchAnswer(tag=plan.tag, status=plan.status, body=plan.refusal)
            continue
        stuck = next((state.stuck for state in states if state.stuck is not None), None)
        if stuck is not None:
            body = error_body(_BAD_REQUEST, stuck, param="structured_outputs")
            yield BatchAnswer(tag=plan.tag, status=_BAD_REQUEST, body=body)
            continue
        for index, state in enumerate(states):
            for delta in _deltas(state):
                plan.assembler.add(index, delta)
        yield BatchAnswer(tag=plan.tag, status=_OK, body=plan.assembler.whole())


@dataclass(frozen=True, kw_only=True)
class _Plan(Generic[TagT]):
    """The way in which a request is answered: by an assembler, or, when there is none, by a refusal."""

    tag: TagT
    assembler: Assembler[Any] | None = None
    status: int = _OK
    refusal: Body = field(default_factory=dict)


def _group(request: BatchRequest[TagT], model: BatchModel) -> tuple[_Plan[TagT], list[EngineRequest]]:
    try:
        assembler, engine_requests = _READERS[request.url](request.body, model)
    except WireError as error:
        refusal = error_body(error.status, error.message, param=error.param)
        return _Plan(tag=request.tag, status=error.status, refusal=refusal), []
    return _Plan(tag=request.tag, assembler=assembler), engine_requests


def _completion(body: bytes, model: BatchModel) -> tuple[Assembler[Any], list[EngineRequest]]:
    request = read_request(CompletionRequest, body, model.limits)
    _check(request, model)
    engine_requests = completion_requests(request, model)
    return CompletionAssembler(
        request, engine_requests, model.input_processor.tokenizer, **_head("cmpl", model)
    ), engine_requests


def _chat(body: bytes, model: BatchModel) -> tuple[Assembler[Any], list[EngineRequest]]:
    request = read_request(ChatCompletionRequest, body, model.limits)
    _check(request, model)
    engine_requests = [chat_request(request, model)]
    return ChatAssembler(
        request, engine_requests, model.input_processor.tokenizer, **_head("chatcmpl", model)
    ), engine_requests


_READERS = {"/v1/completions": _completion, "/v1/chat/completions": _chat}


def _check(request: CompletionRequest | ChatCompletionRequest, model: BatchModel) -> None:
    if request.model is not None and request.model not in model.names:
        names = " or ".join(map(repr, model.names))
        raise WireError(
            f"there is no model {request.model!r:.100}: this batch runs {names}; see --served-model-name",
            "model",
            _NOT_FOUND,
        )
    if request.stream:
        raise WireError("answers in a batch file are not streamed: leave it out", "stream")


def _head(kind: str, model: BatchModel) -> dict[str, Any]:
    return {"response_id": f"{kind}-{uuid.uuid4().hex}", "model": model.names[0], "created": int(time.time())}


def _deltas(state: RequestState) -> Iterator[Delta]:
    """Yield all that a finished engine request has brought, one delta per choice."""
    for index, choice in enumerate(state.choices):
        yield Delta(
            id=0,
            choice=index,
            text=choice.text,
            token_ids=list(choice.request.output),
            logprobs=None if state.engine_request.params.logprobs is None else choice.logprobs,
            finish_reason=choice.request.finish_reason,
            stop_reason=choice.stop_reason,
            num_cached_tokens=state.choices[0].request.metrics.num_cached_tokens,
            prompt_logprobs=state.prompt_logprobs(),
        )
