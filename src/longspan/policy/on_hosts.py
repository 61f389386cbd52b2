"""Requests that outgrow all devices of their group: what they find on hosts, and how much they compute in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from longspan.core.blocks import BlockRef, PrefixHit
from longspan.core.view import RequestView

if TYPE_CHECKING:  # types alone
    from longspan.policy.batching import Budget


def hit_on_hosts(request: RequestView, group: tuple[int, ...], budget: Budget) -> PrefixHit:
    """Finds the longest beginning of a request that a group can read, on its devices or its hosts.

    Each device keeps free as many blocks as one step takes.
    """
    step_blocks = -(-budget.view.max_num_batched_tokens // request.block_size) + 1
    most = {i: max(0, budget.blocks[i] - step_blocks) for i in group}
    return budget.view.kv.match_beside(request, most, budget.hosts_of(request, group))


def blocks_now(
    request: RequestView, group: Sequence[int], budget: Budget, cost: Mapping[int, int], *, is_new: bool
) -> tuple[int, ...]:
    """Counts the blocks that a request can have on each member in this step, beside what others need.

    More are free once older blocks have gone to hosts. A running request may take what others need rather than have
    none at all.

    Args:
        cost: blocks that the beginning of an admitted request takes, see `KvView.hit_cost`.
    """
    missing = 0 if is_new else request.blocks_for(request.num_tokens) - len(request.table)
    own = -(-missing // len(request.kv_owners)) if missing else 0
    free = [budget.blocks[i] - cost.get(i, 0) for i in group]
    left = [number - max(0, budget.reserved[i] - own) for i, number in zip(group, free, strict=True)]
    found = tuple([max(0, number) for number in left])
    return found if is_new or any(found) else tuple([min(1, max(0, number)) for number in free])


def tokens_now(
    table: Sequence[BlockRef], start: int, size: int, group: Sequence[int], blocks: Sequence[int], *, is_new: bool
) -> tuple[int, ...]:
    """Counts the tokens that each member has room for: in these blocks of `size` tokens, and behind `start` in its own.

    A running request without any room asks for one block all the same, so that others give way.
    """
    begun = table[start // size].pool if start % size else None
    rest = [-start % size if i == begun else 0 for i in group]
    least = 0 if is_new or any(blocks) or any(rest) else 1
    return tuple([max(least, number) * size + more for number, more in zip(blocks, rest, strict=True)])
