"""Types of pydantic as arguments of tools, without `strict`: as schemas, and by pydantic's models of requests."""

from __future__ import annotations

import datetime as dt
import decimal
import ipaddress
import json
import pathlib
import urllib.error
import urllib.request
import uuid
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, NamedTuple

import openai
import pydantic
from checks import BASE, KEY, MODEL, QUESTION, run
from pydantic import BaseModel, Field, TypeAdapter, create_model
from typing_extensions import TypedDict


class Colour(Enum):
    """Has texts as values, which become an `enum` in the schema."""

    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    """Has one value, which becomes a `const` in the schema."""

    LOW = 1


class Cat(BaseModel):
    """Has a `kind`, by which a `oneOf` is chosen."""

    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=1, le=9)] = 9


class Dog(BaseModel):
    """Has another `kind`, and a pattern."""

    kind: Literal["dog"]
    name: str = Field("Rex", examples=["Rex"], min_length=1, pattern=r"^[A-Z]\w+$")


class Tree(BaseModel):
    """Refers to itself, which becomes a `$ref` in the schema."""

    children: list[Tree] = []
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Pair(NamedTuple):
    """Becomes an array with `prefixItems` in the schema."""

    left: int
    right: str = ""


class Options(TypedDict, total=False):
    """Has a key that may be missing."""

    depth: int


TYPES: list[Any] = [
    *(str, int, float, bool, None, bytes, Any, object, decimal.Decimal, complex, pathlib.Path, uuid.UUID),
    *(dt.date, dt.datetime, dt.time, dt.timedelta),
    *(ipaddress.IPv4Address, ipaddress.IPv6Address, ipaddress.IPv4Network, ipaddress.IPv6Interface),
    *(list, dict, set, frozenset, tuple, deque[int], list[int], set[str], frozenset[int], Sequence[int]),
    *(tuple[int, str], tuple[int, ...], dict[str, int], dict[int, str], dict[Colour, int], dict[uuid.UUID, int]),
    *(OrderedDict[str, int], Mapping[str, Any], int | None, int | str, list[int] | dict[str, int]),
    *(Literal["a", 1] | None, Colour, Level, Cat, Dog, Tree, Pair, Options, Cat | Dog, list[Tree]),
    *(pydantic.AnyUrl, pydantic.HttpUrl, pydantic.SecretStr, pydantic.Json, pydantic.ByteSize, pydantic.PastDate),
    *(pydantic.AwareDatetime, pydantic.UUID4, pydantic.Base64Bytes, pydantic.StrictInt, pydantic.ImportString),
    *(pydantic.PositiveInt, pydantic.NonNegativeFloat, pydantic.FilePath, pydantic.IPvAnyAddress),
    *(Annotated[int, Field(gt=0)], Annotated[int, Field(ge=2, multiple_of=3)], Annotated[str, Field(max_length=5)]),
    *(Annotated[list[int], Field(min_length=1, max_length=3)], Annotated[dict[str, int], Field(min_length=1)]),
    Annotated[dict[Annotated[str, Field(pattern="^x-")], int], Field(description="headers")],
]
PER_REQUEST = 20
"""Tools of a request. The descriptions of all types do not fit into the context of the model."""


def refused(tools: Sequence[Any]) -> list[str]:
    """Return the messages of the refused requests, each with some of the tools."""
    messages = []
    for start in range(0, len(tools), PER_REQUEST):
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 1, "tool_choice": "required"}
        data = json.dumps({**body, "model": MODEL, "tools": tools[start : start + PER_REQUEST]}).encode()
        request = urllib.request.Request(f"{BASE}/chat/completions", data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                answer.read()
        except urllib.error.HTTPError as error:
            messages.append(error.read().decode())
    return messages


def schemas_of_types() -> None:
    schemas = [TypeAdapter(kind).json_schema() for kind in TYPES]
    objects = [{"type": "object", "properties": {"value": schema}, "required": ["value"]} for schema in schemas]
    for parameters in (schemas, objects):
        tools = [
            {"type": "function", "function": {"name": f"f{index}", "parameters": schema}}
            for index, schema in enumerate(parameters)
        ]
        assert not (messages := refused(tools)), f"refused: {messages}"


def schemas_of_models() -> None:
    """Send the schemas of both modes, with references."""
    models = [create_model(f"Model{index}", value=(kind, ...)) for index, kind in enumerate(TYPES)]
    for mode in ("validation", "serialization"):
        tools = [
            {"type": "function", "function": {"name": model.__name__, "parameters": model.model_json_schema(mode=mode)}}
            for model in models
        ]
        assert not (messages := refused(tools)), f"refused: {messages}"


def tools_of_the_openai_client() -> None:
    """Leave `strict` out, which the client sets by default."""
    client = openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0)
    messages: Any = [{"role": "user", "content": QUESTION}]
    for kind in (Cat, Dog, Tree):
        tool: Any = openai.pydantic_function_tool(kind)
        del tool["function"]["strict"]
        client.chat.completions.create(model=MODEL, messages=messages, tools=[tool], max_tokens=1)


run("pydantic", [schemas_of_types, schemas_of_models, tools_of_the_openai_client])
