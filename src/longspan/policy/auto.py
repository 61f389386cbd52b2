"""The default: a group size for each prompt by what it costs everybody, and decodes where prompts disturb them least.

A prompt is given a group when instances are free for it, and not before; who has waited longest, for its length, is
first in line (`_assign`). More instances give its first token sooner, but use more seconds of instances in all, for
which others wait, and prompts delay the decodes that are on their instances. The group with the smallest sum of these
is taken (`_costs`).

Its KV goes, layer by layer while it is computed, to one instance that decodes it (`_home`): where a token takes least,
for itself and for those that decode there. Prompts avoid instances that decode, and decodes those that prefill; so
instances lean to one of both by load, and back. What no instance has room for is decoded by as few as have.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.core.blocks import PrefixHit, Target, coupled_instances
from longspan.core.exchange import Exchange
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.cost.profile import DecodeFit, PrefillTime
from longspan.errors import ParameterError
from longspan.policy.batching import Batch, Budget, is_decode, single_part
from longspan.policy.facts import Facts
from longspan.policy.routing import Router, goes_on, joined, plan_alone, shares_by
from longspan.policy.tetris import GroupOptions, expected_times, measured_times, sp_times

Numbers = NDArray[np.float64]

_WINDOW = 2500.0
"""Window over which arrivals are counted, in decode steps of one request: 29 s for llama-3-8b on an A100. A longer
window gives steadier rates, which follow a change of the load later. All times of this policy are multiples of measured
times, so a machine with half the speed gets the same decisions at half the rate.
"""
_LEAST_WINDOW = 85.0
"""Shortest window of a rate, in decode steps of one request: the first arrivals would count as a high rate."""
_MEMORY = 850.0
"""Decay time of the prefill seconds counted for an instance, in decode steps of one request. A longer time keeps
decodes away longer from an instance that has prefilled.
"""
_BUSIEST = 0.9
"""The largest part of the time that instances are taken to be busy: it bounds what others are expected to wait."""
_SLOWER = 20.0
"""A step with a prompt may take so many times as long as a token alone, by default: shorter steps delay answers as
long in all, and prompts longer.
"""
_AHEAD = 4.0
"""A prompt is assigned to an instance at most this many decode steps before the instance is free. A later decision uses
fresher load.
"""
_WEIGHT = 2.0
"""An answer that takes twice as long counts as much as so many first tokens that do."""
_ANSWER, _LEARNS = 200.0, 0.05
"""Tokens of an answer before any has ended, and how much each that has is believed."""
_EFFICIENT = 2
"""Prompts are cut into steps of so many times their start at least, whatever decodes: less costs more than it saves."""
_BESIDE = 1.25
"""Prompts are taken to need so many times as long beside decodes, which want short steps."""
_SPARE = 1.4
"""Prompts are left so many times the instances that they keep busy; and half of all, if decodes need no more."""
_CALM = 3.0
"""Tokens should take at most so many times as long as alone, for most of the time."""
_COMFORT = 0.6
"""The part of that which a step of decodes alone may take before more instances decode."""
_LEAST = 0.01
"""Lower bound for predicted prefill seconds, in decode steps of one request: shorter times are measurement noise."""
_LEAST_TOKEN_S = 1e-5
"""Lower bound for the seconds of a decode step, for a fit that rounds to zero. No device is as quick."""
_GUESSED_DECODE = DecodeFit(mean_error=0.0, max_error=0.0, num_samples=0, start_s=0.02, request_s=1e-4, context_s=1e-7)
"""Stands for measurements, for want of any."""


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


class Arrivals:
    """Counts recent prompts, with the seconds of each on one instance and on its quickest group.

    Attributes:
        usual_s, usual_quick_s: the medians of these seconds, not always of the very latest.

    Args:
        window_s: seconds over which arrivals count.
        least_window_s: lower bound for the span of a rate, while fewer seconds have passed.
    """

    def __init__(self, window_s: float, least_window_s: float) -> None:
        self._window_s, self._least_window_s = window_s, least_window_s
        self._recent: deque[tuple[float, float, float]] = deque()
        self._total_s, self._begun_s, self._num_unseen = 0.0, math.inf, 0
        self.usual_s = self.usual_quick_s = 0.0

    def add(self, arrival_s: float, single_s: float, quick_s: float) -> None:
        self._begun_s = min(self._begun_s, arrival_s)
        self._recent.append((arrival_s, single_s, quick_s))
        self._total_s += single_s
        self._num_unseen += 1
        if self._num_unseen > len(self._recent) // 16:
            self._num_unseen = 0
            self.usual_s = median([one for _, one, _ in self._recent])
            self.usual_quick_s = median([one for _, _, one in self._recent])

    def rates(self, now_s: float) -> tuple[float, float]:
        """Returns requests per second, and seconds of one instance that they take per second."""
        while self._recent and self._recent[0][0] < now_s - self._window_s:
            self._total_s -= self._recent.popleft()[1]
        span_s = min(self._window_s, max(self._least_window_s, now_s - self._begun_s))
        return len(self._recent) / span_s, max(0.0, self._total_s) / span_s


@dataclass(slots=True)
class Instance:
    """An instance as it is known while a plan is made.

    Attributes:
        decodes: requests that decode here, or will.
        active: those that do.
        context: tokens that they have.
        wait_s: until it is done with prompts.
        room: blocks that nothing needs.
        seats: requests that may still join, here or from others.
    """

    decodes: int
    active: int
    context: int
    wait_s: float
    room: int
    seats: int


class Seen(NamedTuple):
    """A request that waits: its fewest seconds, by what was cached when it came."""

    request: RequestView
    quick_s: float


class Line:
    """Waiting requests, and the groups that were chosen for some of them.

    Attributes:
        unseen: requests that have arrived, or lost their KV, and have not been able to start since; by id.
        seen: requests that were able to start, in that order.
        groups: chosen for requests that have not begun, first in line first.
        wants: the seconds and the blocks that each of these needs.
    """

    def __init__(self) -> None:
        self.unseen: dict[int, RequestView] = {}
        self.seen: dict[int, Seen] = {}
        self.groups: dict[int, tuple[int, ...]] = {}
        self.wants: dict[int, tuple[float, int]] = {}

    def drop(self, request_id: int) -> None:
        """Forget a request that does not wait any more."""
        for known in (self.unseen, self.seen, self.groups, self.wants):
            known.pop(request_id, None)

    def drop_admitted(self) -> None:
        for one in [one for one in self.groups if self.seen[one].request.group]:
            self.drop(one)


class Choice:
    """The groups to choose from: 1, 2, 4 and so on neighbours, of one host if it has so many, and all.

    Those of a size do not overlap, and where hosts have 2, 4 or 8 instances those of half the size are halves of them,
    so that prompts of different lengths seldom wait for a member while others are idle.

    Attributes:
        groups: ascending in size.
        sizes: of each, `[num_groups]`.
    """

    def __init__(self, hosts: Sequence[Sequence[int]], sizes: Collection[int], place: Mapping[int, int]) -> None:
        num_instances = [instance for host in hosts for instance in host]
        self.groups: list[tuple[int, ...]] = []
        kinds = []
        for kind, size in enumerate(sizes):
            for host in hosts if size <= max(map(len, hosts)) else [num_instances]:
                groups = [host[first : first + size] for first in range(0, len(host) - size + 1, size)]
                self.groups += [tuple(group) for group in groups]
                kinds += [kind] * len(groups)
        self._kinds = np.array(kinds)
        self._places = np.array([place[instance] for group in self.groups for instance in group])
        self.sizes = np.array(list(map(len, self.groups)))
        self._starts = np.cumsum(self.sizes) - self.sizes

    def spread(self, by_size: Sequence[float]) -> Numbers:
        """Gives each what its size has."""
        found: Numbers = np.array(by_size)[self._kinds]
        return found

    def sums(self, values: Numbers) -> Numbers:
        """Adds up what the members of each have."""
        return np.add.reduceat(values[self._places], self._starts)

    def most(self, values: Numbers) -> Numbers:
        """Returns the most that a member of each has."""
        return np.maximum.reduceat(values[self._places], self._starts)


class Auto(Policy, name="auto"):
    """Chooses for every prompt a group and where it decodes; decodes and prompts are then batched as by `chunked`."""

    Options = AutoOptions
    knows_roles = reads_hosts = True

    def __init__(self, instances: tuple[int, ...], options: AutoOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self._all, self._only_decode = frozenset(instances), facts.decode
        self._times = group_times(facts, options.exchanges, len(instances))
        fits = {} if facts.profile is None else facts.profile.decode_fits()
        alone = [fit for (members, _), fit in fits.items() if members == 1]
        self._decode = alone[0] if alone else _GUESSED_DECODE
        self._usual_token_s = token_s = max(_LEAST_TOKEN_S, self._decode.seconds(1, 0))
        self._ahead_s, self._memory_s, self._least_s = _AHEAD * token_s, _MEMORY * token_s, _LEAST * token_s
        usual_s = _SLOWER * self._usual_token_s if alone else math.inf  # a guess is no reason to cut steps
        self._target_s = usual_s if options.target_tbt == "auto" else options.target_tbt
        hosts: dict[object, list[int]] = {}
        for instance in instances:
            hosts.setdefault(facts.location(instance).host_id, []).append(instance)
        self._place = {instance: place for place, instance in enumerate(instances)}
        self._choice = Choice(list(hosts.values()), self._times, self._place)
        self._parts = options.group_parts(instances, facts)
        self._arrivals, self._answer = Arrivals(_WINDOW * token_s, _LEAST_WINDOW * token_s), _ANSWER
        self._line = Line()
        self._free_at_s = dict.fromkeys(instances, 0.0)
        """When steps that were planned are expected to be done with prompts."""
        self._begun: dict[int, tuple[int, ...]] = {}
        """Groups of requests that have begun, and do not only decode yet."""
        self._decoding: dict[int, Sequence[RequestView]] = dict.fromkeys(instances, ())
        """Who decoded on each instance, with so many tokens (`_context`), after so many changes there (`_counted`)."""
        self._context, self._counted = dict.fromkeys(instances, 0), dict[int, int]()
        self._prefilled_s = dict.fromkeys(instances, 0.0)
        self._prefilled_at_s = 0.0

    @property
    def capacity(self) -> int:
        """Counts all instances: a request that outgrows one is shared by all."""
        return len(self.instances)

    def plan(self, view: ClusterView) -> Plan:
        """Goes on with running requests, and admits those that wait and have a group that can step."""
        decodes = plan_alone(view, self._only_decode, self._token)
        if self._all <= view.full:
            return decodes
        self._forget(view)
        known = self._known(view) if view.startable or self._begun else {}
        if view.startable:
            self._reconsider(known)
            self._assign(view, known)
        groups = [group for group in self._line.groups.values() if len(group) > 1]
        coupled = view.running.coupled_sets
        batch = Batch(view, self._all, coupled_sets=coupled_instances([*coupled, *groups]) if groups else coupled)
        for request in batch.running():
            batch.add(self._next(request, batch.budget, known))
        router = Router(view, self._only_decode) if self._only_decode else None
        assigned = [self._line.seen[one].request for one in self._line.groups] if view.startable else []
        for one in assigned:  # a request that cannot be admitted holds up no other
            for request in batch.waiting([one] if batch.instances.issuperset(self._line.groups[one.id]) else ()):
                batch.add(self._first(request, batch.budget, known, router))
        for part in batch.parts:
            if part.stop - part.start > 1:
                seconds = self._seconds(len(part.group), part.stop - part.start, part.start)
                end_s = max(view.now_s, *(self._free_at_s[i] for i in part.group)) + seconds
                for instance in part.group:
                    self._prefilled_s[instance] += seconds
                    self._free_at_s[instance] = end_s
        return joined([batch.plan(), decodes])

    # ---------------------------------------------------------------- what is known

    def arrived(self, request: RequestView) -> None:
        self._line.unseen[request.id] = request

    def preempted(self, request: RequestView) -> None:
        self._line.drop(request.id)
        self._line.unseen[request.id] = request

    def ended(self, request: RequestView) -> None:
        self._line.drop(request.id)
        if request.num_known > request.num_prompt:
            self._answer += _LEARNS * (request.num_known - request.num_prompt - self._answer)

    def _forget(self, view: ClusterView) -> None:
        """Forget the requests that were admitted, and gradually the seconds that instances have prefilled."""
        self._line.drop_admitted()
        fades = math.exp((self._prefilled_at_s - view.now_s) / self._memory_s)
        self._prefilled_at_s = view.now_s
        for instance in self._prefilled_s:
            self._prefilled_s[instance] *= fades

    def _known(self, view: ClusterView) -> dict[int, Instance]:
        """Looks at all instances, or where nobody waits at those that have prompts to go on with."""
        kv, running, reserved = view.kv, view.running, view.running.due_blocks
        begun = self._still_begun(view)
        changes, expected, max_num_seqs = running.changes, view.expected, view.max_num_seqs
        found = {}
        involved = {i for one in begun for i in (*one.group, *(() if self._only_decode else one.targets))}
        for i in self.instances if view.startable else involved:
            if self._counted.get(i) != changes[i]:
                self._count(i, view)
            decoding, context = self._decoding[i], self._context[i]
            room = kv.num_free(i) - max(0, reserved[i]) - expected.get(i, 0)
            found[i] = Instance(len(decoding), len(decoding), context, 0.0, room, max_num_seqs - len(running.on(i)))
        for request in begun if not self._only_decode else ():
            homes = request.targets or request.group
            self._add_decode(request, homes, found)
            for instance in homes:
                found[instance].seats -= bool(request.targets)
                found[instance].active += not self._is_prefill(request) and not request.targets
        self._wait(view, begun, found)
        return found

    def _add_decode(self, request: RequestView, homes: Collection[int], known: Mapping[int, Instance]) -> None:
        """Counts what will decode on its homes, unless it ends with its next token."""
        for instance in homes if goes_on(request) else ():
            known[instance].decodes += 1
            known[instance].context += request.num_tokens // len(homes)

    def _wait(self, view: ClusterView, begun: Sequence[RequestView], known: Mapping[int, Instance]) -> None:
        """Adds up what instances still have to do for prompts."""
        busy_s: dict[int, float] = {}
        for request in begun:
            group = request.group
            if request.in_flight and request.num_computed < request.num_prompt:
                busy_s |= {i: max(0.0, self._free_at_s[i] - view.now_s) for i in group}
            if self._is_prefill(request):
                seconds = self._seconds(len(group), request.num_tokens - request.num_scheduled, request.num_scheduled)
                for instance in group:
                    known[instance].wait_s += seconds
        for instance, one in known.items():
            one.wait_s += busy_s.get(instance, 0.0)
            if instance not in busy_s:
                self._free_at_s[instance] = view.now_s  # whatever was expected

    def _reconsider(self, known: Mapping[int, Instance]) -> None:
        """Takes back groups that have no room or seats any more, and has others wait for the rest."""
        for one, group in list(self._line.groups.items()):
            seconds, num_blocks = self._line.wants[one]
            has_room = sum([max(0, known[i].room) for i in group]) >= num_blocks
            has_seats = self._line.seen[one].request.residency.can_start and all(known[i].seats > 0 for i in group)
            if has_room and has_seats:
                end_s = max([known[i].wait_s for i in group]) + seconds
                for instance in group:
                    known[instance].wait_s = end_s
            else:
                del self._line.groups[one]

    def _is_prefill(self, request: RequestView) -> bool:
        """Tells whether anything but its next token is still to be scheduled."""
        return request.num_scheduled < max(request.num_prompt, request.num_tokens - 1)

    def _count(self, instance: int, view: ClusterView) -> None:
        """Count the requests that decode on an instance, and their tokens."""
        decoding = [one for one in view.running.on(instance) if one.id not in self._begun]
        self._counted[instance], self._decoding[instance] = view.running.changes[instance], decoding
        self._context[instance] = sum([one.num_tokens for one in decoding])

    def _still_begun(self, view: ClusterView) -> list[RequestView]:
        """Lists the requests that run and are not only decoding yet, and forgets others."""
        found = []
        for one, group in list(self._begun.items()):
            request = view.running.get(one)
            if request is not None and (
                request.targets
                or request.num_computed < request.num_prompt
                or request.num_tokens > request.num_scheduled + 1
            ):
                found.append(request)
                continue
            del self._begun[one]
            for instance in group if request is None else request.group:
                self._counted.pop(instance, None)
        return found

    def _time(self, members: int) -> PrefillTime:
        """Predicts prompts on a group: those that go on elsewhere may be on fewer than any that is chosen."""
        return self._times[max(size for size in self._times if size <= members)]

    def _seconds(self, members: int, new_tokens: int, cached_tokens: int) -> float:
        return self._time(members).seconds(new_tokens, cached_tokens)

    def _quickest_s(self, num_tokens: int, num_cached: int = 0) -> float:
        return min([times.seconds(num_tokens - num_cached, num_cached) for times in self._times.values()])

    # ---------------------------------------------------------------- groups

    def _assign(self, view: ClusterView, known: Mapping[int, Instance]) -> None:
        """Gives requests groups until no instance is free for one: first comes who has waited longest, for its length.

        That is by the wait over the square root of a request's quickest seconds, between first come, first served, and
        the highest response ratio: short ones of a burst pass long ones, which still have their turn under load.
        """
        for request in view.startable if self._line.unseen else ():
            if self._line.unseen.pop(request.id, None) is not None:
                hit = view.kv.match(request, self.instances)
                quick_s = max(self._least_s, self._quickest_s(request.num_tokens - hit.num_tokens, hit.num_tokens))
                self._line.seen[request.id] = Seen(request, quick_s)
                if not request.was_admitted:
                    single_s = self._seconds(1, request.num_tokens - hit.num_tokens, hit.num_tokens)
                    self._arrivals.add(request.arrival_s, single_s, quick_s)
        waits = [one.wait_s for one in known.values()]
        if min(waits) > self._ahead_s:
            return
        wait_s = np.array(waits)
        able = (one for one in self._line.seen.values() if one.request.residency.can_start)
        waiting = [one for one in able if one.request.id not in self._line.groups]
        waiting.sort(key=lambda one: ((one.request.arrival_s - view.now_s) / math.sqrt(one.quick_s), one.quick_s))
        strain = np.array([self._strain(i, one) if one.active else 0.0 for i, one in known.items()])
        room = np.array([float(max(0, one.room)) if one.seats > 0 else -math.inf for one in known.values()])
        strains = self._choice.sums(strain)
        slowness = sum([1 / one.quick_s for one in waiting])
        for request, quick_s in waiting:
            if wait_s.min() > self._ahead_s:
                break
            slowness -= 1 / quick_s
            num_blocks = request.blocks_for(request.num_tokens)
            seconds_of, blocks_of = self._by_prefix(request, num_blocks, view)
            costs = self._costs(seconds_of, quick_s, slowness, view.now_s, wait_s, strains)
            costs[self._choice.sums(room) < blocks_of] = math.inf
            best = int(costs.argmin())
            if costs[best] == math.inf:
                break
            group, seconds, num_blocks = self._choice.groups[best], float(seconds_of[best]), int(blocks_of[best])
            places = [self._place[i] for i in group]
            begins_s = float(wait_s[places].max())
            if begins_s <= self._ahead_s:
                self._line.groups[request.id], self._line.wants[request.id] = group, (seconds, num_blocks)
            wait_s[places] = begins_s + seconds
            room[places] -= num_blocks / len(group)

    def _by_prefix(self, request: RequestView, num_blocks: int, view: ClusterView) -> tuple[Numbers, Numbers]:
        """Returns for each group the seconds of a prompt, and the blocks it needs, behind what is cached there."""
        choice = self._choice
        seconds = choice.spread([times.seconds(request.num_tokens) for times in self._times.values()])
        blocks = np.full(len(seconds), float(num_blocks))
        shared = view.kv.match(request, self.instances)
        holders = {ref.pool for ref in shared.refs}.intersection(self._all)
        hits = [((i,), view.kv.match(request, (i,))) for i in holders] if len(holders) > 1 else []
        for members, hit in sorted([*hits, (tuple(holders), shared)], key=lambda one: one[1].num_tokens):
            if not hit.num_tokens:
                continue
            have = choice.sums(np.array([i in members for i in self._place], float)) == len(members)
            if hit.num_loaded:
                from longspan.policy.loading import held_near  # noqa: PLC0415 - without other tiers nothing is loaded

                near = held_near(hit, view.cluster)
                have &= choice.sums(np.array([i not in near for i in self._place], float)) == 0
            left = request.num_tokens - hit.num_tokens
            seconds[have] = choice.spread([times.seconds(left, hit.num_tokens) for times in self._times.values()])[have]
            blocks[have] = num_blocks - hit.num_held + sum(view.kv.hit_cost(hit, set()).values())
        on_hosts = sum(map(view.kv.num_free, Budget(view, ()).hosts_of(request, self.instances)))
        blocks[choice.sizes == len(self.instances)] -= on_hosts  # none but all instances hold what outgrows them
        return seconds, blocks

    def _costs(
        self, seconds: Numbers, quick_s: float, slowness: float, now_s: float, wait_s: Numbers, strains: Numbers
    ) -> Numbers:
        """Sums slowdowns for each group on which a prompt takes so many seconds.

        They are those of its first token, over the quickest that it could have; of prompts that wait behind it
        (`slowness` is the sum of what a second means to them) or come later, for which more of the instances' time is
        spent, or which find none free; and of answers on the group, which wait meanwhile.

        Args:
            wait_s: `[num_instances]`.
            strains: `[num_groups]`, see `_strain`.
        """
        choice, num_instances = self._choice, len(self.instances)
        requests_per_s, busy = self._arrivals.rates(now_s)
        slack = 1 - min(_BUSIEST, busy / num_instances)
        num_free, usual_s = int((wait_s <= self._ahead_s).sum()), self._arrivals.usual_s
        usual_quick_s = max(self._least_s, self._arrivals.usual_quick_s)
        queues_s = [_queue_s(num_free - size, requests_per_s, usual_s) for size in self._times]

        begins_s = choice.most(wait_s)
        idle_s = choice.sizes * begins_s - choice.sums(wait_s)
        single_s = seconds[:num_instances].min()
        more_s = np.maximum(0.0, idle_s + choice.sizes * seconds - single_s) / num_instances
        seconds = np.where(strains > 0, _BESIDE * seconds, seconds)
        held_up_s = np.minimum(np.maximum(0.0, seconds / 2 - usual_s), choice.spread(queues_s))
        coming = requests_per_s * seconds
        costs: Numbers = (begins_s + seconds) / quick_s + slowness * more_s
        costs += strains * seconds / (self._answer * self._usual_token_s)
        costs += coming * more_s / (slack * max(usual_quick_s, quick_s))
        costs += coming * held_up_s / max(usual_quick_s, usual_s)
        return costs

    def _strain(self, instance: int, known: Instance) -> float:
        """Returns the weight of what a prompt takes on an instance to the answers there."""
        token_s = self._step_s(known.decodes, known.context) / self._left(instance)
        return _WEIGHT * known.decodes * min(1.0, token_s / (_CALM * self._usual_token_s)) ** 2

    def _left(self, instance: int) -> float:
        """Returns the part of its time that prompts leave an instance."""
        return 1 - min(_BUSIEST, self._prefilled_s[instance] / self._memory_s)

    def _step_s(self, decodes: int, context: int) -> float:
        fit = self._decode
        return fit.start_s + fit.request_s * decodes + fit.context_s * context

    def _in_order(self, group: Sequence[int]) -> tuple[int, ...]:
        return tuple([i for i in self.instances if i in group]) if len(group) > 1 else tuple(group)

    # ---------------------------------------------------------------- where it decodes

    def _home(self, request: RequestView, group: tuple[int, ...], known: Mapping[int, Instance]) -> tuple[Target, ...]:
        """Chooses the instance that decodes a request, or as few as have room; none when these are its group.

        Beside its own tokens' seconds count those by which others' become longer. An instance that spends a part of
        its time on prompts decodes in the rest of it.
        """
        if not goes_on(request):
            return ()
        num_blocks = request.blocks_for(request.num_tokens)
        own_share = -(-num_blocks // len(group))

        def has_room(instance: int) -> bool:
            one = known[instance]
            needed = num_blocks + (own_share if instance in group else 0)
            return group == (instance,) or (one.seats > 0 and one.room >= needed)

        by_use = sorted([(-known[i].decodes, -place, i) for i, place in self._place.items()])
        number = self._num_decoders(known, request)
        able = [i for _, _, i in by_use[:number] if has_room(i)] or [i for _, _, i in by_use[number:] if has_room(i)]
        if not able:
            return self._homes(num_blocks, group, known)
        best = min(able, key=lambda i: self._added_s(request, i, known[i]))
        return () if group == (best,) else (Target(best, num_blocks),)

    def _added_s(self, request: RequestView, instance: int, known: Instance) -> float:
        """Returns the seconds of a token on an instance, and what it adds to those of others there."""
        without_s = self._step_s(known.decodes, known.context)
        seconds = self._step_s(known.decodes + 1, known.context + request.num_tokens)
        added_s = (seconds - without_s) * known.decodes
        return (seconds + added_s) / self._left(instance)

    def _homes(self, num_blocks: int, group: tuple[int, ...], known: Mapping[int, Instance]) -> tuple[Target, ...]:
        """Shards what no instance has room for over as few as have, if they are fewer than its group."""
        own_share = -(-num_blocks // len(group))
        room = {i: one.room - (own_share if i in group else 0) for i, one in known.items() if one.seats > 0}
        best = sorted(room, key=room.__getitem__, reverse=True)
        for number in range(2, len(group)):
            chosen = self._in_order(best[:number])
            if sum([max(0, room[i]) for i in chosen]) >= num_blocks:
                shares = shares_by([max(0, room[i]) for i in chosen], num_blocks)
                return tuple([Target(i, share) for i, share in zip(chosen, shares, strict=True) if share])
        return ()

    def _num_decoders(self, known: Mapping[int, Instance], request: RequestView) -> int:
        """Counts the instances that should decode: as many as prompts leave, or as decodes need to be quick enough."""
        fit, num_instances = self._decode, len(self.instances)
        decodes = 1 + sum([one.decodes for one in known.values()])
        context = request.num_tokens + sum([one.context for one in known.values()])
        spread_s = fit.request_s * decodes + fit.context_s * context
        needed = spread_s / max(1e-9, _COMFORT * min(_CALM * self._usual_token_s, self._target_s) - fit.start_s)
        _, busy = self._arrivals.rates(self._prefilled_at_s)
        left = num_instances - max(num_instances / 2, _SPARE * busy)
        return min(num_instances, max(1, math.ceil(min(needed, num_instances)), int(left)))

    # ---------------------------------------------------------------- parts

    def _first(
        self, request: RequestView, budget: Budget, known: Mapping[int, Instance], router: Router | None
    ) -> ScheduledPart | None:
        group = self._line.groups[request.id]
        if any(known[i].seats <= 0 for i in group):
            return None
        hit = budget.hit(request, group)
        if (part := self._prefill(request, group, hit.num_tokens, budget, hit, known)) is None:
            return None
        self._begun[request.id] = group
        for instance in group:
            known[instance].seats -= 1
        if router is not None:
            return replace(part, targets=router.route(request))
        targets = () if budget.outgrows(request) else self._home(request, group, known)
        for target, num_blocks in targets:
            known[target].seats -= 1
            known[target].room -= num_blocks
        for instance in group:
            known[instance].room -= -(-request.blocks_for(request.num_tokens) // len(group))
        self._add_decode(request, [target for target, _ in targets] or group, known)
        return replace(part, targets=targets)

    def _next(self, request: RequestView, budget: Budget, known: Mapping[int, Instance]) -> ScheduledPart | None:
        if is_decode(request, request.num_scheduled):
            return self._token(request, budget)
        return self._prefill(request, request.group, request.num_scheduled, budget, None, known)

    def _token(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        return self._parts.next(request, budget, budget.view.max_num_batched_tokens)

    def _prefill(
        self,
        request: RequestView,
        group: tuple[int, ...],
        start: int,
        budget: Budget,
        hit: PrefixHit | None,
        known: Mapping[int, Instance],
    ) -> ScheduledPart | None:
        """Schedules as much of a prompt as others that decode on its group can wait for."""
        most = budget.view.max_num_batched_tokens
        if any(known[i].active for i in group) and self._target_s < math.inf:
            times = self._time(len(group))
            in_time = times.most_tokens(max(self._target_s, (1 + _EFFICIENT) * times.start_s), start)
            most = max(min(most, int(in_time) // len(group)), request.block_size)
        if len(group) == 1:
            return single_part(request, group[0], start, budget, hit, most=most)
        if any(i not in budget.tokens for i in group):
            return None
        return self._parts.chunk(request, budget, group, hit, most=most, end=request.num_tokens)


def _queue_s(number: int, requests_per_s: float, service_s: float) -> float:
    """Estimates how long a prompt waits for one of so many free instances (as M/M/c, roughly)."""
    load = requests_per_s * service_s
    return (load / number) ** number * service_s / (number - load) if number > load else math.inf


def group_times(facts: Facts, exchanges: Collection[Exchange], number: int) -> dict[int, PrefillTime]:
    """Predicts prompts on 1, 2, 4 and so on instances, and on all."""
    times = sp_times(facts, exchanges, "auto", number)
    measured = measured_times(facts, exchanges)
    missing = {1, number} - times.keys()
    times |= {size: one for size, one in measured.items() if size in missing}
    largest = max(measured, default=0)
    for size, one in expected_times(facts, missing - times.keys()).items():
        times[size] = _shared(measured[largest], largest / size) if largest else one
    return dict(sorted(times.items()))


def _shared(times: PrefillTime, part: float) -> PrefillTime:
    """Predicts a part of the work."""
    return PrefillTime(
        start_s=times.start_s,
        token_s=times.token_s * part,
        cached_s=times.cached_s * part,
        square_s=times.square_s * part,
    )
