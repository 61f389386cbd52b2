"""LoongServe's decode: a request's KV is moved to as few members of its group as have room, and decodes there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longspan.core.exchange import RING_Q, of_any_layout
from longspan.core.runs import shard_span
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Budget, single_part
from longspan.policy.choosing import Chooser, Facts
from longspan.policy.group_parts import GroupParts, check_exchange
from longspan.policy.spec import PolicySpec
from longspan.policy.tetris.execution import Cdsp, Planned
from longspan.policy.tetris.planner import Planner
from longspan.policy.tetris.policy import GroupOptions, planner_of
from longspan.policy.tetris.rates import RateTable, RateWatch
from longspan.policy.tetris.times import QueueTimes


def goes_on(request: RequestView) -> bool:
    """Tells whether it will have another token than the next one."""
    return request.num_known - request.num_prompt + 1 < request.max_tokens


def owners(request: RequestView) -> set[int]:
    """Returns the instances that a request decodes on, or will once its prompt is done."""
    if request.num_scheduled <= request.num_prompt:
        return {request.table[-1].instance}
    return {ref.instance for ref in request.table}


class AloneParts(GroupParts):
    """Shares of decodes that nobody else takes part in.

    Attributes:
        spare: instances that do nothing, which a request can grow to that lacks room.
    """

    spare: Sequence[int] = ()

    def next(self, request: RequestView, budget: Budget, most: int) -> ScheduledPart | None:
        """Schedules the next token of a decode. The first one takes the KV along to where all following ones are."""
        start = request.num_scheduled
        if request.num_tokens - start != 1:
            return super().next(request, budget, most)
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
            return single_part(request, home, start, budget)
        return ScheduledPart(
            request=request,
            group=group,
            start=start,
            stop=start + 1,
            runs=shard_span("single", start, start + 1, len(group), head=group.index(home)),
            block_owners=(home,) * (request.blocks_for(start + 1) - len(request.table)),
            exchange=RING_Q,
            moves=moves,
        )


def _scaled_down(request: RequestView, budget: Budget) -> tuple[tuple[int, int], ...]:
    """Gives blocks to members so that as few as possible hold any: first the one with the last
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


_ANY_GAIN = RateTable(entries=((0.0, 0.0),))
"""A larger group need only be quicker."""


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
        check_exchange("exchange", self.exchange, of_any_layout())

    @property
    def group(self) -> GroupOptions:
        """Returns the options of a group that these stand for."""
        return GroupOptions(exchange=self.exchange, layout=self.layout)


class _Reserved(QueueTimes):
    """Instances that decode are not free at any time that is known."""

    reserved: frozenset[int] = frozenset()

    def waits_s(self, now_s: float) -> list[float]:
        """Returns no known time for instances that decode."""
        return [math.inf if i in self.reserved else wait for i, wait in enumerate(super().waits_s(now_s))]

    def is_old(self, now_s: float) -> bool:
        """Always: few prompts are planned, but often."""
        del now_s
        return True


class LoongServe(Cdsp):
    """One prompt at a time per group, one answer at a time per instance."""

    def __init__(self, everyone: tuple[int, ...], planner: Planner, scheduled_parts: AloneParts) -> None:
        super().__init__(everyone, planner, scheduled_parts, RateWatch(_ANY_GAIN), chunking=False)
        self._alone = scheduled_parts
        self._queue: _Reserved = _Reserved(len(everyone))
        self._closed: frozenset[int] = frozenset()
        """Instances on which no other prompt begins: decode there has them, or still has to leave them."""

    def plan(self, view: ClusterView) -> Plan:
        """Plans only so many prompts as could begin; the others may find all changed."""
        return super().plan(replace(view, waiting=view.waiting[: len(self._everyone)]))

    def _look(self, view: ClusterView) -> None:
        decoding = [request for request in view.running if self._is_decoding(request)]
        taken = frozenset(instance for request in decoding for instance in owners(request))
        self._closed = taken.union(*(request.group for request in decoding))
        if taken != self._queue.reserved:
            self._queue.reserved = taken
            self._plans = {one: planned for one, planned in self._plans.items() if view.running.get(one) is not None}
        super()._look(view)
        busy = self._closed.union(*(planned.group for planned in self._plans.values() if planned.begun))
        self._alone.spare = [instance for instance in self._everyone if instance not in busy]

    def _is_decoding(self, request: RequestView) -> bool:
        planned = self._plans.get(request.id)
        return (planned is None or planned.is_scheduled) and goes_on(request)

    def _is_first(self, request_id: int, group: Iterable[int]) -> bool:
        planned: Planned = self._plans[request_id]
        if not planned.begun and not self._closed.isdisjoint(group):
            return False
        return super()._is_first(request_id, group)


def _make(instances: tuple[int, ...], options: LoongServeOptions, facts: Facts) -> LoongServe:
    sharing = options.group.sharing()
    planner = planner_of(facts, sorted(instances), options.group.exchanges, options.sp_sizes)
    return LoongServe(instances, planner, AloneParts(sharing, Chooser(len(instances), facts, sharing.wanted)))


def _make_disaggregated(instances: tuple[int, ...], options: LoongServeOptions, facts: Facts) -> Cdsp:
    if not facts.has_roles:
        raise ValueError(
            f"policy loongserve-disagg needs instances that decode only, but all {len(instances)} do both: give "
            "--prefill-parallel and --decode-parallel, or --policy loongserve"
        )
    sharing = options.group.sharing()
    return Cdsp(
        instances,
        planner_of(facts, sorted(instances), options.group.exchanges, options.sp_sizes),
        GroupParts(sharing, Chooser(len(instances), facts, sharing.wanted)),
        RateWatch(_ANY_GAIN),
        chunking=False,
        decode=facts.decode,
    )


LOONGSERVE = PolicySpec(
    name="loongserve", options=LoongServeOptions, make=_make, capacity=lambda policy: policy.capacity
)
LOONGSERVE_DISAGG = PolicySpec(
    name="loongserve-disagg",
    options=LoongServeOptions,
    make=_make_disaggregated,
    capacity=lambda policy: policy.capacity,
    knows_roles=True,
)
