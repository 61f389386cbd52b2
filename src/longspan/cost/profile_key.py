"""The key of a profile: a model on a machine; and the base of what is stored as JSON."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A base of what is stored as JSON, whose fields are those of the object; `called` is what errors call it."""

    called: ClassVar[str]

    def to_json(self, indent: int = 1) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=indent).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: for text that is no such thing, with what is wrong with it and where.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a {cls.called}: {error}") from error


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and machine that a profile is of. Times under one key say nothing of another.

    Attributes:
        tp: ranks of an instance.
        threads: of a rank.
        kernel: of attention, `native` or `torch`.
        machine: the processor, and the accelerator if that computes.
        revision: of longspan, as far as it changes times or how they are measured; 0 is unknown.
        sizes: a hash of what the model's layers compute, since another model may be found by the same name later.
    """

    model: str
    dtype: str
    device: str
    tp: int
    threads: int
    kernel: str
    machine: str
    revision: int = 0
    sizes: str = ""
