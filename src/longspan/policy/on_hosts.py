"""Requests that outgrow all devices of their group: what they find on hosts, and how much they compute in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from longspan.core.blocks import PrefixHit
from longspan.core.view import RequestView

if TYPE_CHECKING:  # types alone
    from longspan.policy.batching import Budget
    from longspan.policy.group_parts import Room


def hit_on_hosts(request: RequestView, group: tuple[int, ...], budget: Budget) -> PrefixHit:
    """Finds the longest beginning of a request that a group can read, on its devices or its hosts.

    Each device keeps free as many blocks as one step takes.
    """
    step_blocks = -(-budget.view.max_num_batched_tokens // request.block_size) + 1
    most = {i: max(0, budget.blocks[i] - step_blocks) for i in group}
    return budget.view.kv.match_beside(request, most, budget.hosts_of(request, group))


def blocks_now(
    request: RequestView, group: Sequence[int], budget: Budget, free: Sequence[int], *, is_new: bool
) -> tuple[int, ...]:
    """Counts the blocks that a request can have on each member in this step, beside what others need.

    More are free once older blocks have gone to hosts. A running request may take what others need rather than have
    none at all.

    Args:
        free: blocks of each member, but for those that the beginning of an admitted request takes.
    """
    missing = 0 if is_new else request.blocks_for(request.num_tokens) - len(request.table)
    own = -(-missing // len(request.kv_owners)) if missing else 0
    left = [number - max(0, budget.reserved[i] - own) for i, number in zip(group, free, strict=True)]
    found = tuple([max(0, number) for number in left])
    return found if is_new or any(found) else tuple([min(1, max(0, number)) for number in free])


def room_now(request: RequestView, group: Sequence[int], budget: Budget, room: Room, hit: PrefixHit | None) -> Room:
    """Bounds the room of each member by the blocks it has now, with the rest of the block that the request is in.

    A running request without any room asks for one block all the same, so that others give way.
    """
    table, start = (request.table, request.num_scheduled) if hit is None else (hit.refs, hit.num_tokens)
    blocks, size = blocks_now(request, group, budget, room.blocks, is_new=hit is not None), room.block_size
    begun = table[start // size].pool if start % size else None
    rest = [-start % size if i == begun else 0 for i in group]
    least = int(hit is None and not any(blocks) and not any(rest))
    most = [max(least, number) * size + more for number, more in zip(blocks, rest, strict=True)]
    return replace(room, blocks=blocks, tokens=tuple(map(min, room.tokens, most)))
