"""Execution of planned chunks: one after the other on growing groups, in the order of the plans.

A prompt is planned when it can start, and again after it was preempted. It is then in the queue of every instance that
its chunks name, until its last chunk is scheduled. Each instance prefills one prompt at a time. It decodes in the same
steps, unless other instances decode. Running prompts overtake prompts that wait for free blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from longspan.core.blocks import PrefixHit, coupled_instances
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, KvView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget, Growing, single_part
from longspan.policy.group_parts import GroupParts
from longspan.policy.routing import Router, joined, plan_alone
from longspan.policy.tetris.planner import ChunkPlan, Prompt
from longspan.policy.tetris.rates import RateTable, RateWatch

if TYPE_CHECKING:
    from longspan.policy.tetris.learning import Learner


class ChunkPlanner(Protocol):
    """Decides the chunks of a prompt."""

    @property
    def largest(self) -> int:
        """The number of instances that can share one prompt."""

    def plan(self, prompt: Prompt, queue_s: Sequence[float], used: Sequence[int], /) -> ChunkPlan | None:
        """Plan chunks on instances that are free `queue_s` seconds from now. Of equals, less `used` ones are chosen.

        Return None if no group has all instances with cached blocks.
        """

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:
        """Predict a chunk on `size` instances."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A chunk as token positions up to `stop`, on `group` in ring order."""

    stop: int
    group: tuple[int, ...]


