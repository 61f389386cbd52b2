"""How attention heads are dealt to ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads `[q_start, q_stop)` of one rank, and the KV heads `[kv_start, kv_stop)` that they read."""

    q_start: int
    q_stop: int
    kv_start: int
    kv_stop: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.q_stop - self.q_start

    @property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.kv_stop - self.kv_start


def deal_heads(num_heads: int, num_kv_heads: int, num_ranks: int) -> tuple[HeadShare, ...]:
    """Deals the heads of a layer as evenly as possible, so that every rank has the KV heads that its queries read.

    Up to as many ranks as KV heads, each gets whole groups (a KV head with its query heads): 3 KV heads on 2 ranks are
    2 and 1. With more ranks, those that share a KV head each have a copy of it and split its query heads; a rank may
    then be left without any.
    """
    group = num_heads // num_kv_heads
    if num_ranks <= num_kv_heads:
        bounds = cut_evenly(num_kv_heads, num_ranks)
        return tuple(HeadShare(start * group, stop * group, start, stop) for start, stop in bounds)
    shares = []
    for kv_head, (first, last) in enumerate(cut_evenly(num_ranks, num_kv_heads)):
        for start, stop in cut_evenly(group, last - first):
            begin = kv_head * group
            shares.append(HeadShare(begin + start, begin + stop, kv_head, kv_head + (stop > start)))
    return tuple(shares)


def cut_evenly(number: int, num_pieces: int) -> list[tuple[int, int]]:
    """`[start, stop)` of consecutive pieces of `[0, number)`, the first ones longer by one if it does not divide."""
    size, longer = divmod(number, num_pieces)
    starts = [piece * size + min(piece, longer) for piece in range(num_pieces + 1)]
    return list(itertools.pairwise(starts))
