"""Layouts: how a span is sharded over the members of a group."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

from longspan.core.runs import Layout, Run, SpanShards


def shard_span(
    layout: Layout,
    start: int,
    stop: int,
    num_members: int,
    *,
    align: int = 1,
    head: int | None = None,
    fractions: Sequence[float] = (),
) -> SpanShards:
    """Shard the span `[start, stop)` over `num_members` members.

    Every cut falls on a multiple of `align` (the KV block size), so that each block of tokens lies on one member. If
    the span starts inside a block, the rest of that block goes to member `head`, which holds the block.

    - `zigzag` cuts 2N chunks and gives member i chunks i and 2N-1-i, so that causal work is even (Context Parallelism
      §3.5.1). Cuts are rounded to blocks to minimise the tokens of the busiest member.
    - `striped` gives block b to member b mod N.
    - `contiguous` cuts N even chunks, or the `fractions` of the span, rounded to blocks (KV-Runahead §4.3).
    - `single` gives all tokens to member `head` (or 0).

    Raises:
        ValueError: no member, another number of fractions, or no `head` for a span that starts inside a block.
    """
    if num_members < 1:
        raise ValueError(f"a span is sharded over at least 1 member, but {num_members} given")
    if fractions and (layout != "contiguous" or len(fractions) != num_members):
        raise ValueError(f"fractions {tuple(fractions)} are for a contiguous layout with one for each of {num_members}")
    if layout == "single":
        return _all_to_one(start, stop, num_members, member=head or 0)
    body = min(stop, -(-start // align) * align)
    if body > start and head is None:
        raise ValueError(f"span [{start}, {stop}) starts inside a block of {align} tokens: name its holder")
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(num_members)]
    if head is not None:
        _append(pieces[head], start, body)
    cuts = [min(stop, body + cut * align) for cut in _cuts(layout, (stop - body) / align, num_members, fractions)]
    there_and_back = [*range(num_members), *range(num_members - 1, -1, -1)]
    members = itertools.cycle(there_and_back if layout == "zigzag" else range(num_members))
    for member, first, last in zip(members, cuts, cuts[1:], strict=False):
        _append(pieces[member], first, last)
    return tuple([tuple([Run(first, last) for first, last in member]) for member in pieces])


def _all_to_one(start: int, stop: int, num_members: int, *, member: int) -> SpanShards:
    whole = (Run(start, stop),) if stop > start else ()
    return ((),) * member + (whole,) + ((),) * (num_members - member - 1)


def _append(pieces: list[tuple[int, int]], first: int, last: int) -> None:
    """Append a piece, or extend the last piece if they touch. Skip an empty piece."""
    if first >= last:
        return
    if pieces and pieces[-1][1] == first:
        pieces[-1] = pieces[-1][0], last
    else:
        pieces.append((first, last))


def _cuts(layout: Layout, num_blocks: float, num_members: int, fractions: Sequence[float]) -> list[int]:
    """Return the cuts of blocks into chunks, including both ends. The last block may be partial."""
    whole, begun = math.floor(num_blocks), math.ceil(num_blocks)
    match layout:
        case "striped":
            return list(range(begun + 1))
        case "contiguous" if fractions:
            shares = itertools.accumulate(fractions[:-1])
            return [0, *(min(whole, math.floor(num_blocks * share + 0.5)) for share in shares), begun]
        case "contiguous":
            return [begun * i // num_members for i in range(num_members + 1)]
        case _:  # zigzag
            num_chunks = 2 * num_members
            common = max(0, begun // num_chunks - 1) * num_chunks  # equal blocks of all chunks do not change the choice
            phase = _zigzag_phase(begun - common, num_members, ragged=whole < begun)
            return [(begun * i + phase) // num_chunks for i in range(num_chunks + 1)]


@lru_cache(maxsize=4096)
def _zigzag_phase(num_blocks: int, num_members: int, *, ragged: bool) -> int:
    """Choose the rounding of a zigzag's cuts that minimises the tokens of the busiest member, then its attention.

    A `ragged` last block counts as half. With 3 or more members, other cuts could save half a block. Over all phases
    each cut moves by one block, once. Only then the work of its members is computed again.
    """
    num_chunks, end = 2 * num_members, num_blocks - (0.5 if ragged else 0.0)
    moved = [set(range(num_members)), *(set[int]() for _ in range(num_chunks - 1))]  # by phase, members whose cuts move
    for cut in range(1, num_chunks):
        moved[-num_blocks * cut % num_chunks] |= {min(chunk, num_chunks - 1 - chunk) for chunk in (cut - 1, cut)}
    works: list[tuple[float, float]] = [(0.0, 0.0)] * num_members  # tokens, and pairs of a query and a key
    heaps: tuple[list[tuple[float, int]], ...] = ([], [])  # largest first, stale entries are popped at the top

    def busiest(phase: int) -> tuple[float, ...]:
        for member in moved[phase]:
            chunks = (member, num_chunks - 1 - member)
            cuts = [[min(end, (num_blocks * (c + i) + phase) // num_chunks) for i in (0, 1)] for c in chunks]
            works[member] = sum([b - a for a, b in cuts]), sum([b**2 - a**2 for a, b in cuts])
        for kind, heap in enumerate(heaps):
            for member in moved[phase]:
                heapq.heappush(heap, (-works[member][kind], member))
            while -heap[0][0] != works[heap[0][1]][kind]:
                heapq.heappop(heap)
        return tuple([-heap[0][0] for heap in heaps])

    busy = [busiest(phase) for phase in range(num_chunks)]
    return busy.index(min(busy))
