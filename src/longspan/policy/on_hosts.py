"""Requests larger than the device pools of their group: prefix hits on hosts, and the size of the next chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.core.blocks import PrefixHit
from longspan.core.view import RequestView

if TYPE_CHECKING:  # types alone
    from longspan.policy.batching import Budget
    from longspan.policy.shards import Capacity


def hit_on_hosts(request: RequestView, group: tuple[int, ...], budget: Budget) -> PrefixHit:
    """Return the longest cached prefix on the devices or hosts of a group. Host blocks are read in place.

    Each device keeps the blocks of one step free.
    """
    step_blocks = -(-budget.view.max_num_batched_tokens // request.block_size) + 1
    max_blocks = {i: max(0, budget.blocks[i] - step_blocks) for i in group}
    return budget.view.kv.match_in_place(request, max_blocks, budget.hosts_of(request, group))


def blocks_now(
    request: RequestView, group: Sequence[int], budget: Budget, free: Sequence[int], *, is_new: bool
) -> tuple[int, ...]:
    """Return the number of blocks that each member can allocate for a request in this step.

    Blocks reserved for other requests are left out, except when a running request would get none at all.

    Args:
        free: free blocks of each member, without the blocks that the prefix hit of a new request takes.
    """
    missing = 0 if is_new else request.blocks_for(request.num_tokens) - len(request.table)
    own = -(-missing // len(request.kv_owners)) if missing else 0
    left = [number - max(0, budget.reserved[i] - own) for i, number in zip(group, free, strict=True)]
    blocks = tuple([max(0, number) for number in left])
    return blocks if is_new or any(blocks) else tuple([min(1, max(0, number)) for number in free])


def capacity_now(
    request: RequestView, group: Sequence[int], budget: Budget, capacity: Capacity, hit: PrefixHit | None
) -> Capacity:
    """Bound the tokens of each member by its free blocks, and by the free slots of the request's last block.

    A running request without free blocks still asks for one block, so that preemption can free it.
    """
    table, start = (request.table, request.num_scheduled) if hit is None else (hit.refs, hit.num_tokens)
    blocks, size = blocks_now(request, group, budget, capacity.blocks, is_new=hit is not None), capacity.block_size
    begun = table[start // size].pool if start % size else None
    rest = [-start % size if i == begun else 0 for i in group]
    least = int(hit is None and not any(blocks) and not any(rest))
    max_tokens = [max(least, number) * size + more for number, more in zip(blocks, rest, strict=True)]
    return replace(capacity, blocks=blocks, tokens=tuple(map(min, capacity.tokens, max_tokens)))
