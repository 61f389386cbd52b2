"""Instructor, in each of its modes for OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import instructor
from checks import BASE, KEY, MODEL, QUESTION, run
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

MAX_TOKENS = 800
"""Enough for an answer of `Weather` with the most whitespace that the server allows: 64 characters in ten places."""


class Weather(BaseModel):
    """The form of structured answers: clients send its schema and parse the answer by it."""

    # In a schema without this, a model may add properties without end.
    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]
    rains: bool


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=BASE, api_key=KEY, max_retries=0), mode=mode)


def ask(mode: instructor.Mode, **options: Any) -> None:
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}
    assert isinstance(client(mode).create(**fields, response_model=Weather, **options), Weather)


def tools() -> None:
    ask(instructor.Mode.TOOLS, max_tokens=MAX_TOKENS)


def strict_tools() -> None:
    ask(instructor.Mode.TOOLS_STRICT, max_tokens=MAX_TOKENS)


def json_schema() -> None:
    ask(instructor.Mode.JSON_SCHEMA, max_tokens=MAX_TOKENS)


def responses_with_tools() -> None:
    ask(instructor.Mode.RESPONSES_TOOLS)


def partial_stream() -> None:
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}
    parts = list(client(instructor.Mode.TOOLS).create_partial(**fields, response_model=Weather, max_tokens=MAX_TOKENS))
    assert parts and parts[-1].city in {"Rome", "Oslo"}


run("instructor", [tools, strict_tools, json_schema, partial_stream, responses_with_tools])
