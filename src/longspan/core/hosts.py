"""The split of a request's host blocks over the members of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from longspan.core.blocks import BlockRef
from longspan.core.runs import Run, SpanShards, coalesce


def divide_among_hosts(hosted: Mapping[int, int], pools: Sequence[int]) -> tuple[int, ...]:
    """Return `Part.hosted`: the host blocks of a request, divided evenly among the members on each host.

    Args:
        hosted: number of blocks by host pool.
        pools: the host pool of each member.
    """
    left, members, shares = dict(hosted), Counter(pools), list[int]()
    for pool in pools:
        shares.append(-(-left.get(pool, 0) // members[pool]))
        members[pool] -= 1
        left[pool] = left.get(pool, 0) - shares[-1]
    assert not any(left.values()), "each host pool with blocks of a request has a member of its group"
    return tuple(shares)


def shares_of_hosts(
    table: Sequence[BlockRef], pools: Sequence[int], numbers: Sequence[int], block_size: int
) -> tuple[SpanShards, tuple[tuple[int, ...], ...]]:
    """Return the token runs that each member attends over on its host, and the block numbers of these runs.

    Args:
        pools: the host pool of each member.
        numbers: number of blocks of each member, see `Part.hosted`.
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
