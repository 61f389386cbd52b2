"""Values of options: bounds of numbers, and the options of a policy from texts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from longspan.errors import ParameterError, PluginError

OptionsT = TypeVar("OptionsT")

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
    for one in fields(options):
        check_number(one.name, getattr(options, one.name))


def check_text(name: str, value: object) -> None:
    """Raise a ParameterError for a parallel spec that is neither a text nor None."""
    if not isinstance(value, str | None):
        raise ParameterError(name, f"must be a text such as '2' or 'tp2', but {value!r:.60} given", value)


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """Reads texts into the dataclass `kind`.

    Raises:
        ValueError: for an unknown key or a value of the wrong type.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every options class is a dataclass
    for key in options:
        if key not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none, but context and others do"
            raise ValueError(f"policy {policy} has no option {key!r}: {valid}")
    try:
        parsed = msgspec.convert(dict(options), kind, strict=False)
        check_numbers(parsed)
    except msgspec.ValidationError as error:
        if isinstance(cause := error.__cause__, ParameterError):
            raise ParameterError(cause.parameter, f"{cause.problem} (policy {policy})", cause.value) from cause
        if isinstance(cause, PluginError):
            raise cause from None
        raise ValueError(f"policy {policy}: {_explained(error, kind, options)}") from error
    return parsed


def _explained(error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> str:
    key = str(error).rpartition("$.")[2].rstrip("`")
    if key not in options:
        return str(error)
    wanted = list(_wanted(get_type_hints(kind)[key]))
    return f"option {key} is {'one of ' if len(wanted) > 1 else ''}{', '.join(wanted)}, but {options[key]!r} given"


def _wanted(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type, a union, a literal or what it lists
    if isinstance(hint, str):
        yield hint
    elif choices := get_args(hint):
        for choice in choices:
            yield from _wanted(choice)
    else:
        yield from {bool: ("true", "false"), int: ("a whole number",), float: ("a number",), str: ("a text",)}.get(
            hint, ()
        )
