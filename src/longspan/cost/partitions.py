"""Partitions of a prompt: the length of each member's piece when they work in a chain (KV-Runahead, arXiv 2405.05329,
§4.2).

Earlier members see fewer keys, so they take more tokens, but later ones wait for them: the best cut depends on the
hardware. It is searched once for some lengths (the paper's KVR-S) and interpolated between (KVR-P); `even` is KVR-E.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import ClassVar

import msgspec

from longspan.core.runs import shard_span
from longspan.cost.catalog import Stored
from longspan.errors import ParameterError

Partition = tuple[int, ...]
"""Tokens of every member, in the order of the prompt; all but the last are multiples of the block size."""

_SUM_TOLERANCE = 1e-3
_CONFIRMED = 3
_MANY = 8


def even(length: int, members: int, align: int) -> Partition:
    """Cuts pieces whose numbers of blocks differ by at most one, as the `contiguous` layout cuts them."""
    return tuple(sum(map(len, runs)) for runs in shard_span("contiguous", 0, length, members, align=align))


def cut(fractions: Sequence[float], length: int, align: int) -> Partition:
    """The partition nearest to these fractions; in a short prompt, members may get nothing.

    Raises:
        ValueError: for fractions that are not positive or do not add up to 1.
    """
    check_fractions(fractions)
    sharded = shard_span("contiguous", 0, length, len(fractions), align=align, fractions=fractions)
    return tuple(sum(map(len, runs)) for runs in sharded)


def parse_fractions(text: str) -> tuple[float, ...]:
    """Reads fractions with commas between, such as `0.35,0.255,0.21,0.185`.

    Raises:
        ParameterError: for what is no number, not positive, or does not add up to 1.
    """
    try:
        fractions = tuple(float(word) for word in text.split(","))
    except ValueError:
        problem = f"must be numbers with commas between, such as 0.6,0.4, but {text!r} given"
        raise ParameterError("fractions", problem, text) from None
    check_fractions(fractions)
    return fractions


def check_fractions(fractions: Sequence[float]) -> None:
    """Raises ParameterError unless all are positive and add up to 1, within 0.001."""
    shown = ",".join(f"{fraction:g}" for fraction in fractions)
    if not all(fraction > 0 for fraction in fractions):
        problem = f"must be above 0, but {shown} given: use fewer members rather than empty ones"
        raise ParameterError("fractions", problem, shown)
    if not abs(sum(fractions) - 1) <= _SUM_TOLERANCE:
        problem = f"must add up to 1, but {shown} add up to {sum(fractions):g}: change one of them"
        raise ParameterError("fractions", problem, shown)


def search(
    ttft: Callable[[Partition], float],
    length: int,
    members: int,
    align: int,
    seed: Partition | None = None,
    *,
    noisy: bool = False,
) -> Partition:
    """Finds the partition with the shortest time to first token, by a hierarchical grid search (Fig. 6).

    It begins with the seed, or with even pieces, and a stride of a piece, rounded down to a power of two blocks (with a
    seed, a quarter of that). Around the best partition so far it tries all those to which one or two strides of tokens
    have changed hands, and goes on from the best of all, up to `members - 1` times or until nothing is better. Then it
    halves the stride, until that would be less than a block.

    For two members and no seed this is binary search, and finds the best cut when time falls and then rises with it.
    For more members nothing guarantees the best (docs/experiments/ says how near it comes).

    No partition is evaluated twice, unless it is `noisy`. For m members and `levels = 1 + log2(first stride / align)`,
    evaluations are at most `1 + levels * (m - 1) * neighbours`, with `neighbours = m * (m - 1) * (m * m - m + 2) / 4`:
    2 for two members, 12 for three, 42 for four, 812 for eight. More than eight members would be too many for that: of
    those a single stride changes hands, which is `m * (m - 1)` neighbours.

    Args:
        ttft: seconds, measured or modelled; infinity for a partition that does not fit.
        length: tokens of the prompt.
        members: how many share it. Each keeps at least a token.
        align: tokens of a block.
        seed: a partition to start from, usually one predicted from other lengths.
        noisy: measure the best three once more, and return the one that is best then: the luckiest of many need not be.

    Returns:
        The best partition evaluated; with fewer blocks than members, even pieces, without evaluating any.

    Raises:
        ValueError: for a seed that is no aligned partition of this prompt.
    """
    pieces = even(length, members, align)
    best = pieces if seed is None else _checked(seed, length, members, align)
    blocks = -(-length // align)
    if members == 1 or blocks < members:
        return pieces
    known = {best: ttft(best)}
    shifts = _shifts(members)
    top = int(math.log2(blocks / members)) - (2 if seed is not None else 0)
    for level in range(max(0, top), -1, -1):
        for _ in range(members - 1):
            center, stride = best, 2**level * align
            for shift in shifts:
                moved = tuple(piece + stride * by for piece, by in zip(center, shift, strict=True))
                if min(moved) > 0 and moved not in known:
                    known[moved] = ttft(moved)
            best = min(known, key=known.__getitem__)
            if best == center:
                break
    return _confirmed(known, ttft) if noisy else best


def _confirmed(known: dict[Partition, float], ttft: Callable[[Partition], float]) -> Partition:
    """Measures the best few again, and returns the best of them."""
    again = {partition: ttft(partition) for partition in sorted(known, key=known.__getitem__)[:_CONFIRMED]}
    return min(again, key=again.__getitem__)


def _shifts(members: int) -> list[tuple[int, ...]]:
    """Lists what members gain, in strides, when one or two change hands, but not two between the same two members.

    One, for more than `_MANY` members.
    """
    gifts = list(itertools.permutations(range(members), 2))
    pairs = itertools.combinations(gifts, 2) if members <= _MANY else ()
    twice = (two for two in pairs if len({*two[0], *two[1]}) > 2)
    gains = (
        tuple(sum((m == taker) - (m == giver) for giver, taker in given) for m in range(members))
        for given in [*((gift,) for gift in gifts), *twice]
    )
    return list(dict.fromkeys(gains))


def _checked(seed: Partition, length: int, members: int, align: int) -> Partition:
    aligned = all(piece >= 0 and piece % align == 0 for piece in seed[:-1]) and seed[-1:] >= (0,)
    if len(seed) != members or sum(seed) != length or not aligned:
        raise ValueError(f"seed {seed} does not cut {length} tokens in {members} pieces of whole blocks of {align}")
    return seed


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
        """Returns a table that also has this entry, in place of one for the same model, number of members and
        length.
        """
        kept = (other for other in self.partitions if _key(other) != _key(entry))
        return PartitionTable((*kept, entry))

    def lengths(self, model: str, members: int) -> tuple[int, ...]:
        """The table has entries for prompts of these lengths, ascending."""
        return tuple(sorted(e.length for e in self.partitions if (e.model, e.members) == (model, members)))

    def predict(self, model: str, members: int, length: int) -> tuple[float, ...] | None:
        """Interpolates fractions for a prompt of this length, between those of the two nearest lengths known for model
        and members.

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
