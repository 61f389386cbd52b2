"""Seesaw: prefill and decode alternate on the same devices, each phase with its own cluster (Su et al., 2025).

The prefill phase computes prompts until the host pools are full or no prompt waits. Its steps offload KV (§5.2). Then
the model is re-sharded, and the decode phase loads and decodes these requests (§4.2).

If costs are known, the cluster changes only if that saves more time than the change takes. Otherwise it changes as in
the paper. A request larger than one KV pool is shared by all instances of the phase, by the rules of `context`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Literal

from longspan.core.cluster import Cluster
from longspan.core.exchange import RING_Q
from longspan.core.policy import Policy
from longspan.core.view import Admitted, ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.batching import Batch
from longspan.policy.by_length import ByLength
from longspan.policy.chunked import admit_alone
from longspan.policy.context import Context, ContextOptions, LengthOptions
from longspan.policy.facts import Facts


@dataclass(frozen=True, kw_only=True)
class SeesawOptions(LengthOptions):
    """Options of `seesaw`: when it changes clusters, and how instances share a request.

    Attributes:
        strict: change clusters whenever the paper does, even if the change takes longer than it saves.
        threshold: all instances share a prompt with more tokens than this. `auto` shares only the requests that exceed
            one KV pool, because single instances have a higher throughput.
        exchange, layout, decode, weights: as of `context`.
    """

    strict: bool = False
    exchange: str = "auto"
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "auto"
    decode: str = RING_Q.kind
    weights: Literal["auto", "host", "peers"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.sharing  # checks the options

    @cached_property
    def sharing(self) -> ContextOptions:
        """The options of the groups. KV is offloaded after the prefill, so a chain leaves it where it is computed."""
        sharing = ContextOptions.of(self)
        chains = sharing.wanted is None or sharing.wanted.traits.keeps == "later"
        return replace(sharing, home="computed") if chains else sharing


class Seesaw(Policy, name="seesaw"):
    """Prefills on one cluster and decodes on the other. Requests that exceed one instance are shared by all."""

    Options = SeesawOptions
    takes_phases = True

    def __init__(self, instances: tuple[int, ...], options: SeesawOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        if not facts.phases:
            problem = (
                "seesaw prefills and decodes on the same devices, one after the other: give `prefill_parallel` and"
            )
            raise ParameterError("policy", f"{problem} `decode_parallel`", "seesaw")
        self._prefill, self._decode = facts.phases
        self._groups = {cluster.spec: _PhaseGroups(cluster, options.sharing, facts) for cluster in facts.phases}
        self._cost = None if options.strict else facts.phase_cost
        self._mixes = False  # a change does not pay off: this cluster prefills and decodes the remaining requests
        self._parked: list[tuple[int, int]] = []
        """The tokens so far, and the tokens left to decode, of requests that were parked in this phase."""
        self._num_unfinished = 0
        self._started: set[int] = set()
        """Waiting requests that have an output."""

    @property
    def hint(self) -> str | None:
        """Advise to measure, if the gain of a change of clusters is unknown."""
        if self.options.strict or self._cost is not None:
            return None
        return (
            "clusters change as in the paper, also where that takes longer than it gains: longspan profile measures "
            "what steps take on CPUs, for instances of each cluster"
        )

    def capacity_on(self, cluster: Cluster) -> int:
        """Return the number of instances: all of them share a request that exceeds one."""
        return cluster.num_instances

    def arrived(self, request: RequestView) -> None:
        self._num_unfinished += 1
        if _has_output(request) and not request.group:
            self._started.add(request.id)

    def ended(self, request: RequestView) -> None:
        self._num_unfinished -= 1
        self._started.discard(request.id)
        for groups in self._groups.values():
            groups.ended(request)

    def preempted(self, request: RequestView) -> None:
        if _has_output(request):
            self._started.add(request.id)
        for groups in self._groups.values():
            groups.preempted(request)

    def resumed(self, request: RequestView) -> None:
        self._started.discard(request.id)

    def _num_new(self, view: ClusterView) -> int:
        """Return the number of waiting requests without an output."""
        return self._num_unfinished - len(view.running) - len(self._started)

    def admits(self, cluster: Cluster) -> Admitted:
        """Return `new` in the prefill phase, `started` in the decode phase, and `all` if this cluster does both."""
        return "all" if self._mixes else "new" if cluster.spec == self._prefill.spec else "started"

    def plan(self, view: ClusterView) -> Plan:
        """Continue the phase of this cluster, or end it."""
        return self._prefill_phase(view) if self.admits(view.cluster) == "new" else self._decode_phase(view)

    def _prefill_phase(self, view: ClusterView) -> Plan:
        """Compute prompts as far as host pools have free blocks. Park each request after its first token."""
        done = tuple([r for r in view.running if not r.in_flight and _has_output(r)])
        self._parked += [(r.num_tokens, r.max_tokens - (r.num_known - r.num_prompt)) for r in done]
        hosts = _HostBudget(view, view.running)
        plan = self._groups[view.cluster.spec].prefill(view, hosts)
        plan.parked, plan.offloads = done, True
        is_done = not (plan.batches or plan.loads or view.busy) and len(done) == len(view.running)
        num_started = len(self._started) + len(done)
        if is_done and num_started and not self._can_continue(view, hosts):
            if self._is_worth_decoding(num_started, self._num_new(view)):
                plan.reshard = self._decode
            else:
                self._mixes = True
            self._parked = []
        return plan

    def _can_continue(self, view: ClusterView, hosts: _HostBudget) -> bool:
        """Return True if the KV of the first waiting prompt fits into host pools. Its device blocks become free."""
        if not view.startable:
            return self._num_new(view) > 0  # its prefix is being loaded
        return self._fits_on_hosts(view.startable[0], hosts)

    def _fits_on_hosts(self, request: RequestView, hosts: _HostBudget) -> bool:
        """Return True if the KV of a prompt fits into host pools after its prefill."""
        return hosts.fits(request, is_shared=self._groups[self._prefill.spec].shares(request))

    def _decode_phase(self, view: ClusterView) -> Plan:
        """Decode with continuous batching, until hosts hold no request to decode and a change to prefill pays off."""
        if self.admits(view.cluster) == "started" and not self._started and view.waiting:
            first, hosts, num_new = view.waiting[0], _HostBudget(view, view.running), self._num_new(view)
            if self._fits_on_hosts(first, hosts) and hosts.is_ample(first, num_new):
                if self._is_worth_prefilling(first, hosts, num_new):
                    return Plan(reshard=self._prefill)
                self._mixes = True
        plan = self._groups[view.cluster.spec].plan(view)
        if self._mixes and not (plan.batches or view.busy or view.waiting):
            self._mixes = False  # all requests have finished
        return plan

    def _is_worth_decoding(self, num_started: int, num_new: int) -> bool:
        """Return True if the decode cluster saves more time for started requests than the change takes.

        In the decode phase, batches shrink until the next prefill phase. On the prefill cluster, new requests would be
        prefilled concurrently, and replace finished requests while there are any.
        """
        if self._cost is None or not self._parked:
            return True
        cost, num_parked, num_total = self._cost, len(self._parked), num_started + num_new
        lengths, tokens_left = zip(*self._parked, strict=True)
        times, length = num_started / num_parked, (sum(lengths) + sum(tokens_left) // 2) // num_parked
        pieces = [(round(times * number), num_tokens) for number, num_tokens in drain(tokens_left)]
        there_s = sum(num_tokens * cost.decode_s(self._decode, number, length) for number, num_tokens in pieces)
        here_s = sum(num_tokens * cost.decode_s(self._prefill, number, length) for number, num_tokens in pieces)
        if num_new:
            here_s = times * sum(tokens_left) * cost.decode_s(self._prefill, num_total, length) / num_total
        return here_s - there_s > cost.reshard_s(self._decode)

    def _is_worth_prefilling(self, first: RequestView, hosts: _HostBudget, num_new: int) -> bool:
        """Return True if the prefill cluster saves more time for new prompts than both changes take."""
        if (cost := self._cost) is None:
            return True
        length = first.num_tokens
        num_tokens = min(num_new * length, hosts.num_blocks * first.block_size)
        here_s, there_s = (cost.prefill_s(cluster, num_tokens, length) for cluster in (self._decode, self._prefill))
        swapped_s = 2 * cost.swap_s(self._decode, hosts.num_running)
        return here_s - there_s > cost.reshard_s(self._prefill) + cost.reshard_s(self._decode) + swapped_s


class _PhaseGroups(Context):
    """Places the requests of one phase: on single instances, or on a group of all instances.

    Args:
        facts: the facts of the prefill cluster. A profile of instances with another tp is not used.
    """

    def __init__(self, cluster: Cluster, sharing: ContextOptions, facts: Facts) -> None:
        if cluster.spec.tp == 1:
            sharing = replace(sharing, weights="auto")
        profile = facts.profile if cluster.spec.tp == facts.tp else None
        instances = tuple(sorted(cluster.instances, key=cluster.location))
        facts, all_or_one = replace(facts, cluster=cluster, profile=profile), partial(_AllOrOne, shares=self.shares)
        super().__init__(instances, sharing, facts, placement=all_or_one)
        self._pool_blocks = min(cluster.num_blocks, default=0)
        self._spread: set[int] | None = set() if len(set(self._by_length.host.values())) > 1 else None
        """Waiting requests with an output whose KV is in the pools of several hosts. None on a single host."""

    def preempted(self, request: RequestView) -> None:
        if self._spread is not None and len(request.group) > 1:
            self._spread.add(request.id)

    def ended(self, request: RequestView) -> None:
        if self._spread is not None:
            self._spread.discard(request.id)

    def shares(self, request: RequestView) -> bool:
        """Return True for a request larger than one KV pool, a prompt beyond the threshold, or KV on several hosts."""
        if len(self.instances) == 1:
            return False
        if request.blocks_for(request.num_tokens) > self._pool_blocks:
            return True
        if _has_output(request):
            return self._spread is not None and request.id in self._spread
        threshold = self._sharing.threshold
        return threshold != "auto" and request.num_tokens > threshold

    def prefill(self, view: ClusterView, hosts: _HostBudget) -> Plan:
        """Continue running prompts, and admit prompts whose KV fits into the host pools. No request is decoded.

        If all instances are to share the first waiting prompt, instances that could step wait until all of them can.
        """
        batch, first = Batch(view, self._all), next(self._candidates(view), None)
        for request in batch.running():
            if request.num_scheduled < request.num_prompt:
                batch.add(self.parts.next(request, batch.budget, self._max_long_tokens(view)))
        can_admit = first is not None and hosts.fits(first, is_shared=self.shares(first))
        if first is not None and can_admit and self._lacks_members(first, view, batch.instances):
            return Plan()
        for request in batch.waiting(self._candidates(view)):
            if self.shares(request):
                part = self._first(request, batch.budget)
            else:
                part = admit_alone(request, batch.budget, hosts.instances(request, self.instances))
            batch.add(part if part is not None and hosts.reserve(part) else None)
        return batch.plan()


class _AllOrOne:
    """Places a request on all instances of a phase or on one. Shared prompts are prefilled one after the other."""

    is_concurrent = False

    def __init__(self, by_length: ByLength, shares: Callable[[RequestView], bool]) -> None:
        self._shares, self._number = shares, len(by_length.instances)
        self.partition, self.ranked = by_length.partition, by_length.ranked

    def members(self, request: RequestView, cached_tokens: int, view: ClusterView) -> int:
        del cached_tokens, view
        return self._number if self._shares(request) else 1


class _HostBudget:
    """Free blocks of host pools, without the blocks that running requests still need when they are offloaded.

    A shared request reserves all of its blocks on each host of its group, because its shares are not known before.
    """

    def __init__(self, view: ClusterView, running: Iterable[RequestView]) -> None:
        cluster, kv = view.cluster, view.kv
        self._pool = {instance: cluster.host_pool(instance) for instance in cluster.instances}
        self._free = Counter({pool: kv.num_free(pool) for pool in self._pool.values()})
        self._size = sum(map(kv.num_blocks, self._free))
        self.num_running = 0
        for request in running:
            number = request.blocks_for(request.num_tokens)
            self._free.subtract({pool: number - request.streamed[pool] for pool in self._pools(request.group)})
            self.num_running += number

    @property
    def num_blocks(self) -> int:
        return sum(self._free.values())

    def _pools(self, group: Sequence[int]) -> set[int]:
        """Return the host pools of a group."""
        return {self._pool[instance] for instance in group}

    def fits(self, request: RequestView, *, is_shared: bool) -> bool:
        """Return True if the KV of a request fits into the pool of a host, or of every host if it is shared."""
        blocks = self._free.values()
        return (min(blocks) if is_shared else max(blocks)) >= _needed(request)

    def is_ample(self, first: RequestView, num_new: int) -> bool:
        """Return True if all new requests fit, at the size of the first, or running requests need at most half.

        If device pools are larger than host pools, a change for each prompt that fits would take most of the time.
        """
        return self.num_blocks >= num_new * _needed(first) or 2 * self.num_running <= self._size

    def instances(self, request: RequestView, instances: Sequence[int]) -> list[int]:
        """Return the instances whose host pool has free blocks for a request."""
        return [instance for instance in instances if self._free[self._pool[instance]] >= _needed(request)]

    def reserve(self, part: ScheduledPart) -> bool:
        """Reserve the host blocks of an admitted request. Return False, and reserve none, if they are not free."""
        pools, number = self._pools(part.group), _needed(part.request)
        if any(self._free[pool] < number for pool in pools):
            return False
        self._free.subtract(dict.fromkeys(pools, number))
        return True


def _has_output(request: RequestView) -> bool:
    return request.num_known > request.num_prompt


def _needed(request: RequestView) -> int:
    """Return the blocks of a request after its prefill."""
    return request.blocks_for(request.num_tokens)


def drain(lengths: Iterable[int]) -> list[tuple[int, int]]:
    """Split a decode of all requests into pieces that end when a half, three quarters and so on have finished.

    A small batch may be quicker on another cluster than a full one, so the mean batch size is not enough.

    Args:
        lengths: output tokens of each request. All requests start together.

    Returns:
        For each piece the mean number of running requests, and its length in tokens.
    """
    falling, pieces, done = sorted(lengths, reverse=True), [], 0
    number = len(falling)
    while number:
        end = falling[number // 2]
        if end > done:
            num_decoded = sum(min(tokens, end) - done for tokens in falling[:number])
            pieces.append((round(num_decoded / (end - done)), end - done))
            done = end
        number //= 2
    return pieces
