"""Continuous batching with chunked prefill, as two loops that a policy writes.

    batch = Batch(view, instances)
    for request in batch.running():
        batch.add(single_part(request, ...))
    for request in batch.waiting():
        batch.add(single_part(request, ...))
    return batch.plan()

Running requests come first, in the order of admission; when blocks run out, the last admitted gives its KV up. Then
waiting requests are admitted while their whole prompt fits beside what the running ones still need (as vLLM and
Sarathi-Serve do, but for several instances at once).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import NamedTuple

from longspan.core.blocks import BlockRef, PrefixHit, coupled_instances
from longspan.core.exchange import LOCAL
from longspan.core.runs import Run, chunk_tokens
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart


class Growing(NamedTuple):
    """Groups that are planned to be larger than they are.

    Attributes:
        groups: the instances that will hold what is still to come, by request id.
        more: how many more blocks that will need of each instance.
    """

    groups: Mapping[int, tuple[int, ...]]
    more: Mapping[int, int]


_NONE_GROWS = Growing({}, {})
_FREE: Mapping[int, int] = {}


class Batch:
    """A plan in the making: the parts of one step of all instances that can take a step, and who loses its KV.

    Instances that share requests step together. When a step in flight names who must give way, the batch starts again
    with a new `budget` and only the `instances` that have nothing in flight: read both from it for every request.

    Args:
        everyone: the instances to choose from. A request takes part when its whole group is among them.
        coupled_sets: the instances that step together; by default those that share requests.

    Attributes:
        instances: those that can take a step.
    """

    def __init__(
        self,
        view: ClusterView,
        everyone: frozenset[int],
        *,
        coupled_sets: Sequence[frozenset[int]] | None = None,
        growing: Growing = _NONE_GROWS,
    ) -> None:
        self._view, self._everyone, self._growing = view, everyone, growing
        self._coupled_sets = view.running.coupled_sets if coupled_sets is None else coupled_sets
        self._begin_without(view.full)

    def _begin_without(self, excluded: frozenset[int]) -> None:
        """Begins a plan for all instances but these and those coupled with them."""
        coupled = [coupled for coupled in self._coupled_sets if not coupled.isdisjoint(excluded)]
        self.instances = self._everyone.difference(excluded, *coupled)
        self.budget = Budget(self._view, self.instances, self._growing)
        self.parts: list[ScheduledPart] = []
        self.loads: list[ScheduledPart] = []
        self._preempted: list[RequestView] = []
        behind = [r for r in self._view.running.within(self.instances) if r.num_scheduled < r.num_tokens]
        runnable = [r for r in behind if r.residency.can_compute]
        self._loading = [r for r in behind if not r.residency.can_compute] if len(runnable) < len(behind) else []
        if len(runnable) > 1:
            runnable.sort(key=lambda r: r.admission)
        self._later, self._next_turn = deque(runnable), list[RequestView]()
        self._spare = deque[RequestView]()
        """Those of the next turn who could take the place of somebody that waits for room."""
        if self._view.cluster.has_stages:
            from longspan.policy.stage_turns import take_turns  # noqa: PLC0415 - most instances have one stage

            self._later, self._next_turn, self._spare = take_turns(self._view, self.instances, runnable)

    def running(self) -> Iterator[RequestView]:
        """Yields requests that hold KV and have something to compute, first admitted first.

        A request comes again when another one has given way for the part that was added for it.
        """
        while self._later:
            yield self._later.popleft()

    def waiting(self, candidates: Iterable[RequestView] | None = None) -> Iterator[RequestView]:
        """Yield the waiting requests that can start now, or those of `candidates`, until one cannot be admitted."""
        if self._preempted or not self.instances:
            return
        for request in self._view.startable if candidates is None else candidates:
            if candidates is not None and not request.residency.can_start:
                continue
            num_admitted = len(self.parts) + len(self.loads)
            yield request
            if len(self.parts) + len(self.loads) == num_admitted:
                return

    def add(self, part: ScheduledPart | None) -> None:
        """Gives a part the tokens and blocks it asks for, if it can have them now; without one, its request waits."""
        if part is None:
            return
        if part.hit is not None:
            if self.budget.admit(part, part.hit):
                (self.loads if part.hit.waits else self.parts).append(part)
        elif part.block_owners and not self.budget.fits(part.new_blocks):
            self._make_way(part)
        else:
            self.budget.grow(part)
            self.parts.append(part)

    def plan(self) -> Plan:
        return Plan(preempted=tuple(self._preempted), loads=tuple(self.loads), batches=_by_coupled(self.parts))

    def _make_way(self, part: ScheduledPart) -> None:
        """Preempts somebody for a running request's part that lacks blocks, unless they will be free in time."""
        request, kv = part.request, self._view.kv
        short = {i for i, number in part.new_blocks.items() if self.budget.blocks[i] < number}
        if any(kv.num_pending_free(instance) for instance in short):
            return  # blocks are free as soon as KV on its way has left
        if any(ref.instance in short for one in self._loading for ref in one.table):
            return  # one that loads may give way as soon as it has its KV
        later = (r for r in (*self._later, *self._next_turn) if any(ref.instance in short for ref in r.table))
        victim = max((request, *later), key=lambda r: r.admission)
        if victim is request and _can_wait(part, self._view):
            self._next_turn.append(request)
            if self._spare:  # or all would wait for somebody whose turn never comes
                instead = self._spare.popleft()
                self._next_turn.remove(instead)
                self._later.append(instead)
            return
        if victim.in_flight:
            self._begin_without(self._view.busy)
            return
        self._preempted.append(victim)
        for instance, number in kv.reclaimable(victim).items():
            self.budget.blocks[instance] += number
        if victim is not request:
            (self._next_turn if victim in self._next_turn else self._later).remove(victim)
            self._spare = deque(one for one in self._spare if one is not victim)
            self._later.appendleft(request)


