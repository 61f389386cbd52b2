"""Continuous batching with chunked prefill, shared by the policies: who gets tokens and blocks of the next step.

Running requests come first, in the order of admission; when blocks run out, the last admitted gives its KV up. Then
waiting requests are admitted while their whole prompt fits beside what the running ones still need (as vLLM and
Sarathi-Serve do, but for several instances at once).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Protocol

from longspan.core.exchange import LOCAL, Exchange
from longspan.core.owners import BlockRef, PrefixHit, Rotation
from longspan.core.runs import Run, shard_span
from longspan.core.view import ClusterView, RequestView, RunningView, ScheduledPart


class PerInstance(dict[int, int]):
    """A number of each instance, found out when somebody first asks for it."""

    __slots__ = ("_find",)

    def __init__(self, find: Callable[[int], int]) -> None:
        self._find = find

    def __missing__(self, instance: int) -> int:
        found = self[instance] = self._find(instance)
        return found


@dataclass(frozen=True, kw_only=True)
class Growing:
    """Groups that are planned to be larger than they are.

    Attributes:
        groups: that will hold what is still to come, by request id.
        more: how many more blocks each instance will be asked for then.
    """

    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    more: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, running: RunningView, groups: Mapping[int, tuple[int, ...]]) -> Growing:
        """Of these requests; those that wait ask for nothing yet."""
        if not groups:
            return _NONE_GROWS
        more: Counter[int] = Counter()
        for request_id, group in groups.items():
            request = running.get(request_id)
            if request is None:
                continue
            missing = request.blocks_for(request.num_tokens) - len(request.table)
            for instances, sign in ((group, 1), (request.kv_owners, -1)):
                each = sign * -(-missing // len(instances))
                for instance in instances:
                    more[instance] += each
        return cls(groups=groups, more=more)


_NONE_GROWS = Growing()


class Budget:
    """What is left to give away in the step being planned, per instance; all there is at first.

    Args:
        instances: that compute.

    Attributes:
        tokens: of these; all else is known of every instance.
        claimed, adopted: blocks that admissions of this plan begin with, and those of them that are taken over.
        growing: of requests whose groups are still to grow.
    """

    def __init__(self, view: ClusterView, instances: Iterable[int], growing: Growing = _NONE_GROWS) -> None:
        self._view = view
        self.tokens = dict.fromkeys(instances, view.limits.max_num_batched_tokens)
        self.claimed: set[BlockRef] = set()
        self.adopted: set[BlockRef] = set()
        self.growing = growing

    @cached_property
    def blocks(self) -> PerInstance:
        """Free ones."""
        return PerInstance(self._view.kv.num_free)

    @cached_property
    def seqs(self) -> PerInstance:
        """Free seats."""
        running, most = self._view.running, self._view.limits.max_num_seqs
        return PerInstance(lambda i: most - len(running.on(i)))

    @cached_property
    def load(self) -> list[int]:
        """Tokens that running and admitted requests still have to compute there."""
        return list(self._view.running.due_tokens)

    @cached_property
    def reserved(self) -> PerInstance:
        """Free blocks that running requests will need for the tokens they have; admissions leave them alone."""
        due, more = self._view.running.due_blocks, self.growing.more
        return PerInstance(lambda i: max(0, due[i] + more.get(i, 0)))

    def fits(self, blocks: Mapping[int, int]) -> bool:
        """Whether so many blocks are free."""
        return all(self.blocks[instance] >= number for instance, number in blocks.items())

    def admits(self, scheduled: ScheduledPart, cost: Counter[int]) -> bool:
        """Whether a request can start: its first blocks are free, its tail not taken, its whole prompt has room."""
        hit, request = scheduled.hit, scheduled.request
        assert hit is not None, "an admission names its prefix"
        if self.adopted.intersection(hit.refs):
            return False
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        room = sum([self.blocks[i] - self.reserved[i] - cost.get(i, 0) for i in self._kv_owners(scheduled)])
        return missing <= room and self.fits(Counter(scheduled.block_owners) + cost)

    def grow(self, scheduled: ScheduledPart) -> None:
        """Gives a running request's share its tokens and blocks, and a seat on each member that is new to it."""
        if scheduled.hit is None and scheduled.group != scheduled.request.group:
            for instance in set(scheduled.group).difference(scheduled.request.group):
                self.seqs[instance] -= 1
        sharded = zip(scheduled.group, scheduled.runs, strict=True)
        for instance, runs in compress(sharded, scheduled.runs):  # one token is for one of many members
            self.tokens[instance] -= sum([len(run) for run in runs])
        if scheduled.block_owners:
            for instance, number in Counter(scheduled.block_owners).items():
                self.reserved[instance] = max(0, self.reserved[instance] - number)
                self.blocks[instance] -= number
        for _, instance in scheduled.moves:
            self.blocks[instance] -= 1

    def admit(self, scheduled: ScheduledPart, cost: Counter[int]) -> None:
        """Gives an admitted request's first share its tokens and blocks, and reserves the rest of its prompt."""
        hit, request = scheduled.hit, scheduled.request
        assert hit is not None, "an admission names its prefix"
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        self._seat(scheduled.group, request.num_tokens - scheduled.start, self._kv_owners(scheduled), missing)
        self.grow(scheduled)
        for instance, number in cost.items():
            self.blocks[instance] -= number
        self.claimed.update(hit.refs)
        if hit.adopts_last:
            self.adopted.add(hit.refs[-1])

    def _seat(self, group: Sequence[int], num_tokens: int, kv_owners: Sequence[int], num_blocks: int) -> None:
        """A request takes a seat on every member; these share the tokens it still needs, its keepers the blocks."""
        for instance in group:
            self.seqs[instance] -= 1
            self.load[instance] += -(-num_tokens // len(group))
        for instance in kv_owners:
            self.reserved[instance] += -(-num_blocks // len(kv_owners))

    def _kv_owners(self, scheduled: ScheduledPart) -> Sequence[int]:
        """Who will hold what is still to come of a request that is admitted."""
        if scheduled.kv_owner is not None:
            return (scheduled.kv_owner,)
        return self.growing.groups.get(scheduled.request.id, scheduled.group)


class Placement(Protocol):
    """How a policy shapes shares; everything else about a batch is common to the policies."""

    def grow(self, request: RequestView, view: ClusterView, budget: Budget) -> ScheduledPart | None:
        """The next share of a running request, or None when its instances have no tokens left to give."""

    def admit(self, request: RequestView, view: ClusterView, budget: Budget) -> ScheduledPart | None:
        """The first share of a waiting request, with its hit, or None when it must wait."""


@dataclass(kw_only=True)
class Batch:
    """The outcome: shares for the step, and who loses its KV."""

    scheduled_parts: list[ScheduledPart] = field(default_factory=list)
    preempted: list[RequestView] = field(default_factory=list)


def fill(
    view: ClusterView,
    instances: frozenset[int],
    placement: Placement,
    waiting: Iterable[RequestView] | None = None,
    growing: Growing = _NONE_GROWS,
) -> Batch | None:
    """Plans one step of `instances`; a request takes part when its whole group is among them.

    `waiting` are those who may be admitted, in turn; by default all who wait. None when the step cannot be planned
    ahead: somebody must be preempted whom a step in flight names.
    """
    batch, queue = Batch(), _runnable(view, instances)
    candidates = view.waiting if waiting is None else waiting
    if not queue and not (view.waiting and candidates):
        return batch
    budget = Budget(view, instances, growing)
    while queue:
        request = queue.popleft()
        scheduled = placement.grow(request, view, budget)
        while scheduled is not None and scheduled.block_owners and not budget.fits(scheduled.new_blocks):
            if _frees_itself(scheduled, view, budget):
                scheduled = None
                continue
            victim = _victim(request, queue, scheduled, budget)
            if victim is request and _can_wait(scheduled, view):
                scheduled = None
                continue
            if victim.in_flight:
                return None
            batch.preempted.append(victim)
            for instance, number in view.kv.reclaimable(victim).items():
                budget.blocks[instance] += number
            if victim is request:
                scheduled = None
            else:
                queue.remove(victim)
                scheduled = placement.grow(request, view, budget)
        if scheduled is not None:
            budget.grow(scheduled)
            batch.scheduled_parts.append(scheduled)
    if not batch.preempted:
        _admit_waiting(candidates, view, budget, placement, batch)
    return batch


def _runnable(view: ClusterView, instances: frozenset[int]) -> deque[RequestView]:
    """Who runs on these instances only and has something to compute, first admitted first."""
    found = [r for r in view.running.within(instances) if r.num_scheduled < r.num_tokens]
    if len(found) > 1:
        found.sort(key=lambda r: r.admission)
    return deque(found)


def _short(scheduled: ScheduledPart, budget: Budget) -> set[int]:
    """The instances where blocks are missing."""
    return {i for i, number in scheduled.new_blocks.items() if budget.blocks[i] < number}


def _frees_itself(scheduled: ScheduledPart, view: ClusterView, budget: Budget) -> bool:
    """Whether blocks where they are missing will be free as soon as KV on its way has left: nobody need give way."""
    return any(view.kv.num_leaving(instance) for instance in _short(scheduled, budget))


def _victim(
    request: RequestView, later: Sequence[RequestView], scheduled: ScheduledPart, budget: Budget
) -> RequestView:
    """The last of `later` that holds a block where one is missing, or else `request` itself."""
    short = _short(scheduled, budget)
    holding = (r for r in reversed(later) if any(ref.instance in short for ref in r.table))
    return next(holding, request)


def _can_wait(scheduled: ScheduledPart, view: ClusterView) -> bool:
    """Whether a share that lacks a block, and for which nobody who came later can give way, will get one in time.

    One that rotates by token can take no other member's, but does while others hold blocks there: they come first. A
    home that is full of its own blocks means that the request outgrows its group.
    """
    if scheduled.rotation is None:
        return False
    [home] = scheduled.block_owners
    return sum(ref.instance == home for ref in scheduled.request.table) < view.kv.num_blocks(home)


def _admit_waiting(
    waiting: Iterable[RequestView], view: ClusterView, budget: Budget, placement: Placement, batch: Batch
) -> None:
    for request in waiting:
        scheduled = placement.admit(request, view, budget)
        if scheduled is None or scheduled.hit is None:
            return
        cost = view.kv.hit_cost(scheduled.hit, budget.claimed)
        if not budget.admits(scheduled, cost):
            return
        budget.admit(scheduled, cost)
        batch.scheduled_parts.append(scheduled)


def single_part(
    request: RequestView,
    instance: int,
    start: int,
    budget: Budget,
    hit: PrefixHit | None = None,
    *,
    most: int | None = None,
    end: int | None = None,
) -> ScheduledPart | None:
    """As much of a request's remaining tokens as one instance has tokens left for; `most` of them, and up to `end`."""
    tokens = budget.tokens[instance] if most is None else min(most, budget.tokens[instance])
    stop = min(request.num_tokens if end is None else end, start + tokens)
    if stop <= start:
        return None
    num_held = len(hit.refs) if hit is not None else len(request.table)
    return ScheduledPart(
        request=request,
        group=(instance,),
        start=start,
        stop=stop,
        runs=((Run(start, stop),),),
        block_owners=(instance,) * (request.blocks_for(stop) - num_held),
        exchange=LOCAL,
        hit=hit,
    )


def one_token_part(request: RequestView, exchange: Exchange, budget: Budget) -> ScheduledPart | None:
    """The next token of a decode inside a block, for whoever holds that; None when that has no tokens left to give."""
    start = request.num_scheduled
    assert start % request.block_size, "a block that begins is dealt like others"
    home = request.group.index(request.table[start // request.block_size].instance)
    return _one_token(request, home, exchange, budget)


def rotated_part(request: RequestView, exchange: Exchange, budget: Budget) -> ScheduledPart | None:
    """The next token of a decode that rotates by token, or None when its home has no tokens left to give.

    When the home has to begin a block and none is free there, the share asks for it all the same: who came later gives
    way, or else it waits.
    """
    start, group = request.num_scheduled, request.group
    rotation = request.rotation or Rotation(start=start, held=request.owners.counts(start))
    home, num_before = rotation.place(start)
    block_owners = () if num_before % request.block_size else (group[home],)
    return _one_token(request, home, exchange, budget, block_owners, rotation)


def _one_token(
    request: RequestView,
    home: int,
    exchange: Exchange,
    budget: Budget,
    block_owners: tuple[int, ...] = (),
    rotation: Rotation | None = None,
) -> ScheduledPart | None:
    """The next token of a request, computed by member `home` of its group."""
    start, group = request.num_scheduled, request.group
    if budget.tokens[group[home]] <= 0:
        return None
    return ScheduledPart(
        request=request,
        group=group,
        start=start,
        stop=start + 1,
        runs=shard_span("single", start, start + 1, len(group), head=home),
        block_owners=block_owners,
        exchange=exchange,
        rotation=rotation,
    )
