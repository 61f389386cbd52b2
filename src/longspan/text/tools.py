"""Tool calls: the formats of model families, their grammars, and the parser of outputs with calls."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal, NamedTuple

from longspan.core.request import FinishReason
from longspan.core.sampling import StructuredOutputsParams
from longspan.errors import ParameterError
from longspan.text.input_processor import TEMPLATE_ERRORS, InputProcessor
from longspan.text.structured import lark_json

Schema = Mapping[str, Any]
_MORE_PROPERTIES = frozenset(("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"))
"""Keywords of schemas that describe properties outside `properties`."""
NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


class Function(NamedTuple):
    """A function that a model may call. `where` is the path of its parameters in the request, for errors."""

    name: str
    parameters: Schema
    where: str


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The format of an output with calls: a text, the first marker, `opening`, calls with `between` between, `closing`.

    A call is `{"name": NAME, KEY: ARGUMENTS}`. `opening`, `between` and `closing` are written in Lark.

    Attributes:
        markers: strings that no text contains. Vocabularies may have them as tokens. In a format without markers, an
            output that begins with a brace is a call.
        key: the name of the arguments.
        between: empty if an output has at most one call.
    """

    markers: tuple[str, ...] = ()
    opening: str = ""
    key: str
    between: str = ""
    closing: str = ""

    @property
    def begin(self) -> str:
        """The marker with which calls begin, or an empty text."""
        return self.markers[0] if self.markers else ""

    @cached_property
    def first_head(self) -> re.Pattern[str]:
        """Matches from the first marker to the arguments of the first call. The group is the name."""
        return re.compile("".join([*self._opened, *self._object[0], "(", *self._object[1], ")", *self._object[2]]))

    @cached_property
    def first_head_begun(self) -> re.Pattern[str]:
        """Matches an end of a text that may be the beginning of a match of `first_head`."""
        parts, begun = [*self._opened, *chain(*self._object)], ""
        for part in reversed(parts[1:]):
            begun = f"(?:{part}{begun})?"
        return re.compile(parts[0] + begun + r"\Z")

    @cached_property
    def next_head(self) -> re.Pattern[str]:
        """Matches the text between the arguments of two calls. The group is the name of the second."""
        return re.compile("".join(["[^{]*", *self._object[0], "(", *self._object[1], ")", *self._object[2]]))

    @property
    def _opened(self) -> list[str]:
        """Regular expressions of the text before the first call, in parts. An output may be cut off after each part."""
        return [*map(re.escape, self.begin), r"[\s\[]*" if self.begin else r"\s*"]

    @property
    def _object(self) -> tuple[list[str], list[str], list[str]]:
        """Regular expressions of a call up to its arguments: the parts before its name, of its name, and after it."""
        blanks, key = r"\s*", map(re.escape, f'"{self.key}"')
        before = [r"\{", blanks, *'"name"', blanks, ":", blanks]
        name = ['"', r'(?:[^"\\]|\\.)*+', r"\\?", '"']  # a backslash may be the last letter of a cut name
        return before, name, [blanks, ",", blanks, *key, blanks, ":", blanks, r"(?=\{)"]


FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(
        markers=("<tool_call>", "</tool_call>"),
        opening=r'"\n"',
        key="arguments",
        between=r'"\n" "</tool_call>" "\n" "<tool_call>" "\n"',
        closing=r'"\n" "</tool_call>"',
    ),
    "llama3_json": ToolFormat(key="parameters"),
    "mistral": ToolFormat(
        markers=("[TOOL_CALLS]",), opening='" "? "["', key="arguments", between='", "', closing='"]"'
    ),
}
"""Formats by the names of vLLM's parsers. Llama 3's templates accept one call per message, so its format has one."""


