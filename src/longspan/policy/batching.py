"""Continuous batching with chunked prefill, shared by the policies: who gets tokens and blocks of the next step.

Running requests come first, in the order of admission; when blocks run out, the last admitted gives its KV up. Then
waiting requests are admitted while their whole prompt fits beside what the running ones still need (as vLLM and
Sarathi-Serve do, but for several instances at once).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Protocol

from longspan.core.account import PrefixHit
from longspan.core.protocols import ClusterView, Share
from longspan.core.request import Request
from longspan.core.rotation import Rotation
from longspan.core.runs import Run, deal
from longspan.core.steps import BlockRef, Exchange


@dataclass(kw_only=True)
class Budget:
    """What is left to give away in the step being planned, per instance.

    Attributes:
        tokens: of the instances that the step is for; all else is known of every instance.
        load: tokens that running and admitted requests still have to compute there.
        reserved: free blocks that running requests will need for the tokens they have; admissions leave them alone.
        claimed, adopted: blocks that admissions of this plan begin with, and those of them that are taken over.
        planned: by request id, the group that will hold a request whose group is still to grow.
    """

    tokens: Counter[int]
    blocks: Counter[int]
    seqs: Counter[int]
    load: Counter[int]
    reserved: Counter[int]
    claimed: set[BlockRef] = field(default_factory=set)
    adopted: set[BlockRef] = field(default_factory=set)
    planned: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, view: ClusterView, instances: Sequence[int], planned: Mapping[int, tuple[int, ...]] | None = None
    ) -> Budget:
        """All there is when only these instances compute."""
        everyone = range(view.num_instances)
        budget = cls(
            tokens=Counter(dict.fromkeys(instances, view.limits.max_num_batched_tokens)),
            blocks=Counter({i: view.account.pool(i).num_free for i in everyone}),
            seqs=Counter(dict.fromkeys(everyone, view.limits.max_num_seqs)),
            load=Counter(),
            reserved=Counter(),
            planned=planned or {},
        )
        for request in view.running:
            missing = request.blocks_for(request.num_tokens) - len(request.table)
            homes = budget._homes(request.id, request.group, {ref.instance for ref in request.table})
            budget._seat(request.group, request.num_tokens - request.num_computed, homes, missing)
        return budget

    def fits(self, blocks: Counter[int]) -> bool:
        """Whether so many blocks are free."""
        return all(self.blocks[instance] >= number for instance, number in blocks.items())

    def admits(self, share: Share, cost: Counter[int]) -> bool:
        """Whether a request can start: its first blocks are free, its tail not taken, its whole prompt has room."""
        hit, request = share.hit, share.request
        assert hit is not None, "an admission names its prefix"
        if self.adopted.intersection(hit.refs):
            return False
        whole = request.blocks_for(request.num_tokens) - len(hit.refs) + cost.total()
        room = sum(self.blocks[i] - self.reserved[i] for i in self._homes_of(share))
        return whole <= room and self.fits(Counter(share.holders) + cost)

    def grow(self, share: Share) -> None:
        """Gives a running request's share its tokens and blocks, and a seat on each member that is new to it."""
        if share.hit is None:
            self.seqs.subtract(set(share.group).difference(share.request.group))
        for instance, runs in zip(share.group, share.runs, strict=True):
            self.tokens[instance] -= sum(len(run) for run in runs)
        for instance in share.holders:
            self.blocks[instance] -= 1
            self.reserved[instance] = max(0, self.reserved[instance] - 1)

    def admit(self, share: Share, cost: Counter[int]) -> None:
        """Gives an admitted request's first share its tokens and blocks, and reserves the rest of its prompt."""
        hit, request = share.hit, share.request
        assert hit is not None, "an admission names its prefix"
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        self._seat(share.group, request.num_tokens - share.start, self._homes_of(share), missing)
        self.grow(share)
        self.blocks.subtract(cost)
        self.claimed.update(hit.refs)
        if hit.adopts_last:
            self.adopted.add(hit.refs[-1])

    def _seat(self, group: Sequence[int], num_tokens: int, homes: Sequence[int], num_blocks: int) -> None:
        """A request takes a seat on every member, which share the tokens it still needs; `homes` share the blocks."""
        self.seqs.subtract(group)
        self.load.update(dict.fromkeys(group, -(-num_tokens // len(group))))
        self.reserved.update(dict.fromkeys(homes, -(-num_blocks // len(homes))))

    def _homes_of(self, share: Share) -> Sequence[int]:
        """Who will hold what a request computes from its first share on: the end of a chain alone."""
        if share.exchange == "chain":
            return self._homes(share.request.id, share.group, set(share.holders))
        return self.planned.get(share.request.id, share.group)

    def _homes(self, request_id: int, group: Sequence[int], holders: AbstractSet[int]) -> Sequence[int]:
        """Who will hold what is still to come of a request: the last member alone if it holds all so far."""
        if request_id in self.planned:
            return self.planned[request_id]
        return group[-1:] if holders == {group[-1]} else group


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
    view: ClusterView, instances: frozenset[int], placement: Placement, budget: Budget | None = None
) -> Batch | None:
    """Plans one step of `instances`; a request takes part when its whole group is among them.

    The `budget` is all there is, unless another is given. None when the step cannot be planned ahead: somebody must be
    preempted whom a step in flight names.
    """
    budget = budget or Budget.of(view, sorted(instances))
    batch = Batch()
    queue = [r for r in view.running if r.num_scheduled < r.num_tokens and instances.issuperset(r.group)]
    while queue:
        request = queue.pop(0)
        share = placement.grow(request, view, budget)
        while share is not None and not budget.fits(Counter(share.holders)):
            victim = _victim(request, queue, share, budget)
            if victim is request and _can_wait(share, view):
                share = None
                continue
            if victim.in_flight:
                return None
            batch.preempted.append(victim)
            budget.blocks.update(view.account.reclaimable(victim))
            if victim is request:
                share = None
            else:
                queue.remove(victim)
                share = placement.grow(request, view, budget)
        if share is not None:
            budget.grow(share)
            batch.shares.append(share)
    if not batch.preempted:
        _admit_waiting(view, budget, placement, batch)
    return batch


def _victim(request: Request, later: Sequence[Request], share: Share, budget: Budget) -> Request:
    """The last of `later` that holds a block where one is missing, or else `request` itself."""
    short = {i for i, number in Counter(share.holders).items() if budget.blocks[i] < number}
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


def _admit_waiting(view: ClusterView, budget: Budget, placement: Placement, batch: Batch) -> None:
    for request in view.waiting:
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


def rotated_share(request: Request, exchange: Exchange, budget: Budget) -> Share | None:
    """The next token of a decode that rotates by token, or None when its home has no tokens left to give.

    When the home has to begin a block and none is free there, the share asks for it all the same: who came later gives
    way, or else it waits.
    """
    start, group = request.num_scheduled, request.group
    rotation = request.rotation or Rotation(start=start, held=request.homes.counts(start))
    home, num_before = rotation.place(start)
    if budget.tokens[group[home]] <= 0:
        return None
    return Share(
        request=request,
        group=group,
        start=start,
        stop=start + 1,
        runs=deal("single", start, start + 1, len(group), head=home),
        holders=() if num_before % request.block_size else (group[home],),
        exchange=exchange,
        rotation=rotation,
    )
