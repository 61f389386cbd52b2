"""What is kept in files as JSON."""

from __future__ import annotations

from typing import ClassVar, Self

import msgspec


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Its fields are those of an object of JSON; `called` is what errors call it."""

    called: ClassVar[str]

    def to_json(self) -> str:
        """As text for a file, a value per line."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote.

        Raises:
            ValueError: for text that is no such thing, with what is wrong with it and where.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a {cls.called}: {error}") from error
