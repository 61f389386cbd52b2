"""The common part of translations: requests become chats, and the deltas of a chat become events of named types."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from longspan.serve.chat_requests import ChatCompletionRequest, TokenizeRequest
from longspan.serve.errors import ServeError, WireError, wire_error
from longspan.serve.messages import Delta
from longspan.serve.responses import AnswerChoice, Body, ChatAssembler, joined

RequestT = TypeVar("RequestT", ChatCompletionRequest, TokenizeRequest)
Names = Sequence[tuple[str, str]]
"""Expressions for paths of fields in chats, each with its replacement in the API."""


def check_tool_kind(data: object, kind: str) -> None:
    """Raise WireError for a tool of another kind than `kind`, which the client runs. This server runs no tools."""
    if isinstance(data, dict) and isinstance(given := data.get("type"), str) and given != kind:
        problem = f"{given[:60]!r} is not supported, because this server runs no tools: use the type {kind}"
        raise WireError(problem, "type")


def chat_of(fields: Mapping[str, Any], names: Names) -> ChatCompletionRequest:
    """Return the chat with these fields, of which None counts as not given. Raise WireError for a mistake."""
    return _parsed(ChatCompletionRequest, fields, names)


def conversation_of(fields: Mapping[str, Any], names: Names) -> TokenizeRequest:
    """Return the request for the tokens of a chat with these fields. See `chat_of`."""
    return _parsed(TokenizeRequest, fields, names)


def _parsed(model: type[RequestT], fields: Mapping[str, Any], names: Names) -> RequestT:
    given = {name: value for name, value in fields.items() if value is not None}
    with api_errors(names):
        try:
            return model.model_validate(given)
        except ValidationError as error:
            raise wire_error(error, given) from error


@contextmanager
def api_errors(names: Names) -> Iterator[None]:
    """Replace the fields of chats by the fields of an API in the errors of the block."""
    try:
        yield
    except WireError as error:
        param, message = api_error(error, names)
        raise WireError(message, param, error.status, error.code) from error


def api_error(error: ServeError, names: Names) -> tuple[str | None, str]:
    """Return the field and the message of an error, with the names of an API."""
    if error.param is None:
        return None, str(error)
    param = error.param
    for pattern, name in names:
        param = re.sub(pattern, name, param)
    return param, str(error).replace(error.param, param, 1)


@dataclass(kw_only=True)
class Part:
    """A part of an answer that is a section of reasoning, a text or a call.

    Attributes:
        index: its position among the parts of the answer.
        call_id, name: of a call.
        pieces: pieces of its text, or of the JSON of its arguments.
        is_complete: True after its end. False while it grows, and for a part that `max_tokens` has cut off.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """Its text so far, or the JSON of its arguments."""
        return "".join(self.pieces)


class EventAssembler(ChatAssembler):
    """Makes the answer of another API: a stream of named events, or `answer` after the last event.

    An answer has one choice. Its parts follow one another: a part is open until the next begins or the output ends.
    """

    end = b""
    names: Names = ()

    def __init__(self, *arguments: Any) -> None:  # noqa: ANN401 - see `ChatAssembler`
        super().__init__(*arguments)
        [self.choice] = self.choices
        self.request_id: str = self._head["id"].removeprefix("chatcmpl-")
        self.parts: list[Part] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._is_open = False

    @abstractmethod
    def answer(self) -> Body:
        """Return the whole answer."""

    @abstractmethod
    def opened(self, part: Part) -> Iterable[Body]:
        """Return the events of a part that begins."""

    @abstractmethod
    def grown(self, part: Part, piece: str) -> Iterable[Body]:
        """Return the events of the next piece of a part."""

    @abstractmethod
    def closed(self, part: Part) -> Iterable[Body]:
        """Return the events of a part that ends."""

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens."""
        return len(self.engine_requests[0].token_ids)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens whose KV was cached, known with the first delta."""
        return self._num_cached[0]

    def whole(self) -> Body:
        for _ in self._events(self.choice, joined(self.choice.deltas)):
            pass
        return self.answer()

    def chunks(self, prompt: int, delta: Delta) -> list[Body]:
        choice, delta = self._record(prompt, delta)
        choice.num_tokens += len(delta.token_ids)
        return list(self._events(choice, delta))

    def encoded(self, chunk: Body) -> bytes:
        kind: str = chunk["type"]
        return b"event: " + kind.encode() + b"\n" + super().encoded(chunk)

    def _events(self, choice: AnswerChoice, delta: Delta) -> Iterator[Body]:
        pieces, fields = self._read(choice, delta)
        if pieces.reasoning:
            yield from self._grow("reasoning", pieces.reasoning)
        if pieces.content:
            yield from self._grow("text", pieces.content)
        for call in pieces.calls:
            yield from self._grow("call", call.arguments, call.id, call.name)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = fields["finish_reason"], delta.stop_reason
            has_called = choice.reader is not None and choice.reader.has_called
            ends_in_call = bool(self.parts) and self.parts[-1].kind == "call"
            yield from self._close(is_complete=has_called if ends_in_call else delta.finish_reason == "stop")

    def _grow(
        self,
        kind: Literal["reasoning", "text", "call"],
        piece: str,
        call_id: str | None = None,
        name: str | None = None,
    ) -> Iterator[Body]:
        """Add a piece to the open part, or to a new part if it has another kind or begins a call."""
        if not self._is_open or self.parts[-1].kind != kind or call_id is not None:
            yield from self._close(is_complete=True)
            self._is_open = True
            self.parts.append(Part(kind=kind, index=len(self.parts), call_id=call_id or "", name=name or ""))
            yield from self.opened(self.parts[-1])
        if piece:
            self.parts[-1].pieces.append(piece)
            yield from self.grown(self.parts[-1], piece)

    def _close(self, *, is_complete: bool) -> Iterator[Body]:
        if self._is_open:
            self._is_open, self.parts[-1].is_complete = False, is_complete
            yield from self.closed(self.parts[-1])
