"""The baselines of Tetris that are called LoongServe: each prompt gets the group that is quickest for itself.

From the paper (Tetris §2.4, §7.1): all instances have one TP size; the group size of a prompt minimises its own time to
first token, waiting included, whatever comes after it; prompts are prefilled one by one, in order of arrival ("single-
request scheduling"). What is prefilled together is decoded together, in a batch that takes nobody in, on instances that
do nothing else meanwhile; KV is scaled down to these, and up again when they lack room.

Our reading: a batch is then one request, and decodes alone. Sizes are powers of two, as Tetris has them. KV goes to the
member that holds the last block (to more, if that lacks room) beside the first decode; in LoongServe it gets there with
the ring, at no cost. A prompt is planned anew whenever another instance is taken or given back, since nobody knows how
long answers will be. `loongserve-disagg` differs from `tetris` by the choice of groups alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from longspan.core.protocols import ClusterView, Plan, PolicySettings
from longspan.core.request import Request
from longspan.policy.cdsp import Planner
from longspan.policy.cdsp_policy import Cdsp, Planned
from longspan.policy.cdsp_queue import QueueTimes
from longspan.policy.cdsp_rates import RateTable, RateWatch
from longspan.policy.choosing import Chooser, Facts
from longspan.policy.group_shares import GroupShares
from longspan.policy.loongserve_decode import AloneShares, goes_on, homes
from longspan.policy.options import parse_options, settings_of
from longspan.policy.tetris import GroupOptions, planner_of

_ANY_GAIN = RateTable(entries=((0.0, 0.0),))
"""A larger group need only be quicker."""


@dataclass(frozen=True, kw_only=True)
class LoongServeOptions:
    """Options of both.

    Attributes:
        exchange, layout: as of `tetris`.
        sp_sizes: of groups; `auto` is powers of two.
    """

    exchange: Literal["auto", "ring_kv", "ring_q", "alltoall", "gather_kv"] = "auto"
    layout: Literal["auto", "zigzag", "striped"] = "auto"
    sp_sizes: str = "auto"

    @property
    def group(self) -> GroupOptions:
        """How groups compute."""
        return GroupOptions(exchange=self.exchange, layout=self.layout)


def create_disaggregated(num_instances: int, options: Mapping[str, str], facts: Facts) -> Cdsp:
    """`loongserve-disagg`: some instances prefill, the others decode as with `tetris`.

    Raises:
        ValueError: for an unknown option or a bad value, or when all instances do both.
    """
    parsed = parse_options("loongserve-disagg", LoongServeOptions, options)
    if facts.roles is None:
        raise ValueError(
            f"policy loongserve-disagg needs instances that decode only, but all {num_instances} do both: give "
            "--prefill-parallel and --decode-parallel, or --policy loongserve"
        )
    everyone = facts.roles.prefill
    planner, sharing = planner_of(facts, everyone, parsed.group.exchanges, parsed.sp_sizes), parsed.group.sharing()
    shares = GroupShares(sharing, Chooser(len(everyone), facts, sharing.wanted))
    ordered = tuple(sorted(everyone, key=facts.place))
    return Cdsp(
        ordered,
        planner,
        shares,
        RateWatch(_ANY_GAIN),
        settings=settings_of("loongserve-disagg", parsed),
        chunking=False,
        decode=facts.roles.decode,
    )


def create_unified(num_instances: int, options: Mapping[str, str], facts: Facts) -> LoongServe:
    """`loongserve`: all instances prefill, and those decode that are taken for it.

    Raises:
        ValueError: for an unknown option or a bad value.
    """
    parsed = parse_options("loongserve", LoongServeOptions, options)
    everyone = range(num_instances)
    planner, sharing = planner_of(facts, everyone, parsed.group.exchanges, parsed.sp_sizes), parsed.group.sharing()
    shares = AloneShares(sharing, Chooser(num_instances, facts, sharing.wanted))
    return LoongServe(tuple(sorted(everyone, key=facts.place)), planner, shares, settings_of("loongserve", parsed))


class _Reserved(QueueTimes):
    """Instances that decode are not free at any time that is known."""

    reserved: frozenset[int] = frozenset()

    def waits_s(self, now_s: float) -> list[float]:
        """See `QueueTimes`."""
        return [math.inf if i in self.reserved else wait for i, wait in enumerate(super().waits_s(now_s))]

    def is_old(self, now_s: float) -> bool:
        """Always: few prompts are planned, but often."""
        del now_s
        return True


class LoongServe(Cdsp):
    """One prompt at a time per group, one answer at a time per instance."""

    def __init__(
        self, everyone: tuple[int, ...], planner: Planner, shares: AloneShares, settings: PolicySettings
    ) -> None:
        super().__init__(everyone, planner, shares, RateWatch(_ANY_GAIN), settings=settings, chunking=False)
        self._alone = shares
        self._queue: _Reserved = _Reserved(len(everyone))
        self._closed: frozenset[int] = frozenset()
        """Instances on which no other prompt begins: decode there has them, or still has to leave them."""

    def plan(self, view: ClusterView) -> Plan:
        """See `Policy`. Only so many prompts are planned as could begin; the others may find all changed."""
        return super().plan(replace(view, waiting=view.waiting[: len(self._everyone)]))

    def _look(self, view: ClusterView) -> None:
        decoding = [request for request in view.running if self._is_decoding(request)]
        taken = frozenset(instance for request in decoding for instance in homes(request))
        self._closed = taken.union(*(request.group for request in decoding))
        if taken != self._queue.reserved:
            self._queue.reserved = taken
            self._plans = {one: planned for one, planned in self._plans.items() if view.running.get(one) is not None}
        super()._look(view)
        busy = self._closed.union(*(planned.group for planned in self._plans.values() if planned.begun))
        self._alone.spare = [instance for instance in self._everyone if instance not in busy]

    def _is_decoding(self, request: Request) -> bool:
        planned = self._plans.get(request.id)
        return (planned is None or planned.is_scheduled) and goes_on(request)

    def _is_first(self, request_id: int, group: Iterable[int]) -> bool:
        planned: Planned = self._plans[request_id]
        if not planned.begun and not self._closed.isdisjoint(group):
            return False
        return super()._is_first(request_id, group)