def _can_wait(part: ScheduledPart, view: ClusterView) -> bool:
    """Tells whether a part that lacks a block, and for which no later request can give way, will get one in time.

    A token that rotates can take no other member's block, but waits while others that run hold blocks there: they come
    first. Else the request outgrows its group, or KV on its way there holds the rest, and may wait for the request.
    """
    if part.rotation is None:
        return False
    me, [owner] = part.request, part.block_owners
    return any(ref.instance == owner for one in view.running.on(owner) if one.id != me.id for ref in one.table)


def _by_coupled(parts: Sequence[ScheduledPart]) -> tuple[tuple[ScheduledPart, ...], ...]:
    """Returns a batch per set of instances that these parts connect, ascending."""
    if not parts:
        return ()
    groups = {_touched(part) for part in parts} if len(parts) > 1 else ()
    if len(groups) <= 1:
        return (tuple(parts),)
    coupled_sets = coupled_instances(groups)
    coupled_with = {i: number for number, coupled in enumerate(coupled_sets) for i in coupled}
    batches: list[list[ScheduledPart]] = [[] for _ in coupled_sets]
    for part in parts:
        batches[coupled_with[part.group[0]]].append(part)
    return tuple(tuple(batch) for batch in batches)


def _touched(part: ScheduledPart) -> tuple[int, ...]:
    """Returns the instances that a part's step names: also the one that passes on a token sampled elsewhere."""
    request, group = part.request, part.group
    if request.sampler in group or request.num_tokens == request.num_known:
        return group
    return (*group, request.sampler)


class PerInstance(dict[int, int]):
    """A number for each instance, computed at first use."""

    def __init__(self, find: Callable[[int], int]) -> None:
        self._find = find

    def __missing__(self, instance: int) -> int:
        found = self[instance] = self._find(instance)
        return found


