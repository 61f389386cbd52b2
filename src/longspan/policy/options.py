"""Options of policies: given as text (`-o key=value`), validated against the policy's own dataclass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from longspan.core.protocols import PolicySettings

OptionsT = TypeVar("OptionsT")


class Settled:
    """A policy that is set as it is for as long as it serves."""

    def __init__(self, settings: PolicySettings) -> None:
        self._settings = settings

    @property
    def settings(self) -> PolicySettings:
        """Its name and its options."""
        return self._settings

    def update(self, options: Mapping[str, str]) -> None:
        """Raises ValueError unless there is nothing to change."""
        self._settings.check_changes(options)


def settings_of(policy: str, options: object, changeable: tuple[str, ...] = ()) -> PolicySettings:
    """How the policy of that name is set, by the instance of its dataclass."""
    values = asdict(options)  # type: ignore[call-overload]  # every options class is a dataclass
    return PolicySettings(name=policy, options=values, changeable=changeable)


def parse_options(policy: str, kind: type[OptionsT], options: Mapping[str, str]) -> OptionsT:
    """`options` as an instance of the dataclass `kind`.

    Raises:
        ValueError: for a key that `kind` lacks or a value of the wrong type; the message lists the valid keys.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # every options class is a dataclass
    for key in options:
        if key not in known:
            valid = f"its options are {', '.join(known)}" if known else "it has none, but context and others do"
            raise ValueError(f"policy {policy} has no option {key!r}: {valid}")
    try:
        return msgspec.convert(dict(options), kind, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"policy {policy}: {_explained(error, kind, options)}") from error


def _explained(error: msgspec.ValidationError, kind: type, options: Mapping[str, str]) -> str:
    """The message of a value of the wrong type, with what would be right where that can be listed."""
    key = str(error).rpartition("$.")[2].rstrip("`")
    if key not in options:
        return str(error)
    wanted = list(_wanted(get_type_hints(kind)[key]))
    one_of = "one of " if len(wanted) > 1 else ""
    return f"option {key} is {one_of}{', '.join(wanted)}, but {options[key]!r} given"


def _wanted(hint: Any) -> Iterator[str]:  # noqa: ANN401 - a type, a union, a literal or what it lists
    """What may be given for a type, in words."""
    if isinstance(hint, str):
        yield hint
    elif choices := get_args(hint):
        for choice in choices:
            yield from _wanted(choice)
    else:
        yield from {bool: ("true", "false"), int: ("a whole number",), float: ("a number",)}[hint]
