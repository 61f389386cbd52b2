"""The instances that decode what others have prefilled, by how free they are (Tetris §4.2, CSPS §4.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise

from longspan.core.blocks import Target
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget


def goes_on(request: RequestView) -> bool:
    return request.num_known - request.num_prompt + 1 < request.max_tokens


class Router:
    """Chooses the decode instances of the requests that one plan admits."""

    def __init__(self, view: ClusterView, decode: Sequence[int]) -> None:
        self._view, self._decode = view, decode
        self._chosen: Counter[int] = Counter()

    def route(self, request: RequestView, number: int = 1) -> tuple[Target, ...]:
        """Shards a request over the instances with the highest freeness, of equals the first, and counts it there.

        There are `number` of them at most, unless it needs the memory of more; each gets blocks by how many are free
        there. Returns none for a request that ends with its next token.
        """
        if not goes_on(request):
            return ()
        num_blocks, kv = request.blocks_for(request.num_tokens), self._view.kv
        best = sorted(self._decode, key=self._freeness, reverse=True)
        while sum(kv.num_blocks(i) for i in best[:number]) < num_blocks and number < len(best):
            number += 1
        chosen = [i for i in self._decode if i in best[:number]]
        free = [max(0, self._free(i)) for i in chosen]
        if sum(free) < num_blocks:
            free = [kv.num_blocks(i) for i in chosen]
        shares = shares_by(free, num_blocks)
        self._chosen.update(dict(zip(chosen, shares, strict=True)))
        return tuple([Target(i, share) for i, share in zip(chosen, shares, strict=True) if share])

    def _free(self, instance: int) -> int:
        view = self._view
        return view.kv.num_free(instance) - view.expected.get(instance, 0) - self._chosen.get(instance, 0)

    def _freeness(self, instance: int) -> float:
        """Returns the free blocks for each request; where more are expected than free, minus the number missing."""
        free = self._free(instance)
        return free / max(1, len(self._view.running.on(instance))) if free > 0 else free


def shares_by(weights: Sequence[int], total: int) -> list[int]:
    """Cuts a total in proportion to weights; where these are enough for it, no share is more than its weight."""
    ends = [total * part // sum(weights) for part in accumulate(weights, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


def plan_alone(
    view: ClusterView, instances: Iterable[int], part: Callable[[RequestView, Budget], ScheduledPart | None]
) -> Plan:
    """Plans each of these instances by itself, as those that only decode; nobody is admitted there."""
    occupied, plans = view.running.occupied, []
    for instance in instances:
        if instance in occupied and instance not in view.full:
            batch = Batch(view, frozenset((instance,)), coupled_sets=())
            for request in batch.running():
                batch.add(part(request, batch.budget))
            plans.append(batch.plan())
    return joined(plans)


def joined(plans: Sequence[Plan]) -> Plan:
    """Makes one of plans for instances that have nothing in common."""
    return Plan(
        preempted=tuple([request for plan in plans for request in plan.preempted]),
        loads=tuple([part for plan in plans for part in plan.loads]),
        batches=tuple([parts for plan in plans for parts in plan.batches]),
    )
