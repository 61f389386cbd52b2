"""Calls that are a name and then a JSON object of arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from longspan.text.call_formats.base import ArgumentsReader, CallFormat, Function, JsonScanner, LarkJson, Schema


@dataclass(frozen=True, kw_only=True)
class NamedCalls(CallFormat):
    """A call is `begin`, the name, `separator_text`, and the arguments.

    Attributes:
        tail: a regular expression of the text between name and arguments that a reader accepts. It also matches each
            beginning of such a text.
    """

    separator_text: str
    tail: str

    def call_rules(
        self, rule: str, function: Function, parameters: Schema, literal: Callable[[str], str], lark_json: LarkJson
    ) -> list[str]:
        return [f"{rule}: {literal(function.name)} {literal(self.separator_text)} {lark_json(parameters)}"]

    def arguments(self, parameters: Schema | None) -> ArgumentsReader:  # noqa: ARG002 - JSON has its types
        return JsonScanner()

    @property
    def opened(self) -> Sequence[str]:
        return [*map(re.escape, self.begin), r"\s*"]

    @property
    def head(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        return [], [r"[\w.\-]+"], [r"\s*", self.tail, r"\s*", r"(?=\{)"]

    @property
    def separator(self) -> str:
        return rf"(?s:.*?){re.escape(self.begin)}\s*"


VARIANTS: Mapping[str, tuple[CallFormat, ...]] = {
    "functionary": (
        NamedCalls(
            begin="<function=",
            markers=("<function=", "</function>"),
            separator_text=">",
            tail=">?",
            between='"</function>" "<function="',
            closing='"</function>"',
        ),
    ),
}
"""Functionary v3.1."""
