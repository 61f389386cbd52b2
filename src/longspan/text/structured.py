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

MAX_CHARS = 65_536
"""Longest schema, regular expression, grammar, or sum of all choices, in characters."""

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Whitespace between JSON tokens. Unbounded, a small model may emit blanks for ever. 64 suffice to indent a line."""


def compile_grammar(params: StructuredOutputsParams, vocabulary: LLTokenizer) -> str:
    """Return the grammar in llguidance's serialised form.

    Raises:
        ValueError: the grammar is too large, invalid or not supported, or it allows no output.
    """
    texts = (params.json, params.regex, *(params.choice or ()), params.grammar)
    length = sum(len(text) for text in texts if isinstance(text, str))
    try:
        if length > MAX_CHARS:
            raise ValueError(f"it has {length} characters, but at most {MAX_CHARS} are allowed: shorten it")
        grammar = _serialised(params)
        if params.choice is None and not params.json_object:  # only the length of these can be wrong
            grammar_check.check(grammar)
        _check_start(grammar, vocabulary)
        return grammar
    except ValueError as error:
        name = next(name for name in ("json", "regex", "choice", "grammar", "json_object") if getattr(params, name))
        raise ParameterError("structured_outputs", f": `{name}` cannot be used: {error}") from None


def lark_json(schema: Mapping[str, Any]) -> str:
    """Return the Lark rule of a JSON value that follows a schema."""
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}, ensure_ascii=False)


def _serialised(params: StructuredOutputsParams) -> str:
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        # One terminal, so that thousands of choices are one automaton instead of thousands of parser items.
        # Lark quotes strings by the rules of JSON.
        quoted = (json.dumps(text, ensure_ascii=False) for text in params.choice)
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(quoted))
    if params.grammar is not None:
        return LLMatcher.grammar_from_lark(params.grammar)
    schema = '{"type": "object"}' if params.json is None else params.json
    assert isinstance(schema, str), "a dictionary becomes text in the constructor"
    return LLMatcher.grammar_from_json_schema(_checked_schema(schema), defaults={"whitespace_pattern": _WHITESPACE})


def _checked_schema(text: str) -> str:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise ValueError("the schema is nested too deeply: flatten it") from None
    except ValueError as error:
        raise ValueError(f"the schema is not JSON ({error}): a schema is an object such as {{...}}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"a schema is an object such as {{...}}, but {text!r:.60} given")
    return text


def _check_start(grammar: str, vocabulary: LLTokenizer) -> None:
    """Raise ValueError for mistakes that show only when the first token is requested."""
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=grammar_check.LIMITS)
    allowed = allocate_token_bitmask(1, vocabulary.vocab_size)
    fill_next_token_bitmask(matcher, allowed)
    if matcher.is_error():
        raise ValueError(grammar_check.first_line(matcher.get_error()))
    if not np.any(allowed):
        raise ValueError("no token of this model can begin such an output: change it")
