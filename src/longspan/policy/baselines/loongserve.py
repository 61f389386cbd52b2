"""LoongServe: before its decode, the KV of a request is moved to as few members of its group as can hold it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longspan.core.exchange import RING_Q, of_any_layout
from longspan.core.layouts import shard_span
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.batching import Budget, single_part
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts
from longspan.policy.routing import goes_on
from longspan.policy.sharing import check_exchange
from longspan.policy.tetris import GroupOptions, sp_times
from longspan.policy.tetris.execution import Cdsp, Planned, QueueTimes
from longspan.policy.tetris.planner import Planner


def decoding_on(request: RequestView) -> set[int]:
    """Return the instances that a request decodes on, or will decode on after its prefill."""
    if request.num_scheduled <= request.num_prompt:
        return {request.table[-1].instance}
    return {ref.instance for ref in request.table}


class AloneParts(GroupParts):
    """Schedules decodes on instances that have one request each.

    Attributes:
        spare: idle instances that a request without free blocks may use, too.
    """

    spare: Sequence[int] = ()

    def next(self, request: RequestView, budget: Budget, most: int, partition: int = 0) -> ScheduledPart | None:
        """Schedule the next token of a decode. The first token moves the KV to the owners of all later tokens."""
        start = request.num_scheduled
        if request.num_tokens - start != 1:
            return super().next(request, budget, most, partition)
        moves = _scaled_down(request, budget) if len(request.group) > 1 else ()
        moved = dict(moves)
        owners = [moved.get(index, ref.instance) for index, ref in enumerate(request.table)]
        group = request.group if moves else tuple(i for i in request.group if i in owners)
        owner = owners[-1]
        if start % request.block_size == 0:
            taken = Counter(moved.values())
            free = {i: budget.blocks[i] - taken[i] for i in set(owners)}
            owner = next((i for i in (owner, *sorted(free)) if free[i] > 0), owner)
            spare = (i for i in self.spare if budget.blocks[i] > 0 and budget.seqs[i] > 0)
            if free[owner] <= 0 and (grown := next(spare, None)) is not None:
                owner, group = grown, (*group, grown)
        if any(instance not in budget.tokens for instance in group):
            return None
        if len(group) == 1:
            return single_part(request, owner, start, budget)
        return ScheduledPart(
            request=request,
            group=group,
            start=start,
            stop=start + 1,
            runs=shard_span("single", start, start + 1, len(group), head=group.index(owner)),
            block_owners=(owner,) * (request.blocks_for(start + 1) - len(request.table)),
            exchange=RING_Q,
            moves=moves,
        )


def _scaled_down(request: RequestView, budget: Budget) -> tuple[tuple[int, int], ...]:
    """Return moves of blocks after which as few members as possible hold any.

    The member with the last block stays, as that may not be full, then the members with the most free and own blocks.
    """
    table = request.table
    held = Counter(ref.instance for ref in table)
    last = table[-1].instance
    free = {i: budget.blocks[i] - budget.reserved[i] for i in request.group}
    ordered = [last, *sorted(set(held) - {last}, key=lambda i: (-free[i] - held[i], i))]
    kept, total = 0, 0
    while total < len(table):
        total += max(0, free[ordered[kept]]) + held[ordered[kept]]
        kept += 1
    receivers = [instance for instance in ordered[:kept] for _ in range(free[instance])]
    leaving = [index for index, ref in enumerate(table) if ref.instance not in ordered[:kept]]
    return tuple(zip(leaving, receivers, strict=False))


@dataclass(frozen=True, kw_only=True)
class LoongServeOptions:
    """Options of `loongserve` and `loongserve-disagg`.

    Attributes:
        exchange, layout: as of `tetris`.
        sp_sizes: of groups; `auto` is powers of two.
    """

    exchange: str = "auto"
    layout: Literal["auto", "zigzag", "striped"] = "auto"
    sp_sizes: str = "auto"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, of_any_layout)

    @property
    def group(self) -> GroupOptions:
        return GroupOptions(exchange=self.exchange, layout=self.layout)

    def planner(self, instances: tuple[int, ...], facts: Facts) -> Planner:
        times = sp_times(facts, self.group.exchanges, self.sp_sizes, len(instances))
        return Planner(times, facts.hosts(instances))


class _Reserved(QueueTimes):
    """Queue times that are infinite for decoding instances, because the end of an answer is unknown."""

    reserved: frozenset[int] = frozenset()

    def waits_s(self, now_s: float) -> list[float]:
        return [math.inf if i in self.reserved else wait for i, wait in enumerate(super().waits_s(now_s))]

    def is_old(self, now_s: float) -> bool:
        """Return True: corrections are cheap, because few prompts are planned."""
        del now_s
        return True


class LoongServe(Cdsp, name="loongserve"):
    """Runs one prompt at a time per group, and one answer at a time per instance."""

    Options = LoongServeOptions

    def __init__(self, instances: tuple[int, ...], options: LoongServeOptions, facts: Facts) -> None:
        parts = AloneParts(len(instances), options.group.sharing(), facts)
        super().__init__(instances, options, options.planner(instances, facts), parts, chunking=False)
        self._group_parts: AloneParts = parts
        self._queue: _Reserved = _Reserved(len(instances))
        self._closed: frozenset[int] = frozenset()
        """Instances on which no prompt begins, because a request decodes there or its KV has not moved away yet."""

    def plan(self, view: ClusterView) -> Plan:
        """Plan at most one prompt per instance. Later prompts are planned with newer loads."""
        return super().plan(replace(view, startable=view.startable[: len(self.instances)]))

    def _update_plans(self, view: ClusterView) -> None:
        decoding = [request for request in view.running if self._is_decoding(request)]
        taken = frozenset(instance for request in decoding for instance in decoding_on(request))
        self._closed = taken.union(*(request.group for request in decoding))
        if taken != self._queue.reserved:
            self._queue.reserved = taken
            waiting = [planned.request for planned in self._plans.values() if not planned.request.group]
            for request in waiting:
                self._unplan(request)
        super()._update_plans(view)
        busy = self._closed.union(*(planned.group for planned in self._plans.values() if planned.begun))
        self._group_parts.spare = [instance for instance in self.instances if instance not in busy]

    def _is_decoding(self, request: RequestView) -> bool:
        planned = self._plans.get(request.id)
        return (planned is None or planned.is_scheduled) and goes_on(request)

    def _is_first(self, request_id: int, group: Iterable[int]) -> bool:
        planned: Planned = self._plans[request_id]
        if not planned.begun and not self._closed.isdisjoint(group):
            return False
        return super()._is_first(request_id, group)


class LoongServeDisagg(Cdsp, name="loongserve-disagg"):
    """Runs one prompt at a time per group. Other instances decode."""

    Options = LoongServeOptions
    knows_roles = True

    def __init__(self, instances: tuple[int, ...], options: LoongServeOptions, facts: Facts) -> None:
        if not facts.has_roles:
            problem = f"loongserve-disagg needs instances that only decode: {facts.cluster or 'it'} has none, give"
            raise ParameterError("policy", f"{problem} `prefill_parallel` and `decode_parallel`, or choose loongserve")
        parts, planner = options.group.group_parts(instances, facts), options.planner(instances, facts)
        super().__init__(instances, options, planner, parts, chunking=False, decode=facts.decode)
