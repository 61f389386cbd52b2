"""How attention heads are dealt to members, with the keys and values that they read (grouped-query attention)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The query heads of one member, and the KV heads that these read. Either may be empty, then both are."""

    heads: range
    kv_heads: range


def deal_heads(num_heads: int, num_kv_heads: int, num_members: int) -> tuple[HeadShare, ...]:
    """Deals query heads to members, each to one, in order.

    KV heads are dealt as evenly as possible, each with all query heads that read it. Where members outnumber them,
    members are dealt to KV heads instead: those of one KV head share its query heads as evenly as possible, and each
    reads a copy of it. With more members than query heads some have none.

    Raises:
        ValueError: when the query heads are no multiple of the KV heads, or there is no member.
    """
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads or num_members < 1:
        raise ValueError(f"{num_heads} query heads on {num_kv_heads} KV heads cannot be dealt to {num_members} members")
    readers = num_heads // num_kv_heads
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


def cut_evenly(total: int, num_pieces: int) -> list[tuple[int, int]]:
    """`[0, total)` in pieces whose lengths differ by at most one."""
    return list(itertools.pairwise(-(-total * index // num_pieces) for index in range(num_pieces + 1)))
