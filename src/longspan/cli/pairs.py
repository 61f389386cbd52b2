"""key=value on the command line."""

from __future__ import annotations

from collections.abc import Sequence


def key_values(flag: str, pairs: Sequence[str]) -> dict[str, str]:
    """Options of the form key=value as a mapping.

    Raises:
        ValueError: for one without a key or `=`, or a key given twice.
    """
    options: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"{flag} {pair} is not of the form key=value")
        if key in options:
            raise ValueError(f"{flag} {key} is given twice: {options[key]!r} and {value!r}")
        options[key] = value
    return options
