"""Answers to the requests of a batch file: the bodies that HTTP would carry, without HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from longspan.llm import LLM
from longspan.serve.answers import Assembler, prepared
from longspan.serve.convert import ServedModel, read_request
from longspan.serve.errors import WireError, error_body
from longspan.serve.messages import delta_of
from longspan.serve.requests import ChatCompletionRequest, CompletionRequest
from longspan.text.input_processor import EngineRequest

TagT = TypeVar("TagT")
_BODIES: dict[str, type[CompletionRequest | ChatCompletionRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
}


def answer_each(
    llm: LLM, model: ServedModel, requests: Iterable[tuple[TagT, str, bytes]], *, most: int
) -> Iterator[tuple[TagT, int, dict[str, Any]]]:
    """Answer requests together, `most` at once, each as soon as it is done; takes them from `requests` as it goes.

    A request is a tag of the caller's, its route and its JSON; an answer is the tag, its HTTP status and its body. A
    request that cannot be served gets the answer that an HTTP server would have given, and stops nobody.

    Raises:
        WorkerLostError: when a worker dies or raises.
    """
    groups = (_group(*request, model) for request in requests)
    for (tag, made), states in llm.finish_each(groups, most=most):
        stuck = next((state.stuck for state in states if state.stuck is not None), None)
        answer = made if stuck is None else WireError(stuck, "structured_outputs")
        if isinstance(answer, WireError):
            yield tag, answer.status, error_body(answer.status, str(answer), param=answer.param)
            continue
        for index, state in enumerate(states):
            for choice in range(len(state.choices)):
                answer.add(index, delta_of(0, state, choice))
        yield tag, 200, answer.whole()


def _group(
    tag: TagT, url: str, body: bytes, model: ServedModel
) -> tuple[tuple[TagT, Assembler | WireError], list[EngineRequest]]:
    """Return the engine requests of a request; with its tag comes what makes its answer, or why it has none."""
    try:
        request = read_request(_BODIES[url], body, model.limits)
        model.check_name(request.model)
        if request.stream:
            raise WireError("answers in a batch file are not streamed: leave it out", "stream")
        engine_requests, assembler = prepared(request, model, request_id=uuid.uuid4().hex, model=model.names[0])
    except WireError as error:
        return (tag, error), []
    return (tag, assembler), engine_requests
