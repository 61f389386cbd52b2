"""The grammar of outputs that may call functions, and the format of a model's calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from llguidance import LLMatcher

from longspan.core.sampling import StructuredOutputsParams
from longspan.errors import ParameterError
from longspan.text import grammar_check
from longspan.text.call_formats import NAMES, variants
from longspan.text.call_formats.base import NO_PARAMETERS, TEXT, CallFormat, Function, Schema, literal, quoted
from longspan.text.call_reader import CallReader
from longspan.text.input_processor import TEMPLATE_ERRORS, InputProcessor
from longspan.text.json_schema import closed, log_left_out, reduced, shape_only
from longspan.text.structured import MAX_TOOL_CHARS, lark_json

_ANY_OBJECT: Schema = {"type": "object"}


def detect_format(input_processor: InputProcessor, name: str = "auto") -> CallFormat | None:
    """Return the format in which the model's chat template writes a call, among the variants of `name` or all formats.

    If the template does not decide, it is the first variant of `name`, or None.
    """
    names = NAMES if name == "auto" else (name,)
    before, text = _probe(input_processor)
    for form in (form for name in names for form in variants(name)):
        start = re.escape(form.begin or before)
        places = re.finditer(start, text) if start else ()
        if any(_reads_probe(form, text[place.start() if form.begin else place.end() :]) for place in places):
            return form
    return None if name == "auto" else variants(name)[0]


_NAME, _ARGUMENTS = "probe", {"where": "here"}


def _probe(input_processor: InputProcessor) -> tuple[str, str]:
    """Return a prompt, and the text of the conversation with a call. Both are empty if the template refuses them."""
    messages: Any = [{"role": "user", "content": "Go."}]
    tools = [{"type": "function", "function": {"name": _NAME, "description": _NAME, "parameters": NO_PARAMETERS}}]
    for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):  # Functionary's templates take JSON, most take objects
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        called = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
        with suppress(ValueError, *TEMPLATE_ERRORS):
            before = input_processor.render_chat(messages, tools=tools)
            return before, input_processor.render_chat(called, tools=tools, add_generation_prompt=False)
    return "", ""


def _reads_probe(form: CallFormat, text: str) -> bool:
    if not form.fits(text):
        return False
    reader = form.output_reader() or CallReader(form, at_start=True)
    calls = reader.add(text, finish_reason="stop").calls
    try:
        return bool(calls) and calls[0].name == _NAME and json.loads(calls[0].arguments) == _ARGUMENTS
    except json.JSONDecodeError:
        return False


def calls_grammar(
    form: CallFormat,
    functions: Sequence[Function],
    input_processor: InputProcessor,
    *,
    required: bool,
    parallel: bool,
    content: Schema | None = None,
    excluded: str = "",
) -> str:
    """Return the grammar of outputs that may call these functions, in llguidance's serialised form.

    The part of a schema that no grammar can express is left out, unless the function is strict.

    Args:
        required: there is at least one call, and no text before it.
        parallel: there may be several calls, if the format supports them.
        content: the schema of an output without calls. None for any text.
        excluded: texts do not begin so.

    Raises:
        ParameterError: the schema of a strict function cannot be followed. The parameter is its path in the request.
            Or the output cannot be `content`, which begins like a call, or a name cannot be in a call.
    """
    for function in functions:
        if not form.can_call(function.name):
            problem = ": this model's calls cannot have this name: use letters, digits, underscores, dots and hyphens"
            raise ParameterError(f"{function.where.removesuffix('parameters')}name", problem)
    if content is not None and not form.begin and not required:
        problem = "cannot be combined with tools, since this model's calls begin as JSON does: set tool_choice"
        raise ParameterError("response_format", problem)
    outputs = _Outputs(form, input_processor, required=required, parallel=parallel, content=content, excluded=excluded)
    schemas = [_schema_of(function) for function in functions]
    try:
        return outputs.grammar(functions, schemas)
    except ParameterError as error:
        if all(function.strict for function in functions):
            raise
        first = error
    weaker = _weakened(functions, schemas)
    if weaker == schemas:  # together they are too much
        weaker = [s if f.strict else _ANY_OBJECT for f, s in zip(functions, schemas, strict=True)]
        log_left_out(f"more than a grammar of tools may have ({first.problem.strip(': ')})")
    return outputs.grammar(functions, weaker)


def _schema_of(function: Function) -> Schema:
    small = reduced(function.parameters)
    if "object" not in _listed(small.schema.get("type", "object")):
        small = small._replace(left_out=(("a type other than object", "type"), *small.left_out))
    if function.strict and small.left_out:
        keyword, path = small.left_out[0]
        problem = f": strict needs a schema that a grammar can express, but it has {keyword} ({path.removeprefix('.')})"
        raise ParameterError(function.where, f"{problem}: leave out {keyword}, or strict")
    return closed(small.log().schema)


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _weakened(functions: Sequence[Function], schemas: Sequence[Schema]) -> list[Schema]:
    """Return the schemas, with weaker schemas in place of schemas that no grammar can follow."""
    weaker = list(schemas)
    open_ = [index for index, function in enumerate(functions) if not function.strict]
    for weaken in (None, lambda schema: closed(shape_only(schema)), lambda _: _ANY_OBJECT):
        if weaken is not None:
            for index in open_:
                weaker[index] = weaken(schemas[index])
        tried = [LLMatcher.grammar_from_lark(f"start: {lark_json(weaker[index], any_of=True)}") for index in open_]
        reasons = grammar_check.faults(tried)
        for reason in filter(None, reasons):
            log_left_out(_reason_in(reason))
        open_ = [index for index, reason in zip(open_, reasons, strict=True) if reason]
        if not open_:
            break
    return weaker


_PLACE = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?: \d+ \||$)")
"""A line, and the reason, in an error of llguidance."""


def _reason_in(fault: str) -> str:
    place = _PLACE.search(fault)
    return place[2] if place else fault


class _Outputs:
    """The outputs of one request, but for the schemas of its functions."""

    def __init__(
        self,
        form: CallFormat,
        input_processor: InputProcessor,
        *,
        required: bool,
        parallel: bool,
        content: Schema | None,
        excluded: str,
    ) -> None:
        self._form, self._input_processor = form, input_processor
        self._required, self._parallel, self._content, self._excluded = required, parallel, content, excluded
        special = input_processor.special_tokens
        self._tokens = {marker: special[marker] for marker in form.markers if marker in special}
        self._special = ",".join(str(token) for text, token in special.items() if text not in (form.begin, excluded))

    def grammar(self, functions: Sequence[Function], schemas: Sequence[Schema]) -> str:
        """Return the checked grammar. Raise ParameterError with the function whose schema cannot be followed."""
        form, places = self._form, dict[int, Function]()
        opening, between, closing = map(self._with_tokens, (form.opening, form.between, form.closing))
        rules = ["%llguidance {}", *form.shared_rules(self._literal), *self._start_rules(functions)]
        more = f"({between} call)*" if form.between and self._parallel else ""
        rules.append(f"calls: {opening} call {more} {closing}")
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(functions)))}")
        for number, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
            to_json = partial(lark_json, any_of=not function.strict)
            for rule in form.call_rules(f"call_{number}", function, schema, self._literal, to_json):
                rules.append(rule)
                places[len(rules)] = function
        if not form.begin and not self._required:
            rules += self._headed_rules(functions, schemas, places, first_line=len(rules) + 1)
        try:
            params = StructuredOutputsParams(grammar="\n".join(rules))
            return self._input_processor.grammar(params, max_chars=MAX_TOOL_CHARS)
        except ParameterError as error:
            raise _at_function(error, places) from None

    def _start_rules(self, functions: Sequence[Function]) -> list[str]:
        """Return the rules of an output: a text, calls, or a text and then calls."""
        form = self._form
        begin = self._literal(form.begin) if form.begin else ""
        first, answer = ("", quoted(form.answer_begin)) if form.answer_begin else (begin, "")
        if self._required:
            return [f"start: {self._with_tokens(form.preamble)} {first} calls"]
        if self._content is not None:
            return [f"start: {first} calls | {answer} content", f"content: {lark_json(self._content)}"]
        excluded = rf" & ~/[ \t\r\n]*{re.escape(self._excluded)}(.|\n)*/" if self._excluded else ""
        rules = [rf"TEXT: {TEXT}{excluded}"]
        # Tokens without bytes are allowed anywhere in a text.
        pieces = "piece*" if self._special else ""
        rules += [f"piece: TEXT <[{self._special}]>"] if self._special else []
        if not begin:
            heads = " | ".join(f"headed_{number}" for number in range(len(functions)))
            return [f"start: {pieces} ({heads} | TEXT)", *rules]
        lazy = "" if begin.startswith("<[") else "[lazy]"
        start = f"calls | {answer}" if answer else ""
        return [f"start: {start} {pieces} (trigger calls | TEXT)", *rules, f"trigger{lazy}: TEXT {begin}"]

    def _headed_rules(
        self, functions: Sequence[Function], schemas: Sequence[Schema], places: dict[int, Function], first_line: int
    ) -> list[str]:
        """Return the rules of calls that a text may contain, each recognised by its head."""
        rules = list[str]()
        for number, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
            head = quoted(self._form.call_head(function))
            places[first_line + len(rules)] = function
            rules.append(f'headed_{number}: head_{number} {lark_json(schema, any_of=not function.strict)} "}}"')
            rules.append(f"head_{number}[lazy]: TEXT {head}")
        return rules

    def _literal(self, text: str) -> str:
        """Return a text in Lark, in which markers are tokens if the vocabulary has them."""
        return literal(text, self._tokens)

    def _with_tokens(self, lark: str) -> str:
        for marker, token in self._tokens.items():
            lark = lark.replace(f'"{marker}"', f"<[{token}]>")
        return lark


def _at_function(error: ParameterError, places: Mapping[int, Function]) -> ParameterError:
    """Return an error of the grammar as an error of the function in whose line it occurs."""
    place = _PLACE.search(error.problem)
    function = places.get(int(place[1])) if place else None
    if place and function is not None:
        return ParameterError(function.where, f": this schema cannot be used: {place[2]}")
    return ParameterError("tools", error.problem.replace(": grammar", ": their grammar", 1))
