"""What the fields of several requests are made of. The models double as the server's OpenAPI document.

A number is a number here and a string a string: nothing is converted. Null always means that a field was not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, FailFast, Field, Tag, model_validator
from typing_extensions import TypeAliasType

from longspan.serve.wire import refused
from longspan.serve.wire.errors import WireError

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
    """Which alternative a prompt is, told from its first item, so that only that one is tried."""
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


class WireModel(BaseModel):
    """Fields that a model does not know are ignored, unless they are in the tables of `refused`."""

    model_config = ConfigDict(
        strict=True,
        extra="ignore",
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class StreamOptions(WireModel):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    """End with a chunk that has no choices, but the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`: every chunk has the usage of its choice so far."""


class TextFormat(WireModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(WireModel):
    """Any JSON object."""

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
    """Says in a model's JSON schema that one of these fields is given; null and false are as if it were not."""
    given = {"not": {"enum": [None, False]}}
    return {"oneOf": [{"required": [name], "properties": {name: given}} for name in names]}


def check_exactly_one(values: Mapping[str, object]) -> None:
    """Whether one of these fields is given.

    Raises:
        WireError: if none is, or more than one.
    """
    given = [name for name, value in values.items() if value is not None and value is not False]
    if len(given) != 1:
        raise WireError(f"exactly one of {', '.join(values)} must be given, but {' and '.join(given) or 'none'} is")


_GUIDES = ("json", "regex", "choice", "grammar", "json_object")


class StructuredOutputs(WireModel):
    """What outputs must follow; exactly one of these."""

    model_config = ConfigDict(json_schema_extra=exactly_one(*_GUIDES))

    json_: SomeText | Schema | None = Field(default=None, alias="json")
    """A JSON schema, or its text."""
    regex: SomeText | None = None
    """What the whole output must match."""
    choice: Choices | None = None
    """Texts, one of which is the output."""
    grammar: SomeText | None = None
    """A grammar in Lark's notation."""
    json_object: bool | None = None
    """Any JSON object."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: object) -> object:
        refused.refuse(data, refused.STRUCTURED)
        return data

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        check_exactly_one(self.fields)
        return self

    @property
    def fields(self) -> dict[str, Any]:
        """By their names on the wire."""
        return {name: self.json_ if name == "json" else getattr(self, name) for name in _GUIDES}
