"""Searched partitions of prompts over the members of a chain, by model, number of members and length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar

import msgspec

from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.cost.profile_key import Count, Stored
from longspan.errors import ParameterError

_SUM_TOLERANCE = 1e-3


def parse_fractions(text: str) -> tuple[float, ...]:
    """Parse fractions separated by commas, such as `0.35,0.255,0.21,0.185`.

    Raises:
        ParameterError: a text is not a positive number, or the fractions do not add up to 1.
    """
    try:
        fractions = tuple(float(word) for word in text.split(","))
    except ValueError:
        problem = f"must be numbers with commas between, such as 0.6,0.4, but {text!r} given"
        raise ParameterError("fractions", problem, text) from None
    _check_fractions(fractions)
    return fractions


def _check_fractions(fractions: Sequence[float]) -> None:
    shown = ",".join(f"{fraction:g}" for fraction in fractions)
    if not all(fraction > 0 for fraction in fractions):
        problem = f"must be above 0, but {shown} given: use fewer members rather than empty ones"
        raise ParameterError("fractions", problem, shown)
    if not abs(sum(fractions) - 1) <= _SUM_TOLERANCE:
        problem = f"must add up to 1, but {shown} add up to {sum(fractions):g}: change one of them"
        raise ParameterError("fractions", problem, shown)


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A searched partition: the fraction of a prompt of `length` tokens for each member.

    Attributes:
        link_class: the slowest class of link between the members.
    """

    model: str
    members: int
    length: Count
    fractions: tuple[float, ...]
    link_class: LinkClass = SAME_HOST

    def __post_init__(self) -> None:
        _check_fractions(self.fractions)
        if len(self.fractions) != self.members:
            raise ValueError(f"{len(self.fractions)} fractions given for {self.members} members")

    @property
    def key(self) -> tuple[str, int, int, LinkClass]:
        return self.model, self.members, self.length, self.link_class


class PartitionTable(Stored, frozen=True):
    """Entries, at most one for each model, number of members, length and class of link."""

    called: ClassVar[str] = "table of partitions"

    partitions: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        for key, following in pairwise(sorted(entry.key for entry in self.partitions)):
            if key == following:
                raise ValueError(f"two partitions for model {key[0]!r}, {key[1]} members and {key[2]} tokens: keep one")

    def with_entry(self, entry: Entry) -> PartitionTable:
        """Return a table with this entry, which replaces an entry with the same key."""
        return PartitionTable((*(other for other in self.partitions if other.key != entry.key), entry))

    def of_sizes(self, classes: Mapping[int, LinkClass]) -> PartitionTable:
        """Return a table with the entries over the class of link that a group of their size has here."""
        entries = (entry for entry in self.partitions if classes.get(entry.members) == entry.link_class)
        return PartitionTable(tuple(entries))

    def lengths(self, model: str, members: int) -> tuple[int, ...]:
        """Return the prompt lengths with an entry, ascending."""
        return tuple(entry.length for entry in self._known(model, members))

    def predict(self, model: str, members: int, length: int) -> tuple[float, ...] | None:
        """Interpolate fractions for a prompt length between the entries of the two nearest lengths.

        Below the shortest and above the longest length, return the fractions of that entry. None without entries.
        """
        known = [(entry.length, entry.fractions) for entry in self._known(model, members)]
        return interpolated(known, length) if known else None

    def exact(self, model: str, members: int, length: int) -> tuple[float, ...] | None:
        """Return the fractions searched for a prompt of exactly this length. None if there is no such entry."""
        return self.predict(model, members, length) if length in self.lengths(model, members) else None

    def _known(self, model: str, members: int) -> list[Entry]:
        entries = (entry for entry in self.partitions if (entry.model, entry.members) == (model, members))
        return sorted(entries, key=lambda entry: entry.length)


def interpolated(known: Sequence[tuple[int, tuple[float, ...]]], length: int) -> tuple[float, ...]:
    """Interpolate fractions between the two nearest lengths. Beyond all lengths, return the nearest fractions."""
    for (shorter, first), (longer, second) in pairwise(known):
        if shorter <= length <= longer:
            weight = (length - shorter) / (longer - shorter)
            return tuple((1 - weight) * a + weight * b for a, b in zip(first, second, strict=True))
    return known[0 if length < known[0][0] else -1][1]
