"""A simulation: the engine and a policy as they serve, on a virtual clock, and what can go wrong in it."""

from __future__ import annotations

import gc
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from longspan.core.engine import Engine, EngineConfig
from longspan.core.owners import coupled_instances
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward, MoveKV
from longspan.core.view import EnginePolicy
from longspan.cost.step_cost import StepCost
from longspan.sim.executor import Ran, SimExecutor, VirtualClock
from longspan.sim.result import Result, Served
from longspan.sim.spec import Faults
from longspan.workload.arrivals import Arrival, Texts


@dataclass(frozen=True)
class SlowedCost:
    """A cost under which some instances compute slowly, by all of their time, also what they wait and sample.

    Links are as quick as ever. Whoever shares a ring with a slow one ends with it, and those behind it in a chain are
    as late; who is late only for that does not make others of a further chain in the same step late.
    """

    cost: StepCost
    factors: Mapping[int, float]

    @property
    def num_layers(self) -> int:
        """Prices it as `StepCost` says."""
        return self.cost.num_layers

    def move_s(self, move: MoveKV) -> float:
        """Prices it as `StepCost` says."""
        return self.cost.move_s(move)

    def received_s(self, move: MoveKV) -> float:
        """Prices it as `StepCost` says."""
        return self.cost.received_s(move)

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Prices it so that whoever works with a slow instance waits for it, but for those before it in a chain."""
        own_s = self.cost.seconds(forward)
        found = {i: seconds * self.factors.get(i, 1.0) for i, seconds in own_s.items()}
        parts = [part for part in forward.parts if len(part.group) > 1]
        for part in parts:
            if part.exchange.traits.skewed:
                late_s = -math.inf
                for instance in part.group:
                    found[instance] = max(found[instance], own_s[instance] + late_s)
                    late_s = max(late_s, found[instance] - own_s[instance])
        for coupled in coupled_instances({part.group for part in parts if not part.exchange.traits.skewed}):
            late_s = max(found[instance] - own_s[instance] for instance in coupled)
            found.update({instance: max(found[instance], own_s[instance] + late_s) for instance in coupled})
        return found


_VOCAB_SIZE = 2**15
_LOSS, _ARRIVAL = 0, 1
_MANY = 1000
"""From so many arrivals on, searching them for garbage takes a notable part of a simulation."""
_Event = tuple[float, int, int]
"""When, what, and for an arrival its index."""


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Callables that are told what happens.

    Attributes:
        ran: of each step, when its times are settled.
        moment: of the engine, whenever it has planned and something has completed.
        admitted: of a request's id in the engine, and its index among the arrivals.
        lost: of the time, when a worker is.
        finished: how many requests are, after each.
    """

    ran: Callable[[Ran], None] | None = None
    moment: Callable[[float, Engine], None] | None = None
    admitted: Callable[[int, int], None] | None = None
    lost: Callable[[float], None] | None = None
    finished: Callable[[int], None] | None = None


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    policy: EnginePolicy,
    cost: StepCost,
    *,
    faults: Faults | None = None,
    watch: Watch | None = None,
) -> Result:
    """Serves all arrivals, and returns what became of them.

    Raises:
        ValueError: when the longest request does not fit the KV pools, or a fault names no instance.
    """
    faults = faults or Faults()
    faults.check(config.cluster.num_instances)
    slowed = SlowedCost(cost, faults.slow) if faults.slow else cost
    simulation = _Simulation(arrivals, config, policy, slowed, faults, watch or Watch())
    with _garbage_left_alone(arrivals):
        return simulation.run()


