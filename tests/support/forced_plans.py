"""Groups that grow as they are told, or at random."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

from longspan.core.blocks import PrefixHit
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget, single_part
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts
from longspan.policy.sharing import SharingOptions
from longspan.policy.tetris.execution import Cdsp, ChunkPlanner
from longspan.policy.tetris.planner import Chunk, ChunkPlan, Prompt

Plans = Mapping[int, Sequence[tuple[int, tuple[int, ...]]]]
"""By length of the prompt: the tokens and the group of every chunk but the last, whose tokens are the rest."""
PLANS: dict[str, Plans] = {
    "2 then 4": {300: [(130, (0, 1)), (170, (0, 1, 2, 3))]},
    "1 then 3": {300: [(100, (2,)), (200, (2, 0, 3))]},
    "1, 2, 4": {300: [(50, (3,)), (105, (1, 3)), (145, (0, 1, 2, 3))]},
    "two at once": {300: [(64, (0,)), (236, (0, 1, 2))], 200: [(90, (3, 2)), (110, (1, 2, 3, 0))]},
}


class ForcedPlanner:
    """Return the plan of each length. Other prompts, and prompts with cached tokens, go to instance 0."""

    def __init__(self, plans: Plans, num_instances: int) -> None:
        self._plans, self.largest = plans, num_instances

    def plan(self, prompt: Prompt, queue_s: Sequence[float], _used: Sequence[int] = ()) -> ChunkPlan | None:
        if prompt.held:
            return None
        left, chunks = prompt.new_tokens, []
        planned = self._plans.get(prompt.new_tokens, [(prompt.new_tokens, (0,))])
        for number, (tokens, group) in enumerate(planned, start=1):
            taken = left if number == len(planned) else tokens
            chunks.append(Chunk(num_tokens=taken, group=group))
            left -= taken
        return ChunkPlan(chunks=tuple(chunks), ttft_s=max(queue_s) + 1.0)

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:  # noqa: ARG002 - of the protocol
        return 1.0


class GrowingPlanner:
    """Up to three chunks of any length on any groups that grow."""

    def __init__(self, num_instances: int, seed: int) -> None:
        self.largest, self._seed = num_instances, seed

    def plan(self, prompt: Prompt, queue_s: Sequence[float], _used: Sequence[int] = ()) -> ChunkPlan | None:
        draw = random.Random(f"{self._seed} {prompt.new_tokens} {prompt.held}")
        others = [i for i in range(self.largest) if i not in prompt.held]
        order = [*prompt.held, *draw.sample(others, len(others))]
        sizes = sorted(draw.randint(1, self.largest) for _ in range(draw.randint(1, 3)))
        room = prompt.instance_tokens or prompt.new_tokens
        sizes = [max(size, len(prompt.held)) for size in sizes]
        cuts = sorted({0, prompt.new_tokens, *(draw.randint(0, prompt.new_tokens) for _ in sizes[1:])})
        chunks = []
        for (start, stop), size in zip(pairwise(cuts), sizes[-len(cuts) + 1 :], strict=True):
            fewest = -(-(prompt.cached_tokens + stop) // room)
            chunks.append(Chunk(num_tokens=stop - start, group=tuple(order[: max(size, fewest)])))
        return ChunkPlan(chunks=tuple(chunks), ttft_s=max(queue_s) + draw.random())

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:  # noqa: ARG002 - of the protocol
        return 1.0


def forced(
    plans: Plans,
    num_instances: int,
    options: SharingOptions | None = None,
    *,
    decode: Sequence[int] = (),
    balance: bool = False,
) -> Policy:
    return planned(ForcedPlanner(plans, num_instances), options, decode=decode, balance=balance)


def planned(
    planner: ChunkPlanner, options: SharingOptions | None = None, *, decode: Sequence[int] = (), balance: bool = True
) -> Policy:
    """Prompts as a planner wishes, on instances that also decode, or with separate decode instances."""
    instances, options = tuple(range(planner.largest)), options or SharingOptions()
    parts = GroupParts(len(instances), options, Facts(), balance=balance)
    return Cdsp(instances, options, planner, parts, decode=decode)


class Wandering(Policy):
    """A policy that picks a random group for each step, also in decode. The group has all holders of the KV."""

    def __init__(self, num_instances: int, seed: int) -> None:
        super().__init__(tuple(range(num_instances)), None, None)
        self._seed = seed
        self._group_parts = GroupParts(num_instances, SharingOptions(), Facts())

    @property
    def capacity(self) -> int:
        return len(self.instances)

    def plan(self, view: ClusterView) -> Plan:
        batch = Batch(view, frozenset(self.instances), coupled_sets=(frozenset(self.instances),))
        for request in batch.running():
            batch.add(self._part(request, batch.budget, None))
        for request in batch.waiting():
            batch.add(self._part(request, batch.budget, PrefixHit()))
        return batch.plan()

    def _part(self, request: RequestView, budget: Budget, hit: PrefixHit | None) -> ScheduledPart | None:
        draw = random.Random(f"{self._seed} {request.id} {request.num_scheduled}")
        known = {ref.instance for ref in request.table} or {draw.choice(self.instances)}
        seats = {i for i in self.instances if budget.seqs[i] > 0 or i in request.group}
        group = tuple(i for i in self.instances if i in known or (i in seats and draw.random() < 0.4))
        if not known <= seats:
            return None
        if len(group) == 1:
            return single_part(request, group[0], request.num_scheduled, budget, hit, most=40)
        return self._group_parts.chunk(request, budget, group, hit, most=40, end=request.num_tokens)
