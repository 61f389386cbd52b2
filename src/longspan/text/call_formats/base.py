"""The interface of the formats of calls: rules of a grammar, and expressions by which a reader recognises a call."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from longspan.core.request import FinishReason

Schema = Mapping[str, Any]
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
TEXT = r"/(.|\n)*/"
"""Any text, in Lark."""


class Function(NamedTuple):
    """A function that a model may call.

    Attributes:
        where: the path of its parameters in the request, for errors.
        strict: a schema that no grammar can express is an error, instead of being weakened.
    """

    name: str
    parameters: Schema
    where: str
    strict: bool = False


@dataclass(kw_only=True)
class CallDelta:
    """The part of a call that a piece of text contains. The first part has an id and a name.

    Attributes:
        index: position of the call in its answer.
        arguments: the next piece of their JSON.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


class Pieces(NamedTuple):
    """The parts of a piece of output."""

    reasoning: str = ""
    content: str = ""
    calls: Sequence[CallDelta] = ()


class OutputReader(Protocol):
    """Separates the text of one streamed output into reasoning, content and calls."""

    @property
    def has_called(self) -> bool:
        """Whether the output has calls and all of them are complete."""

    def add(
        self, text: str, *, finish_reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> Pieces:
        """Add the next piece of the output. The last piece has the reasons of the output's end."""


class ArgumentsReader(Protocol):
    """Turns the text of one call's arguments into JSON.

    Attributes:
        done: True after the end of the arguments.
    """

    done: bool

    def take(self, pending: str) -> tuple[str, str]:
        """Return the next piece of the JSON, and the text that remains."""


@dataclass(frozen=True, kw_only=True)
class CallFormat(ABC):
    """The format of an output with calls: a text, `begin`, `opening`, calls with `between` between, `closing`.

    `preamble`, `opening`, `between` and `closing` are written in Lark. With `answer_begin`, an output is calls or
    `answer_begin` and a text, after which calls may follow, and prompts end with `begin`.

    Attributes:
        begin: the text at which calls begin. Without one, a call is recognised by its head.
        markers: strings that no text contains. Vocabularies may have them as tokens.
        preamble: the beginning of an output that must call, before `begin`.
        between: empty if an output has at most one call.
        answer_begin: the beginning of each output that does not begin with a call.
    """

    begin: str = ""
    markers: tuple[str, ...] = ()
    preamble: str = ""
    opening: str = ""
    between: str = ""
    closing: str = ""
    answer_begin: str = ""

    @abstractmethod
    def call_rules(
        self, rule: str, function: Function, parameters: Schema, literal: Callable[[str], str], lark_json: LarkJson
    ) -> list[str]:
        """Return the Lark rules of one call. The first is named `rule`.

        `literal` writes a text, or the token of a marker. `lark_json` writes the JSON of a schema.
        """

    @property
    def reads_objects(self) -> bool:
        """Whether calls are JSON objects, which a reader accepts with their keys in any order."""
        return False

    def shared_rules(self, literal: Callable[[str], str]) -> list[str]:  # noqa: ARG002 - few formats have some
        """Return the Lark rules that the rules of all calls use."""
        return []

    def fits(self, text: str) -> bool:  # noqa: ARG002 - few formats differ in more than what a reader sees
        """Return False if a text that begins with `begin` is of another format, although a reader accepts it."""
        return True

    def output_reader(self) -> OutputReader | None:
        """Return a reader of whole outputs, if the format structures more than calls."""
        return None

    def call_head(self, function: Function) -> str:
        """Return the text of a call before its arguments. Only grammars of calls without a begin need it."""
        raise AssertionError(f"calls of {function.name} begin with {self.begin!r}")

    @abstractmethod
    def arguments(self, parameters: Schema | None) -> ArgumentsReader:
        """Return a reader of the arguments of a call. Without `parameters`, the function is not known."""

    @property
    @abstractmethod
    def opened(self) -> Sequence[str]:
        """Regular expressions of the text before the first call, in parts. An output may be cut after each part."""

    @property
    @abstractmethod
    def head(self) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
        """Regular expressions up to the arguments: parts before a call's name, of its name, and after it."""

    @property
    def separator(self) -> str:
        """A regular expression of the text between two calls."""
        return "[^{]*"

    def can_call(self, name: str) -> bool:
        """Return True if a reader recognises this name of a function."""
        return re.fullmatch("".join(self.head[1]), name) is not None

    def name_of(self, text: str) -> str:
        """Return the name in a match of the name's expression, or an empty text if it is malformed."""
        return text


class LarkJson(Protocol):
    """Writes the Lark rule of a JSON value that follows a schema."""

    def __call__(self, schema: Schema) -> str: ...


def prefixes(parts: Sequence[str]) -> re.Pattern[str]:
    """Return an expression of an end of a text that is the first parts. Each part also matches its own beginnings."""
    begun = ""
    for part in reversed(parts[1:]):
        begun = f"(?:{part}{begun})?"
    return re.compile(parts[0] + begun + r"\Z")


def literal(text: str, tokens: Mapping[str, int]) -> str:
    """Return a text in Lark, in which the given texts are tokens of the vocabulary."""
    if not tokens:
        return quoted(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, tokens)) + ")", text)
    return " ".join(f"<[{tokens[part]}]>" if part in tokens else quoted(part) for part in parts if part)


def quoted(text: str) -> str:
    """Return a text as a literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str) -> Any:  # noqa: ANN401 - JSON
    """Parse JSON of a model or of a client.

    Raises:
        ValueError: it is not JSON, is nested too deeply, or has a value that few clients can read. These are infinite
            numbers, integers of more than 4300 digits, and escapes of half a character.
    """
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower() and _LONE_SURROGATE.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError("it has half a character")
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


class JsonScanner:
    """Finds the end of a JSON object in a text that arrives in pieces."""

    def __init__(self) -> None:
        self.done = False
        self._depth = 0
        self._in_string = self._escaped = False

    def take(self, pending: str) -> tuple[str, str]:
        """Return the part up to the object's end, and the rest."""
        for at, letter in enumerate(pending):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if not self._depth:
                    self.done = True
                    return pending[: at + 1], pending[at + 1 :]
        return pending, ""
