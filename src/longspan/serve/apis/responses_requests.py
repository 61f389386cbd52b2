"""Bodies of OpenAI's Responses API: requests, which become chats, and answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    FailFast,
    Field,
    Tag,
    TypeAdapter,
    field_validator,
    model_validator,
)
from typing_extensions import TypeAliasType

from longspan.serve.apis.base import Names, chat_of, check_tool_kind
from longspan.serve.chat_requests import ChatCompletionRequest, kind_of_choice
from longspan.serve.errors import WireError, shortened
from longspan.serve.requests import MAX_COUNT, UNSERVED, JsonObjectFormat, Schema, SomeText, TextFormat, WireModel

NAMES: Names = (
    (r"^messages$", "input"),
    (r"^(max_completion_tokens|max_tokens)$", "max_output_tokens"),
    (r"^response_format(\.json_schema)?", "text.format"),
    (r"^reasoning_effort$", "reasoning.effort"),
    (r"^(tools\[\d+\])\.function", r"\1"),
)
_STATELESS = "this server is stateless and keeps no responses"
_WHOLE_INPUT = f"{_STATELESS}: send the whole conversation as input"


class InputText(WireModel):
    """A part of a message. InputParts that are not text are refused."""

    type: Literal["input_text", "output_text"]
    text: str


class Refusal(WireModel):
    """A part of an earlier answer in which a model has refused."""

    type: Literal["refusal"]
    refusal: str


InputParts = TypeAliasType(
    "InputParts", Annotated[list[Annotated[InputText | Refusal, Field(discriminator="type")]], FailFast()]
)


class MessageItem(WireModel):
    """A message of any side. The role `developer` counts as `system`."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | InputParts


class FunctionCallItem(WireModel):
    """A call that the model has made. `arguments` is JSON."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutputItem(WireModel):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | InputParts


class ReasoningText(WireModel):
    """A part of a reasoning item."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


ReasoningTexts = TypeAliasType("ReasoningTexts", Annotated[list[ReasoningText], FailFast()])


class ReasoningItem(WireModel):
    """Earlier reasoning, which the chat template may show. The summary counts if there is no content."""

    type: Literal["reasoning"]
    summary: ReasoningTexts | None = None
    content: ReasoningTexts | None = None


class ItemReference(WireModel):
    """An item of a recent response, by its id. Clients send it if they did not set `store` to false."""

    type: Literal["item_reference"]
    id: str


def _with_type(value: object) -> object:
    """Add the type to a message without one."""
    return {"type": "message", **value} if isinstance(value, dict) and "role" in value else value


WholeItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
_WHOLE_ITEM: TypeAdapter[WholeItem] = TypeAdapter(Annotated[WholeItem, Field(discriminator="type")])
Item = Annotated[
    Annotated[WholeItem | ItemReference, Field(discriminator="type")],
    BeforeValidator(_with_type),
]
InputItems = TypeAliasType("InputItems", Annotated[list[Item], Field(min_length=1), FailFast()])


class FlatTool(WireModel):
    """A function that the model may call. Tools that a server would run are refused."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: object) -> object:
        check_tool_kind(data, "function")
        return data


FlatTools = TypeAliasType("FlatTools", Annotated[list[FlatTool], FailFast()])


class FlatName(WireModel):
    """The function that the model must call, or may call."""

    type: Literal["function"]
    name: str


class FlatAllowed(WireModel):
    """The functions that the model may call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatName], Field(min_length=1), FailFast()]


FlatChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FlatName, Tag("named")]
    | Annotated[FlatAllowed, Tag("allowed")],
    Discriminator(kind_of_choice),
]


