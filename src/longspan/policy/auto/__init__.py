"""The default policy: a group size for each prompt by what it costs all requests, and decodes where prefills are rare.

A prompt gets a group when instances are free for it, and not before. The queue is ordered by the wait relative to the
length (`_assign`). A larger group computes the first token sooner, but uses more seconds of instances in all, for which
other prompts wait. Prefills also delay the decodes on their instances. `Costs` sums these slowdowns, and the group with
the smallest sum is taken.

KV is sent, layer by layer while it is computed, to the instance that decodes the request (`DecodePlacement`): where a
token takes least, for the request and for those that decode there. Prefills avoid instances that decode, and decodes
avoid instances that prefill. So instances lean to one of the two by load, and back. A request that fits on no instance
is decoded by the fewest instances with enough blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from longspan.core.blocks import PrefixHit, coupled_instances
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.auto.candidates import CandidateGroups, Costs, Load, SizeTimes
from longspan.policy.auto.estimates import Estimates
from longspan.policy.auto.observation import Arrivals, InstanceState, Numbers, Observer, count_decode
from longspan.policy.auto.placement import DecodePlacement
from longspan.policy.auto.waiting import WaitingQueue
from longspan.policy.batching import Batch, Budget, is_decode, single_part
from longspan.policy.facts import Facts
from longspan.policy.routing import Router, joined, plan_alone
from longspan.policy.tetris import GroupOptions

_SLOWER = 20.0
"""Default bound for a decode step that runs a prefill, too, relative to a step of one request. Shorter steps delay
answers as long in all, and prompts longer.
"""
_MIN_STEP = 2
"""Prefill steps compute at least this many times their start seconds. Shorter steps cost more than they save."""
_FIRST_ANSWER, _LEARNING_RATE = 200.0, 0.05
"""Expected tokens of an answer before any has ended, and the weight of each answer that ends."""


@dataclass(frozen=True, kw_only=True)
class AutoOptions(GroupOptions):
    """Options of `auto`: what prompts may do to others, and how groups compute.

    Attributes:
        target_tbt: seconds between tokens of a request that a step with a prompt should not exceed; `auto` is twenty
            times what a token takes alone, and no bound where that was not measured.
    """

    target_tbt: float | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_tbt != "auto" and self.target_tbt <= 0:
            problem = f"must be above 0 seconds, but {self.target_tbt} given"
            raise ParameterError("target_tbt", problem, self.target_tbt)


class Auto(Policy, name="auto"):
    """Chooses a prefill group and a decode instance per prompt. Decodes and prompts are batched as by `chunked`."""

    Options = AutoOptions
    knows_roles = reads_hosts = True

    def __init__(self, instances: tuple[int, ...], options: AutoOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self._all, self._decode_only = frozenset(instances), facts.decode
        self._estimates = estimates = Estimates.of(facts, options.exchanges, len(instances))
        usual_s = _SLOWER * estimates.token_s if estimates.is_measured else math.inf  # a guess cuts no steps
        self._target_s = usual_s if options.target_tbt == "auto" else options.target_tbt
        hosts: dict[object, list[int]] = {}
        for instance in instances:
            hosts.setdefault(facts.location(instance).host_id, []).append(instance)
        self._place = {instance: place for place, instance in enumerate(instances)}
        self._candidates = CandidateGroups(list(hosts.values()), estimates.prefill, self._place)
        self._times = SizeTimes(estimates.prefill.values())
        self._parts = options.group_parts(instances, facts)
        self._arrivals, self._answer = Arrivals.in_steps_of(estimates.token_s), _FIRST_ANSWER
        self._costs = Costs(self._candidates, estimates, self._arrivals, len(instances))
        self._observer = Observer(instances, estimates, has_roles=bool(facts.decode))
        self._placement = DecodePlacement(instances, estimates, self._arrivals, self._observer, self._target_s)
        self._queue = WaitingQueue()

    @property
    def capacity(self) -> int:
        """The number of all instances: they share a request that is too large for one."""
        return len(self.instances)

    def plan(self, view: ClusterView) -> Plan:
        """Continue running requests, and admit waiting requests with a group that can step."""
        decodes = plan_alone(view, self._decode_only, self._token)
        if self._all <= view.full:
            return decodes
        self._queue.remove_admitted()
        self._observer.advance(view.now_s)
        states = self._observer.states(view) if view.startable or self._observer.has_prefills else {}
        if view.startable:
            self._queue.reconsider(states)
            self._assign(view, states)
        groups = [waiting.group for waiting in self._queue.assigned.values() if len(waiting.group) > 1]
        coupled = view.running.coupled_sets
        batch = Batch(view, self._all, coupled_sets=coupled_instances([*coupled, *groups]) if groups else coupled)
        for request in batch.running():
            batch.add(self._next(request, batch.budget, states))
        router = Router(view, self._decode_only) if self._decode_only else None
        for waiting in list(self._queue.assigned.values()) if view.startable else ():
            candidates = [waiting.request] if batch.instances.issuperset(waiting.group) else ()
            for request in batch.waiting(candidates):  # one that is not admitted stops no other
                batch.add(self._first(request, waiting.group, batch.budget, states, router))
        self._observer.scheduled(batch.parts)
        return joined([batch.plan(), decodes])

    def arrived(self, request: RequestView) -> None:
        self._queue.add(request)

    def preempted(self, request: RequestView) -> None:
        self._queue.remove(request.id)
        self._queue.add(request)

    def ended(self, request: RequestView) -> None:
        self._queue.remove(request.id)
        if request.num_known > request.num_prompt:
            self._answer += _LEARNING_RATE * (request.num_known - request.num_prompt - self._answer)

    # ---------------------------------------------------------------- groups

    def _assign(self, view: ClusterView, states: Mapping[int, InstanceState]) -> None:
        """Assign groups to waiting requests until no instance is free.

        The queue is ordered by the wait over the square root of a request's fastest seconds. This is between first
        come, first served and the highest response ratio: short prompts of a burst pass long ones, which still start
        under load.
        """
        self._register(view)
        waits = [one.wait_s for one in states.values()]
        if min(waits) > self._costs.ahead_s:
            return
        now_s = view.now_s
        order = [
            ((one.request.arrival_s - now_s) / math.sqrt(one.fastest_s), one.fastest_s, place, one)
            for place, one in enumerate(self._queue.unassigned())
        ]
        order.sort()
        strains = self._candidates.sum(self._placement.strain(states))
        load = Load(wait_s=np.array(waits), strains=strains, answer_s=self._answer * self._estimates.token_s)
        free_blocks = np.array(
            [max(0, o.free_blocks) if o.free_slots > 0 else -math.inf for o in states.values()], float
        )
        slowness = sum([1 / fastest_s for _, fastest_s, _, _ in order])
        for _, fastest_s, _, waiting in order:
            if load.wait_s.min() > self._costs.ahead_s:
                break
            request = waiting.request
            slowness -= 1 / fastest_s
            all_blocks = request.blocks_for(request.num_tokens)
            seconds_of, blocks_of = self._by_prefix(request, all_blocks, view)
            costs = self._costs.of(seconds_of, fastest_s, slowness, now_s, load)
            costs[self._candidates.sum(free_blocks) < blocks_of] = math.inf
            best = int(costs.argmin())
            if costs[best] == math.inf:
                break
            group, seconds, num_blocks = self._candidates.groups[best], float(seconds_of[best]), int(blocks_of[best])
            places = [self._place[i] for i in group]
            begins_s = float(load.wait_s[places].max())
            if begins_s <= self._costs.ahead_s:
                self._queue.assign(waiting, group, seconds, num_blocks)
            load.wait_s[places] = begins_s + seconds
            free_blocks[places] -= num_blocks / len(group)

    def _register(self, view: ClusterView) -> None:
        """Move new requests that can start to the queue, and count the arrivals among them."""
        new = self._queue.new
        for request in view.startable if new else ():
            if new.pop(request.id, None) is not None:
                hit = view.kv.match(request, self.instances)
                rest = request.num_tokens - hit.num_tokens, hit.num_tokens
                fastest_s = max(self._costs.min_prefill_s, self._estimates.fastest_s(*rest))
                self._queue.started(request, fastest_s)
                if not request.was_admitted:
                    self._arrivals.add(request.arrival_s, self._estimates.prefill_s(1, *rest), fastest_s)

    def _by_prefix(self, request: RequestView, num_blocks: int, view: ClusterView) -> tuple[Numbers, Numbers]:
        """Return the prefill seconds and needed blocks of each group, behind the prefix that is cached there."""
        candidates = self._candidates
        seconds = candidates.by_size(self._times.seconds(request.num_tokens))
        blocks = np.full(len(seconds), float(num_blocks))
        shared = view.kv.match(request, self.instances)
        holders = {ref.pool for ref in shared.refs}.intersection(self._all)
        hits = [((i,), view.kv.match(request, (i,))) for i in holders] if len(holders) > 1 else []
        for members, hit in sorted([*hits, (tuple(holders), shared)], key=lambda found: found[1].num_tokens):
            if not hit.num_tokens:
                continue
            have = candidates.sum(np.array([i in members for i in self._place], float)) == len(members)
            if hit.num_loaded:
                from longspan.policy.loading import held_near  # noqa: PLC0415 - without other tiers nothing is loaded

                near = held_near(hit, view.cluster)
                have &= candidates.sum(np.array([i not in near for i in self._place], float)) == 0
            rest = request.num_tokens - hit.num_tokens
            seconds[have] = candidates.by_size(self._times.seconds(rest, hit.num_tokens))[have]
            blocks[have] = num_blocks - hit.num_held + sum(view.kv.hit_cost(hit, set()).values())
        on_hosts = sum(map(view.kv.num_free, Budget(view, ()).hosts_of(request, self.instances)))
        blocks[candidates.sizes == len(self.instances)] -= on_hosts  # only all instances together read hosts
        return seconds, blocks

    # ---------------------------------------------------------------- parts

    def _first(
        self,
        request: RequestView,
        group: tuple[int, ...],
        budget: Budget,
        states: Mapping[int, InstanceState],
        router: Router | None,
    ) -> ScheduledPart | None:
        """Schedule the first part of a request on its group, and choose where it decodes."""
        if any(states[i].free_slots <= 0 for i in group):
            return None
        hit = budget.hit(request, group)
        if (part := self._prefill(request, group, hit.num_tokens, budget, hit, states)) is None:
            return None
        self._observer.admitted(request, group)
        for instance in group:
            states[instance].free_slots -= 1
        if router is not None:
            return replace(part, targets=router.route(request))
        targets = () if budget.outgrows(request) else self._placement.targets(request, group, states)
        for target, num_blocks in targets:
            states[target].free_slots -= 1
            states[target].free_blocks -= num_blocks
        for instance in group:
            states[instance].free_blocks -= -(-request.blocks_for(request.num_tokens) // len(group))
        count_decode(request, [target for target, _ in targets] or group, states)
        return replace(part, targets=targets)

    def _next(self, request: RequestView, budget: Budget, states: Mapping[int, InstanceState]) -> ScheduledPart | None:
        if is_decode(request, request.num_scheduled):
            return self._token(request, budget)
        return self._prefill(request, request.group, request.num_scheduled, budget, None, states)

    def _token(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        return self._parts.next(request, budget, budget.view.max_num_batched_tokens)

    def _prefill(
        self,
        request: RequestView,
        group: tuple[int, ...],
        start: int,
        budget: Budget,
        hit: PrefixHit | None,
        states: Mapping[int, InstanceState],
    ) -> ScheduledPart | None:
        """Schedule the next chunk of a prompt. It is shorter on instances that decode."""
        max_tokens = budget.view.max_num_batched_tokens
        if self._target_s < math.inf and any(states[i].active for i in group):
            times = self._estimates.on(len(group))
            in_time = times.most_tokens(max(self._target_s, (1 + _MIN_STEP) * times.start_s), start)
            max_tokens = max(min(max_tokens, int(in_time) // len(group)), request.block_size)
        if len(group) == 1:
            return single_part(request, group[0], start, budget, hit, most=max_tokens)
        if any(i not in budget.tokens for i in group):
            return None
        return self._parts.chunk(request, budget, group, hit, most=max_tokens, end=request.num_tokens)
