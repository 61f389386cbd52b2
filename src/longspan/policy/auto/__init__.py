"""The default policy: prefill groups by their cost for all requests, and decodes on instances with few prefills.

A prompt gets a group when instances are free for it, and not before. `WaitingQueue` orders prompts by their wait
relative to their length. A larger group computes the first token sooner, but uses more seconds of instances in all, for
which other prompts wait. Prefills also delay the decodes on their instances. `Costs` sums these penalties, and
`GroupAssignment` takes the group with the smallest sum.

KV is sent, layer by layer while it is computed, to the instance that decodes the request. `DecodePlacement` chooses
the instance where its tokens add the fewest seconds. Prefills avoid instances that decode, and decodes avoid instances
that prefill. So the load decides which instances mostly prefill and which mostly decode. A request that fits on no
instance is decoded by the fewest instances with enough blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from longspan.core.blocks import PrefixHit, coupled_instances
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.auto.assignment import GroupAssignment
from longspan.policy.auto.candidates import CandidateGroups, Costs
from longspan.policy.auto.estimates import Estimates
from longspan.policy.auto.history import History
from longspan.policy.auto.observation import Observation, Observer
from longspan.policy.auto.placement import DecodePlacement
from longspan.policy.auto.waiting import WaitingQueue
from longspan.policy.batching import Batch, Budget, is_decode, single_part
from longspan.policy.facts import Facts
from longspan.policy.routing import Router, joined, plan_alone
from longspan.policy.tetris import GroupOptions
from longspan.policy.traffic import Traffic

_NOTHING = Plan()


@dataclass(frozen=True, kw_only=True)
class AutoOptions(GroupOptions):
    """Options of `auto`: latency bounds, and how groups compute.

    Attributes:
        target_tbt: wanted bound for the seconds of a step that prefills and decodes. `auto` is the shortest step that
            spends nine tenths on the prefill's tokens, and no bound if decodes were not measured.
        ttft_slowdown: wanted bound for a first token, relative to the fastest group of its prompt. A higher one
            protects answers from prefills.
        tbt_slowdown: wanted bound for the mean time between tokens, relative to a request that decodes alone.
        overtaking: a prompt is overdue, and precedes all prompts that are not, once it has waited for this many times
            the wait of first come, first served. 1 keeps the longest waits short, infinity the median.
    """

    target_tbt: float | Literal["auto"] = "auto"
    ttft_slowdown: float = 4.0
    tbt_slowdown: float = 2.0
    overtaking: float = 1.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_tbt != "auto" and self.target_tbt <= 0:
            problem = f"must be above 0 seconds, but {self.target_tbt} given"
            raise ParameterError("target_tbt", problem, self.target_tbt)
        for name in ("ttft_slowdown", "tbt_slowdown", "overtaking"):
            if not (value := getattr(self, name)) >= 1:
                raise ParameterError(name, f"must be at least 1, but {value} given", value)


class Auto(Policy, name="auto"):
    """Chooses a prefill group and a decode instance per prompt. Decodes and prompts are batched as by `chunked`."""

    Options = AutoOptions
    knows_roles = reads_hosts = True

    def __init__(self, instances: tuple[int, ...], options: AutoOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self._all, self._decode_only = frozenset(instances), facts.decode
        target_s = None if options.target_tbt == "auto" else options.target_tbt
        self._estimates = estimates = Estimates(facts, options.exchanges, len(instances), target_s)
        hosts: dict[object, list[int]] = {}
        for instance in instances:
            hosts.setdefault(facts.location(instance).host_id, []).append(instance)
        self._place = {instance: place for place, instance in enumerate(instances)}
        candidates = CandidateGroups(list(hosts.values()), estimates.sizes, self._place)
        self._parts = options.group_parts(instances, facts)
        self._history = history = History(estimates.token_s, facts.traffic)
        history.expect(estimates.whole_prompt_s)
        self._observer = observer = Observer(self._place, estimates, history, has_roles=bool(facts.decode))
        self._placement = DecodePlacement(self._place, estimates, history, observer, options.tbt_slowdown)
        self._queue = queue = WaitingQueue(len(instances), options.overtaking, options.ttft_slowdown)
        costs = Costs(candidates, estimates, history, options.ttft_slowdown, options.tbt_slowdown)
        self._assignment = GroupAssignment(instances, queue, costs, observer, self._placement)

    @property
    def capacity(self) -> int:
        """The number of all instances: they share a request that is too large for one."""
        return len(self.instances)

    @property
    def traffic(self) -> Traffic | None:
        return self._history.traffic

    def plan(self, view: ClusterView) -> Plan:
        """Continue running requests, and admit waiting requests with a group that can step."""
        decodes = plan_alone(view, self._decode_only, self._token) if self._decode_only else _NOTHING
        if self._all <= view.full:
            return decodes
        self._queue.remove_admitted()
        self._observer.update(view)
        seen = self._assignment.assign(view) if view.startable else None
        groups = [waiting.group for waiting in self._queue.assigned.values() if len(waiting.group) > 1]
        coupled = view.running.coupled_sets
        batch = Batch(view, self._all, coupled_sets=coupled_instances([*coupled, *groups]) if groups else coupled)
        for request in batch.running():
            batch.add(self._next(request, batch.budget))
        ready = [one for one in self._queue.assigned.values() if batch.instances.issuperset(one.group)]
        if ready and view.startable:
            seen = seen or self._observer.observe(view)
            router = Router(view, self._decode_only) if self._decode_only else None
            for waiting in ready:
                for request in batch.waiting([waiting.request]):  # a request that is not admitted stops no other
                    batch.add(self._first(request, waiting.group, batch.budget, seen, router))
        self._observer.scheduled(batch.parts, view.now_s)
        return joined([batch.plan(), decodes]) if self._decode_only else batch.plan()

    def arrived(self, request: RequestView) -> None:
        self._queue.add(request)

    def preempted(self, request: RequestView) -> None:
        self._queue.remove(request.id)
        self._queue.add(request)

    def ended(self, request: RequestView) -> None:
        self._queue.remove(request.id)
        if request.num_known > request.num_prompt:
            self._history.add_answer(request.num_known - request.num_prompt)

    # ---------------------------------------------------------------- parts

    def _first(
        self, request: RequestView, group: tuple[int, ...], budget: Budget, seen: Observation, router: Router | None
    ) -> ScheduledPart | None:
        """Schedule the first part of a request on its group, and choose where it decodes."""
        members = [self._place[i] for i in group]
        if seen.free_slots[members].min() <= 0:
            return None
        hit = budget.hit(request, group)
        if (part := self._prefill(request, group, hit.num_tokens, budget, hit)) is None:
            return None
        self._observer.admitted(request)
        seen.free_slots[members] -= 1
        if router is not None:
            return replace(part, targets=router.route(request))
        targets = () if budget.outgrows(request) else self._placement.targets(request, group, seen, budget.view.now_s)
        for target, num_blocks in targets:
            seen.free_slots[self._place[target]] -= 1
            seen.free_blocks[self._place[target]] -= num_blocks
        seen.free_blocks[members] -= -(-request.blocks_for(request.num_tokens) // len(group))
        seen.add_decode(request, [self._place[target] for target, _ in targets] or members)
        return replace(part, targets=targets)

    def _next(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        if is_decode(request, request.num_scheduled):
            return self._token(request, budget)
        return self._prefill(request, request.group, request.num_scheduled, budget, None)

    def _token(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        return self._parts.next(request, budget, budget.view.max_num_batched_tokens)

    def _prefill(
        self,
        request: RequestView,
        group: tuple[int, ...],
        start: int,
        budget: Budget,
        hit: PrefixHit | None,
    ) -> ScheduledPart | None:
        """Schedule the next chunk of a prompt. It is shorter on instances that decode."""
        max_tokens = budget.view.max_num_batched_tokens
        if self._estimates.cuts_steps and (decode_s := self._observer.decode_s(group, budget.view)):
            in_time = int(self._estimates.max_tokens(len(group), start, decode_s))
            max_tokens = max(min(max_tokens, in_time // len(group)), request.block_size)
        if len(group) == 1:
            return single_part(request, group[0], start, budget, hit, most=max_tokens)
        if any(i not in budget.tokens for i in group):
            return None
        return self._parts.chunk(request, budget, group, hit, most=max_tokens, end=request.num_tokens)
