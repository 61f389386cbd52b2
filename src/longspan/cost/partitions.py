"""Partitions of a prompt over a chain, and the time to first token (KV-Runahead, arXiv 2405.05329, §4.2).

Earlier members attend to fewer keys, so they get more tokens, but later members wait for them. The best cut depends on
the hardware. It is searched for some lengths (the paper's KVR-S) and interpolated between (KVR-P). `even` is KVR-E.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from longspan.core.exchange import LOCAL
from longspan.core.layouts import shard_span
from longspan.core.link_classes import SAME_HOST, LinkClass
from longspan.cost.partition_table import interpolated
from longspan.cost.profile import LinkFit, PrefillTime, Profile
from longspan.cost.shape import ModelShape

Partition = tuple[int, ...]
"""Tokens of every member, in the order of the prompt. All but the last are multiples of the block size."""

_CONFIRMED = 3
_MODELLED = tuple(2**power for power in range(9, 21))
"""Lengths from 512 tokens to a million."""
_SEARCHED = 4
"""Number of members up to which a search takes well below a second. A simulation searches for several lengths."""
_MANY = 8
MAX_SEARCHED = 16
"""Largest number of members in a search. Searches for more would take minutes."""


def even(length: int, members: int, align: int) -> Partition:
    """Return pieces that differ by at most one block, as in the `contiguous` layout."""
    return _cut(length, members, align)


def cut(fractions: Sequence[float], length: int, align: int) -> Partition:
    """Return the partition nearest to these fractions. In a short prompt, members may get no tokens."""
    return _cut(length, len(fractions), align, fractions)


def _cut(length: int, members: int, align: int, fractions: Sequence[float] = ()) -> Partition:
    sharded = shard_span("contiguous", 0, length, members, align=align, fractions=fractions)
    return tuple(sum(map(len, runs)) for runs in sharded)


def search(
    ttft: Callable[[Partition], float],
    length: int,
    members: int,
    align: int,
    seed: Partition | None = None,
    *,
    noisy: bool = False,
) -> Partition:
    """Return the partition with the shortest time to first token, by a hierarchical grid search (Fig. 6).

    The search starts from the seed, or from even pieces. The first stride is a piece, rounded down to a power of two
    blocks, or a quarter of that with a seed. Neighbours move one or two strides of tokens between members. The search
    moves to the best neighbour up to `members - 1` times, while it is better. Then it halves the stride.

    For two members and no seed this is a binary search, which is exact if the time falls and then rises with the cut.
    For more members it is a heuristic (docs/experiments/ has its error).

    No partition is evaluated twice, unless it is `noisy`. For m members and `levels = 1 + log2(first stride / align)`,
    evaluations are at most `1 + levels * (m - 1) * neighbours`, with `neighbours = m * (m - 1) * (m * m - m + 2) / 4`:
    2 for two members, 12 for three, 42 for four, 812 for eight. With more than eight members only one stride is moved,
    which gives `m * (m - 1)` neighbours.

    Args:
        ttft: returns the seconds, measured or modelled. Infinity for a partition that does not fit.
        length: tokens of the prompt.
        members: number of members. Each keeps at least one token.
        align: tokens of a block.
        seed: a partition to start from, usually one predicted from other lengths.
        noisy: measure the best three again, and return the best of them, since the minimum of noisy values is biased.

    Returns:
        The best partition evaluated; with fewer blocks than members, even pieces, without evaluating any.
    """
    pieces = even(length, members, align)
    best = pieces if seed is None else seed
    assert len(best) == members and sum(best) == length, f"{best} is no partition of {length} tokens"
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
    if noisy:
        again = {partition: ttft(partition) for partition in sorted(known, key=known.__getitem__)[:_CONFIRMED]}
        best = min(again, key=again.__getitem__)
    return best


def _shifts(members: int) -> list[tuple[int, ...]]:
    """Return the strides that members gain in each neighbour: one or two moves, not both between the same members.

    Above `_MANY` members only one stride is moved.
    """
    gifts = list(itertools.permutations(range(members), 2))
    pairs = itertools.combinations(gifts, 2) if members <= _MANY else ()
    twice = (two for two in pairs if len({*two[0], *two[1]}) > 2)
    gains = (
        tuple(sum((m == taker) - (m == giver) for giver, taker in given) for m in range(members))
        for given in [*((gift,) for gift in gifts), *twice]
    )
    return list(dict.fromkeys(gains))


def modelled_ttft(
    profile: Profile, shape: ModelShape, link_class: LinkClass = SAME_HOST
) -> Callable[[Partition], float] | None:
    """Return the model of a chain over links of this class, from a profile. None if the profile lacks a part of it."""
    alone, link = profile.over(link_class).fits().get((1, LOCAL)), profile.link("point_to_point", 2, link_class)
    if alone is None or link is None:
        return None
    kv_bytes = shape.kv_bytes / profile.profile_key.tp
    return lambda partition: chain_ttft_s(partition, alone, link, num_layers=shape.num_layers, kv_bytes=kv_bytes)


def fractions_by(ttft: Callable[[Partition], float], members: int, length: int, *, align: int) -> tuple[float, ...]:
    """Search the fractions of members. Pieces are multiples of `searched_block`."""
    partition = search(ttft, length, members, searched_block(length, members, align))
    return tuple(piece / length for piece in partition)


def searched_block(length: int, members: int, align: int) -> int:
    """Return `align` tokens, or fewer for short prompts whose pieces would have few blocks."""
    return min(align, max(1, length // (4 * members)))


class ModelledPartitions:
    """Partitions searched by a model of the chain on first use, for a simulated cluster without a table.

    Fractions are searched for powers of two and interpolated between them, as from a table.

    Args:
        search: returns the fractions for a number of members and a prompt length.
        estimate: returns nearly as good fractions in less time, for more than 4 members. A search for 8 members and
            one length takes seconds. None: always search.
    """

    def __init__(
        self,
        search: Callable[[int, int], tuple[float, ...]],
        estimate: Callable[[int, int], tuple[float, ...]] | None = None,
    ) -> None:
        self._search = lru_cache(maxsize=None)(search)
        self._estimate = self._search if estimate is None else lru_cache(maxsize=None)(estimate)

    def lengths(self, _model: str, members: int) -> tuple[int, ...]:
        """Return the lengths with searched fractions."""
        return _MODELLED if members <= MAX_SEARCHED else ()

    def exact(self, _model: str, members: int, length: int) -> tuple[float, ...] | None:
        return self._search(members, length) if members <= MAX_SEARCHED else None

    def predict(self, _model: str, members: int, length: int) -> tuple[float, ...] | None:
        if members > MAX_SEARCHED:
            return None
        nearest, fractions = bisect_left(_MODELLED, length), self._estimate if members > _SEARCHED else self._search
        around = [(known, fractions(members, known)) for known in _MODELLED[max(0, nearest - 1) : nearest + 1]]
        return interpolated(around, length)


@dataclass(frozen=True, kw_only=True)
class Member:
    """Costs of a layer for one member of a chain, in seconds.

    Attributes:
        before_s: until its own keys and values are computed.
        behind_s: attention and everything after it.
        message_s: transfer of all keys and values up to its own to the next member.
        latency_s: further latency of that message.
    """

    before_s: float
    behind_s: float
    message_s: float
    latency_s: float = 0.0


def skewed(
    members: Sequence[Member], num_layers: int, *, rendezvous: bool = False, gather_s: float = 0.0
) -> list[float]:
    """Return the end time of each member of a chain (§4.1, Fig. 7).

    In every layer a member projects its tokens while its predecessor's message is in flight. When all KV up to its own
    has arrived, it starts attention and sends the KV to its successor. So layers run skewed, and no member waits for a
    later member. A link carries one message at a time.

    With `rendezvous`, a message also waits until its receiver has reached the same layer.

    Keys of earlier steps are spread over all members, which gather them in every layer before other messages. That
    takes `gather_s`. With cached keys, members thus wait for the last member in each layer, and the skew is small.
    """
    free_s, link_free_s = [0.0] * len(members), [0.0] * len(members)
    for _ in range(num_layers):
        arrived_s = ready_s = 0.0
        cached_s = max(free_s) + gather_s if gather_s else 0.0
        if gather_s:
            link_free_s = [max(own_s, link_s) + gather_s for own_s, link_s in zip(free_s, link_free_s, strict=True)]
        for index, member in enumerate(members):
            if index and rendezvous:
                previous = members[index - 1]
                begun_s = max(ready_s, free_s[index], link_free_s[index - 1])
                link_free_s[index - 1] = begun_s + previous.message_s
                arrived_s = link_free_s[index - 1] + previous.latency_s
            ready_s = max(free_s[index] + member.before_s, arrived_s)
            if not rendezvous:
                link_free_s[index] = max(ready_s, link_free_s[index]) + member.message_s
                arrived_s = link_free_s[index] + member.latency_s
            free_s[index] = max(ready_s, cached_s) + member.behind_s
    return free_s


def chain_ttft_s(partition: Partition, alone: PrefillTime, link: LinkFit, *, num_layers: int, kv_bytes: float) -> float:
    """Return the end time of a chain, from the fits of one instance and a link.

    The fits do not separate projections from later operators, so all time counts as later operators.

    Args:
        kv_bytes: bytes of a token and layer that one rank sends.
    """
    members, end = [], 0
    for tokens in partition:
        pairs = tokens * end + tokens * (tokens + 1) / 2
        end += tokens
        members.append(
            Member(
                before_s=0.0,
                behind_s=alone.pair_s / num_layers * pairs + alone.token_s / num_layers * tokens,
                message_s=end * kv_bytes / link.bytes_per_s,
                latency_s=link.start_s,
            )
        )
    return skewed(members, num_layers)[-1]
