"""Continuous batching with chunked prefill, as two loops that a policy writes.

    batch = Batch(view, instances)
    for request in batch.running():
        batch.add(single_part(request, ...))
    for request in batch.waiting():
        batch.add(single_part(request, ...))
    return batch.plan()

Running requests are scheduled first, in the order of admission. If blocks run out, the most recently admitted request
is preempted. Then waiting requests are admitted while their whole prompt fits into the free blocks that running
requests do not need. This is the order of vLLM and Sarathi-Serve, for several instances at once.
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
    """Requests whose groups are planned to grow.

    Attributes:
        groups: the instances that will hold the tokens still to compute, by request id.
        more: additional blocks that these tokens need, by instance.
    """

    groups: Mapping[int, tuple[int, ...]]
    more: Mapping[int, int]


_NO_GROWTH = Growing({}, {})
_NO_COST: Mapping[int, int] = {}


class Batch:
    """A plan under construction: the parts of one step of all instances that can step, and preempted requests.

    Instances that share requests step together. If a step in flight names the request to preempt, the batch restarts
    with a new `budget` and the `instances` without steps in flight. Read both again for every request.

    Args:
        instances: the instances to plan for. A request is scheduled if they include its whole group.
        coupled_sets: instances that step together. By default these share a request.

    Attributes:
        instances: the instances that can step.
    """

    def __init__(
        self,
        view: ClusterView,
        instances: frozenset[int],
        *,
        coupled_sets: Sequence[frozenset[int]] | None = None,
        growing: Growing = _NO_GROWTH,
    ) -> None:
        self._view, self._given, self._growing = view, instances, growing
        self._coupled_sets = view.running.coupled_sets if coupled_sets is None else coupled_sets
        self._restart_without(view.full)

    def _restart_without(self, excluded: frozenset[int]) -> None:
        """Start a plan for all instances except these and the instances coupled with them."""
        coupled = [coupled for coupled in self._coupled_sets if not coupled.isdisjoint(excluded)]
        self.instances = self._given.difference(excluded, *coupled)
        self.budget = Budget(self._view, self.instances, self._growing)
        self.parts: list[ScheduledPart] = []
        self.loads: list[ScheduledPart] = []
        self._preempted: list[RequestView] = []
        behind = [r for r in self._view.running.within(self.instances) if r.num_scheduled < r.num_tokens]
        runnable = [r for r in behind if r.residency.can_compute]
        self._loading = [r for r in behind if not r.residency.can_compute] if len(runnable) < len(behind) else []
        if len(runnable) > 1:
            runnable.sort(key=lambda r: r.admission)
        self._queue, self._postponed = deque(runnable), list[RequestView]()
        self._spare = deque[RequestView]()
        """Postponed requests that may be scheduled instead of a request that waits for a block."""
        if self._view.cluster.has_stages:
            from longspan.policy.stage_batches import split_decodes  # noqa: PLC0415 - most instances have one stage

            self._queue, self._postponed, self._spare = split_decodes(self._view, self.instances, runnable)

    def running(self) -> Iterator[RequestView]:
        """Yield the requests that hold KV and have tokens to compute, in the order of admission.

        A request is yielded again if its part lacked blocks and another request was preempted for it.
        """
        while self._queue:
            yield self._queue.popleft()

    def waiting(self, candidates: Iterable[RequestView] | None = None) -> Iterator[RequestView]:
        """Yield the waiting requests that can start now, or only of `candidates`, until one cannot be admitted."""
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
        """Allocate the tokens and blocks of a part, or preempt a request for them. A request without a part waits."""
        if part is None:
            return
        if part.hit is not None:
            if self.budget.admit(part, part.hit):
                (self.loads if part.hit.waits else self.parts).append(part)
        elif part.block_owners and not self.budget.fits(part.new_blocks):
            self._preempt_for(part)
        else:
            self.budget.grow(part)
            self.parts.append(part)

    def plan(self) -> Plan:
        return Plan(preempted=tuple(self._preempted), loads=tuple(self.loads), batches=_by_coupled(self.parts))

    def _preempt_for(self, part: ScheduledPart) -> None:
        """Preempt a request for a running request's part that lacks blocks, unless blocks become free soon."""
        request, kv = part.request, self._view.kv
        short = {i for i, number in part.new_blocks.items() if self.budget.blocks[i] < number}
        if any(kv.num_pending_free(instance) for instance in short):
            return  # in-flight copies free blocks
        if any(ref.instance in short for loading in self._loading for ref in loading.table):
            return  # a request that loads can be preempted as soon as it has its KV
        later = (r for r in (*self._queue, *self._postponed) if any(ref.instance in short for ref in r.table))
        victim = max((request, *later), key=lambda r: r.admission)
        if victim is request and _can_wait(part, self._view):
            self._postponed.append(request)
            if self._spare:  # otherwise all requests could wait for a postponed one
                instead = self._spare.popleft()
                self._postponed.remove(instead)
                self._queue.append(instead)
            return
        if victim.in_flight:
            self._restart_without(self._view.busy)
            return
        self._preempted.append(victim)
        for instance, number in kv.reclaimable(victim).items():
            self.budget.blocks[instance] += number
        if victim is not request:
            (self._postponed if victim in self._postponed else self._queue).remove(victim)
            self._spare = deque(spare for spare in self._spare if spare is not victim)
            self._queue.appendleft(request)


