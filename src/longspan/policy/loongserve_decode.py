"""How `loongserve` decodes: a request's KV is moved to as few members of its group as have room, and decodes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from longspan.core.protocols import ClusterView, Share
from longspan.core.request import Request
from longspan.core.runs import deal
from longspan.policy.batching import Budget, single_share
from longspan.policy.group_shares import GroupShares


def goes_on(request: Request) -> bool:
    """Whether it will have another token than the next one."""
    return len(request.output) + 1 < request.max_tokens


def homes(request: Request) -> set[int]:
    """The instances that a request decodes on, or will once its prompt is done."""
    if request.num_scheduled <= request.num_prompt:
        return {request.table[-1].instance}
    return {ref.instance for ref in request.table}


class AloneShares(GroupShares):
    """Shares of decodes that nobody else takes part in.

    Attributes:
        spare: instances that do nothing, which a request can grow to that lacks room.
    """

    spare: Sequence[int] = ()

    def next(self, request: Request, view: ClusterView, budget: Budget, most: int) -> Share | None:
        """The next token of a decode. The first one takes the KV along to where all following ones are."""
        start = request.num_scheduled
        if request.num_tokens - start != 1:
            return super().next(request, view, budget, most)
        moves = _scaled_down(request, budget) if len(request.group) > 1 else ()
        lie = dict(moves)
        owners = [lie.get(place, ref.instance) for place, ref in enumerate(request.table)]
        group = request.group if moves else tuple(i for i in request.group if i in owners)
        if start % request.block_size:
            home = owners[-1]
        else:
            held = Counter(instance for _, instance in moves)
            free = {i: budget.blocks[i] - held[i] for i in set(owners)}
            home = next((i for i in (owners[-1], *sorted(free)) if free[i] > 0), owners[-1])
            if free[home] <= 0 and (grown := next((i for i in self.spare if budget.blocks[i] > 0), None)) is not None:
                home, group = grown, (*group, grown)
        if any(instance not in budget.tokens for instance in group):
            return None
        if len(group) == 1:
            return single_share(request, home, start, budget)
        return Share(
            request=request,
            group=group,
            start=start,
            stop=start + 1,
            runs=deal("single", start, start + 1, len(group), head=group.index(home)),
            holders=(home,) * (request.blocks_for(start + 1) - len(request.table)),
            exchange="ring_q",
            moves=moves,
        )


def _scaled_down(request: Request, budget: Budget) -> tuple[tuple[int, int], ...]:
    """Which block of a request goes to which member, so that as few as possible hold any: first the one with the last
    block, which may not be full and stays, then those with most room.
    """
    table = request.table
    held = Counter(ref.instance for ref in table)
    last = table[-1].instance
    room = {i: budget.blocks[i] - budget.reserved[i] for i in request.group}
    ordered = [last, *sorted(set(held) - {last}, key=lambda i: (-room[i] - held[i], i))]
    kept, total = 0, 0
    while total < len(table):
        total += max(0, room[ordered[kept]]) + held[ordered[kept]]
        kept += 1
    places = [instance for instance in ordered[:kept] for _ in range(max(0, room[instance]))]
    leaving = [place for place, ref in enumerate(table) if ref.instance not in ordered[:kept]]
    return tuple(zip(leaving, places, strict=False))
