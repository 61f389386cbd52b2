"""A simulation: the engine and a policy as they serve, on a virtual clock; what can go wrong in it, and its result."""

from __future__ import annotations

import gc
import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.policy import Policy
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.transitions import Transition, phase_seconds
from longspan.cost.step_cost import StepCost
from longspan.sim.executor import MoveTiming, SimExecutor, StepTiming, VirtualClock
from longspan.sim.spec import Faults, ServiceLevel
from longspan.workload.arrivals import Arrival, TokenText

_VOCAB_SIZE = 2**15
_LOSS, _ARRIVAL = 0, 1
_MANY = 1000
"""Arrivals from which on searching them for garbage takes a notable part of a simulation."""


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Callbacks about a simulation's progress.

    Attributes:
        ran: of each step, when its times are settled.
        moved: of each transfer, when it has ended.
        moment: of the engine, whenever it has planned and something has completed.
        admitted: of a request's id in the engine, and its index among the arrivals.
        lost: of the time, when a worker is.
        finished: how many requests are, after each.
    """

    ran: Callable[[StepTiming], None] | None = None
    moved: Callable[[MoveTiming], None] | None = None
    moment: Callable[[float, Engine], None] | None = None
    admitted: Callable[[int, int], None] | None = None
    lost: Callable[[float], None] | None = None
    finished: Callable[[int], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A request that was served, in seconds of the virtual clock; `index` counts arrivals.

    Attributes:
        ttft_s: from its arrival to its first token.
        tbt_s: between its tokens, `[num_output_tokens - 1]`.
        num_missing_tokens: of its answer, for which a request has no room; 0 for what was asked for.
    """

    index: int
    arrival_s: float
    ttft_s: float
    tbt_s: array[float]
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_missing_tokens: int

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def mean_tbt_s(self) -> float:
        """The mean time between its tokens, 0 for a single one; vLLM's TPOT."""
        return sum(self.tbt_s) / len(self.tbt_s) if self.tbt_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Result:
    """A simulation that has ended, with all that was served or refused.

    Attributes:
        served: by arrival index.
        refused: reasons, by arrival index.
        makespan_s: from the start to the last token.
        busy_s: seconds per instance in which it had a step to run.
        max_queue: most requests that waited at once after what could be started had been.
        num_host_hits, num_disk_hits: tokens whose KV came back from the memory of hosts, and from their disks.
        num_swapped_blocks: KV blocks that were copied from devices to hosts and back.
        transitions: changes of clusters that take turns; `phase_s` has the seconds of each phase, see `phase_seconds`.
    """

    served: tuple[Served, ...]
    refused: Mapping[int, str]
    makespan_s: float
    busy_s: tuple[float, ...]
    max_queue: int
    num_preemptions: int
    num_host_hits: int = 0
    num_disk_hits: int = 0
    num_swapped_blocks: int = 0
    transitions: tuple[Transition, ...] = ()
    phase_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def ttfts_s(self) -> NDArray[np.float64]:
        """Times to first token, by arrival."""
        return np.array([one.ttft_s for one in self.served])

    @property
    def tbts_s(self) -> NDArray[np.float64]:
        """Times between tokens, of all requests together."""
        return np.concatenate([np.frombuffer(one.tbt_s) for one in self.served if one.tbt_s] or [np.empty(0)])

    @property
    def num_tokens(self) -> int:
        return sum(one.num_prompt_tokens + one.num_output_tokens for one in self.served)

    @property
    def truncated(self) -> tuple[Served, ...]:
        """The requests with a shorter answer than was asked for."""
        return tuple(one for one in self.served if one.num_missing_tokens)

    def num_good(self, level: ServiceLevel) -> int:
        """Counts the requests that kept within a service level."""
        return sum(level.met_by(ttft_s=one.ttft_s, mean_tbt_s=one.mean_tbt_s) for one in self.served)

    def attainment(self, level: ServiceLevel) -> float:
        """Returns the part of all requests, refused ones included, that kept within a service level."""
        return self.num_good(level) / max(1, len(self.served) + len(self.refused))

    def summary(self, level: ServiceLevel | None = None) -> dict[str, float | int | None]:
        """Returns the numbers that `longspan simulate --json` prints; a number is None where there is nothing to count.

        Throughput counts the tokens of prompts and answers. Utilisation is the part of the makespan in which an
        instance had a step to run, over all instances. With a service level, goodput counts requests that kept within
        it, per second of the makespan.
        """
        made_s, ttft, tbt = self.makespan_s, self.ttfts_s, self.tbts_s
        good: dict[str, float | int | None] = {}
        if level is not None and level.is_given:
            good["goodput_requests_per_s"] = self.num_good(level) / made_s if made_s else None
            good["slo_attainment"] = self.attainment(level)
        return good | {
            "ttft_p50_s": percentile(ttft, 50),
            "ttft_p99_s": percentile(ttft, 99),
            "tbt_p50_s": percentile(tbt, 50),
            "tbt_p99_s": percentile(tbt, 99),
            "e2e_p50_s": percentile(np.array([one.e2e_s for one in self.served]), 50),
            "throughput_tokens_per_s": self.num_tokens / made_s if made_s else None,
            "max_queue": self.max_queue,
            "utilisation": sum(self.busy_s) / len(self.busy_s) / made_s if made_s else None,
            "num_completed": len(self.served),
            "makespan_s": made_s,
            "num_refused": len(self.refused),
            "num_truncated": len(self.truncated),
            "num_preemptions": self.num_preemptions,
            "num_prompt_tokens": sum(one.num_prompt_tokens for one in self.served),
            "num_output_tokens": sum(one.num_output_tokens for one in self.served),
            "num_cached_tokens": sum(one.num_cached_tokens for one in self.served),
        }


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """Interpolates as numpy does; None for no values."""
    return float(np.percentile(values, percent)) if len(values) else None


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    policy: Policy,
    cost: StepCost,
    *,
    faults: Faults | None = None,
    watch: Observers | None = None,
) -> Result:
    """Serves all arrivals, and returns what became of them.

    Raises:
        ValueError: when the longest request does not fit the KV pools, or a fault names no instance.
    """
    faults = faults or Faults()
    faults.check(config.cluster.num_instances)
    simulation = _Simulation(arrivals, config, policy, cost, faults, watch or Observers())
    with _garbage_left_alone(arrivals):
        return simulation.run()