class Budget:
    """The tokens, blocks and seats left to give away in the step being planned, by instance.

    Attributes:
        tokens: that can still be computed, only of the `instances` that compute.
        blocks: free ones.
        claimed: blocks that admissions of this plan begin with.
        adopted: blocks among them that are taken over.
    """

    def __init__(self, view: ClusterView, instances: Iterable[int], growing: Growing = _NONE_GROWS) -> None:
        self.view, self._growing = view, growing
        self.claimed: set[BlockRef] = set()
        self.adopted: set[BlockRef] = set()
        self.tokens = dict.fromkeys(instances, view.max_num_batched_tokens)
        if view.cluster.has_stages:
            self.tokens = {instance: _step_tokens(view, instance) for instance in instances}
        self.blocks = PerInstance(view.kv.num_free)

    @cached_property
    def seqs(self) -> PerInstance:
        """Requests that may still join, by instance."""
        running, most = self.view.running, self.view.max_num_seqs
        return PerInstance(lambda i: most - len(running.on(i)))

    @cached_property
    def load(self) -> list[int]:
        """Tokens that running and admitted requests still have to compute, by instance."""
        return list(self.view.running.due_tokens)

    @cached_property
    def reserved(self) -> PerInstance:
        """Free blocks that running requests will need for the tokens they have; admissions leave them alone."""
        due, more = self.view.running.due_blocks, self._growing.more
        return PerInstance(lambda i: max(0, due[i] + more.get(i, 0)))

    def outgrows(self, request: RequestView) -> bool:
        """Return True if a request needs more blocks than `device_limit`."""
        return (limit := self.view.device_limit) is not None and request.blocks_for(request.num_tokens) > limit

    def hosts_of(self, request: RequestView, group: Iterable[int]) -> tuple[int, ...]:
        """Return the host pools of a group for a request above `device_limit`, else an empty tuple."""
        return tuple(dict.fromkeys(map(self.view.cluster.host_pool, group if self.outgrows(request) else ())))

    def hit(self, request: RequestView, group: tuple[int, ...]) -> PrefixHit:
        """Return the prefix hit on a group. Requests above `device_limit` also hit host blocks in place."""
        if not self.outgrows(request):
            return self.view.kv.match(request, group)
        from longspan.policy.on_hosts import hit_on_hosts  # noqa: PLC0415 - few requests are so long

        return hit_on_hosts(request, group, self)

    def room(self, request: RequestView, group: Sequence[int], cost: Mapping[int, int] = _FREE) -> int:
        """Counts the blocks left for a request on a group, or its hosts, beside what others need and a hit `cost`s."""
        room = sum([self.blocks[i] - self.reserved[i] - cost.get(i, 0) for i in group])
        hosts = self.hosts_of(request, group) if self.view.device_limit is not None else ()
        return room + sum([self.blocks[host] - cost.get(host, 0) for host in hosts])

    def fits(self, blocks: Mapping[int, int]) -> bool:
        return all(self.blocks[instance] >= number for instance, number in blocks.items())

    def grow(self, part: ScheduledPart) -> None:
        """Gives a running request's part its tokens and blocks, and a seat on each member that is new to it."""
        if part.hit is None and part.group != part.request.group:
            for instance in set(part.group).difference(part.request.group):
                self.seqs[instance] -= 1
        for instance, runs in compress(zip(part.group, part.runs, strict=True), part.runs):  # most may be empty
            self.tokens[instance] -= sum([len(run) for run in runs])
        if part.block_owners:
            for instance, number in Counter(part.block_owners).items():
                self.reserved[instance] = max(0, self.reserved[instance] - number)
                self.blocks[instance] -= number
        for _, instance in part.moves:
            self.blocks[instance] -= 1

    def admit(self, part: ScheduledPart, hit: PrefixHit) -> bool:
        """Gives a request's first part its tokens and blocks, and reserves the rest of its prompt.

        Returns False, and gives nothing, when its first blocks, its tail or room for its prompt are not free.
        """
        if self.adopted.intersection(hit.refs) or (hit.adopts_last and hit.refs[-1] in self.claimed):
            return False
        shared = self.claimed.intersection(hit.refs) if hit.num_loaded else ()
        if any(self.view.cluster.tier(pool) != "device" for pool, _ in shared):
            return False  # another admission of this plan loads some of the same: the next plan finds it on its way
        request, cost = part.request, self.view.kv.hit_cost(hit, self.claimed)
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        owners = self._growing.groups.get(request.id, part.group) if part.kv_owner is None else (part.kv_owner,)
        taken = Counter(part.block_owners) + cost
        if missing > self.room(request, owners, taken if hit.waits else cost) or not self.fits(taken):
            return False
        evenly = -(-(request.num_tokens - part.start) // len(part.group))
        for instance, runs in zip(part.group, part.runs, strict=True):
            self.seqs[instance] -= 1
            self.load[instance] += sum([len(run) for run in runs]) if part.stop == request.num_tokens else evenly
        for instance in owners:
            self.reserved[instance] += -(-missing // len(owners))
        self.grow(part)
        for instance, number in cost.items():
            self.blocks[instance] -= number
        self.claimed.update(hit.refs)
        if hit.adopts_last:
            self.adopted.add(hit.refs[-1])
        return True


def is_decode(request: RequestView, start: int) -> bool:
    """Tells whether its latest token is all that a request still has to compute; output may be computed anew, too."""
    return start >= request.num_prompt and request.num_tokens - start <= 1


def _step_tokens(view: ClusterView, instance: int) -> int:
    """Bounds the tokens of a step: on an instance of several stages so that what is due makes some steps for each, and
    all that are in flight have about as many as a single one otherwise.
    """
    pp = view.cluster.pp(instance)
    most = -(-view.max_num_batched_tokens // pp)
    if pp == 1:
        return most
    if len(view.startable) < len(view.waiting):
        return most  # the tokens of the others cannot be told: they wait for blocks, or for the other cluster
    due = view.running.due_tokens[instance]
    for request in view.startable:
        if chunk_tokens(due, pp) >= most:
            break
        due += request.num_tokens
    return min(most, chunk_tokens(due, pp))


def loaded_first(request: RequestView, group: tuple[int, ...], budget: Budget, hit: PrefixHit) -> ScheduledPart | None:
    """Admits a request whose beginning must be loaded, see `loading.load_part`."""
    from longspan.policy.loading import load_part  # noqa: PLC0415 - without other tiers nothing is loaded

    return load_part(request, group, budget, hit)


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
    """Schedules the tokens of a request from `start` on that one instance has budget for; `most` of them, up to `end`.

    Returns None when there are none. An admission names its `hit`; it has no tokens if that must be loaded first.
    """
    if hit is not None and hit.waits:
        return loaded_first(request, (instance,), budget, hit)
    tokens = budget.tokens[instance] if most is None else min(most, budget.tokens[instance])
    stop = min(request.num_tokens if end is None else end, start + tokens)
    num_held = len(hit.refs) if hit is not None else len(request.table)
    if budget.outgrows(request):
        from longspan.policy.on_hosts import blocks_now  # noqa: PLC0415 - few requests are so long

        cost = 0 if hit is None else budget.view.kv.hit_cost(hit, budget.claimed)[instance]
        [now] = blocks_now(request, (instance,), budget, (budget.blocks[instance] - cost,), is_new=hit is not None)
        stop = min(stop, (num_held + max(hit is None, now)) * request.block_size)  # a running request asks for one
    if stop <= start:
        return None
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
