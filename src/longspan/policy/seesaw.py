"""Seesaw: prefill and decode take turns, each on a cluster that is split as suits it (Su et al., 2025).

Prompts are prefilled until the memory of the hosts is full, or nothing waits; their KV goes there as each is done. Then
the model is re-sharded, and all of it is decoded, while further KV comes in from hosts; and so on (§4.2).

Where costs are known, clusters only change when that gains more than it takes; else it is as in the paper.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longspan.core.cluster import Cluster
from longspan.core.policy import Policy
from longspan.core.view import Admitted, ClusterView, Plan, RequestView, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.batching import Batch, single_part
from longspan.policy.chunked import admit_alone
from longspan.policy.facts import Facts


@dataclass(frozen=True, kw_only=True)
class SeesawOptions:
    """Options that say when `seesaw` changes clusters.

    Attributes:
        strict: change clusters whenever the paper does, also when that takes longer than it gains.
    """

    strict: bool = False


class Seesaw(Policy, name="seesaw"):
    """Prefills on one cluster and decodes on the other; each request is on one instance."""

    Options = SeesawOptions
    takes_phases = True

    def __init__(self, instances: tuple[int, ...], options: SeesawOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        if not facts.turns:
            problem = "seesaw prefills and decodes on the same devices, one after the other: give prefill_parallel and"
            raise ParameterError("policy", f"{problem} decode_parallel", "seesaw")
        self._prefill, self._decode = facts.turns
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

    def arrived(self, request: RequestView) -> None:
        self._num_unfinished += 1
        if _has_output(request) and not request.group:
            self._started.add(request.id)

    def ended(self, request: RequestView) -> None:
        self._num_unfinished -= 1
        self._started.discard(request.id)

    def preempted(self, request: RequestView) -> None:
        if _has_output(request):
            self._started.add(request.id)

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
        """Parks whoever has its first token, and prefills as many others as hosts have room for."""
        done = tuple([r for r in view.running if not r.in_flight and _has_output(r)])
        for request in done:
            self._parked.add(request)
        room = _Room(view, view.running)
        batch, instances = Batch(view, frozenset(view.cluster.instances)), tuple(view.cluster.instances)
        for request in batch.running():
            if request.num_scheduled < request.num_prompt:
                batch.add(single_part(request, request.group[0], request.num_scheduled, batch.budget))
        for request in batch.waiting():
            part = admit_alone(request, batch.budget, room.instances(request, instances))
            batch.add(part if part is not None and room.take(part) else None)
        plan = batch.plan()
        plan.parked = done
        is_done = not (plan.batches or view.busy) and len(done) == len(view.running)
        num_started = len(self._started) + len(done)
        if is_done and num_started and not self._can_go_on(view, room):
            if self._is_worth_decoding(num_started, self._num_new(view)):
                plan.reshard = self._decode
            else:
                self._mixes = True
            self._parked = _Parked()
        return plan

    def _can_go_on(self, view: ClusterView, room: _Room) -> bool:
        """Tells whether a prompt waits that hosts have room for: devices have it soon."""
        if not view.startable:
            return self._num_new(view) > 0  # its prefix is on its way
        return room.has(view.startable[0])

    def _decode_turn(self, view: ClusterView) -> Plan:
        """Decodes with continuous batching, until hosts have nothing more to decode and new prompts are worth it."""
        if self.admits(view.cluster) == "started" and not self._started and view.waiting:
            first, room, num_new = view.waiting[0], _Room(view, view.running), self._num_new(view)
            if room.is_ample(first, num_new):
                if self._is_worth_prefilling(first, room, num_new):
                    return Plan(reshard=self._prefill)
                self._mixes = True
        batch, instances = Batch(view, frozenset(view.cluster.instances)), tuple(view.cluster.instances)
        for request in batch.running():
            batch.add(single_part(request, request.group[0], request.num_scheduled, batch.budget))
        for request in batch.waiting():
            batch.add(admit_alone(request, batch.budget, instances))
        plan = batch.plan()
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


class _Room:
    """Blocks in the memory of hosts, but for those that running requests will need when they leave the devices."""

    def __init__(self, view: ClusterView, running: Iterable[RequestView]) -> None:
        cluster, kv = view.cluster, view.kv
        self._pool = {instance: cluster.host_pool(instance) for instance in cluster.instances}
        self._left = Counter({pool: kv.num_free(pool) for pool in self._pool.values()})
        self._size = sum(map(kv.num_blocks, self._left))
        self.num_running = 0
        for request in running:
            number = request.blocks_for(request.num_tokens)
            self._left[self._pool[request.group[0]]] -= number
            self.num_running += number

    @property
    def num_blocks(self) -> int:
        return sum(self._left.values())

    def has(self, request: RequestView) -> bool:
        """Tells whether any host has room for a request."""
        return max(self._left.values()) >= _needed(request)

    def is_ample(self, first: RequestView, num_new: int) -> bool:
        """Tells whether hosts have room for all new requests, if they are like the first, or for that and half empty.

        Where devices hold more than hosts, a change for each prompt that fits would take most of the time.
        """
        lacks = self.num_blocks < num_new * _needed(first)
        return self.has(first) and not (lacks and 2 * self.num_running > self._size)

    def instances(self, request: RequestView, instances: Sequence[int]) -> list[int]:
        """Returns those whose host has room for a request."""
        return [instance for instance in instances if self._left[self._pool[instance]] >= _needed(request)]

    def take(self, part: ScheduledPart) -> bool:
        """Takes the room for a request to be admitted; returns whether there was any."""
        pool, number = self._pool[part.group[0]], _needed(part.request)
        if self._left[pool] < number:
            return False
        self._left[pool] -= number
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
