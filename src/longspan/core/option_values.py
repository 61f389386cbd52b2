"""Options of a policy from texts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
            raise unknown_option(policy, key, known)
    try:
        parsed = msgspec.convert(dict(options), kind, strict=False)
        check_numbers(parsed)
    except msgspec.ValidationError as error:
        if isinstance(cause := error.__cause__, ParameterError):
            raise ParameterError(cause.parameter, f"{cause.problem} (policy {policy})", cause.value) from cause
        if isinstance(cause, PluginError):
            raise cause from None
        raise _wrong_value(policy, error, kind, options) from error
    return parsed


def unknown_option(policy: str, key: str, known: Collection[str], where: str = "") -> ParameterError:
    """Return the error about an option that a policy lacks, with a similar option if there is one."""
    if not known:
        remedy = "it has none, but context and tetris do"
    else:
        from longspan.names import closest  # noqa: PLC0415 - an error

        similar = closest(key, known)
        remedy = f"its options are {', '.join(known)}" + ("" if similar is None else f" ({similar} is similar)")
    problem = f"{key}: policy {policy} has no such option{where}: leave it out, or change it: {remedy}"
    return ParameterError("policy_options", problem, key)


def _wrong_value(policy: str, error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> ValueError:
    key = str(error).rpartition("$.")[2].rstrip("`")
    if key not in options:
        return ValueError(f"policy {policy}: {error}")
    values = list(_valid_values(get_type_hints(kind)[key]))
    one_of = "one of " if len(values) > 1 else ""
    problem = f"must be {one_of}{', '.join(values)}, but {options[key]!r:.60} given (policy {policy})"
    return ParameterError(key, problem, options[key])


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