@contextmanager
def _garbage_left_alone(arrivals: Sequence[Arrival]) -> Iterator[None]:
    """Keeps the garbage collector from searching existing objects again and again, if there are many arrivals."""
    if len(arrivals) < _MANY:
        yield
        return
    gc.collect()  # an earlier engine, say, which is in a cycle
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Simulation:
    def __init__(
        self,
        arrivals: Sequence[Arrival],
        config: EngineConfig,
        policy: Policy,
        cost: StepCost,
        faults: Faults,
        watch: Observers,
    ) -> None:
        self._arrivals, self._cost, self._faults, self._watch = arrivals, cost, faults, watch
        self._clock = VirtualClock()
        self._engine = Engine(policy=policy, executor=self._executor(0.0), clock=self._clock, config=config)
        self._served: list[Served] = []
        self._refused: dict[int, str] = {}
        self._indices: dict[int, int] = {}
        self._num_to_come = len(arrivals)
        self._said: dict[int, tuple[Sequence[int], ...]] = {}  # before a further turn
        self._further: dict[int, list[int]] = defaultdict(list)
        self._events: list[tuple[float, int, int]] = [(at_s, _LOSS, 0) for at_s in faults.lost_at_s]
        """When, what, and for an arrival its index."""
        for index, arrival in enumerate(arrivals):
            if arrival.follows is None:
                self._events.append((arrival.due_s, _ARRIVAL, index))
            else:
                self._further[arrival.follows].append(index)
        heapq.heapify(self._events)

    def _executor(self, ready_s: float) -> SimExecutor:
        cost = self._cost
        if ready_s and self._engine.config.phases:
            cost = cost.resharded(self._engine.config.cluster)
        return SimExecutor(
            clock=self._clock,
            vocab_size=_VOCAB_SIZE,
            cost=cost,
            slow=self._faults.slow,
            ready_s=ready_s,
            watch=self._watch.ran,
            watch_moves=self._watch.moved,
        )

    def run(self) -> Result:
        """Steps the engine until all is served."""
        engine, clock, watch, max_queue = self._engine, self._clock, self._watch, 0
        while engine.has_unfinished or self._num_to_come:
            if not engine.has_unfinished:
                clock.advance_to(max(clock.now(), self._events[0][0]))
            if not engine.has_ready:
                self._deliver()
            timeout_s = self._events[0][0] - clock.now() if self._events else None
            for request in engine.step(timeout_s):
                if request.finish_reason is not None:
                    self._finish(request)
            max_queue = max(max_queue, engine.num_waiting)
            if watch.moment is not None:
                watch.moment(clock.now(), engine)
        makespan_s = max((one.finished_s for one in self._served), default=0.0)
        return Result(
            served=tuple(sorted(self._served, key=lambda one: one.index)),
            refused=self._refused,
            makespan_s=makespan_s,
            busy_s=tuple(engine.load().busy_s),
            max_queue=max_queue,
            num_preemptions=engine.counts.num_preemptions,
            num_host_hits=engine.kv.counts.num_hits,
            num_disk_hits=engine.kv.counts.num_disk_hits,
            num_swapped_blocks=engine.kv.counts.num_swapped_blocks,
            transitions=tuple(engine.transitions),
            phase_s=phase_seconds(engine.transitions, engine.config.phases, 0.0, makespan_s),
        )

    def _deliver(self) -> None:
        """Gives the engine all that is due by now."""
        now_s = self._clock.now()
        while self._events and self._events[0][0] <= now_s:
            _, kind, index = heapq.heappop(self._events)
            if kind == _ARRIVAL:
                self._add(index)
                continue
            if self._watch.lost is not None:
                self._watch.lost(now_s)
            self._engine.restart(self._executor(now_s + self._faults.seconds_to_restart))

    def _add(self, index: int) -> None:
        arrival, said = self._arrivals[index], self._said.pop(index, None)
        prompt = arrival.prompt if said is None else TokenText([*said, arrival.prompt])
        try:
            request = self._engine.add(prompt, _params(arrival.output_len), cache_salt=arrival.cache_salt)
        except ValueError as error:
            self._refuse(index, str(error))
            return
        self._num_to_come -= 1
        self._indices[request.id] = index
        if self._watch.admitted is not None:
            self._watch.admitted(request.id, index)

    def _refuse(self, index: int, reason: str) -> None:
        """Refuses a request, and with it the further turns of its conversation."""
        self._refused[index] = reason
        self._num_to_come -= 1
        for further in self._further.pop(index, ()):
            self._refuse(further, reason)

    def _finish(self, request: Request) -> None:
        index, metrics = self._indices.pop(request.id), request.metrics
        assert metrics.ttft_s is not None and metrics.finished_s is not None
        served = Served(
            index=index,
            arrival_s=metrics.arrival_s,
            ttft_s=metrics.ttft_s,
            tbt_s=array("d", metrics.tbt_s),
            finished_s=metrics.finished_s,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=len(request.output),
            num_cached_tokens=metrics.num_cached_tokens,
            num_missing_tokens=self._arrivals[index].output_len - len(request.output),
        )
        self._served.append(served)
        for further in self._further.pop(index, ()):
            self._said[further] = (request.prompt, tuple(request.output))
            heapq.heappush(self._events, (served.finished_s + self._arrivals[further].due_s, _ARRIVAL, further))
        if self._watch.finished is not None:
            self._watch.finished(len(self._served) + len(self._refused))


@cache
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