@dataclass(kw_only=True, slots=True)
class Planned:
    """A request with its chunks. It has `begun` if it has held KV since it was planned."""

    request: RequestView
    start: int
    spans: tuple[Span, ...]
    begun: bool = False

    @property
    def group(self) -> tuple[int, ...]:
        """The instances of the last chunk, which include the instances of all chunks."""
        return self.spans[-1].group

    @property
    def is_scheduled(self) -> bool:
        return self.request.num_scheduled >= self.spans[-1].stop

    @property
    def next_group(self) -> tuple[int, ...]:
        """The instances of the next chunk."""
        return (self.span(self.request.num_scheduled) if self.begun else self.spans[0]).group

    def span(self, position: int) -> Span:
        return next(span for span in self.spans if span.stop > position)

    def remaining(self) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return new tokens, earlier tokens, and group of each chunk that is not computed."""
        done = self.request.num_computed if self.begun else self.start
        chunks = []
        for span in self.spans:
            if span.stop > done:
                chunks.append((span.stop - done, done, span.group))
                done = span.stop
        return chunks


class Cdsp(Policy):
    """Prefills prompts in the chunks of a planner. Decodes run in the same steps, or on other instances.

    Args:
        watch: has the improvement rate. Without it, a larger group need only be quicker.
        decode: the instances that only decode.

    Attributes:
        chunking: whether new plans may have several chunks.
    """

    def __init__(
        self,
        instances: tuple[int, ...],
        options: Any,  # noqa: ANN401 - of a subclass
        planner: ChunkPlanner,
        group_parts: GroupParts,
        watch: RateWatch | None = None,
        *,
        chunking: bool = True,
        decode: Sequence[int] = (),
    ) -> None:
        super().__init__(instances, options, None)
        self._all = frozenset(instances)
        self._planner, self._group_parts, self.chunking, self._decode = planner, group_parts, chunking, decode
        self._watch = watch or RateWatch(RateTable(entries=((0.0, 0.0),)))
        self._learner: Learner | None = None
        """Renews the table of the watch, if a subclass sets it."""
        self._queue = QueueTimes(len(instances))
        self._unplanned: dict[int, RequestView] = {}
        """Requests that were not planned since they arrived or were preempted, by id."""
        self._plans: dict[int, Planned] = {}
        """By request id, in the order of prefills."""
        self._first: dict[int, int] = {}
        """The request that may prefill on each instance."""
        self._idle: tuple[KvView, int] | None = None
        """The view of the last plan if that was empty. An equal view has the same plan. Time changes only the watch."""

    @property
    def capacity(self) -> int:
        """The size of the largest group that can share one request."""
        return self._planner.largest

    def plan(self, view: ClusterView) -> Plan:
        """Plan each decode instance alone, and the prefill instances in the order of the planned prompts."""
        decodes = plan_alone(view, self._decode, self._next)
        if self._all <= view.full:
            return decodes
        if self._idle is not None and self._idle == self._snapshot(view):
            self._renew(view.now_s)
            return decodes
        self._update_plans(view)
        plan, stuck = self._plan_first(view)
        if stuck and self._move_running_first() and not (plan.batches or plan.preempted):
            plan, _ = self._plan_first(view)
        self._idle = None if plan.batches or plan.preempted else self._snapshot(view)
        return joined([plan, decodes])

    def _renew(self, now_s: float) -> None:
        """Look up the improvement rate for the present request rate, and learn from the prompts so far."""
        self._watch.renew(now_s)
        if self._learner is not None:
            table = self._learner.advance(self._watch.requests_per_s, now_s)
            if table is not None:
                self._watch.use(table)

    def _snapshot(self, view: ClusterView) -> tuple[KvView, int]:
        return view.kv, view.changes(self.instances)

    # ---------------------------------------------------------------- plans

    def arrived(self, request: RequestView) -> None:
        self._unplanned[request.id] = request
        if not request.was_admitted:
            self._watch.arrived(request.arrival_s)

    def preempted(self, request: RequestView) -> None:
        self._unplan(request)

    def _unplan(self, request: RequestView) -> None:
        """Drop the plan of a request. It is planned again when it can start."""
        self._plans.pop(request.id, None)
        self._unplanned[request.id] = request

    def ended(self, request: RequestView) -> None:
        self._plans.pop(request.id, None)
        self._unplanned.pop(request.id, None)

    def _update_plans(self, view: ClusterView) -> None:
        """Forget the plans of prompts that are computed, and plan the requests that can start."""
        for request_id, planned in list(self._plans.items()):
            request = planned.request
            if request.group and request.num_computed < planned.spans[-1].stop:
                planned.begun = True
            elif request.group:
                del self._plans[request_id]
        arrived = [request for request in view.startable if request.id in self._unplanned] if self._unplanned else []
        self._renew(view.now_s)
        if arrived and self._queue.is_old(view.now_s):
            left = [
                [(self._planner.seconds(len(group), new, cached), group) for new, cached, group in planned.remaining()]
                for planned in self._plans.values()
            ]
            self._queue.correct(view.now_s, left)
        for request in arrived:
            self._plans[request.id] = self._planned(self._unplanned.pop(request.id), view)
            if request.was_admitted:
                self._move_before_later(request)

    def _in_order(self, group: Collection[int]) -> tuple[int, ...]:
        return tuple([i for i in self.instances if i in group])

    def _planned(self, request: RequestView, view: ClusterView) -> Planned:
        """Plan a request with its cached tokens, unless they are on too many or too busy instances."""
        now_s, queue_s = view.now_s, self._queue.waits_s(view.now_s)
        used = [view.kv.num_allocated(instance) for instance in sorted(self.instances)]
        limit = view.device_limit if Budget(view, ()).outgrows(request) else None
        fresh = Prompt(
            new_tokens=request.num_tokens if limit is None else limit * request.block_size,
            improvement_rate=self._watch.improvement_rate,
            chunking=self.chunking,
            instance_tokens=view.kv.num_blocks(0) * request.block_size,
        )
        best, start = self._planner.plan(fresh, queue_s, used), 0
        assert best is not None, "a prompt without cached blocks fits every group"
        if limit is not None:  # the largest group computes all tokens
            self._queue.book(best.chunks[-1].group, now_s + best.ttft_s)
            group = self._in_order(set(best.chunks[-1].group))
            return Planned(request=request, start=0, spans=(Span(stop=request.num_tokens, group=group),))
        hit = view.kv.match(request, self.instances)
        if hit.num_tokens:
            held = tuple(
                sorted({ref.pool for ref in hit.refs}.intersection(self.instances))
            )  # hosts can load to any instance
            rest = replace(
                fresh, new_tokens=request.num_tokens - hit.num_tokens, cached_tokens=hit.num_tokens, held=held
            )
            behind = self._planner.plan(rest, queue_s, used)
            if behind is not None and behind.ttft_s <= best.ttft_s:
                best, start = behind, hit.num_tokens
        if self._learner is not None and not request.was_admitted:
            self._learner.add(replace(fresh, new_tokens=request.num_tokens - start))
        self._queue.book(best.chunks[-1].group, now_s + best.ttft_s)
        return Planned(request=request, start=start, spans=self._spans(best, start, request.block_size))

    def _spans(self, plan: ChunkPlan, start: int, block_size: int) -> tuple[Span, ...]:
        """Round chunk ends down to whole blocks, so that each block has one owner. Merge chunks without a block."""
        stops = list(accumulate((chunk.num_tokens for chunk in plan.chunks), initial=start))
        ends = [stop // block_size * block_size for stop in stops[1:-1]] + stops[-1:]
        spans, before = [], start
        for end, chunk in zip(ends, plan.chunks, strict=True):
            if end > before:
                spans.append(Span(stop=end, group=self._in_order(set(chunk.group))))
                before = end
        return tuple(spans)

    # ---------------------------------------------------------------- order

    def _plan_first(self, view: ClusterView) -> tuple[Plan, bool]:
        """Plan the first request of each queue. Return the plan, and True if one of them waits for free blocks."""
        unscheduled = [
            planned
            for planned in self._plans.values()
            if not planned.is_scheduled and (planned.begun or planned.request.residency.can_start)
        ]
        if not unscheduled:  # all requests decode
            return self._with_running(Batch(view, self._all)).plan(), False
        first = self._first_in_queues(unscheduled)
        growing = _growing([p for p in unscheduled if p.begun] + [p for p in first if not p.begun])
        budget = Budget(view, (), growing)
        able = [planned for planned in first if planned.begun or _likely_fits(planned, budget)]
        coupled_sets = _coupled(view, [planned.next_group for planned in able])
        batch = self._with_running(Batch(view, self._all, coupled_sets=coupled_sets, growing=growing))
        router = Router(view, self._decode) if self._decode else None
        tried = [p.request for p in able if not p.begun and batch.instances.issuperset(p.next_group)]
        for request in batch.waiting(tried):
            batch.add(self._first_part(request, batch.budget, router))
        begun = {part.request.id for part in (*batch.parts, *batch.loads)}
        stuck = len(able) < len(first) or any(request.id not in begun for request in tried)
        return batch.plan(), stuck

    def _with_running(self, batch: Batch) -> Batch:
        for request in batch.running():
            batch.add(self._next(request, batch.budget))
        return batch

    def _first_in_queues(self, unscheduled: Iterable[Planned]) -> list[Planned]:
        """Return the requests that are first in the queue of every instance of their next chunk."""
        first = self._first = {}
        ready = []
        for planned in unscheduled:
            if len(first) == len(self.instances):
                break
            for instance in planned.group:
                first.setdefault(instance, planned.request.id)
            if self._is_first(planned.request.id, planned.next_group):
                ready.append(planned)
        return ready

    def _is_first(self, request_id: int, group: Iterable[int]) -> bool:
        return all(self._first[instance] == request_id for instance in group)

    def _move_before_later(self, request: RequestView) -> None:
        """Move a preempted request before the requests that arrived later and have not begun."""
        later = [number for number, planned in self._plans.items() if number > request.id and not planned.begun]
        for number in later:
            self._plans[number] = self._plans.pop(number)

    def _move_running_first(self) -> bool:
        """Move running requests before waiting ones, which avoids deadlocks. Return True if the order has changed."""
        before = list(self._plans)
        self._plans = dict(sorted(self._plans.items(), key=lambda item: not item[1].begun))
        return before != list(self._plans)

    # ---------------------------------------------------------------- parts

    def _first_part(self, request: RequestView, budget: Budget, router: Router | None) -> ScheduledPart | None:
        """Schedule the first chunk that is not fully cached on its own group."""
        planned = self._plans[request.id]
        for span in planned.spans:
            hit = budget.hit(request, span.group)
            if hit.num_tokens < span.stop:
                break
        part = self._part(request, budget, span, hit)
        if part is None or router is None:
            return part
        return replace(part, targets=router.route(request))

    def _next(self, request: RequestView, budget: Budget) -> ScheduledPart | None:
        planned = self._plans.get(request.id)
        if planned is None or planned.is_scheduled:
            return self._group_parts.next(request, budget, budget.view.max_num_batched_tokens)
        return self._part(request, budget, planned.span(request.num_scheduled), None)

    def _part(self, request: RequestView, budget: Budget, span: Span, hit: PrefixHit | None) -> ScheduledPart | None:
        """Schedule tokens of a chunk, if it is first in all queues and new members have free request slots."""
        group, new = span.group, set(span.group).difference(request.group)
        if any(i not in budget.tokens for i in group) or any(budget.seqs[i] <= 0 for i in new):
            return None
        if not self._is_first(request.id, group):
            return None
        # Decodes on these instances use the budget first.
        max_tokens = max(1, budget.view.max_num_batched_tokens - max(self._num_decodes(i, budget.view) for i in group))
        if len(group) > 1:
            return self._group_parts.chunk(request, budget, group, hit, most=max_tokens, end=span.stop)
        start = request.num_scheduled if hit is None else hit.num_tokens
        return single_part(request, group[0], start, budget, hit, most=max_tokens, end=span.stop)

    def _num_decodes(self, instance: int, view: ClusterView) -> int:
        return sum(request.id not in self._plans and not request.targets for request in view.running.on(instance))


def _likely_fits(planned: Planned, budget: Budget) -> bool:
    """Return True if a request is likely to be admitted. `Budget.admit` decides."""
    request, group, kv = planned.request, planned.group, budget.view.kv
    if any(budget.seqs[i] <= 0 for i in planned.spans[0].group):
        return False
    free, whole = budget.free_blocks(request, group), request.blocks_for(request.num_tokens)
    if whole <= free:
        return True
    hit = budget.hit(request, group)  # cached blocks that running requests hold need no free blocks
    return whole - hit.num_held + kv.hit_cost(hit, budget.claimed).total() <= free


def _growing(plans: Iterable[Planned]) -> Growing:
    """Return the blocks that these requests will need on their last groups. Waiting requests need none yet."""
    groups: dict[int, tuple[int, ...]] = {}
    more: Counter[int] = Counter()
    for planned in plans:
        request = planned.request
        groups[request.id] = planned.group
        if planned.begun:
            missing = request.blocks_for(request.num_tokens) - len(request.table)
            for instances, sign in ((planned.group, 1), (request.kv_owners, -1)):
                each = sign * -(-missing // len(instances))
                for instance in instances:
                    more[instance] += each
    return Growing(groups, more)


def _coupled(view: ClusterView, groups: Sequence[tuple[int, ...]]) -> Sequence[frozenset[int]]:
    """Return the sets of instances that step together if these groups are added."""
    coupled_sets = view.running.coupled_sets
    joined = [g for g in groups if len(g) > 1 and not any(coupled.issuperset(g) for coupled in coupled_sets)]
    return coupled_instances([*coupled_sets, *joined]) if joined else coupled_sets


_TOLERANCE = 0.02
"""Maximum age of the queue times, as a share of the longest wait. A larger share saves time if many prompts wait."""


class QueueTimes:
    """Predicts the time at which each instance has no prompts. `correct` replaces predictions by observed progress."""

    def __init__(self, num_instances: int) -> None:
        self._free_at_s = [0.0] * num_instances
        self._corrected_at_s = 0.0

    def waits_s(self, now_s: float) -> list[float]:
        return [max(0.0, free_at_s - now_s) for free_at_s in self._free_at_s]

    def book(self, group: Iterable[int], end_s: float) -> None:
        """Reserve a group for a prompt until `end_s`."""
        for instance in group:
            self._free_at_s[instance] = end_s

    def is_old(self, now_s: float) -> bool:
        return now_s - self._corrected_at_s >= _TOLERANCE * max(self.waits_s(now_s))

    def correct(self, now_s: float, prompts: Iterable[Sequence[tuple[float, tuple[int, ...]]]]) -> None:
        """Recompute all times from the remaining chunks of each prompt: seconds and group, in order.

        A chunk starts when the chunk before it has finished and all instances of its group are free.
        """
        self._corrected_at_s = now_s
        free_at_s = [now_s] * len(self._free_at_s)
        for chunks in prompts:
            end_s = now_s
            for seconds, group in chunks:
                end_s = max(end_s, *(free_at_s[instance] for instance in group)) + seconds
                for instance in group:
                    free_at_s[instance] = end_s
        self._free_at_s = free_at_s
