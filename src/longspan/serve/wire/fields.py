"""Types of the fields of requests, and the messages of conversations. They are the OpenAPI document, too.

A number is a number here and a string a string: nothing is converted. Null always means that a field was not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from longspan.serve.errors import WireError

MOST = 2**31 - 1
"""Of numbers that count something. Model and memory allow much less."""

Whole = Annotated[int, Field(ge=0, le=MOST)]
TokenId = Annotated[int, Field(ge=0, le=MOST)]
SomeText = Annotated[str, Field(min_length=1)]

# Lists fail at their first wrong item: a body of a million wrong items must not make a million errors.
Texts = TypeAliasType("Texts", Annotated[list[SomeText], Field(min_length=1), FailFast()])
TokenIds = TypeAliasType("TokenIds", Annotated[list[TokenId], Field(min_length=1), FailFast()])
TokenLists = TypeAliasType("TokenLists", Annotated[list[TokenIds], Field(min_length=1), FailFast()])
StopTokens = TypeAliasType("StopTokens", Annotated[list[TokenId], FailFast()])
Choices = TypeAliasType("Choices", Annotated[list[SomeText], Field(min_length=1), FailFast()])
StopStrings = TypeAliasType("StopStrings", Annotated[list[SomeText], FailFast()])


def _kind_of_prompt(value: object) -> str:
    """Choose the alternative of a prompt by its first item, so that only that one is tried."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, list):
        return "token_lists"
    if isinstance(first, int):
        return "token_ids"
    return "texts" if isinstance(value, list) else "text"


Prompts = Annotated[
    Annotated[SomeText, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("token_ids")]
    | Annotated[TokenLists, Tag("token_lists")],
    Discriminator(_kind_of_prompt),
]
"""One prompt or several, each a text or its token ids."""

LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,8})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(json_schema_extra={"additionalProperties": False}),
]
"""JSON has no integer keys: token ids are written as strings."""

Schema = dict[str, Any]


_NO_TOOLS = "put the description of tools into a message"
_NO_GUIDED = "use structured_outputs or response_format"
_TEXT_ONLY = "only text is served"
UNSERVED: Mapping[str, tuple[object, str]] = {
    "allowed_token_ids": ([], "use logit_bias or structured_outputs"),
    "audio": (None, _TEXT_ONLY),
    "bad_words": ([], "use logit_bias"),
    "cache_salt": (None, "all requests share the prefix cache: start another server for those that must not"),
    "chat_template": (None, "the model's own is used; chat_template_kwargs sets its variables"),
    "chat_template_kwargs": ({}, "only conversations have a template: use /v1/chat/completions"),
    "continue_final_message": (False, "only conversations have a template: use /v1/chat/completions"),
    "documents": ([], "put documents into a message"),
    "echo": (False, "only /v1/completions repeats a prompt"),
    "function_call": ("none", _NO_TOOLS),
    "functions": ([], _NO_TOOLS),
    "guided_choice": (None, _NO_GUIDED),
    "guided_grammar": (None, _NO_GUIDED),
    "guided_json": (None, _NO_GUIDED),
    "guided_regex": (None, _NO_GUIDED),
    "include_stop_str_in_output": (False, "append stop_reason to the text"),
    "length_penalty": (1, "it belongs to beam search"),
    "logits_processors": ([], "use logit_bias or structured_outputs"),
    "modalities": (["text"], _TEXT_ONLY),
    "prompt_embeds": (None, "prompts are text or token ids"),
    "reasoning_effort": (None, "chat_template_kwargs sets the variables of a template"),
    "return_tokens_as_token_ids": (False, "use return_token_ids"),
    "skip_special_tokens": (True, "use return_token_ids"),
    "structural_tag": (None, "use grammar"),
    "suffix": ("", "only continuations are served"),
    "tool_choice": ("none", _NO_TOOLS),
    "tools": ([], _NO_TOOLS),
    "top_logprobs": (0, "use logprobs, which is a number here"),
    "truncate_prompt_tokens": (None, "shorten the prompt"),
    "use_beam_search": (False, "use n and temperature"),
    "web_search_options": (None, "put what is to be known into a message"),
    "whitespace_pattern": (None, "use grammar"),
}
"""Fields of OpenAI's and vLLM's API that would change the answer and are not served.

Each has its neutral value, beside null, and what to do instead. Other unknown fields are ignored, as they are by
OpenAI's and vLLM's servers.
"""


