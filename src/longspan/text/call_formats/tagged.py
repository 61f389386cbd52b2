"""Calls whose arguments are tagged texts, one for each parameter."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from longspan.text.call_formats.base import (
    TEXT,
    ArgumentsReader,
    CallFormat,
    Function,
    LarkJson,
    Schema,
    parse_json,
    quoted,
)


@dataclass(frozen=True, kw_only=True)
class TaggedCalls(CallFormat):
    """A call is `name_begin`, a name, `name_end`, parameters, and `call_end`.

    A parameter is `key_begin`, its name, `key_end`, its value, `value_end`. A string is its text, without quotes.
    Other values are JSON. Blanks around these texts are ignored by the reader.
    """

    name_begin: str
    name_end: str
    key_begin: str
    key_end: str
    value_end: str
    call_end: str

    def call_rules(
        self, rule: str, function: Function, parameters: Schema, literal: Callable[[str], str], lark_json: LarkJson
    ) -> list[str]:
        names, rules = list[str](), list[str]()
        plain = _plain_properties(parameters)
        for index, (name, schema) in enumerate((plain or {}).items()):
            parameter = f"{rule}_{index}"
            key = f"{literal(self.key_begin)} {quoted(name)} {literal(self.key_end)}"
            texts = _texts(schema)
            if texts is None:
                value = f"{lark_json(_with_definitions(schema, parameters))} {literal(self.value_end)}"
            elif texts:
                value = f"({' | '.join(map(quoted, texts))}) {literal(self.value_end)}"
            else:
                value = "value_text"
            rules.append(f"{parameter}: {key} {value}")
            names.append(parameter + ("" if name in parameters.get("required", ()) else "?"))
        if plain is None:
            names.append("any_parameter*")
        start = f"{literal(self.name_begin)} {quoted(function.name)} {literal(self.name_end)}"
        return [f"{rule}: {start} {' '.join(names)} {literal(self.call_end)}", *rules]

    def shared_rules(self, literal: Callable[[str], str]) -> list[str]:
        end = literal(self.value_end)
        lazy = "" if end.startswith("<[") else "[lazy]"
        key = f"{literal(self.key_begin)} PARAMETER_NAME {literal(self.key_end)}"
        return [
            f"value_text{lazy}: {TEXT} {end}",
            f"any_parameter: {key} value_text",
            r"PARAMETER_NAME: /[^<>\n]+/",
        ]

    def arguments(self, parameters: Schema | None) -> ArgumentsReader:
        return _TaggedArguments(self, parameters or {})

    @property
    def opened(self) -> Sequence[str]:
        return [*map(re.escape, self.begin), r"\s*"]

    @property
    def head(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        end = self.name_end.strip()
        after = [r"\s*", *map(re.escape, end)] if end else [r"\s*", "(?=<)"]
        return [*map(re.escape, self.name_begin)], [r"[^<>\s]+"], after

    @property
    def separator(self) -> str:
        return rf"(?s:.*?){re.escape(self.begin)}\s*"


class _TaggedArguments:
    """Reads parameters. Each is emitted once its value is complete."""

    def __init__(self, form: TaggedCalls, parameters: Schema) -> None:
        self.done = False
        self._schemas = _plain_properties(parameters) or {}
        self._num_read = 0
        self._num_scanned = 0  # characters of the pending text that have no end
        self._ends = form.value_end.strip(), form.call_end.strip()
        key_begin, key_end = (
            r"\s*".join(map(re.escape, text.strip().split("\n"))) for text in (form.key_begin, form.key_end)
        )
        value = rf"\n?(.*?)\n?{re.escape(self._ends[0])}"
        self._parameter = re.compile(rf"\s*{key_begin}\s*([^<>\n]*?)\s*{key_end}{value}", re.DOTALL)
        self._end = re.compile(rf"\s*{re.escape(self._ends[1])}")

    def take(self, pending: str) -> tuple[str, str]:
        pieces = list[str]()
        while not self.done and self._has_end(pending):
            if match := self._parameter.match(pending):
                pieces.append(f"{', ' if self._num_read else '{'}{json.dumps(match[1], ensure_ascii=False)}: ")
                pieces.append(_json_of(match[2], self._schemas.get(match[1])))
                self._num_read += 1
            elif match := self._end.match(pending):
                pieces.append("}" if self._num_read else "{}")
                self.done = True
            else:
                self._num_scanned = len(pending)  # an end in the middle of a value
                break
            pending, self._num_scanned = pending[match.end() :], 0
        return "".join(pieces), pending

    def _has_end(self, pending: str) -> bool:
        """Return True if the end of a value or of the call may be in the text. A long value is scanned once."""
        start = max(0, self._num_scanned - max(map(len, self._ends)))
        if any(pending.find(end, start) >= 0 for end in self._ends):
            return True
        self._num_scanned = len(pending)
        return False


def _plain_properties(parameters: Schema) -> Mapping[str, Any] | None:
    """Return the schemas of parameters by name, or None if the schema describes them in another way."""
    elsewhere = {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"} & parameters.keys()
    properties = parameters.get("properties")
    if elsewhere or properties is None or parameters.get("additionalProperties") not in (None, False):
        return None
    return dict(properties)


def _with_definitions(schema: object, root: Schema) -> Schema:
    """Return a subschema as a schema of its own."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**schema, **definitions} if isinstance(schema, Mapping) else {}


def _texts(schema: object) -> list[str] | None:
    """Return the strings that a schema of strings allows, or an empty list for any string. None for other schemas."""
    if not isinstance(schema, Mapping):
        return None
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if choices is not None:
        return choices if all(isinstance(choice, str) and choice for choice in choices) else None
    return [] if schema.get("type") == "string" else None


def _json_of(text: str, schema: object) -> str:
    """Return a value as JSON: a string if the schema has only strings, or if the text is not JSON."""
    if _texts(schema) is None:
        with suppress(ValueError):
            value = parse_json(text)
            if schema is not None or not isinstance(value, str):  # quotes belong to a string without a schema
                return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


VARIANTS: Mapping[str, tuple[CallFormat, ...]] = {
    "qwen3_coder": (
        TaggedCalls(
            begin="<tool_call>",
            markers=("<tool_call>", "</tool_call>"),
            opening=r'"\n"',
            name_begin="<function=",
            name_end=">\n",
            key_begin="<parameter=",
            key_end=">\n",
            value_end="\n</parameter>\n",
            call_end="</function>",
            between=r'"\n" "</tool_call>" "\n" "<tool_call>" "\n"',
            closing=r'"\n" "</tool_call>"',
        ),
    ),
    "glm45": (
        TaggedCalls(
            begin="<tool_call>",
            markers=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            name_begin="",
            name_end="\n",
            key_begin="<arg_key>",
            key_end="</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
            call_end="</tool_call>",
            between=r'"\n" "<tool_call>"',
        ),
    ),
}
"""Qwen3-Coder's format, and that of GLM-4.5 to 4.7."""
