"""The choice of decode instances for prefilled requests, by their free blocks (Tetris §4.2, CSPS §4.2)."""

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
        """Shard a request over the `number` instances with the highest freeness, and count it there.

        Of equals, the first instances are chosen. There are more if the request exceeds their pools. Each instance gets
        blocks in proportion to its free blocks. Return an empty tuple if the request ends with its next token.
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
        """Return the free blocks per request, or minus the missing blocks if more are expected than free."""
        free = self._free(instance)
        return free / max(1, len(self._view.running.on(instance))) if free > 0 else free


def shares_by(weights: Sequence[int], total: int) -> list[int]:
    """Split a total in proportion to weights. No share exceeds its weight if the total does not exceed their sum."""
    ends = [total * part // sum(weights) for part in accumulate(weights, initial=0)]
    return [stop - start for start, stop in pairwise(ends)]


def plan_alone(
    view: ClusterView, instances: Iterable[int], part: Callable[[RequestView, Budget], ScheduledPart | None]
) -> Plan:
    """Plan each of these instances alone, without admissions, as for instances that only decode."""
    occupied, plans = view.running.occupied, []
    for instance in instances:
        if instance in occupied and instance not in view.full:
            batch = Batch(view, frozenset((instance,)), coupled_sets=())
            for request in batch.running():
                batch.add(part(request, batch.budget))
            plans.append(batch.plan())
    return joined(plans)


def joined(plans: Sequence[Plan]) -> Plan:
    """Merge plans for disjoint sets of instances."""
    return Plan(
        preempted=tuple([request for plan in plans for request in plan.preempted]),
        loads=tuple([part for plan in plans for part in plan.loads]),
        batches=tuple([parts for plan in plans for parts in plan.batches]),
    )
