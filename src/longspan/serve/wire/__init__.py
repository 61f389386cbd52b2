"""OpenAI's and vLLM's JSON, in and out, without any HTTP: bodies to requests to jobs, updates to answers."""

from longspan.serve.wire.answers import Assembler
from longspan.serve.wire.body import check_content_type, read_request
from longspan.serve.wire.chat_answer import ChatAssembler
from longspan.serve.wire.completion_answer import CompletionAssembler
from longspan.serve.wire.convert import (
    Served,
    chat_request,
    completion_requests,
    detokenized,
    form_kind,
    grammar_of,
    tokenized,
)
from longspan.serve.wire.errors import WireError, blaming, wire_error
from longspan.serve.wire.policy import PolicyInfo, PolicyUpdate
from longspan.serve.wire.requests import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from longspan.serve.wire.responses import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    DetokenizeResponse,
    ErrorBody,
    ModelCard,
    ModelList,
    TokenizeResponse,
    VersionInfo,
)

__all__ = [
    "Assembler",
    "ChatAssembler",
    "ChatCompletionChunk",
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "CompletionAssembler",
    "CompletionRequest",
    "CompletionResponse",
    "DetokenizeRequest",
    "DetokenizeResponse",
    "ErrorBody",
    "ModelCard",
    "ModelList",
    "PolicyInfo",
    "PolicyUpdate",
    "Served",
    "TokenizeRequest",
    "TokenizeResponse",
    "VersionInfo",
    "WireError",
    "blaming",
    "chat_request",
    "check_content_type",
    "completion_requests",
    "detokenized",
    "form_kind",
    "grammar_of",
    "read_request",
    "tokenized",
    "wire_error",
]
