"""Seesaw: prefill and decode alternate on the same devices, each phase with its own cluster (Su et al., 2025).

The prefill phase computes prompts until the host pools are full or no prompt waits. The KV of each finished prompt is
offloaded to its hosts. Then the model is re-sharded, and the decode phase loads and decodes these requests (§4.2).

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
        sharing = ContextOptions(
            threshold=self.threshold,
            long_share=self.long_share,
            exchange=self.exchange,
            layout=self.layout,
            decode=self.decode,
            weights=self.weights,
        )
        chains = sharing.wanted is None or sharing.wanted.traits.keeps == "later"
        return replace(sharing, home="computed") if chains else sharing


class Seesaw(Policy, name="seesaw"):
    """Prefills on one cluster and decodes on the other. Requests that exceed one instance are shared by all."""

    Options = SeesawOptions
    takes_phases = True

    def __init__(self, instances: tuple[int, ...], options: SeesawOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        if not facts.turns:
            problem = "seesaw prefills and decodes on the same devices, one after the other: give prefill_parallel and"
            raise ParameterError("policy", f"{problem} decode_parallel", "seesaw")
        self._prefill, self._decode = facts.turns
        self._groups = {cluster.spec: _PhaseGroups(cluster, options.sharing, facts) for cluster in facts.turns}
        self._cost = None if options.strict else facts.turn_cost
        self._mixes = False  # what is left is not worth a change: it is prefilled and decoded where it is
        self._parked = _Parked()
        self._num_unfinished = 0
        self._started: set[int] = set()
        """Waiting requests that have an output."""

    @property
    def hint(self) -> str | None:
        """Advise to measure, when nothing is known of what a change of clusters gains."""
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
        """Admits new requests while prompts are prefilled, and those that have begun while they decode."""
        return "all" if self._mixes else "new" if cluster.spec == self._prefill.spec else "started"

    def plan(self, view: ClusterView) -> Plan:
        """Goes on with the turn of this cluster, or ends it."""
        return self._prefill_turn(view) if self.admits(view.cluster) == "new" else self._decode_turn(view)

    def _prefill_turn(self, view: ClusterView) -> Plan:
        """Compute prompts as far as host pools have free blocks. Park each request after its first token."""
        done = tuple([r for r in view.running if not r.in_flight and _has_output(r)])
        for request in done:
            self._parked.add(request)
        room = _Room(view, view.running)
        plan = self._groups[view.cluster.spec].prefill(view, room)
        plan.parked = done
        is_done = not (plan.batches or plan.loads or view.busy) and len(done) == len(view.running)
        num_started = len(self._started) + len(done)
        if is_done and num_started and not self._can_go_on(view, room):
            if self._is_worth_decoding(num_started, self._num_new(view)):
                plan.reshard = self._decode
            else:
                self._mixes = True
            self._parked = _Parked()
        return plan

    def _can_go_on(self, view: ClusterView, room: _Room) -> bool:
        """Return True if the KV of the first waiting prompt fits into host pools. Its device blocks become free."""
        if not view.startable:
            return self._num_new(view) > 0  # its prefix is on its way
        return self._has_room(view.startable[0], room)

    def _has_room(self, request: RequestView, room: _Room) -> bool:
        """Return True if the KV of a prompt fits into host pools after its prefill."""
        return room.has(request, is_shared=self._groups[self._prefill.spec].shares(request))

    def _decode_turn(self, view: ClusterView) -> Plan:
        """Decode with continuous batching, until hosts hold no request to decode and a change to prefill pays off."""
        if self.admits(view.cluster) == "started" and not self._started and view.waiting:
            first, room, num_new = view.waiting[0], _Room(view, view.running), self._num_new(view)
            if self._has_room(first, room) and room.is_ample(first, num_new):
                if self._is_worth_prefilling(first, room, num_new):
                    return Plan(reshard=self._prefill)
                self._mixes = True
        plan = self._groups[view.cluster.spec].plan(view)
        if self._mixes and not (plan.batches or view.busy or view.waiting):
            self._mixes = False  # all have ended
        return plan

    def _is_worth_decoding(self, num_started: int, num_new: int) -> bool:
        """Tells whether the requests that have begun gain more by the other cluster than the way there takes.

        There, batches shrink until the next turn. Here, new requests would be prefilled beside them and take the places
        of those that end, as long as there are any.
        """
        if self._cost is None or not self._parked.number:
            return True
        cost, parked, everyone = self._cost, self._parked, num_started + num_new
        times, length = num_started / parked.number, parked.length
        pieces = [(round(times * number), num_tokens) for number, num_tokens in drain(parked.left)]
        there_s = sum(num_tokens * cost.decode_s(self._decode, number, length) for number, num_tokens in pieces)
        here_s = sum(num_tokens * cost.decode_s(self._prefill, number, length) for number, num_tokens in pieces)
        if num_new:
            here_s = times * sum(parked.left) * cost.decode_s(self._prefill, everyone, length) / everyone
        return here_s - there_s > cost.reshard_s(self._decode)

    def _is_worth_prefilling(self, first: RequestView, room: _Room, num_new: int) -> bool:
        """Tells whether new prompts gain more by the other cluster than the way there and back takes."""
        if (cost := self._cost) is None:
            return True
        length = first.num_tokens
        num_tokens = min(num_new * length, room.num_blocks * first.block_size)
        here_s, there_s = (cost.prefill_s(one, num_tokens, length) for one in (self._decode, self._prefill))
        swapped_s = 2 * cost.swap_s(self._decode, room.num_running)
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

    def prefill(self, view: ClusterView, room: _Room) -> Plan:
        """Continue running prompts, and admit prompts whose KV fits into the host pools. No request is decoded.

        If all instances are to share the first waiting prompt, instances that could step wait until all of them can.
        """
        batch, first = Batch(view, self._all), next(self._candidates(view), None)
        for request in batch.running():
            if request.num_scheduled < request.num_prompt:
                batch.add(self.parts.next(request, batch.budget, self._max_long_tokens(view)))
        can_admit = first is not None and room.has(first, is_shared=self.shares(first))
        if first is not None and can_admit and self._lacks_members(first, view, batch.instances):
            return Plan()
        for request in batch.waiting(self._candidates(view)):
            if self.shares(request):
                part = self._first(request, batch.budget)
            else:
                part = admit_alone(request, batch.budget, room.instances(request, self.instances))
            batch.add(part if part is not None and room.take(part) else None)
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


class _Room:
    """Free blocks of host pools, without the blocks that running requests need when they are offloaded.

    A shared request reserves all of its blocks on each host of its group, because its shares are not known before.
    """

    def __init__(self, view: ClusterView, running: Iterable[RequestView]) -> None:
        cluster, kv = view.cluster, view.kv
        self._pool = {instance: cluster.host_pool(instance) for instance in cluster.instances}
        self._left = Counter({pool: kv.num_free(pool) for pool in self._pool.values()})
        self._size = sum(map(kv.num_blocks, self._left))
        self.num_running = 0
        for request in running:
            number = request.blocks_for(request.num_tokens)
            self._left.subtract(dict.fromkeys(self._pools(request.group), number))
            self.num_running += number

    @property
    def num_blocks(self) -> int:
        return sum(self._left.values())

    def _pools(self, group: Sequence[int]) -> set[int]:
        """Return the host pools of a group."""
        return {self._pool[instance] for instance in group}

    def has(self, request: RequestView, *, is_shared: bool) -> bool:
        """Return True if the KV of a request fits into the pool of a host, or of every host if it is shared."""
        blocks = self._left.values()
        return (min(blocks) if is_shared else max(blocks)) >= _needed(request)

    def is_ample(self, first: RequestView, num_new: int) -> bool:
        """Return True if all new requests fit, at the size of the first, or running requests need at most half.

        If device pools are larger than host pools, a change for each prompt that fits would take most of the time.
        """
        return self.num_blocks >= num_new * _needed(first) or 2 * self.num_running <= self._size

    def instances(self, request: RequestView, instances: Sequence[int]) -> list[int]:
        """Return the instances whose host pool has free blocks for a request."""
        return [instance for instance in instances if self._left[self._pool[instance]] >= _needed(request)]

    def take(self, part: ScheduledPart) -> bool:
        """Reserve the host blocks of an admitted request. Return False, and reserve none, if they are not free."""
        pools, number = self._pools(part.group), _needed(part.request)
        if any(self._left[pool] < number for pool in pools):
            return False
        self._left.subtract(dict.fromkeys(pools, number))
        return True


def _has_output(request: RequestView) -> bool:
    return request.num_known > request.num_prompt


def _needed(request: RequestView) -> int:
    """Counts the blocks of a request when its prompt is computed."""
    return request.blocks_for(request.num_tokens)


class _Parked:
    """The requests that were parked in a turn."""

    def __init__(self) -> None:
        self.left: list[int] = []
        """How many tokens each of them may still put out."""
        self._num_tokens = 0

    def add(self, request: RequestView) -> None:
        self._num_tokens += request.num_tokens
        self.left.append(request.max_tokens - (request.num_known - request.num_prompt))

    @property
    def number(self) -> int:
        return len(self.left)

    @property
    def length(self) -> int:
        """Their mean length in tokens, while they decode."""
        return (self._num_tokens + sum(self.left) // 2) // self.number


def drain(left: Iterable[int]) -> list[tuple[int, int]]:
    """Cuts the time in which requests decode where half of them, half of the others and so on have ended.

    A batch that shrinks may be quicker by another parallelism than a full one: means do not tell.

    Args:
        left: how many tokens each request still puts out, if all begin at once.

    Returns:
        For each piece how many requests decode on average, and for how many tokens it lasts.
    """
    falling, pieces, done = sorted(left, reverse=True), [], 0
    number = len(falling)
    while number:
        end = falling[number // 2]
        if end > done:
            num_decoded = sum(min(one, end) - done for one in falling[:number])
            pieces.append((round(num_decoded / (end - done)), end - done))
            done = end
        number //= 2
    return pieces
