"""Checks of values that users give."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from longspan.errors import ParameterError

MAX_NUMBER = 1e15
"""Upper bound of options that are seconds, GiB or ratios. Larger values overflow timeouts and sizes, and JSON has no
infinity. A petabyte is 1e6 GiB, and 1e15 seconds are 32 million years.
"""


def check_number(name: str, value: object, *, may_be_infinite: bool = False) -> None:
    """Raise a ParameterError for a float that is NaN, infinite or beyond `MAX_NUMBER`. Ignore other types."""
    if isinstance(value, float) and not (abs(value) <= MAX_NUMBER or (may_be_infinite and abs(value) == math.inf)):
        raise ParameterError(name, f"must be a number of at most {MAX_NUMBER:g}, but {value:g} given", value)


def check_numbers(options: Any) -> None:  # noqa: ANN401 - any dataclass
    """Apply `check_number` to every field of a dataclass."""
    for field in fields(options):
        check_number(field.name, getattr(options, field.name))


def check_text(name: str, value: object) -> None:
    """Raise a ParameterError for a parallel spec that is neither a text nor None."""
    if not isinstance(value, str | None):
        raise ParameterError(name, f"must be a text such as '2' or 'tp2', but {value!r:.60} given", value)


_KINDS: Mapping[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Mapping: "a dict",
    type(None): "None",
}
_ACCEPTED = {int: Integral, float: Real}


def check_types(options: Any) -> None:  # noqa: ANN401 - any dataclass
    """Raise a ParameterError for a field whose value has none of its types. Literals are for `check_choice`."""
    for name, kinds in _types_of(cast(Any, type(options))).items():
        value = getattr(options, name)
        if kinds <= _KINDS.keys() and not any(_is_of(value, kind) for kind in kinds):
            words = [words for kind, words in _KINDS.items() if kind in kinds]
            raise ParameterError(name, f"must be {' or '.join(words)}, but {value!r:.60} given", value)


def check_choice(name: str, value: object, hint: Any) -> None:  # noqa: ANN401 - a type
    """Raise a ParameterError for a value that is none of the literals of its type, if it has literals."""
    parts = _parts(hint)
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    if choices and value not in choices and not (value is None and type(None) in parts):
        one_of = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise ParameterError(name, f"must be {one_of}, but {value!r:.60} given", value)


@cache
def _types_of(kind: Any) -> dict[str, frozenset[Any]]:  # noqa: ANN401 - a dataclass
    """Return the types of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {
        field.name: frozenset(get_origin(part) or part for part in _parts(hints[field.name])) for field in fields(kind)
    }


def _parts(hint: Any) -> tuple[Any, ...]:  # noqa: ANN401 - a type
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _is_of(value: object, kind: type) -> bool:
    """Return True for a value of this type. True and False are no numbers."""
    return isinstance(value, _ACCEPTED.get(kind, kind)) and (kind is bool or not isinstance(value, bool))
