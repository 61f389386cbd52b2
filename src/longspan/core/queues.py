"""The waiting requests, the running requests by instance, and the steps in flight."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence

from longspan.core.blocks import coupled_instances
from longspan.core.cluster import Cluster
from longspan.core.request import Request
from longspan.core.steps import Completion, Forward
from longspan.core.view import Admitted


class Waiting:
    """Waiting requests in the order of their ids. A preempted request returns to its earlier position.

    Attributes:
        changes: number of requests added or removed so far.
        num_started: number of these requests with output tokens.
    """

    def __init__(self) -> None:
        self.changes = self.num_started = 0
        self._all: list[Request] = []
        self._num_followers = 0

    def __len__(self) -> int:
        return len(self._all)

    def add(self, request: Request) -> None:
        self._all.insert(self._place(request), request)
        self.changes += 1
        self._num_followers += request.leader is not None
        self.num_started += bool(request.output)

    def remove(self, request: Request) -> None:
        del self._all[self._place(request)]
        self.changes += 1
        self._num_followers -= request.leader is not None
        self.num_started -= bool(request.output)

    def runnable(self, admitted: Admitted = "all") -> Sequence[Request]:
        """Return the requests that lack only blocks and slots: their leader, if any, has computed their prompt.

        `admitted` selects requests without ("new") or with ("started") output tokens.
        """
        if admitted == "all" or (admitted == "new" and not self.num_started):
            return [r for r in self._all if not r.must_wait] if self._num_followers else self._all
        is_started = admitted == "started"
        return [r for r in self._all if bool(r.output) == is_started and not r.must_wait]

    def _place(self, request: Request) -> int:
        return bisect_left(self._all, request.id, key=lambda waiting: waiting.id)


class Running:
    """Running requests in order of admission. The engine changes it, and reports the requests that have changed.

    A request after `pause` runs on no instance.

    Attributes:
        changes: number of changes of the running requests and steps in flight of each instance.
        occupied: the instances that take part in any request.
    """

    def __init__(self, num_instances: int) -> None:
        self.replace(num_instances)

    def replace(self, num_instances: int) -> None:
        """Replace the instances by `num_instances` instances, on which no request runs."""
        self.changes = [0] * num_instances
        self.occupied: set[int] = set()
        self._all: dict[int, Request] = {}
        self._groups: dict[int, tuple[int, ...]] = {}
        self._by_group: dict[tuple[int, ...], dict[int, Request]] = {}
        self._coupled_sets: list[frozenset[int]] | None = None  # None after a change of the groups
        self._on: list[dict[int, Request]] = [{} for _ in range(num_instances)]
        self._tokens, self._blocks = [0] * num_instances, [0] * num_instances
        self._demands: dict[int, _Demand] = {}
        self._stale: set[int] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._all.values())

    def get(self, request_id: int) -> Request | None:
        return self._all.get(request_id)

    def on(self, instance: int) -> Collection[Request]:
        return self._on[instance].values()

    @property
    def coupled_sets(self) -> Sequence[frozenset[int]]:
        if self._coupled_sets is None:
            self._coupled_sets = coupled_instances(group for group in self._by_group if len(group) > 1)
        return self._coupled_sets

    @property
    def shared(self) -> Iterator[Request]:
        shared = (requests for group, requests in self._by_group.items() if len(group) > 1)
        return (request for requests in shared for request in requests.values())

    def within(self, instances: frozenset[int]) -> Iterator[Request]:
        if len(instances) == 1:
            yield from self._by_group.get(tuple(instances), {}).values()
            return
        for group, requests in self._by_group.items():
            if instances.issuperset(group):
                yield from requests.values()

    @property
    def due_tokens(self) -> Sequence[int]:
        self._update_demands()
        return self._tokens

    @property
    def due_blocks(self) -> Sequence[int]:
        self._update_demands()
        return self._blocks

    def add(self, request: Request) -> None:
        self._all[request.id] = request
        self._add_to_group(request)

    def regroup(self, request: Request) -> None:
        if self._groups[request.id] != request.group:
            self._remove_from_group(request)
            self._add_to_group(request)

    def pause(self, request: Request) -> None:
        """Schedule no more steps of a request that keeps its KV on its group, until it gets another group."""
        self._remove_from_group(request)
        self._groups[request.id] = ()

    def remove(self, request: Request) -> None:
        if self._all.pop(request.id, None) is not None:
            self._remove_from_group(request)
            self.changed(request.group, ())

    def changed(self, instances: Iterable[int], request_ids: Iterable[int]) -> None:
        """Record changes of these requests' demand, and of the steps in flight on these instances."""
        for instance in instances:
            self.changes[instance] += 1
        self._stale.update(request_ids)

    def _add_to_group(self, request: Request) -> None:
        group = self._groups[request.id] = request.group
        if group not in self._by_group:
            self._by_group[group] = {}
            if len(group) > 1:
                self._coupled_sets = None
        self._by_group[group][request.id] = request
        for instance in group:
            self._on[instance][request.id] = request
        self.occupied.update(group)
        self.changed(group, (request.id,))

    def _remove_from_group(self, request: Request) -> None:
        group = self._groups.pop(request.id)
        if not group:
            return  # the request is paused
        for instance in group:
            del self._on[instance][request.id]
            if not self._on[instance]:
                self.occupied.discard(instance)
        del self._by_group[group][request.id]
        if not self._by_group[group]:
            del self._by_group[group]
            if len(group) > 1:
                self._coupled_sets = None
        self._set_demand(request.id, None)
        self.changed(group, ())

    def _update_demands(self) -> None:
        for request_id in self._stale:
            if self._groups.get(request_id):
                demand = _demand_of(self._all[request_id])
                if demand != self._demands.get(request_id):
                    self._set_demand(request_id, demand)
        self._stale.clear()

    def _set_demand(self, request_id: int, demand: _Demand | None) -> None:
        before = self._demands.pop(request_id, None)
        if demand is not None:
            self._demands[request_id] = demand
        for entry, sign in ((before, -1), (demand, 1)):
            if entry is not None:
                group, tokens, kv_owners, blocks = entry
                for instance in group:
                    self._tokens[instance] += sign * tokens
                for instance in kv_owners:
                    self._blocks[instance] += sign * blocks


