"""Schemas of tools as Zod 4 and pydantic write them: none is refused, and a reduced schema is weaker."""

from __future__ import annotations

import datetime as dt
import decimal
import ipaddress
import json
import logging
import pathlib
import uuid
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, IntEnum
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple

import pydantic
import pytest
from annotated_types import Ge, Gt, Len, MultipleOf
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tool_models import grammar_accepts, tool_tokenizer, tool_vocabulary
from typing_extensions import TypedDict

from longspan.text.call_formats import NAMES, variants
from longspan.text.call_formats.base import Function, quoted
from longspan.text.call_grammar import calls_grammar
from longspan.text.input_processor import InputProcessor
from longspan.text.json_schema import closed, log_left_out, reduced, shape_only, without_annotations
from longspan.text.structured import lark_json


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)] = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field("Rex", description="its name", examples=["Rex"], min_length=1, pattern=r"^[A-Z]\w+$")


class Tree(BaseModel):
    model_config = ConfigDict(extra="forbid", title="A tree")
    children: list[Tree] = []
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Pair(NamedTuple):
    left: int
    right: str = ""


class Looks(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    ahead: Annotated[str, Field(pattern="^(?=a)b")]


class Options(TypedDict, total=False):
    depth: int


PYDANTIC: list[Any] = [
    *(str, int, float, bool, None, bytes, Any, object, decimal.Decimal, complex, pathlib.Path, uuid.UUID),
    *(dt.date, dt.datetime, dt.time, dt.timedelta),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Interface),
    *(list, dict, set, frozenset, tuple, deque[int], list[int], set[str], frozenset[int], Sequence[int]),
    *(tuple[int, str], tuple[int, ...], dict[str, int], dict[int, str], dict[Colour, int], dict[uuid.UUID, int]),
    *(
        OrderedDict[str, int],
        Mapping[str, Any],
        int | None,
        int | str,
        list[int] | dict[str, int],
        Literal["a", 1] | None,
    ),
    *(Colour, Level, Cat, Dog, Tree, Pair, Options, Cat | Dog, list[Tree]),
    *(pydantic.AnyUrl, pydantic.HttpUrl, pydantic.SecretStr, pydantic.Json, pydantic.ByteSize, pydantic.PastDate),
    *(pydantic.AwareDatetime, pydantic.UUID4, pydantic.Base64Bytes, pydantic.StrictInt, pydantic.ImportString),
    *(pydantic.PositiveInt, pydantic.NonNegativeFloat, pydantic.FilePath, pydantic.IPvAnyAddress),
    *(Annotated[int, Gt(0)], Annotated[int, Ge(2), MultipleOf(3)], Annotated[list[int], Len(1, 3)]),
    *(Annotated[dict[str, int], Len(1, 3)], Looks, Annotated[str, Len(2, 5)]),
    Annotated[dict[Annotated[str, Field(pattern="^x-")], int], Field(description="headers")],
]
"""Types whose schemas pydantic can make."""