def _can_wait(part: ScheduledPart, view: ClusterView) -> bool:
    """Return True if the request should wait for a block instead of being preempted.

    A rotated token needs a block of one member, and waits while other running requests hold blocks there. Otherwise the
    request exceeds its group, or in-flight copies hold the other blocks and may wait for this request.
    """
    if part.rotation is None:
        return False
    me, [owner] = part.request, part.block_owners
    return any(ref.instance == owner for peer in view.running.on(owner) if peer.id != me.id for ref in peer.table)


def _by_coupled(parts: Sequence[ScheduledPart]) -> tuple[tuple[ScheduledPart, ...], ...]:
    """Return one batch for each set of instances that the parts connect, in ascending order."""
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
    """Return the instances that the step of a part names, with the instance that sampled the latest token."""
    request, group = part.request, part.group
    if request.sampler in group or request.num_tokens == request.num_known:
        return group
    return (*group, request.sampler)


class PerInstance(dict[int, int]):
    """A number for each instance, computed at first use."""

    def __init__(self, compute: Callable[[int], int]) -> None:
        self._compute = compute

    def __missing__(self, instance: int) -> int:
        number = self[instance] = self._compute(instance)
        return number


class Budget:
    """The tokens, blocks and request slots that the plan may still use, by instance.

    Attributes:
        tokens: tokens that an instance can still compute in this step. Instances without a step are missing.
        blocks: free blocks.
        claimed: cached blocks that requests admitted by this plan start with.
        adopted: claimed blocks that one request takes over.
    """

    def __init__(self, view: ClusterView, instances: Iterable[int], growing: Growing = _NO_GROWTH) -> None:
        self.view, self._growing = view, growing
        self.claimed: set[BlockRef] = set()
        self.adopted: set[BlockRef] = set()
        self.tokens = dict.fromkeys(instances, view.max_num_batched_tokens)
        if view.cluster.has_stages:
            self.tokens = {instance: _step_tokens(view, instance) for instance in instances}
        self.blocks = PerInstance(view.kv.num_free)

    @cached_property
    def seqs(self) -> PerInstance:
        """Free request slots, by instance."""
        running, max_num_seqs = self.view.running, self.view.max_num_seqs
        return PerInstance(lambda i: max_num_seqs - len(running.on(i)))

    @cached_property
    def load(self) -> list[int]:
        """Tokens that running and admitted requests still have to compute, by instance."""
        return list(self.view.running.due_tokens)

    @cached_property
    def reserved(self) -> PerInstance:
        """Free blocks that running requests need for the tokens they have. Admissions do not use them."""
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

    def free_blocks(self, request: RequestView, group: Sequence[int], cost: Mapping[int, int] = _NO_COST) -> int:
        """Return the unreserved free blocks for a request on a group and its hosts, without the `cost` of a hit."""
        blocks = sum([self.blocks[i] - self.reserved[i] - cost.get(i, 0) for i in group])
        hosts = self.hosts_of(request, group) if self.view.device_limit is not None else ()
        return blocks + sum([self.blocks[host] - cost.get(host, 0) for host in hosts])

    def fits(self, blocks: Mapping[int, int]) -> bool:
        return all(self.blocks[instance] >= number for instance, number in blocks.items())

    def grow(self, part: ScheduledPart) -> None:
        """Allocate the tokens and blocks of a part, and request slots on new members of a running request."""
        if part.hit is None and part.group != part.request.group:
            for instance in set(part.group).difference(part.request.group):
                self.seqs[instance] -= 1
        for instance, runs in compress(zip(part.group, part.runs, strict=True), part.runs):  # many may be empty
            self.tokens[instance] -= sum([len(run) for run in runs])
        if part.block_owners:
            for instance, number in Counter(part.block_owners).items():
                self.reserved[instance] = max(0, self.reserved[instance] - number)
                self.blocks[instance] -= number
        for _, instance in part.moves:
            self.blocks[instance] -= 1

    def admit(self, part: ScheduledPart, hit: PrefixHit) -> bool:
        """Allocate the tokens and blocks of a request's first part, and reserve blocks for its whole prompt.

        Return False, and allocate nothing, if the plan has taken over a block of its hit, or too few blocks are free.
        """
        if self.adopted.intersection(hit.refs) or (hit.adopts_last and hit.refs[-1] in self.claimed):
            return False
        shared = self.claimed.intersection(hit.refs) if hit.num_loaded else ()
        if any(self.view.cluster.tier(pool) != "device" for pool, _ in shared):
            return False  # another admission of this plan loads the same blocks: the next plan sees that load
        request, cost = part.request, self.view.kv.hit_cost(hit, self.claimed)
        missing = request.blocks_for(request.num_tokens) - len(hit.refs)
        owners = self._growing.groups.get(request.id, part.group) if part.kv_owner is None else (part.kv_owner,)
        taken = Counter([*part.block_owners, *cost.elements()])
        if missing > self.free_blocks(request, owners, taken if hit.waits else cost) or not self.fits(taken):
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
    """Return True if a request has only its latest token to compute, behind its prompt."""
    return start >= request.num_prompt and request.num_tokens - start <= 1


def _step_tokens(view: ClusterView, instance: int) -> int:
    """Return an upper bound for the tokens of a step: with several stages 1/pp of all, or less to keep stages busy."""
    pp = view.cluster.pp(instance)
    max_tokens = -(-view.max_num_batched_tokens // pp)
    if pp == 1:
        return max_tokens
    if len(view.startable) < len(view.waiting):
        return max_tokens  # the due tokens are unknown: requests wait for blocks, or for the other cluster
    due = view.running.due_tokens[instance]
    for request in view.startable:
        if chunk_tokens(due, pp) >= max_tokens:
            break
        due += request.num_tokens
    return min(max_tokens, chunk_tokens(due, pp))


def loaded_first(request: RequestView, group: tuple[int, ...], budget: Budget, hit: PrefixHit) -> ScheduledPart | None:
    """Admit a request whose hit must be loaded first, see `loading.load_part`."""
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
    """Schedule tokens of a request from `start` up to `end`, `most` of them, as far as one instance has budget.

    Return None if there is no token. An admission has a `hit`. It has no tokens if the hit must be loaded first.
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
        stop = min(stop, (num_held + max(hit is None, now)) * request.block_size)  # a running request asks for a block
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