def detect_format(input_processor: InputProcessor) -> ToolFormat | None:
    """Return the format in which the model's chat template writes a call. None if it is not in `FORMATS`."""
    name, arguments = "probe", {"where": "here"}
    question: Any = [{"role": "user", "content": "Go."}]
    call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": name, "arguments": arguments}}
    described = {"name": name, "description": name, "parameters": NO_PARAMETERS}
    tools = [{"type": "function", "function": described}]
    try:
        before = input_processor.render_chat(question, tools=tools)
        called = [*question, {"role": "assistant", "content": "", "tool_calls": [call]}]
        text = input_processor.render_chat(called, tools=tools, add_generation_prompt=False)
    except (ValueError, *TEMPLATE_ERRORS):
        return None
    for form in FORMATS.values():
        start = re.escape(form.begin) if form.begin else re.escape(before)
        for place in re.finditer(start + r"[\s\[]*(?=\{)", text):
            written = _object_at(text, place.end())
            if (written.get("name"), written.get(form.key)) == (name, arguments):
                return form
    return None


def _object_at(text: str, start: int) -> dict[str, Any]:
    """Return the JSON object that begins at `start`, or an empty object."""
    try:
        return dict(json.JSONDecoder().raw_decode(text, start)[0])
    except ValueError:
        return {}


def calls_grammar(
    form: ToolFormat,
    functions: Sequence[Function],
    input_processor: InputProcessor,
    *,
    required: bool,
    parallel: bool,
    content: Schema | None = None,
) -> str:
    """Return the grammar of outputs that may call these functions, in llguidance's serialised form.

    Args:
        required: there is at least one call, and no text before it.
        parallel: there may be several calls, if the format supports them.
        content: the schema of an output without calls. None for any text.

    Raises:
        ParameterError: the schema of a function's parameters cannot be followed. The parameter is their path in the
            request. Or the output cannot be `content`, which begins like a call.
    """
    special = input_processor.special_tokens
    parts = [f'"{form.begin}"', form.opening, form.between, form.closing]
    for marker in special.keys() & set(form.markers):
        parts = [part.replace(f'"{marker}"', f"<[{special[marker]}]>") for part in parts]
    begin, opening, between, closing = parts
    names = " | ".join(f"call_{number}" for number in range(len(functions)))
    rules = [
        "%llguidance {}",
        f"calls: {opening} call {f'({between} call)*' if between and parallel else ''} {closing}",
        f"call: {names}",
    ]
    first_line = len(rules) + 1
    for number, function in enumerate(functions):
        head = json.dumps(
            f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{form.key}": ', ensure_ascii=False
        )
        rules.append(f'call_{number}: {head} {lark_json(_closed(function.parameters))} "}}"')
    called = f"{begin} calls" if form.begin else "calls"
    if required:
        rules.append(f"start: {called}")
    elif content is not None and not form.begin:
        problem = "cannot be combined with tools, since this model's calls begin as JSON does: set tool_choice"
        raise ParameterError("response_format", problem)
    elif content is not None:
        rules += [f"start: {called} | content", f"content: {lark_json(content)}"]
    else:
        ids = (str(token) for text, token in special.items() if text != form.begin)
        rules += _free_text(form, begin, ",".join(ids))
    try:
        return input_processor.grammar(StructuredOutputsParams(grammar="\n".join(rules)))
    except ParameterError as error:
        raise _at_function(error, functions, first_line) from None


def _closed(parameters: Schema) -> Schema:
    """Return the schema of arguments. It allows no undescribed properties, unless the schema has `_MORE_PROPERTIES`."""
    is_plain = "properties" in parameters and not _MORE_PROPERTIES & parameters.keys()
    return {"type": "object", **({"additionalProperties": False} if is_plain else {}), **parameters}


def _free_text(form: ToolFormat, begin: str, special: str) -> list[str]:
    """Return rules of an output that is a text, a call, or a text and then calls.

    `special` are tokens without bytes. They are allowed anywhere in a text, such as at the beginning of a thought.
    """
    if not form.begin:
        text = r"TEXT: /([ \t\r\n]*[^{ \t\r\n](.|\n)*)?/"
        return [f"start: {f'<[{special}]>*' if special else ''} (calls | TEXT)", text]
    rules = [f"start: {'piece*' if special else ''} (trigger calls | TEXT)", r"TEXT: /(.|\n)*/"]
    rules += [f"piece: TEXT <[{special}]>"] if special else []
    is_token = begin.startswith("<[")
    return [*rules, f"trigger: TEXT {begin}" if is_token else f"trigger[lazy]: TEXT {begin}"]