class FlatSchema(WireModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    name: str
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(WireModel):
    """The form of the text."""

    format: Annotated[TextFormat | JsonObjectFormat | FlatSchema, Field(discriminator="type")] | None = None


class ReasoningOptions(WireModel):
    """Options of reasoning, of which only the effort is read."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the chat template. `none` also sets `enable_thinking` and `thinking` to false."""


class ResponsesRequest(WireModel):
    """`POST /v1/responses`. The server keeps no responses, so `input` is the whole conversation.

    Items of recent responses may be given by their ids.
    """

    unserved: ClassVar[Mapping[str, tuple[Sequence[object], str]]] = {
        **UNSERVED,
        "background": ((False,), f"{_STATELESS}: leave it out, or use stream"),
        "conversation": ((), _WHOLE_INPUT),
        "max_tokens": ((), "use max_output_tokens"),
        "previous_response_id": ((), _WHOLE_INPUT),
        "prompt": ((), f"{_STATELESS} and no prompts: use instructions and input"),
        "response_format": ((), "use text.format"),
        "top_logprobs": ((0,), "use /v1/chat/completions"),
        "truncation": (("disabled",), "shorten the input"),
    }

    model: str | None = None
    """A name of `/v1/models`. May be omitted."""
    input: SomeText | InputItems
    """A text of the user, or the items of a conversation."""
    instructions: str | None = None
    """A text that precedes the input, as a system message."""
    store: bool | None = None
    """Later requests cannot name the items of this response by their ids if this is false."""
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Default: the rest of the context."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tools: FlatTools | None = None
    tool_choice: FlatChoice | None = None
    """`auto`, the default: the model answers or calls. `required`: it calls. Or the functions that it may call."""
    parallel_tool_calls: bool | None = None
    """If false, an answer has at most one call."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    """Returned in the answer."""
    stream: bool | None = None

    @field_validator("store")
    @classmethod
    def _keep_nothing(cls, store: bool | None) -> bool | None:
        if store:
            raise ValueError(f"{_STATELESS}: leave it out, or set it to false")
        return store

    def chat(self, item_of: Callable[[str], dict[str, Any] | None]) -> ChatCompletionRequest:
        """Return the same request as a chat. `item_of` returns the item with an id.

        Raises:
            WireError: it cannot be served.
        """
        fields = {
            "model": self.model,
            "messages": list(_messages(self, item_of)),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": None if self.tools is None else [_nested(tool) for tool in self.tools],
            "tool_choice": _choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": _format(self.text),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "stream": self.stream,
        }
        return chat_of(fields, NAMES)


def _nested(flat: FlatTool | FlatName) -> dict[str, Any]:
    """Return a tool, or its name, in the form of chats."""
    return {"type": "function", "function": flat.model_dump(exclude={"type"}, exclude_none=True)}


def _choice(choice: str | FlatName | FlatAllowed | None) -> Any:  # noqa: ANN401 - JSON
    match choice:
        case FlatName():
            return _nested(choice)
        case FlatAllowed():
            allowed = {"mode": choice.mode, "tools": [_nested(name) for name in choice.tools]}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _format(options: TextOptions | None) -> dict[str, Any] | None:
    if options is None or options.format is None:
        return None
    given = options.format.model_dump(by_alias=True, exclude_none=True)
    if isinstance(options.format, FlatSchema):
        return {"type": given.pop("type"), "json_schema": given}
    return given


def _messages(request: ResponsesRequest, item_of: Callable[[str], dict[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat. System messages at the beginning become one, as most templates demand."""
    given = request.input
    items: list[WholeItem] = [MessageItem(role="user", content=given)] if isinstance(given, str) else []
    named = set[str]()
    for index, item in enumerate(() if isinstance(given, str) else given):
        if not isinstance(item, ItemReference):
            items.append(item)
            continue
        place, name = f"input[{index}]", shortened(repr(item.id))
        if item.id in named:  # a small request could otherwise become a large conversation
            raise WireError(f"{place}: {name} is given twice: give each item once", place)
        named.add(item.id)
        if (kept := item_of(item.id)) is None:
            problem = f"{name} is no item of a recent response"
            raise WireError(f"{place}: {problem}: send the item itself (store: false)", place)
        items.append(_WHOLE_ITEM.validate_python(kept))
    system = [] if request.instructions is None else [request.instructions]
    messages = list(_turns(items))
    num_system = next((index for index, message in enumerate(messages) if message["role"] != "system"), len(messages))
    system += [message["content"] for message in messages[:num_system]]
    if system:
        yield {"role": "system", "content": "\n\n".join(system)}
    yield from messages[num_system:]


def _turns(items: Sequence[WholeItem]) -> Iterator[Any]:
    """Yield the messages of items. Successive reasoning, text and calls are one message of the assistant."""
    turn: dict[str, Any] = {}
    for item in items:
        is_text = isinstance(item, MessageItem) and item.role == "assistant"
        is_begun = "content" in turn or "tool_calls" in turn
        goes_on = isinstance(item, FunctionCallItem) or ((is_text or isinstance(item, ReasoningItem)) and not is_begun)
        if turn and not goes_on:
            yield {"role": "assistant", "content": "", **turn}
            turn = {}
        match item:
            case ReasoningItem():
                texts = "\n".join(part.text for part in item.content or item.summary or ())
                before = turn.get("reasoning_content")
                turn["reasoning_content"] = texts if before is None else f"{before}\n{texts}"
            case FunctionCallItem():
                call = {"name": item.name, "arguments": item.arguments}
                turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": call})
            case FunctionCallOutputItem():
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            case MessageItem() if is_text:
                turn["content"] = _text(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                yield {"role": role, "content": _text(item.content)}
    if turn:
        yield {"role": "assistant", "content": "", **turn}


def _text(content: str | Sequence[InputText | Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)


class InputTokensDetails(BaseModel):
    """Input tokens whose KV was cached. Writing to the cache is not counted."""

    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(BaseModel):
    """Output tokens of reasoning sections."""

    reasoning_tokens: int


class ResponsesUsage(BaseModel):
    """Numbers of tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponsesAnswer(BaseModel):
    """The answer of `POST /v1/responses`, and part of some events of its stream."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]] = Field(description="items of the types reasoning, message and function_call")
    usage: ResponsesUsage | None
    metadata: dict[str, str]
