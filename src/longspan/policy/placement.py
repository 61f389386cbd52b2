"""Which instances step together, and which of them a request goes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from longspan.core.cluster import coupled_instances
from longspan.core.owners import PrefixHit
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget, Placement, fill, single_part


def plan_coupled(
    view: ClusterView,
    groups: Sequence[tuple[int, ...]],
    everyone: frozenset[int],
    fill: Callable[[frozenset[int]], Batch | None],
) -> Plan:
    """One batch per set of instances that share requests, where all of the set can take a step.

    `groups` step together, besides those of running requests. `fill` plans a step of the instances it is given, or
    returns None when somebody in flight is in the way; it is then asked again for those that have nothing in flight.
    """
    coupled_sets = view.running.coupled_sets
    if joined := [g for g in groups if len(g) > 1 and not any(coupled.issuperset(g) for coupled in coupled_sets)]:
        coupled_sets = coupled_instances([*coupled_sets, *joined])

    def attempt(taken: frozenset[int]) -> Batch | None:
        return fill(everyone.difference(taken, *[coupled for coupled in coupled_sets if not coupled.isdisjoint(taken)]))

    batch = attempt(view.full) or attempt(view.busy) or Batch()
    return Plan(preempted=tuple(batch.preempted), batches=_by_coupled(batch.scheduled_parts))


def _by_coupled(scheduled_parts: Sequence[ScheduledPart]) -> tuple[tuple[ScheduledPart, ...], ...]:
    """A batch for each set of instances that these shares connect, in ascending order."""
    if not scheduled_parts:
        return ()
    groups = {_touched(scheduled) for scheduled in scheduled_parts}
    if len(groups) == 1:
        return (tuple(scheduled_parts),)
    coupled_sets = coupled_instances(groups)
    coupled_with = {i: number for number, coupled in enumerate(coupled_sets) for i in coupled}
    batches: list[list[ScheduledPart]] = [[] for _ in coupled_sets]
    for scheduled in scheduled_parts:
        batches[coupled_with[scheduled.group[0]]].append(scheduled)
    return tuple(tuple(batch) for batch in batches)


def _touched(scheduled: ScheduledPart) -> tuple[int, ...]:
    """The instances that a share's step names: also who passes on a token that was sampled elsewhere."""
    request, group = scheduled.request, scheduled.group
    if request.sampler in group or request.num_tokens == request.num_known:
        return group
    return (*group, request.sampler)


def admit_alone(
    request: RequestView, view: ClusterView, budget: Budget, everyone: Sequence[int]
) -> ScheduledPart | None:
    """The first share of a request on the instance where its prefill is expected to end first.

    That is the one with the fewest tokens to compute, its own uncached ones included. None while no instance has a seat
    and room for it, or the best one takes no part in this step.
    """
    hits = {i: view.kv.match(request, (i,)) for i in everyone}
    best_first = sorted(everyone, key=lambda i: (budget.load[i] - hits[i].num_tokens, i))
    able = (i for i in best_first if budget.seqs[i] > 0 and _has_room(request, i, hits[i], budget))
    home = next(able, None)
    if home is None or home not in budget.tokens:
        return None
    return single_part(request, home, hits[home].num_tokens, budget, hits[home])


def _has_room(request: RequestView, instance: int, hit: PrefixHit, budget: Budget) -> bool:
    """Whether the prompt is likely to fit beside what is promised; `Budget.admits` has the last word."""
    missing = request.blocks_for(request.num_tokens) - len(hit.refs)
    return missing <= budget.blocks[instance] - budget.reserved[instance]


class Router:
    """Chooses targets for the admissions of one plan."""

    def __init__(self, view: ClusterView, decode: Sequence[int]) -> None:
        self._view, self._decode = view, decode
        self._chosen: Counter[int] = Counter()

    def route(self, request: RequestView) -> int | None:
        """The instance with the highest freeness, of equals the first, which counts the request from now on; None for
        a request that ends with its next token.
        """
        if request.num_known - request.num_prompt + 1 >= request.max_tokens:
            return None
        target = max(self._decode, key=self._freeness)
        self._chosen[target] += request.blocks_for(request.num_tokens)
        return target

    def _freeness(self, instance: int) -> float:
        """Free blocks for each request; where more are promised than there are, how many are missing, below 0."""
        view = self._view
        free = view.kv.num_free(instance) - view.promised.get(instance, 0) - self._chosen.get(instance, 0)
        return free / max(1, len(view.running.on(instance))) if free > 0 else free


def plan_decodes(view: ClusterView, decode: Sequence[int], placement: Placement) -> Plan:
    """Continuous batching on each of these instances by itself; nobody is admitted there."""
    full, occupied = view.full, view.running.occupied
    able = [i for i in decode if i in occupied and i not in full]
    filled = [fill(view, frozenset((instance,)), placement, ()) or Batch() for instance in able]
    return Plan(
        preempted=tuple([request for batch in filled for request in batch.preempted]),
        batches=tuple([tuple(batch.scheduled_parts) for batch in filled if batch.scheduled_parts]),
    )
