"""Options of policies: given as text (`-o key=value`), validated against the policy's own dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TypeVar, get_args, get_type_hints

import msgspec

OptionsT = TypeVar("OptionsT")


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """`options` as an instance of the dataclass `kind`.

    Raises:
        ValueError: for a key that `kind` lacks or a value of the wrong type; the message lists the valid keys.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every options class is a dataclass
    for key in options:
        if key not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"policy {policy} has no option {key!r}: {valid}")
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"policy {policy}: {_explained(error, kind, options)}") from error


def _explained(error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> str:
    """The message of a value of the wrong type, with what would be right where that can be listed."""
    key = str(error).rpartition("$.")[2].rstrip("`")
    choices = get_args(get_type_hints(kind).get(key))
    if key in options and choices and all(isinstance(choice, str) for choice in choices):
        return f"option {key} is one of {', '.join(choices)}, but {options[key]!r} given"
    return f"option {error}"
