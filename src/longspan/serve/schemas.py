"""Response bodies, for the OpenAPI document only. Responses are made without these models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from longspan.core.request import FinishReason
from longspan.serve.chat_requests import ToolCall


class ErrorInfo(BaseModel):
    """The message of an error, its kind and its cause."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Any response with a status of 400 or more."""

    error: ErrorInfo


class MessagesErrorDetails(BaseModel):
    """The reason why a thread is refused, by which Anthropic's clients send whole conversations."""

    error_code: str
    unsupported: list[str]


class MessagesErrorInfo(BaseModel):
    """The message of an error and its kind. Only refused threads have details."""

    message: str
    type: str
    details: MessagesErrorDetails | None = None


class MessagesErrorBody(BaseModel):
    """An error in the form of Anthropic's API, below `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorInfo
    request_id: str | None


class ModelCard(BaseModel):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "longspan"
    root: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    """`GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class VersionInfo(BaseModel):
    """`GET /version`."""

    version: str


class TokenizeResponse(BaseModel):
    """`POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """`POST /detokenize`."""

    prompt: str


class PromptTokensDetails(BaseModel):
    """Prompt tokens whose KV was cached."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """Output tokens of reasoning, without its markers."""

    reasoning_tokens: int


class Usage(BaseModel):
    """Numbers of tokens of a request. In a stream with `continuous_usage_stats`, of a choice so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = Field(None, description="of chats, at their end")


class PromptLogprob(BaseModel):
    """The logprob of a token in the prompt."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Logprobs by token id. Null for the first token."""


class CompletionLogprobs(BaseModel):
    """Four lists of the same length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int] = Field(description="where in the choice's text a token begins, in characters")


class CompletionChoice(BaseModel):
    """One text, or in a stream its new part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(BaseModel):
    """`POST /v1/completions`, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A token with its bytes. Null if it has no bytes of its own."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """An output token, with the most likely tokens at its position."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """The logprobs of all output tokens."""

    content: list[TokenLogprob]


class ChatMessage(BaseModel):
    """The message that answers a conversation."""

    role: Literal["assistant"]
    content: str | None = Field(description="null if there are calls or reasoning, and no text")
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="the same text as `reasoning_content`")
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | Literal["tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletionResponse(BaseModel):
    """`POST /v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None = None
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
