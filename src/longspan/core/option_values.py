"""Options of a policy from texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from longspan.core.checks import check_numbers
from longspan.errors import ParameterError, PluginError

OptionsT = TypeVar("OptionsT")


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """Parse texts into the dataclass `kind`.

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
    values = list(_valid_values(get_type_hints(kind)[key]))
    return f"option {key} is {'one of ' if len(values) > 1 else ''}{', '.join(values)}, but {options[key]!r} given"


def _valid_values(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type, a union, a literal or its items
    if isinstance(hint, str):
        yield hint
    elif choices := get_args(hint):
        for choice in choices:
            yield from _valid_values(choice)
    else:
        yield from {bool: ("true", "false"), int: ("a whole number",), float: ("a number",), str: ("a text",)}.get(
            hint, ()
        )
