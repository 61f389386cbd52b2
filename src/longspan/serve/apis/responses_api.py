"""OpenAI's Responses API: answers and events, made of the deltas of a chat."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from pydantic_core import to_json

from longspan.serve.apis.base import EventAssembler, Part, api_error, api_errors
from longspan.serve.apis.responses_requests import NAMES, ResponsesRequest
from longspan.serve.errors import ServeError

if TYPE_CHECKING:
    from fastapi import Request
    from starlette.responses import Response

    from longspan.serve.chat_requests import ChatCompletionRequest
    from longspan.serve.convert import ServedModel
    from longspan.serve.responses import Body
    from longspan.serve.server import Server

_ITEM_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_PART_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}
_EVENTS = {
    "reasoning": "response.reasoning_text",
    "text": "response.output_text",
    "call": "response.function_call_arguments",
}


async def answer(server: Server, request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses API, whole or as a stream."""
    body = await server.parse(request, ResponsesRequest)
    key = request.headers.get("authorization") or request.headers.get("x-api-key") or ""
    items = server.recent_items
    chat = await server.in_thread(request, partial(_chat, partial(items.get, key)), body)
    with api_errors(NAMES):
        return await server.answer(request, chat, partial(ResponsesAssembler, body, partial(items.add, key)))


def _chat(
    item_of: Callable[[str], dict[str, Any] | None], body: ResponsesRequest, _: ServedModel
) -> ChatCompletionRequest:
    return body.chat(item_of)


class ResponsesAssembler(EventAssembler):
    """Makes a response of `given`. The last event of a stream has the whole response. `keep` gets its items."""

    def __init__(
        self,
        given: ResponsesRequest,
        keep: Callable[[list[Body]], None],
        *arguments: Any,  # noqa: ANN401 - see `EventAssembler`
    ) -> None:
        super().__init__(*arguments)
        self._given, self._keep = given, keep
        self._echo = _echo(given)
        self._items_id = uuid.uuid4().hex  # requests may share an id, which their client or a proxy chose
        self._num_events = 0

    def answer(self) -> Body:
        status = "incomplete" if self.finish_reason == "length" else "completed"
        response = self._response(status, usage=self._used())
        if self._given.store is not False:
            self._keep(response["output"])
        return response

    def first_chunks(self) -> list[Body]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def last_chunks(self) -> list[Body]:
        response = self.answer()
        return [self._event(f"response.{response['status']}", response=response)]

    def failure_chunks(self, error: ServeError) -> list[Body]:
        """Return the event of a response that fails after its first event."""
        param, message = api_error(error, NAMES)
        code = "server_error" if param is None else "invalid_prompt"
        return [
            self._event("response.failed", response=self._response("failed", error={"code": code, "message": message}))
        ]

    def opened(self, part: Part) -> Iterator[Body]:
        item = self._item(part, "in_progress")
        yield self._event("response.output_item.added", output_index=part.index, item=item)
        if part.kind != "call":
            yield self._event("response.content_part.added", **self._place(part), part=_content(part))

    def grown(self, part: Part, piece: str) -> Iterator[Body]:
        logprobs: Body = {"logprobs": []} if part.kind == "text" else {}
        yield self._event(f"{_EVENTS[part.kind]}.delta", **self._place(part), delta=piece, **logprobs)

    def closed(self, part: Part) -> Iterator[Body]:
        match part.kind:
            case "call":
                whole: Body = {"name": part.name, "arguments": part.text}
            case "text":
                whole = {"text": part.text, "logprobs": []}
            case "reasoning":
                whole = {"text": part.text}
        yield self._event(f"{_EVENTS[part.kind]}.done", **self._place(part), **whole)
        if part.kind != "call":
            yield self._event("response.content_part.done", **self._place(part), part=_content(part))
        yield self._event("response.output_item.done", output_index=part.index, item=self._item(part))

    def _event(self, kind: str, **fields: Any) -> Body:  # noqa: ANN401 - JSON
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, "sequence_number": number, **fields}

    def _place(self, part: Part) -> Body:
        content_index = {} if part.kind == "call" else {"content_index": 0}
        return {"item_id": self._item_id(part), "output_index": part.index, **content_index}

    def _item_id(self, part: Part) -> str:
        return f"{_ITEM_PREFIXES[part.kind]}_{self._items_id}_{part.index}"

    def _item(self, part: Part, status: str | None = None) -> Body:
        """Return the item of a part. An item in progress has no content yet."""
        is_begun = status is None
        item: Body = {
            "id": self._item_id(part),
            "status": status or ("completed" if part.is_complete else "incomplete"),
        }
        match part.kind:
            case "call":
                call = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return {"type": "function_call", **item, **call}
            case "text":
                return {"type": "message", **item, "role": "assistant", "content": [_content(part)] * is_begun}
        return {"type": "reasoning", **item, "summary": [], "content": [_content(part)] * is_begun}

    def _response(self, status: str, *, error: Body | None = None, usage: Body | None = None) -> Body:
        params, reasoning = self.engine_requests[0].params, self._given.reasoning
        is_over = status != "in_progress"
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "background": False,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._given.instructions,
            "max_output_tokens": self._given.max_output_tokens,
            "model": self._head["model"],
            "output": [self._item(part) for part in self.parts if is_over],
            "parallel_tool_calls": self._given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if reasoning is None else reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            **self._echo,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": usage,
            "metadata": self._given.metadata or {},
        }

    def _used(self) -> Body:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.choice.num_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.choice.num_tokens,
        }


def _echo(request: ResponsesRequest) -> Body:
    """Return fields of a request for its answer, as JSON. Schemas may have integers that msgspec cannot encode."""
    given = request.model_dump(include={"text", "tool_choice", "tools"}, by_alias=True, exclude_none=True)
    fields = {
        "text": {"format": given.get("text", {}).get("format", {"type": "text"})},
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": [{"strict": None, "parameters": None, **tool} for tool in given.get("tools", ())],
    }
    return {name: msgspec.Raw(to_json(value, inf_nan_mode="null")) for name, value in fields.items()}


def _content(part: Part) -> Body:
    extra: Body = {"annotations": [], "logprobs": []} if part.kind == "text" else {}
    return {"type": _PART_TYPES[part.kind], "text": part.text, **extra}