_Demand = tuple[tuple[int, ...], int, tuple[int, ...], int]
"""A group and the tokens that a running request needs of each member, then KV owners and the blocks of each."""


def _demand_of(request: Request) -> _Demand:
    num_tokens, group, kv_owners = request.num_tokens, request.group, request.kv_owners
    missing = request.blocks_for(num_tokens) - len(request.table)
    num_loading = request.residency.num_loading
    num_ready = request.num_computed if num_loading is None else num_loading
    return group, -(-(request.num_known - num_ready) // len(group)), kv_owners, -(-missing // len(kv_owners))


class StepOrder:
    """The steps in flight, and completions that wait for earlier steps.

    A completion waits until no earlier step is in flight on an instance of its step.
    """

    def __init__(self) -> None:
        self._sent: dict[int, Forward] = {}
        self._queues: defaultdict[int, deque[int]] = defaultdict(deque)  # by instance, the numbers of steps not ready
        self._early: dict[int, Completion] = {}
        self._ready: deque[Completion] = deque()

    def __bool__(self) -> bool:
        return bool(self._sent)

    def send(self, forward: Forward) -> None:
        """Record an emitted step. Numbers ascend."""
        self._sent[forward.number] = forward
        for instance in forward.instances:
            self._queues[instance].append(forward.number)

    def complete(self, done: Completion) -> None:
        """Add a completion. `take` returns it once no earlier step is in flight on its instances."""
        self._early[done.number] = done
        candidates = [done.number]  # a heap: steps that are ready are taken in the order of their numbers
        while candidates:
            number = heapq.heappop(candidates)
            queues = [self._queues[instance] for instance in self._sent[number].instances]
            if number not in self._early or any(queue[0] != number for queue in queues):
                continue
            self._ready.append(self._early.pop(number))
            for queue in queues:
                queue.popleft()
                if queue and queue[0] in self._early:
                    heapq.heappush(candidates, queue[0])

    @property
    def has_ready(self) -> bool:
        return bool(self._ready)

    def take(self) -> tuple[Forward, Completion]:
        """Return the next completion, and the step that it completes."""
        done = self._ready.popleft()
        return self._sent.pop(done.number), done

    def clear(self) -> list[Forward]:
        """Remove all steps and completions. Return the steps in flight."""
        steps = list(self._sent.values())
        self._sent.clear()
        self._queues.clear()
        self._early.clear()
        self._ready.clear()
        return steps


class Occupancy:
    """Steps in flight per instance. An instance with its number in `max_steps` is full.

    Instances can be replaced while no step is in flight. Busy seconds are kept by instance number.
    """

    def __init__(self, max_steps: Sequence[int]) -> None:
        self._busy_s = list[float]()
        self.replace(max_steps)

    def replace(self, max_steps: Sequence[int]) -> None:
        self._max_steps, self._counts = max_steps, [0] * len(max_steps)
        self.busy, self.full = set[int](), set[int]()
        self._busy_since_s = [0.0] * len(max_steps)
        self._busy_s += [0.0] * (len(max_steps) - len(self._busy_s))

    @property
    def all_full(self) -> bool:
        return len(self.full) == len(self._max_steps)

    def begin(self, instances: Iterable[int], now_s: float) -> None:
        for i in instances:
            assert i not in self.full, f"instance {i} is full"
            self._counts[i] += 1
            if self._counts[i] == 1:
                self.busy.add(i)
                self._busy_since_s[i] = now_s
            if self._counts[i] == self._max_steps[i]:
                self.full.add(i)

    def end(self, instances: Iterable[int], now_s: float) -> None:
        for i in instances:
            assert i in self.busy, f"instance {i} has no step"
            self._counts[i] -= 1
            self.full.discard(i)
            if not self._counts[i]:
                self.busy.remove(i)
                self._busy_s[i] += now_s - self._busy_since_s[i]

    def busy_s(self, now_s: float) -> list[float]:
        """Return the seconds in which each instance had a step in flight."""
        running_s = {i: now_s - self._busy_since_s[i] for i in self.busy}
        return [ended_s + running_s.get(i, 0.0) for i, ended_s in enumerate(self._busy_s)]


class Queues:
    """Queues of all requests of an engine. A request waits or runs. Steps in flight name running requests.

    Attributes:
        requests: by id, until they have ended and no step names them.
    """

    def __init__(self, cluster: Cluster, max_steps_in_flight: int) -> None:
        self.requests: dict[int, Request] = {}
        self.waiting, self.running, self.steps = Waiting(), Running(cluster.num_instances), StepOrder()
        self._max_steps_in_flight = max_steps_in_flight
        self.occupancy = Occupancy(self._step_limits(cluster))

    def _step_limits(self, cluster: Cluster) -> list[int]:
        return [self._max_steps_in_flight - 1 + cluster.pp(instance) for instance in cluster.instances]

    def replace(self, cluster: Cluster) -> None:
        """Replace the instances by the instances of another cluster. No request runs, and no step is in flight."""
        assert not (self.running or self.steps), "the instances are idle"
        self.running.replace(cluster.num_instances)
        self.occupancy.replace(self._step_limits(cluster))

    @property
    def can_emit(self) -> bool:
        """Whether an instance has capacity for a step, and a request might take part in it."""
        if self.occupancy.all_full:
            return False
        return bool(self.waiting) or not self.occupancy.full.issuperset(self.running.occupied)

    @property
    def unfinished(self) -> list[Request]:
        """Requests that have not ended."""
        return [request for request in self.requests.values() if request.finish_reason is None]

    @property
    def parkable(self) -> list[Request]:
        """Running requests that no step names."""
        return [request for request in self.running if not request.in_flight]

    def live(self, request_id: int) -> Request | None:
        """Return a request that has not ended. Tokens sampled after its end are dropped."""
        request = self.requests.get(request_id)
        return request if request is not None and request.finish_reason is None else None

    def remove(self, request: Request) -> None:
        """Remove a request from the queue that it is in."""
        if request.group:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    def begin(self, forward: Forward, now_s: float) -> None:
        """Count an emitted step."""
        self.steps.send(forward)
        self.occupancy.begin(forward.instances, now_s)
        self._count_step(forward, 1)

    def end(self, forward: Forward, now_s: float) -> None:
        """Count a completed or lost step."""
        self.occupancy.end(forward.instances, now_s)
        self._count_step(forward, -1)

    def lose_steps(self, now_s: float) -> list[Request]:
        """Forget the steps in flight and the requests that have ended. Return all other requests."""
        for forward in self.steps.clear():
            self.end(forward, now_s)
        ended = [request.id for request in self.requests.values() if request.finish_reason is not None]
        for request_id in ended:
            del self.requests[request_id]
        return list(self.requests.values())

    def _count_step(self, forward: Forward, change: int) -> None:
        number, changed = forward.number, []
        for part in forward.parts:
            request = self.requests[part.request_id]
            request.num_steps += change
            request.last_step = max(request.last_step, number)
            # A decode in the middle of a block does not change the request's demand.
            is_decode = part.start >= request.num_prompt and part.stop == part.start + 1
            if not is_decode or part.rotation is not None or part.stop % request.block_size < 2:
                changed.append(request.id)
        self.running.changed(forward.instances, changed)
