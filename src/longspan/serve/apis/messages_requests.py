"""Bodies of Anthropic's Messages API: requests, which become chats, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BaseModel, FailFast, Field, model_validator
from typing_extensions import TypeAliasType

from longspan.serve.apis.base import Names, chat_of, check_tool_kind, conversation_of
from longspan.serve.chat_requests import ChatCompletionRequest, TokenizeRequest
from longspan.serve.errors import UNSUPPORTED_THREAD, WireError
from longspan.serve.requests import MAX_COUNT, UNSERVED, Schema, StopStrings, WireModel

NAMES: Names = (
    (r"^max_completion_tokens$", "max_tokens"),
    (r"^stop$", "stop_sequences"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^(tools\[\d+\])\.function\.parameters", r"\1.input_schema"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)


class TextBlock(WireModel):
    """A text in a message, in the system prompt or in the result of a call."""

    type: Literal["text"]
    text: str


TextBlocks = TypeAliasType("TextBlocks", Annotated[list[TextBlock], FailFast()])


class ToolUseBlock(WireModel):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(WireModel):
    """The result of a call. Its texts alone tell the model about an error."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | TextBlocks | None = None


class ThinkingBlock(WireModel):
    """Earlier reasoning, which the chat template may show."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(WireModel):
    """Encrypted reasoning of another server, which is left out."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]
ContentBlocks = TypeAliasType("ContentBlocks", Annotated[list[Block], FailFast()])

_OF_ROLE = {"user": (TextBlock, ToolResultBlock), "assistant": (TextBlock, ToolUseBlock, ThinkingBlock)}


class MessageParam(WireModel):
    """A message of either side. The model continues the text of a last message of the assistant."""

    role: Literal["user", "assistant"]
    content: str | ContentBlocks

    @model_validator(mode="after")
    def _fit(self) -> MessageParam:
        for index, block in enumerate([] if isinstance(self.content, str) else self.content):
            if not isinstance(block, (*_OF_ROLE[self.role], RedactedThinkingBlock)):
                other = "assistant" if self.role == "user" else "user"
                problem = f"{block.type} is not for the role {self.role}: send it in a message of the role {other}"
                raise WireError(problem, f"content[{index}].type")
        return self


MessageParams = TypeAliasType("MessageParams", Annotated[list[MessageParam], Field(min_length=1), FailFast()])


class CustomTool(WireModel):
    """A tool that the client runs. Tools of Anthropic's servers are refused."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    input_schema: Schema

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: object) -> object:
        check_tool_kind(data, "custom")
        return data


CustomTools = TypeAliasType("CustomTools", Annotated[list[CustomTool], FailFast()])


class FreeToolChoice(WireModel):
    """`auto`, the default: the model answers or calls. `any`: it calls."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None
    """An answer has at most one call."""


class NamedToolChoice(WireModel):
    """The tool that the model must call."""

    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(WireModel):
    """The prompt does not mention the tools."""

    type: Literal["none"]


