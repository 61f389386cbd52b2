"""Calls that are JSON objects with a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longspan.text.call_formats.base import (
    ArgumentsReader,
    CallFormat,
    Function,
    JsonScanner,
    LarkJson,
    Schema,
    parse_json,
    quoted,
)
from longspan.text.call_formats.named import NamedCalls

_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, kw_only=True)
class ObjectCalls(CallFormat):
    """Calls of the form `{"name": NAME, KEY: ARGUMENTS}`, alone or in a list.

    Attributes:
        key: the name of the arguments.
        is_list: calls are a list.
    """

    key: str
    is_list: bool = False

    @property
    def reads_objects(self) -> bool:
        return True

    def fits(self, text: str) -> bool:
        return self.is_list == (text.removeprefix(self.begin).lstrip()[:1] == "[")

    def call_head(self, function: Function) -> str:
        return f'{{"name": {quoted(function.name)}, "{self.key}": '

    def call_rules(
        self, rule: str, function: Function, parameters: Schema, literal: Callable[[str], str], lark_json: LarkJson
    ) -> list[str]:
        return [f'{rule}: {literal(self.call_head(function))} {lark_json(parameters)} "}}"']

    def arguments(self, parameters: Schema | None) -> ArgumentsReader:  # noqa: ARG002 - JSON has its types
        return JsonScanner()

    @property
    def opened(self) -> Sequence[str]:
        return [*map(re.escape, self.begin), r"[\s\[]*"] if self.begin else []

    @property
    def head(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        blanks, key = r"\s*", map(re.escape, f'"{self.key}"')
        before = [r"\{", blanks, *'"name"', blanks, ":", blanks]
        name = ['"', r'(?:[^"\\]|\\.)*+', r"\\?", '"']  # a backslash may be the last letter of a cut name
        return before, name, [blanks, ",", blanks, *key, blanks, ":", blanks, r"(?=\{)"]

    def can_call(self, name: str) -> bool:
        return bool(name)

    def name_of(self, text: str) -> str:
        try:
            return str(parse_json(text))
        except ValueError:  # such as an escape that JSON does not have
            return ""


def call_in(value: object) -> tuple[str, str] | None:
    """Return the name and the arguments of an object that peers read as a call, or None.

    Its keys have any order. The arguments may be a string of JSON, or missing. The object of OpenAI's API, with a
    `function` inside, is a call, too.
    """
    if not isinstance(value, Mapping):
        return None
    inner: Any = value.get("function")
    if isinstance(inner, Mapping):
        return call_in(inner)
    name = value.get("name", inner)
    given: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), {})
    if not isinstance(name, str) or not name or (set(value) - {"name", "function", "type", "id", "index", *_ARGUMENTS}):
        return None
    try:
        arguments = parse_json(given or "{}") if isinstance(given, str) else given
        return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, Mapping) else None
    except ValueError:
        return None


VARIANTS: Mapping[str, tuple[CallFormat, ...]] = {
    "hermes": (
        ObjectCalls(
            begin="<tool_call>",
            markers=("<tool_call>", "</tool_call>"),
            opening=r'"\n"',
            key="arguments",
            between=r'"\n" "</tool_call>" "\n" "<tool_call>" "\n"',
            closing=r'"\n" "</tool_call>"',
        ),
    ),
    "llama3_json": (ObjectCalls(key="parameters"),),
    "mistral": (
        ObjectCalls(
            begin="[TOOL_CALLS]",
            markers=("[TOOL_CALLS]",),
            opening='" "? "["',
            key="arguments",
            between='", "',
            closing='"]"',
            is_list=True,
        ),
        NamedCalls(
            begin="[TOOL_CALLS]",
            markers=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
            separator_text="[ARGS]",
            tail=r"[\[\]\w]*",
            between='"[TOOL_CALLS]"',
        ),
    ),
    "granite": tuple(
        ObjectCalls(
            begin=begin,
            markers=(begin,),
            opening='" "? "["',
            key="arguments",
            between='", "',
            closing='"]"',
            is_list=True,
        )
        for begin in ("<|tool_call|>", "<tool_call>")
    ),
}
"""Llama 3's templates accept one call per message, so its format has one. Mistral's second variant is that of v11."""
