"""KV in the pools of hosts: which member of a group attends over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from longspan.core.blocks import BlockRef
from longspan.core.runs import Run, SpanShards, coalesce


def divide_among_hosts(hosted: Mapping[int, int], pools: Sequence[int]) -> tuple[int, ...]:
    """Divides the blocks in the pools of hosts evenly among the members there; returns `Part.hosted`.

    Args:
        hosted: blocks by pool.
        pools: that of each member's host.
    """
    left, members, shares = dict(hosted), Counter(pools), list[int]()
    for pool in pools:
        shares.append(-(-left.get(pool, 0) // members[pool]))
        members[pool] -= 1
        left[pool] = left.get(pool, 0) - shares[-1]
    assert not any(left.values()), "a member attends over what lies on its host"
    return tuple(shares)


def shares_of_hosts(
    table: Sequence[BlockRef], pools: Sequence[int], numbers: Sequence[int], block_size: int
) -> tuple[SpanShards, tuple[tuple[int, ...], ...]]:
    """Finds what each member attends over in the pool of its host, and the blocks of that.

    Args:
        pools: that of each member's host.
        numbers: blocks of each member, see `Part.hosted`.
    """
    places: dict[int, list[int]] = {pool: [] for pool in pools}
    for index, ref in enumerate(table):
        if ref.pool in places:
            places[ref.pool].append(index)
    runs, blocks, taken = [], [], dict.fromkeys(pools, 0)
    for pool, number in zip(pools, numbers, strict=True):
        own = places[pool][taken[pool] : taken[pool] + number]
        taken[pool] += number
        runs.append(coalesce(Run(index * block_size, (index + 1) * block_size) for index in own))
        blocks.append(tuple([table[index].block for index in own]))
    return tuple(runs), tuple(blocks)
