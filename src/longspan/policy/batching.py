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

from longspan.core.account import PrefixHit
from longspan.core.owners import BlockRef, Rotation
from longspan.core.protocols import ClusterView, Share
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.runs import Run, deal
from longspan.core.steps import Exchange


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
    def of(cls, running: Running, groups: Mapping[int, tuple[int, ...]]) -> Growing:
        """Of these requests; those that wait ask for nothing yet."""
        if not groups:
            return _NONE_GROWS
        more: Counter[int] = Counter()
        for request_id, group in groups.items():
            request = running.get(request_id)
            if request is None:
                continue
            missing = request.blocks_for(request.num_tokens) - len(request.table)
            for instances, sign in ((group, 1), (request.keepers, -1)):
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
        account = self._view.account
        return PerInstance(lambda i: account.pool(i).num_free)

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

    def admits(self, share: Share, cost: Counter[int]) -> bool:
        """Whether a request can start: its first blocks are free, its tail not taken, its whole prompt has room."""
        hit, request = share.hit, share.request
        assert hit is not None, "an admission names its prefix"
        if self.adopted.intersection(hit.refs):
            return False
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        room = sum([self.blocks[i] - self.reserved[i] - cost.get(i, 0) for i in self._keepers(share)])
        return missing <= room and self.fits(Counter(share.holders) + cost)

    def grow(self, share: Share) -> None:
        """Gives a running request's share its tokens and blocks, and a seat on each member that is new to it."""
        if share.hit is None and share.group != share.request.group:
            for instance in set(share.group).difference(share.request.group):
                self.seqs[instance] -= 1
        dealt = zip(share.group, share.runs, strict=True)
        for instance, runs in compress(dealt, share.runs):  # one token is for one of many members
            self.tokens[instance] -= sum([len(run) for run in runs])
        if share.holders:
            for instance, number in Counter(share.holders).items():
                self.reserved[instance] = max(0, self.reserved[instance] - number)
                self.blocks[instance] -= number
        for _, instance in share.moves:
            self.blocks[instance] -= 1

    def admit(self, share: Share, cost: Counter[int]) -> None:
        """Gives an admitted request's first share its tokens and blocks, and reserves the rest of its prompt."""
        hit, request = share.hit, share.request
        assert hit is not None, "an admission names its prefix"
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        self._seat(share.group, request.num_tokens - share.start, self._keepers(share), missing)
        self.grow(share)
        for instance, number in cost.items():
            self.blocks[instance] -= number
        self.claimed.update(hit.refs)
        if hit.adopts_last:
            self.adopted.add(hit.refs[-1])

    def _seat(self, group: Sequence[int], num_tokens: int, keepers: Sequence[int], num_blocks: int) -> None:
        """A request takes a seat on every member; these share the tokens it still needs, its keepers the blocks."""
        for instance in group:
            self.seqs[instance] -= 1
            self.load[instance] += -(-num_tokens // len(group))
        for instance in keepers:
            self.reserved[instance] += -(-num_blocks // len(keepers))

    def _keepers(self, share: Share) -> Sequence[int]:
        """Who will hold what is still to come of a request that is admitted."""
        if share.keeper is not None:
            return (share.keeper,)
        return self.growing.groups.get(share.request.id, share.group)


class Placement(Protocol):
    """How a policy shapes shares; everything else about a batch is common to the policies."""

    def grow(self, request: Request, view: ClusterView, budget: Budget) -> Share | None:
        """The next share of a running request, or None when its instances have no tokens left to give."""

    def admit(self, request: Request, view: ClusterView, budget: Budget) -> Share | None:
        """The first share of a waiting request, with its hit, or None when it must wait."""


@dataclass(kw_only=True)
class Batch:
    """The outcome: shares for the step, and who loses its KV."""

    shares: list[Share] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


def fill(
    view: ClusterView,
    instances: frozenset[int],
    placement: Placement,
    waiting: Iterable[Request] | None = None,
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
        share = placement.grow(request, view, budget)
        while share is not None and share.holders and not budget.fits(share.new_blocks):
            if _frees_itself(share, view, budget):
                share = None
                continue
            victim = _victim(request, queue, share, budget)
            if victim is request and _can_wait(share, view):
                share = None
                continue
            if victim.in_flight:
                return None
            batch.preempted.append(victim)
            for instance, number in view.account.reclaimable(victim).items():
                budget.blocks[instance] += number
            if victim is request:
                share = None
            else:
                queue.remove(victim)
                share = placement.grow(request, view, budget)
        if share is not None:
            budget.grow(share)
            batch.shares.append(share)
    if not batch.preempted:
        _admit_waiting(candidates, view, budget, placement, batch)
    return batch


def _runnable(view: ClusterView, instances: frozenset[int]) -> deque[Request]:
    """Who runs on these instances only and has something to compute, first admitted first."""
    found = [r for r in view.running.within(instances) if r.num_scheduled < r.num_tokens]
    if len(found) > 1:
        found.sort(key=lambda r: r.admission)
    return deque(found)


def _short(share: Share, budget: Budget) -> set[int]:
    """The instances where blocks are missing."""
    return {i for i, number in share.new_blocks.items() if budget.blocks[i] < number}


def _frees_itself(share: Share, view: ClusterView, budget: Budget) -> bool:
    """Whether blocks where they are missing will be free as soon as KV on its way has left: nobody need give way."""
    return any(view.account.pool(instance).num_leaving for instance in _short(share, budget))


def _victim(request: Request, later: Sequence[Request], share: Share, budget: Budget) -> Request:
    """The last of `later` that holds a block where one is missing, or else `request` itself."""
    short = _short(share, budget)
    holding = (r for r in reversed(later) if any(ref.instance in short for ref in r.table))
    return next(holding, request)


def _can_wait(share: Share, view: ClusterView) -> bool:
    """Whether a share that lacks a block, and for which nobody who came later can give way, will get one in time.

    One that rotates by token can take no other member's, but does while others hold blocks there: they come first. A
    home that is full of its own blocks means that the request outgrows its group.
    """
    if share.rotation is None:
        return False
    [home] = share.holders
    return sum(ref.instance == home for ref in share.request.table) < view.account.pool(home).num_blocks


def _admit_waiting(
    waiting: Iterable[Request], view: ClusterView, budget: Budget, placement: Placement, batch: Batch
) -> None:
    for request in waiting:
        share = placement.admit(request, view, budget)
        if share is None or share.hit is None:
            return
        cost = view.account.hit_cost(share.hit, budget.claimed)
        if not budget.admits(share, cost):
            return
        budget.admit(share, cost)
        batch.shares.append(share)


def single_share(
    request: Request,
    instance: int,
    start: int,
    budget: Budget,
    hit: PrefixHit | None = None,
    *,
    most: int | None = None,
    end: int | None = None,
) -> Share | None:
    """As much of a request's remaining tokens as one instance has tokens left for; `most` of them, and up to `end`."""
    tokens = budget.tokens[instance] if most is None else min(most, budget.tokens[instance])
    stop = min(request.num_tokens if end is None else end, start + tokens)
    if stop <= start:
        return None
    num_held = len(hit.refs) if hit is not None else len(request.table)
    return Share(
        request=request,
        group=(instance,),
        start=start,
        stop=stop,
        runs=((Run(start, stop),),),
        holders=(instance,) * (request.blocks_for(stop) - num_held),
        exchange="local",
        hit=hit,
    )


def token_share(request: Request, exchange: Exchange, budget: Budget) -> Share | None:
    """The next token of a decode inside a block, for whoever holds that; None when that has no tokens left to give."""
    start = request.num_scheduled
    assert start % request.block_size, "a block that begins is dealt like others"
    home = request.group.index(request.table[start // request.block_size].instance)
    return _one_token(request, home, exchange, budget)


def rotated_share(request: Request, exchange: Exchange, budget: Budget) -> Share | None:
    """The next token of a decode that rotates by token, or None when its home has no tokens left to give.

    When the home has to begin a block and none is free there, the share asks for it all the same: who came later gives
    way, or else it waits.
    """
    start, group = request.num_scheduled, request.group
    rotation = request.rotation or Rotation(start=start, held=request.homes.counts(start))
    home, num_before = rotation.place(start)
    holders = () if num_before % request.block_size else (group[home],)
    return _one_token(request, home, exchange, budget, holders, rotation)


def _one_token(
    request: Request,
    home: int,
    exchange: Exchange,
    budget: Budget,
    holders: tuple[int, ...] = (),
    rotation: Rotation | None = None,
) -> Share | None:
    """The next token of a request, computed by member `home` of its group."""
    start, group = request.num_scheduled, request.group
    if budget.tokens[group[home]] <= 0:
        return None
    return Share(
        request=request,
        group=group,
        start=start,
        stop=start + 1,
        runs=deal("single", start, start + 1, len(group), head=home),
        holders=holders,
        exchange=exchange,
        rotation=rotation,
    )