SAFE = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
ZOD: list[dict[str, Any]] = [
    *({"type": "string"}, {"type": "number"}, {"type": "boolean"}, {"type": "null"}, {}, {"not": {}}, SAFE),
    {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    {"type": "number", "multipleOf": 0.01, "exclusiveMaximum": 5},
    {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^a.*"},
    {"type": "string", "allOf": [{"pattern": "^a.*"}, {"pattern": ".*b$"}]},
    {
        "type": "string",
        "format": "email",
        "pattern": "^(?!\\.)(?!.*\\.\\.)([A-Za-z0-9_'+.-]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9-]*\\.)+[A-Za-z]{2,}$",
    },
    {
        "type": "string",
        "format": "uuid",
        "pattern": "^([0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[1-8][0-9a-fA-F]{3}-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}|0{8})$",
    },
    {"type": "string", "format": "date-time", "pattern": "^\\d{4}-\\d\\d-\\d\\dT(?:[01]\\d|2[0-3]):[0-5]\\d(?:Z)$"},
    {"type": "string", "format": "emoji", "pattern": "^(\\p{Extended_Pictographic}|\\p{Emoji_Component})+$"},
    {"type": "string", "format": "ipv4", "pattern": "^(?:(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)(?:\\.|$)){4}"},
    {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"},
    {"type": "string", "format": "ulid", "pattern": "^[0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{26}$"},
    {"type": "string", "format": "base64", "contentEncoding": "base64", "pattern": "^$|^(?:[0-9a-zA-Z+/]{4})*$"},
    {"type": "string", "pattern": "^[\\s\\S]{0,}\\u0041[^]$"},
    *({"type": "string", "format": name} for name in ("uri", "jwt", "cidrv4", "e164", "cuid2", "duration", "date")),
    {"type": "string", "contentEncoding": "binary", "contentMediaType": "image/png", "minLength": 3},
    *({"type": "string", "enum": ["a", "b"]}, {"const": "a", "type": "string"}, {"enum": [1, "b", None]}),
    {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3, "uniqueItems": True},
    {"type": "array", "prefixItems": [{"type": "string"}, SAFE], "items": {"type": "number"}},
    {"type": "array", "items": [{"type": "string"}], "additionalItems": False, "minItems": 1},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "number"}},
    {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": SAFE, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {}}, "required": ["a"]},
    {"type": "object", "properties": {}, "additionalProperties": {"not": {}}},
    {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "readOnly": True},
    {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"], "additionalProperties": False},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"], "additionalProperties": False},
        ]
    },
    {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
    {"allOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "properties": {"b": {}}}]},
    {"$ref": "#/$defs/__schema0", "$defs": {"__schema0": {"type": "array", "items": {"$ref": "#/$defs/__schema0"}}}},
    {"id": "Name", "title": "T", "description": "d", "examples": ["x"], "deprecated": True, "type": "string"},
    {"type": ["string", "null"]},
    {"if": {"type": "string"}, "then": {"minLength": 1}, "else": {}},
    {"type": "array", "contains": {"type": "string"}, "minContains": 2},
    {"type": "object", "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False},
    {"type": "object", "patternProperties": {"^(?!x)": {"type": "string"}, "^x-": {}}, "minProperties": 1},
    {"type": "integer", "minimum": 5, "maximum": 3},
    *({"type": "any"}, {"type": "strin"}, {"type": []}, {"enum": []}, {"anyOf": []}, {"multipleOf": 0}),
    *({"$ref": "#/nowhere"}, {"$ref": "http://example.com/x"}, {"properties": []}, {"required": "a"}, {"items": 5}),
]
"""Forms of `z.toJSONSchema`, for every type and check, also in draft 7, and forms that no library should write."""


@cache
def processor() -> InputProcessor:
    tokenizer = tool_tokenizer("hermes", with_markers=True)
    return InputProcessor(tokenizer=tokenizer, vocab_size=len(tokenizer), max_model_len=4096)


@pytest.fixture(scope="module", autouse=True)
def _freed() -> Iterator[None]:
    """Free the vocabulary, of 30 MB."""
    yield
    processor.cache_clear()
    tool_vocabulary.cache_clear()


def made(schemas: list[dict[str, Any]]) -> str:
    functions = [Function(f"f{index}", schema, "") for index, schema in enumerate(schemas)]
    [form] = variants("hermes")
    return calls_grammar(form, functions, processor(), required=True, parallel=False)


def fits(grammar: str, index: int, arguments: object) -> bool:
    text = f'<tool_call>\n{{"name": "f{index}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    return grammar_accepts(grammar, text)


def pydantic_schemas() -> list[dict[str, Any]]:
    return [TypeAdapter(kind).json_schema() for kind in PYDANTIC]


@pytest.mark.parametrize("draft", [None, "https://json-schema.org/draft/2020-12/schema"])
def test_no_schema_of_zod_or_pydantic_is_refused(draft: str | None) -> None:
    """Each is a parameter of a tool, and the schema of all parameters of another tool."""
    schemas = [*ZOD, *pydantic_schemas()]
    head = {} if draft is None else {"$schema": draft}
    inner = [{**head, "type": "object", "properties": {"value": schema}, "required": ["value"]} for schema in schemas]
    assert made(inner)
    assert made([{**head, **schema} for schema in schemas])


def test_a_schema_that_cannot_be_followed_weakens_no_other_schema() -> None:
    bad = {"type": "object", "properties": {"a": {"enum": []}, "b": {"type": "integer"}}, "required": ["a", "b"]}
    good = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
    never = {**bad, "allOf": [{"required": ["c"], "properties": {"c": False}}]}
    grammar = made([bad, good, never])
    assert fits(grammar, 1, {"q": 1}) and not fits(grammar, 1, {"q": "a"})
    assert fits(grammar, 0, {"a": 1, "b": 2}) and not fits(grammar, 0, {"a": 1, "b": "c"})
    assert fits(grammar, 2, {"a": 1, "b": 2})


def test_left_out_keywords_have_their_paths_and_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    schema = {"properties": {"not": {"not": {}}, "b": {"items": {"uniqueItems": True, "pattern": "(?=a)"}}}}
    small = reduced(schema)
    assert small.schema == {"properties": {"not": {}, "b": {"items": {}}}}
    assert set(small.left_out) == {
        ("not", ".properties.not.not"),
        ("uniqueItems", ".properties.b.items.uniqueItems"),
        ("pattern", ".properties.b.items.pattern"),
    }
    log_left_out.cache_clear()
    with caplog.at_level(logging.WARNING, "longspan"):
        small.log()
        reduced(schema).log()
    assert len(caplog.records) == 3
    assert reduced({"uniqueItems": False, "then": {}, "format": "banana", "title": "a"}) == ({}, ())


def test_properties_named_as_keywords_stay() -> None:
    names = ("title", "format", "not", "description", "default", "$ref", "type")
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}
    assert reduced(schema) == (schema, ())
    assert without_annotations(schema) == shape_only(schema) == schema
    value = {"const": {"title": "a", "not": 1}, "enum": [{"format": "b"}]}
    assert reduced(value).schema == without_annotations(value) == value


def test_arguments_may_have_a_required_name_that_no_property_describes() -> None:
    assert closed({"properties": {"a": {}}})["additionalProperties"] is False
    assert "additionalProperties" not in closed({"properties": {"a": {}}, "required": ["b"]})
    assert fits(made([{"properties": {"a": {}}, "required": ["b"]}]), 0, {"b": 1})


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, 5, 1e30, "", "a", "(", "#/anyOf/\u00b2", "#/anyOf/" + "1" * 5000, [], [[]], [None], [{}], ["a"], {}),
    *({"a": 5}, {"a": {}}, {"(": {}}, {"(?=a)": {}}),
)


KEYWORDS = (
    *("type", "enum", "const", "properties", "patternProperties", "additionalProperties", "required", "items"),
    *("prefixItems", "additionalItems", "anyOf", "oneOf", "allOf", "$ref", "$defs", "definitions", "$schema"),
    *("format", "pattern", "minLength", "minItems", "maxProperties", "minimum", "exclusiveMinimum", "multipleOf"),
    *("not", "if", "then", "contains", "minContains", "uniqueItems", "dependentRequired", "title", "default"),
)


@pytest.mark.parametrize("keyword", KEYWORDS)
def test_malformed_keywords_are_left_out_without_an_error(keyword: str) -> None:
    forms = [form for name in NAMES for form in variants(name)]
    for value in ODD_VALUES:
        schema = {keyword: value, "anyOf": [{}]} if keyword != "anyOf" else {keyword: value}
        for whole in (schema, {"properties": {"a": schema}}):
            without_annotations(whole)
            small = closed(reduced(whole).schema)
            shape_only(small)
            for form in forms:
                form.call_rules("call", Function("f", small, ""), small, quoted, lark_json)
