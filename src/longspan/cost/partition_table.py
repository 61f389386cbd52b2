"""Searched partitions by model, number of members and length, and what they say about other lengths.

This is the look-up table of KV-Runahead (arXiv 2405.05329, §4.2); a partition predicted from it is the paper's KVR-P.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import msgspec

from longspan.cost.partition import check_fractions
from longspan.cost.stored import Stored


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A searched partition: what part of a prompt of `length` tokens each member takes.

    Raises:
        ValueError: for fractions that are not positive, do not add up to 1, or are not one per member.
    """

    model: str
    members: int
    length: int
    fractions: tuple[float, ...]

    def __post_init__(self) -> None:
        check_fractions(self.fractions)
        if len(self.fractions) != self.members:
            raise ValueError(f"{len(self.fractions)} fractions given for {self.members} members")
        if self.length < 1:
            raise ValueError(f"length must be at least 1, but {self.length} given")


class PartitionTable(Stored, frozen=True):
    """Entries, at most one for a model, number of members and length.

    Raises:
        ValueError: for two entries of the same.
    """

    called: ClassVar[str] = "table of partitions"

    partitions: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        keys = [_key(entry) for entry in self.partitions]
        for key, following in pairwise(sorted(keys)):
            if key == following:
                raise ValueError(f"two partitions for model {key[0]!r}, {key[1]} members and {key[2]} tokens: keep one")

    def with_entry(self, entry: Entry) -> PartitionTable:
        """A table that also has this entry, in place of one for the same model, number of members and length."""
        kept = (other for other in self.partitions if _key(other) != _key(entry))
        return PartitionTable((*kept, entry))

    def lengths(self, model: str, members: int) -> tuple[int, ...]:
        """For which prompts there is an entry, ascending."""
        return tuple(sorted(e.length for e in self.partitions if (e.model, e.members) == (model, members)))

    def predict(self, model: str, members: int, length: int) -> tuple[float, ...] | None:
        """Fractions for a prompt of this length, between those of the two nearest lengths known for model and members.

        Below the shortest and above the longest known length they are that one's. None when none is known.
        """
        known = sorted(
            (entry for entry in self.partitions if (entry.model, entry.members) == (model, members)),
            key=lambda entry: entry.length,
        )
        if not known:
            return None
        for shorter, longer in pairwise(known):
            if shorter.length <= length <= longer.length:
                weight = (length - shorter.length) / (longer.length - shorter.length)
                pairs = zip(shorter.fractions, longer.fractions, strict=True)
                return tuple((1 - weight) * a + weight * b for a, b in pairs)
        return known[0 if length < known[0].length else -1].fractions


def _key(entry: Entry) -> tuple[str, int, int]:
    return entry.model, entry.members, entry.length
