"""Structured outputs: validate the parameters of a request and compile them to a grammar for ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from longspan.core.sampling import StructuredOutputsParams
from longspan.errors import ParameterError
from longspan.text import grammar_check
from longspan.text.json_schema import without_annotations

MAX_CHARS = 65_536
"""Longest schema, regular expression, grammar, or sum of all choices, in characters."""
MAX_TOOL_CHARS = 1 << 20
"""Longest grammar of tools, in characters. 200 tools of 2 kB each have 0.4 M.

Each rank compiles them in 0.7 s of CPU time, into 27 MB, once for several requests.
"""

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between JSON tokens. Unbounded, a small model may emit blanks for ever. 64 suffice to indent a line."""


def compile_grammar(params: StructuredOutputsParams, vocabulary: LLTokenizer, max_chars: int = MAX_CHARS) -> str:
    """Return the grammar in llguidance's serialised form.

    Annotations of a schema do not count to `max_chars`, and unknown formats are annotations.

    Raises:
        ValueError: the grammar is too large, invalid or not supported, or it allows no output.
    """
    try:
        schema = None if params.json is None else _plain_schema(params.json)
        texts = (schema, params.regex, *(params.choice or ()), params.grammar)
        length = sum(len(text) for text in texts if text is not None)
        if length > max_chars:
            raise ValueError(f"it has {length} characters, but at most {max_chars} are allowed: shorten it")
        grammar = _serialised(params, schema)
        if params.choice is None and not params.json_object:  # only the length of these can be wrong
            grammar_check.check(grammar)
        _check_start(grammar, vocabulary)
        return grammar
    except ValueError as error:
        name = next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(params, name))
        raise ParameterError("structured_outputs", f": `{name}` cannot be used: {error}") from None


def lark_json(schema: Mapping[str, Any], *, any_of: bool = False) -> str:
    """Return the Lark rule of a JSON value that follows a schema. `any_of` takes each `oneOf` as `anyOf`."""
    options = {"whitespace_pattern": _WHITESPACE, **({"coerce_one_of": True} if any_of else {})}
    return "%json " + json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)


def _serialised(params: StructuredOutputsParams, schema: str | None) -> str:
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # One terminal, so that thousands of choices are one automaton instead of thousands of parser items.
        # Lark quotes strings by the rules of JSON.
        quoted = (json.dumps(text, ensure_ascii=False) for text in params.choice)
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    return LLMatcher.grammar_from_json_schema(
        schema or '{"type": "object"}', defaults={"whitespace_pattern": _WHITESPACE}
    )


def _plain_schema(given: object) -> str:
    """Return a schema without annotations."""
    assert isinstance(given, str), "a dictionary becomes text in the constructor"
    try:
        schema = json.loads(given)
        if not isinstance(schema, dict):
            raise ValueError(f"a schema is an object such as {{...}}, but {given!r:.60} given")
        return json.dumps(without_annotations(schema), ensure_ascii=False)
    except RecursionError:
        raise ValueError("the schema is nested too deeply: flatten it") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the schema is not JSON ({error}): a schema is an object such as {{...}}") from None


def _check_start(grammar: str, vocabulary: LLTokenizer) -> None:
    """Raise ValueError for mistakes that show only when the first token is requested."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=grammar_check.LIMITS)
    allowed = allocate_token_bitmask(1, vocabulary.vocab_size)
    fill_next_token_bitmask(matcher, allowed)
    if matcher.is_error():
        raise ValueError(grammar_check.first_line(matcher.get_error()))
    if not np.any(allowed):
        raise ValueError("no token of this model can begin such an output: change it")
