"""Attention heads are split over members, with the KV heads that they read (grouped-query attention)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one member, and the KV heads that these read. Either may be empty, then both are."""

    heads: range
    kv_heads: range


def split_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Splits query heads over members, each to one, in order.

    KV heads are split as evenly as possible, each with all query heads that read it. Where members outnumber them,
    KV heads share out the members instead: those of one KV head share its query heads as evenly as possible, and each
    reads a copy of it. With more members than query heads some have none.

    Raises:
        ValueError: when the query heads are no multiple of the KV heads, or there is no member.
    """
    readers = _readers(num_heads, num_kv_heads, num_members)
    if num_members <= num_kv_heads:
        return tuple(
            HeadShare(range(first * readers, last * readers), range(first, last))
            for first, last in cut_evenly(num_kv_heads, num_members)
        )
    return tuple(
        HeadShare(range(head * readers + first, head * readers + last), range(head, head + (last > first)))
        for head, (first_member, last_member) in enumerate(cut_evenly(num_members, num_kv_heads))
        for first, last in cut_evenly(readers, last_member - first_member)
    )


def spread_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Splits query heads over members as evenly as possible, in order; KV heads go to all who read them.

    Raises:
        ValueError: when the query heads are no multiple of the KV heads, or there is no member.
    """
    readers = _readers(num_heads, num_kv_heads, num_members)
    return tuple(
        HeadShare(
            range(first, last), range(first // readers, -(-last // readers) if last > first else first // readers)
        )
        for first, last in cut_evenly(num_heads, num_members)
    )


def uniform_pieces(share: HeadShare, readers: int) -> list[HeadShare]:
    """Cuts a share so that in each piece all KV heads have equally many readers; a KV head has `readers` in all."""
    first, last = share.heads.start, share.heads.stop
    borders = (-(-first // readers) * readers, last // readers * readers)
    cuts = sorted({first, last, *(border for border in borders if first < border < last)})
    return [
        HeadShare(range(start, stop), range(start // readers, -(-stop // readers)))
        for start, stop in itertools.pairwise(cuts)
    ]


def _readers(num_heads: int, num_kv_heads: int, num_members: int) -> int:
    """Counts the query heads that read each KV head."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads or num_members < 1:
        raise ValueError(
            f"{num_heads} query heads on {num_kv_heads} KV heads cannot be split over {num_members} members"
        )
    return num_heads // num_kv_heads


def cut_evenly(total: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cuts `[0, total)` into pieces whose lengths differ by at most one."""
    return list(itertools.pairwise(-(-total * index // num_pieces) for index in range(num_pieces + 1)))
