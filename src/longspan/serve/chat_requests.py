"""Request bodies with conversations: messages, tools, and options of the chat template."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from longspan.serve.errors import WireError
from longspan.serve.requests import (
    MAX_COUNT,
    ONE_CONSTRAINT,
    CompletionRequest,
    GenerationRequest,
    Schema,
    SomeText,
    Whole,
    WireModel,
    check_exactly_one,
    exactly_one,
    has_value,
)
from longspan.text.call_formats.base import NO_PARAMETERS, Function


class TextPart(WireModel):
    """A part of a message's content. Parts that are not text are refused."""

    type: Literal["text"]
    text: str


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast()])
Content = str | Parts


class FunctionCall(WireModel):
    """A call that the assistant has made. `arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(WireModel):
    """A call with an id. Its result, a message of the role `tool`, has the same id."""

    id: str
    type: Literal["function"]
    function: FunctionCall


ToolCalls = TypeAliasType("ToolCalls", Annotated[list[ToolCall], FailFast()])
_ASSISTANT = "assistant"


class _Message(WireModel):
    """A message whose unknown fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None


class GivenMessage(_Message):
    """A message that the assistant reads, of any role that the chat template renders."""

    role: Annotated[SomeText, Field(json_schema_extra={"not": {"const": _ASSISTANT}})]
    content: Content
    tool_call_id: str | None = None


class AssistantMessage(_Message):
    """A message of the assistant: a text, calls of tools, or both."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: ToolCalls | None = None


def _kind_of_message(value: object) -> str:
    role = value.get("role") if isinstance(value, dict) else getattr(value, "role", None)
    return "made" if role == _ASSISTANT else "given"


Message = Annotated[
    Annotated[GivenMessage, Tag("given")] | Annotated[AssistantMessage, Tag("made")], Discriminator(_kind_of_message)
]
Messages = TypeAliasType("Messages", Annotated[list[Message], Field(min_length=1), FailFast()])


class FunctionDefinition(WireModel):
    """A function that the model may call. Its arguments follow the part of the schema that a grammar can express."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    parameters: Schema | None = None
    """The JSON schema of the arguments, which are an object. Without a schema, there are no arguments."""
    strict: bool | None = None
    """Refuse a schema with a keyword that no grammar can express. By default, such keywords are left out."""


class Tool(WireModel):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """Return the tool in the form of chat templates."""
        named = self.function.model_dump(include={"name", "description"}, exclude_none=True)
        parameters = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": {**named, "parameters": parameters}}


Tools = TypeAliasType("Tools", Annotated[list[Tool], FailFast()])


class NamedFunction(WireModel):
    """The name of a function."""

    name: str


class NamedTool(WireModel):
    """The name of the tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(WireModel):
    """The tools that the model may call. The prompt describes all tools of the request."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1), FailFast()]