def _at_function(error: ParameterError, functions: Sequence[Function], first_line: int) -> ParameterError:
    """Return an error of the grammar as an error of the function in whose line it occurs."""
    place = re.search(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \||$)", error.problem)
    index = int(place[1]) - first_line if place else -1
    if place and 0 <= index < len(functions):
        return ParameterError(functions[index].where, f": this schema cannot be used: {place[2]}")
    return ParameterError("tools", error.problem.replace(": grammar", ": their grammar", 1))


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


class CallReader:
    """Parses one streamed output. Everything that cannot be the beginning of a call is text.

    Args:
        at_start: calls are at the beginning of the output or nowhere.
        marker_is_token: the first marker is a token of the vocabulary, so that no output ends inside it.

    Attributes:
        num_calls: number of calls that have begun.
    """

    def __init__(self, form: ToolFormat, *, at_start: bool = False, marker_is_token: bool = False) -> None:
        self.num_calls = 0
        self._form, self._marker_is_token = form, marker_is_token
        self._at_start = at_start or not form.begin
        self._pending = ""
        self._state: Literal["text", "plain text", "arguments", "after"] = "text"
        self._depth = 0  # nesting of the arguments
        self._in_string = self._escaped = False

    @property
    def has_called(self) -> bool:
        """Whether the output has calls and all of them are complete."""
        return self._state == "after"

    def add(
        self, text: str, *, finish_reason: FinishReason | None = None, stop_reason: int | str | None = None
    ) -> tuple[str, list[CallDelta]]:
        """Add the next piece of the output. Return its text and the new parts of each call.

        The last piece has the reasons of the output's end. If the output was cut off in a call, the part of the call
        before its arguments is neither text nor a call.
        """
        self._pending += text
        content, calls = "", dict[int, CallDelta]()
        if self._state in ("text", "plain text"):
            content = self._take_text()
        while self._pending:
            if self._state == "arguments":
                index = self.num_calls - 1
                calls.setdefault(index, CallDelta(index=index)).arguments += self._take_arguments()
            elif head := self._next_head():
                self._pending, self._state = self._pending[head.end() :], "arguments"
                name = json.loads(head[1])
                calls[self.num_calls] = CallDelta(index=self.num_calls, id=uuid.uuid4().hex[:9], name=name)
                self.num_calls += 1
            else:
                break
        if finish_reason is not None and not self.num_calls and not self._is_cut_call(finish_reason, stop_reason):
            content += self._pending
        return content, list(calls.values())

    def _next_head(self) -> re.Match[str] | None:
        """Return the match of the pending text up to the arguments of a call."""
        match self._state:
            case "text":
                return self._form.first_head.match(self._pending)
            case "after":
                return self._form.next_head.match(self._pending)
        return None

    def _take_text(self) -> str:
        """Remove and return the pending text that cannot be the beginning of a call."""
        form, pending = self._form, self._pending
        end = len(pending)
        if self._state == "text":
            patterns = form.first_head, form.first_head_begun
            matches = (p.match(pending) if self._at_start else p.search(pending) for p in patterns)
            end = next((match.start() for match in matches if match), end)
            if end and self._at_start:
                self._state = "plain text"
        self._pending = pending[end:]
        return pending[:end]

    def _is_cut_call(self, finish_reason: FinishReason, stop_reason: int | str | None) -> bool:
        """Return True if the pending text at the end of an output is the beginning of a call.

        An output that the model has ended itself has no incomplete call. A marker that a stop string has cut is text.
        """
        begun = self._pending.startswith(self._form.begin) if self._form.begin else bool(self._pending.strip())
        if begun:
            return finish_reason != "stop" or stop_reason is not None
        return finish_reason != "stop" and not self._marker_is_token

    def _take_arguments(self) -> str:
        """Remove and return the pending part of the arguments, up to their end."""
        end = len(self._pending)
        for at, letter in enumerate(self._pending):
            if self._in_string:
                self._in_string = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._in_string = True
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if not self._depth:
                    end, self._state = at + 1, "after"
                    break
        piece, self._pending = self._pending[:end], self._pending[end:]
        return piece
