"""The key of a profile, which is a model on a machine, and the base class of JSON files."""

from __future__ import annotations

from typing import Annotated, ClassVar, Self

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A base class of objects stored as JSON, with equal fields. `called` is the name of the object in errors."""

    called: ClassVar[str]

    def to_json(self, indent: int = 1) -> str:
        return msgspec.json.format(msgspec.json.encode(self), indent=indent).decode() + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of `to_json`.

        Raises:
            ValueError: the text has another form. The message has the position and the cause.
        """
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a {cls.called}: {error}") from error


class ProfileKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model and machine of a profile. Times do not carry over to another key.

    Attributes:
        tp: ranks of an instance.
        threads: threads of a rank.
        kernel: attention kernel, `native` or `torch`.
        machine: the processor, or processor and accelerator.
        revision: counts changes of longspan that affect times or their measurement. 0 is unknown.
        sizes: a hash of the model's layer sizes, since a name may refer to another model later.
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