class AllowedToolChoice(WireModel):
    """A choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def kind_of_choice(value: object) -> str:
    """Return the tag of a tool choice, which is parsed JSON or a model."""
    if not isinstance(value, dict | WireModel):
        return "word"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[AllowedToolChoice, Tag("allowed")],
    Discriminator(kind_of_choice),
]


_TOP_NEEDS_LOGPROBS: Schema = {
    "if": has_value("top_logprobs", {"type": "integer", "minimum": 1}),
    "then": has_value("logprobs", {"const": True}),
}
_OPEN_END: Schema = {
    "if": has_value("continue_final_message", {"const": True}),
    "then": {"properties": {"add_generation_prompt": {"enum": [None, False]}}},
}


_SOME_TOOLS = has_value("tools", {"type": "array", "minItems": 1})
_CHOICE_NEEDS_TOOLS: Schema = {
    "if": has_value("tool_choice", {"not": {"enum": [None, "none", "auto"]}}),
    "then": _SOME_TOOLS,
}
_TOOLS_ARE_A_CONSTRAINT: Schema = {
    "if": {"allOf": [_SOME_TOOLS, {"not": has_value("tool_choice", {"const": "none"})}]},
    "then": {"properties": {"structured_outputs": {"type": "null"}}},
}


class TemplateFields(WireModel):
    """Fields that decide how a conversation becomes a prompt."""

    add_generation_prompt: bool | None = None
    """End the prompt with the beginning of an answer. By default, unless `continue_final_message`."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that the model continues it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    """A variable of the chat template. `none` also sets `enable_thinking` and `thinking` to false."""

    tools: Tools | None = None
    """Functions that the model may call. The chat template must support tools."""

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort |= {"enable_thinking": False, "thinking": False}
        return effort | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _fit_template(self) -> TemplateFields:
        names = [tool.function.name for tool in self.tools or ()]
        counts = Counter(names)
        for index, name in enumerate(names):
            if counts[name] > 1:
                problem = f"there are {counts[name]} tools named {name!r}: keep one"
                raise WireError(problem, f"tools[{index}].function.name")
        if self.add_generation_prompt and self.continue_final_message:
            raise WireError(
                "it cannot be combined with add_generation_prompt: keep one of them", "continue_final_message"
            )
        return self


class ChatCompletionRequest(GenerationRequest, TemplateFields):
    """`POST /v1/chat/completions`."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [ONE_CONSTRAINT, _TOP_NEEDS_LOGPROBS, _OPEN_END, _CHOICE_NEEDS_TOOLS, _TOOLS_ARE_A_CONSTRAINT]
        }
    )

    messages: Messages
    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """The former name of `max_completion_tokens`."""
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Default: the rest of the context."""
    logprobs: bool | None = None
    """Report the log-probability of each token."""
    top_logprobs: Whole | None = None
    """Number of most likely tokens to return in addition to the chosen token. Needs `logprobs`."""

    tool_choice: ToolChoice | None = None
    """`auto`, the default: the model answers or calls. `required`: it calls. Or the function that it must call."""
    parallel_tool_calls: bool | None = None
    """If false, an answer has at most one call."""
    service_tier: str | None = None
    """Ignored: all requests have the tier `default`."""

    @property
    def must_call(self) -> bool:
        """Whether an answer has at least one call, and no content."""
        match self.tool_choice:
            case AllowedToolChoice() as choice:
                return choice.allowed_tools.mode == "required"
            case choice:
                return choice not in (None, "none", "auto")

    @property
    def chosen_names(self) -> list[str] | None:
        """The names of the tools that `tool_choice` allows, or None for all tools."""
        match self.tool_choice:
            case NamedTool() as choice:
                return [choice.function.name]
            case AllowedToolChoice() as choice:
                return [tool.function.name for tool in choice.allowed_tools.tools]
        return None

    @property
    def callable_functions(self) -> list[Function]:
        """The functions that the model may call."""
        names = self.chosen_names
        return [
            Function(
                tool.function.name,
                tool.function.parameters or NO_PARAMETERS,
                f"tools[{index}].function.parameters",
                tool.function.strict is True,
            )
            for index, tool in enumerate(self.tools or ())
            if self.tool_choice != "none" and (names is None or tool.function.name in names)
        ]

    @model_validator(mode="after")
    def _fit_chat(self) -> ChatCompletionRequest:
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not self.tools:
            raise WireError("there are no tools to choose from: give some (tools)", "tool_choice")
        given = {tool.function.name for tool in self.tools or ()}
        if unknown := [name for name in self.chosen_names or () if name not in given]:
            raise WireError(f"there is no tool named {unknown[0][:100]!r} among tools", "tool_choice")
        if self.callable_functions and self.structured_outputs:
            raise WireError("it cannot be combined with tools: keep one of them", "structured_outputs")
        if self.top_logprobs and not self.logprobs:
            raise WireError("it needs logprobs: set that to true", "top_logprobs")
        return self


TextRequest = CompletionRequest | ChatCompletionRequest


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`: a prompt, or a conversation."""

    model_config = ConfigDict(json_schema_extra={**exactly_one("prompt", "messages"), "allOf": [_OPEN_END]})

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for a conversation."""
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _fit(self) -> TokenizeRequest:
        check_exactly_one({"prompt": self.prompt, "messages": self.messages})
        return self