@contextmanager
def _garbage_left_alone(arrivals: Sequence[Arrival]) -> Iterator[None]:
    """Keeps what is there already from being searched for garbage again and again, if there are many arrivals."""
    if len(arrivals) < _MANY:
        yield
        return
    gc.collect()  # an earlier engine, say, which is in a cycle
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(kw_only=True)
class _Counts:
    max_queue: int = 0
    served: list[Served] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: EngineConfig,
        policy: EnginePolicy,
        cost: StepCost,
        faults: Faults,
        watch: Watch,
    ) -> None:
        self._arrivals, self._config, self._cost, self._faults, self._watch = arrivals, config, cost, faults, watch
        self._clock = VirtualClock()
        self._engine = Engine(policy=policy, executor=self._executor(0.0), clock=self._clock, config=config)
        self._counts = _Counts()
        self._indices: dict[int, int] = {}
        self._num_to_come = len(arrivals)
        self._said: dict[int, tuple[Sequence[int], ...]] = {}  # before a further turn
        self._further: dict[int, list[int]] = defaultdict(list)
        self._events: list[_Event] = [(at, _LOSS, 0) for at in faults.lost_at_s]
        for index, arrival in enumerate(arrivals):
            if arrival.follows is None:
                self._events.append((arrival.due_s, _ARRIVAL, index))
            else:
                self._further[arrival.follows].append(index)
        heapq.heapify(self._events)

    def _executor(self, ready_s: float) -> SimExecutor:
        return SimExecutor(
            clock=self._clock, vocab_size=_VOCAB_SIZE, cost=self._cost, ready_s=ready_s, watch=self._watch.ran
        )

    def run(self) -> Result:
        """Until nothing is left to come or to do."""
        engine, counts = self._engine, self._counts
        while engine.has_unfinished or self._num_to_come:
            if not engine.has_unfinished:
                self._clock.advance_to(max(self._clock.now(), self._events[0][0]))
            if not engine.has_ready:
                self._deliver()
            timeout_s = self._events[0][0] - self._clock.now() if self._events else None
            for request in engine.step(timeout_s):
                if request.finish_reason is not None:
                    self._finish(request)
            counts.max_queue = max(counts.max_queue, engine.num_waiting)
            if self._watch.moment is not None:
                self._watch.moment(self._clock.now(), engine)
        return Result(
            served=tuple(sorted(counts.served, key=lambda one: one.index)),
            refused=counts.refused,
            num_arrivals=len(self._arrivals),
            makespan_s=max((one.finished_s for one in counts.served), default=0.0),
            busy_s=tuple(engine.load().busy_s),
            max_queue=counts.max_queue,
            num_preemptions=engine.num_preemptions,
        )

    def _deliver(self) -> None:
        """Hands the engine all that is due by now."""
        while self._events and self._events[0][0] <= self._clock.now():
            _, kind, index = heapq.heappop(self._events)
            if kind == _LOSS:
                self._lose()
            else:
                self._add(index)

    def _lose(self) -> None:
        now = self._clock.now()
        if self._watch.lost is not None:
            self._watch.lost(now)
        self._engine.restart(self._executor(now + self._faults.seconds_to_restart))

    def _add(self, index: int) -> None:
        arrival, said = self._arrivals[index], self._said.pop(index, None)
        prompt = arrival.prompt if said is None else Texts([*said, arrival.prompt])
        try:
            request = self._engine.add(prompt, _params(arrival.output_len))
        except ValueError as error:
            self._refuse(index, str(error))
            return
        self._num_to_come -= 1
        self._indices[request.id] = index
        if self._watch.admitted is not None:
            self._watch.admitted(request.id, index)

    def _refuse(self, index: int, reason: str) -> None:
        """Nor do further turns of its conversation come."""
        self._counts.refused[index] = reason
        self._num_to_come -= 1
        for further in self._further.pop(index, ()):
            self._refuse(further, reason)

    def _finish(self, request: Request) -> None:
        index = self._indices.pop(request.id)
        served = Served.of(request, index)
        self._counts.served.append(served)
        for further in self._further.pop(index, ()):
            self._said[further] = (request.prompt, tuple(request.output))
            heapq.heappush(self._events, (served.finished_s + self._arrivals[further].due_s, _ARRIVAL, further))
        if self._watch.finished is not None:
            self._watch.finished(len(self._counts.served) + len(self._counts.refused))


@cache
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