class WireModel(BaseModel):
    """Ignores fields that it does not know, but refuses those of `UNSERVED` that are not neutral."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: object) -> object:
        if isinstance(data, dict):
            for name, value in data.items():
                neutral, instead = (value, "") if name in cls.model_fields else UNSERVED.get(name, (value, ""))
                if value not in (None, neutral):
                    raise WireError(f"it is not supported: {instead}", name)
        return data


class StreamOptions(WireModel):
    """Options of what a stream sends beside the text."""

    include_usage: bool | None = None
    """End with a chunk that has no choices, but the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the usage of its choice so far."""


class TextFormat(WireModel):
    """The output may be any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """The output is any JSON object."""

    type: Literal["json_object"]


class NamedSchema(WireModel):
    """A JSON schema; outputs always follow it, `strict` or not."""

    name: str
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(WireModel):
    """JSON that follows a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def exactly_one(*names: str) -> Schema:
    """Return the JSON schema which says that one of these fields is given; null and false do not count."""
    given = {"not": {"enum": [None, False]}}
    return {"oneOf": [{"required": [name], "properties": {name: given}} for name in names]}


def check_exactly_one(values: Mapping[str, object]) -> None:
    """Check that one of these fields is given.

    Raises:
        WireError: if none is, or more than one.
    """
    given = [name for name, value in values.items() if value is not None and value is not False]
    if len(given) != 1:
        raise WireError(f"exactly one of {', '.join(values)} must be given, but {' and '.join(given) or 'none'} is")


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(WireModel):
    """Constraint that outputs must follow: exactly one of these."""

    model_config = ConfigDict(json_schema_extra=exactly_one(*_CONSTRAINTS))

    json_: SomeText | Schema | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: SomeText | None = None
    """What the whole output must match."""
    choice: Choices | None = None
    """Texts, one of which is the output."""
    grammar: SomeText | None = None
    """A grammar in Lark's notation."""
    json_object: bool | None = None
    """The output is any JSON object."""

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        check_exactly_one(self.fields)
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """Return the constraints by their names in JSON."""
        return {name: self.json_ if name == "json" else getattr(self, name) for name in _CONSTRAINTS}


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


class GivenMessage(_Message):
    """A message that the assistant reads."""

    role: Literal["system", "developer", "user", "tool"]
    content: Content
    tool_call_id: str | None = None


class AssistantMessage(_Message):
    """A message of the assistant: a text, calls of tools, or both."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None


Message = Annotated[GivenMessage | AssistantMessage, Field(discriminator="role")]
Messages = TypeAliasType("Messages", Annotated[list[Message], Field(min_length=1), FailFast()])


def num_chars(message: GivenMessage | AssistantMessage) -> int:
    """Count the characters of a message's content."""
    content = message.content or ""
    return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)


def for_template(message: GivenMessage | AssistantMessage) -> dict[str, Any]:
    """Return a message as chat templates know it: without null, and with arguments of calls as objects."""
    plain = message.model_dump(exclude_none=True)
    if isinstance(message, AssistantMessage):
        plain.setdefault("content", "")
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = _arguments(call["function"]["arguments"])
    return plain


def _arguments(text: str) -> dict[str, Any] | str:
    """Parse the arguments of a call; what a model wrote that is no object is kept as it is."""
    try:
        value = json.loads(text or "{}")
    except (json.JSONDecodeError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
