"""Anthropic's Messages API: answers and events, made of the deltas of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from longspan.serve.apis.base import EventAssembler, Part, api_error, api_errors
from longspan.serve.apis.messages_requests import NAMES, CountTokensRequest, MessagesRequest
from longspan.serve.convert import tokenized
from longspan.serve.errors import ServeError, messages_error_body
from longspan.text.call_formats.base import parse_json

if TYPE_CHECKING:
    from fastapi import Request

    from longspan.serve.chat_requests import ChatCompletionRequest
    from longspan.serve.convert import ServedModel
    from longspan.serve.responses import Body
    from longspan.serve.server import Server

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


async def answer(server: Server, request: Request) -> Response:
    """Answer a conversation in the form of Anthropic's Messages API, whole or as a stream."""
    body = await server.parse(request, MessagesRequest)
    chat = await server.in_thread(request, _chat, body)
    with api_errors(NAMES):
        return await server.answer(request, chat, MessagesAssembler)


async def count_tokens(server: Server, request: Request) -> Response:
    """Return the number of tokens of the prompt that a request would have."""
    body = await server.parse(request, CountTokensRequest)
    count = await server.in_thread(request, _count, body)
    return Response(msgspec.json.encode({"input_tokens": count}), media_type="application/json")


def _chat(body: MessagesRequest, _: ServedModel) -> ChatCompletionRequest:
    return body.chat()


def _count(body: CountTokensRequest, served: ServedModel) -> int:
    with api_errors(NAMES):
        count: int = tokenized(body.conversation(), served)["count"]
        return count


class MessagesAssembler(EventAssembler):
    """Makes a message. The events of a stream have its parts, and the last events its end and its usage."""

    keep_alive = b'event: ping\ndata: {"type":"ping"}\n\n'

    def answer(self) -> Body:
        content = [_block(part) for part in self.parts]
        return {**self._message(), "content": content, **self._stop(), "usage": self._used()}

    def first_chunks(self) -> list[Body]:
        return [{"type": "message_start", "message": self._message()}]

    def last_chunks(self) -> list[Body]:
        end = {"type": "message_delta", "delta": self._stop(), "usage": self._used()}
        return [end, {"type": "message_stop"}]

    def failure_chunks(self, error: ServeError) -> list[Body]:
        _, message = api_error(error, NAMES)
        return [messages_error_body(error.status, message, self.request_id)]

    def opened(self, part: Part) -> Iterator[Body]:
        yield {"type": "content_block_start", "index": part.index, "content_block": _block(part)}

    def grown(self, part: Part, piece: str) -> Iterator[Body]:
        match part.kind:
            case "call":
                delta = {"type": "input_json_delta", "partial_json": piece}
            case "text":
                delta = {"type": "text_delta", "text": piece}
            case "reasoning":
                delta = {"type": "thinking_delta", "thinking": piece}
        yield {"type": "content_block_delta", "index": part.index, "delta": delta}

    def closed(self, part: Part) -> Iterator[Body]:
        yield {"type": "content_block_stop", "index": part.index}

    def _message(self) -> Body:
        """Return the message before its first part, when the number of cached tokens is unknown."""
        return {
            "id": f"msg_{self.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._used(),
        }

    def _stop(self) -> Body:
        sequence = self.stop_reason if isinstance(self.stop_reason, str) and self.finish_reason == "stop" else None
        reason = "end_turn" if sequence is None else "stop_sequence"
        return {"stop_reason": _STOP_REASONS.get(self.finish_reason or "", reason), "stop_sequence": sequence}

    def _used(self) -> Body:
        return {
            "input_tokens": self.num_prompt_tokens - self.num_cached_tokens,
            "cache_read_input_tokens": self.num_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": self.choice.num_tokens,
        }


def _block(part: Part) -> Body:
    """Return the block of a part. A call has an empty input if it was cut off, or if its arguments cannot be read."""
    match part.kind:
        case "call":
            given: Any = {}
            if part.is_complete and part.text:
                with suppress(ValueError):
                    parse_json(part.text)
                    given = msgspec.Raw(part.text.encode())  # integers may have more than 64 bits
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": given}
        case "text":
            return {"type": "text", "text": part.text}
    return {"type": "thinking", "thinking": part.text, "signature": ""}
