"""The chunks of a chat's stream, as the server makes them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from longspan.core.request import FinishReason
from longspan.serve.schemas import ChatLogprobs, PromptLogprobs, Usage


class FunctionDelta(BaseModel):
    """A piece of a call's arguments. The first piece has the name."""

    name: str | None = None
    arguments: str


class CallDelta(BaseModel):
    """A piece of a call. The first piece has the id."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta


class ChatDelta(BaseModel):
    """New text of an answer, pieces of its calls, or its role."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """New text of one of the answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"] | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """A chunk of the stream of `POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
