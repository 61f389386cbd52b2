"""The messages of a conversation."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from longspan.serve.wire import refused
from longspan.serve.wire.fields import WireModel


class TextPart(WireModel):
    """A part of a content. Parts that are not text are refused."""

    type: Literal["text"]
    text: str


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast()])
Content = str | Parts


class FunctionCall(WireModel):
    """A call that the assistant has made; `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(WireModel):
    """A call with the id that its answer, a message of the role `tool`, refers to."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class _Message(WireModel):
    """Fields that are not known go to the chat template, which may know them."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: object) -> object:
        refused.refuse(data, refused.MESSAGE)
        return data


class GivenMessage(_Message):
    """What the assistant reads."""

    role: Literal["system", "developer", "user", "tool"]
    content: Content
    tool_call_id: str | None = None


class AssistantMessage(_Message):
    """What the assistant has said: a text, calls of tools, or both."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None


Message = Annotated[GivenMessage | AssistantMessage, Field(discriminator="role")]
Messages = TypeAliasType("Messages", Annotated[list[Message], Field(min_length=1), FailFast()])


def num_chars(message: GivenMessage | AssistantMessage) -> int:
    """Of its content."""
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def for_template(message: GivenMessage | AssistantMessage) -> dict[str, Any]:
    """A message as chat templates know it: without null, and calls with arguments that are objects, not their text."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message, AssistantMessage):
        plain.setdefault("content", "")
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(text: str) -> dict[str, Any] | str:
    """The object that a text is; a model may have written something else, which is kept as it is."""
    try:
        value = json.loads(text or "{}")
    except (json.JSONDecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