class Thinking(WireModel):
    """Enables reasoning in chat templates that can disable it. By default, it is disabled."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    """Ignored: only `max_tokens` bounds reasoning."""


class OutputFormat(WireModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(WireModel):
    """Options of the output, of which only the format is read."""

    format: OutputFormat | None = None
    """The form of texts. By default, any text."""


class CountTokensRequest(WireModel):
    """`POST /v1/messages/count_tokens`."""

    unserved: ClassVar[Mapping[str, tuple[Sequence[object], str]]] = {
        **UNSERVED,
        "container": ((), "this server runs no tools"),
        "mcp_servers": (([],), "this server runs no tools"),
        "output_format": ((), "use output_config.format"),
        "stop": ((), "use stop_sequences"),
    }

    model: str | None = None
    """A name of `/v1/models`. May be omitted."""
    messages: MessageParams
    system: str | TextBlocks | None = None
    tools: CustomTools | None = None
    tool_choice: Annotated[FreeToolChoice | NamedToolChoice | NoToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_threads(cls, data: object) -> object:
        """Refuse conversations that the server would keep. Anthropic's clients read the code and send everything."""
        if isinstance(data, dict) and data.get("thread") is not None:
            problem = "this server is stateless and keeps no threads: send all messages of the conversation"
            raise WireError(problem, "thread", code=UNSUPPORTED_THREAD)
        return data

    @property
    def continues(self) -> bool:
        """Whether the output continues the last message."""
        last = self.messages[-1]
        return last.role == "assistant" and (
            isinstance(last.content, str) or not any(isinstance(block, ToolUseBlock) for block in last.content)
        )

    def template_fields(self) -> dict[str, Any]:
        """Return the fields of a chat that decide its prompt."""
        thinks = self.thinking is not None and self.thinking.type != "disabled"
        return {
            "model": self.model,
            "messages": list(_messages(self)),
            "tools": [_nested(tool) for tool in self.tools] if self.tools else None,
            "continue_final_message": self.continues or None,
            "chat_template_kwargs": {"enable_thinking": True, "thinking": True} if thinks else None,
            "reasoning_effort": None if thinks else "none",
        }

    def conversation(self) -> TokenizeRequest:
        """Return the same prompt as a request for its tokens."""
        fields = self.template_fields()
        if isinstance(self.tool_choice, NoToolChoice):
            del fields["tools"]
        return conversation_of(fields, NAMES)


class MessagesRequest(CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stop_sequences: StopStrings | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    """0 or -1 for all tokens."""
    output_config: OutputConfig | None = None
    stream: bool | None = None

    def chat(self) -> ChatCompletionRequest:
        """Return the same request as a chat. Raise WireError if it cannot be served."""
        choice: Any = None
        parallel = None
        match self.tool_choice:
            case NamedToolChoice(name=name):
                choice = {"type": "function", "function": {"name": name}}
            case FreeToolChoice(type=kind):
                choice = "required" if kind == "any" else kind
                parallel = False if self.tool_choice.disable_parallel_tool_use else None
            case NoToolChoice():
                choice = "none"
        fields = {
            **self.template_fields(),
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "tool_choice": choice,
            "parallel_tool_calls": parallel,
            "response_format": _format(self.output_config),
            "stream": self.stream,
        }
        return chat_of(fields, NAMES)


def _nested(tool: CustomTool) -> dict[str, Any]:
    """Return a tool in the form of chats."""
    described = tool.model_dump(include={"name", "description"}, exclude_none=True)
    return {"type": "function", "function": {**described, "parameters": tool.input_schema}}


def _format(config: OutputConfig | None) -> dict[str, Any] | None:
    """Return the format of outputs in the form of chats."""
    if config is None or config.format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": config.format.schema_}}


def _messages(request: CountTokensRequest) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat. Results of calls precede the texts of their message, as templates expect."""
    if request.system:
        yield {"role": "system", "content": _text(request.system)}
    for message in request.messages:
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        text = _text([block for block in blocks if isinstance(block, TextBlock)])
        if message.role == "assistant":
            yield {"role": "assistant", "content": text, **_made(blocks)}
            continue
        results = [block for block in blocks if isinstance(block, ToolResultBlock)]
        for result in results:
            yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": _text(result.content or "")}
        if text or not results:
            yield {"role": "user", "content": text}


def _made(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the reasoning and the calls of a message of the assistant."""
    fields: dict[str, Any] = {}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    if thoughts:
        fields["reasoning_content"] = "\n".join(thoughts)
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.input).decode()},
            }
            for call in calls
        ]
    return fields


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class CountTokensAnswer(BaseModel):
    """`POST /v1/messages/count_tokens` answers with the length of the prompt."""

    input_tokens: int


class MessagesUsage(BaseModel):
    """Numbers of tokens of an answer. `input_tokens` counts prompt tokens whose KV was not cached."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: Literal[0]
    output_tokens: int


class MessagesAnswer(BaseModel):
    """`POST /v1/messages` answers with the blocks of one message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]] = Field(description="blocks of the types thinking, text and tool_use")
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage
