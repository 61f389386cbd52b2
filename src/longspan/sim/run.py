"""A simulation: the real engine and policy on a virtual clock, with faults, and its result."""

from __future__ import annotations

import gc
import heapq
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from longspan.sim.spec import DEFAULT_CLASS, Faults, ServiceLevel
from longspan.workload.arrivals import Arrival, Clients, ClosedLoop, TokenText

_VOCAB_SIZE = 2**15
_LOSS, _ARRIVAL = 0, 1
_MANY = 1000
"""Number of arrivals from which garbage collection of these objects slows a simulation noticeably."""


@dataclass(frozen=True, kw_only=True)
class Observers:
    """Callbacks of a running simulation.

    Attributes:
        ran: gets each step when its times are settled.
        moved: gets each transfer when it has ended.
        moment: gets the time and the engine after each engine step.
        admitted: gets a request's id in the engine, and its index among the arrivals.
        lost: gets the time when a worker is lost.
        finished: gets the number of finished requests, after each.
    """

    ran: Callable[[StepTiming], None] | None = None
    moved: Callable[[MoveTiming], None] | None = None
    moment: Callable[[float, Engine], None] | None = None
    admitted: Callable[[int, int], None] | None = None
    lost: Callable[[float], None] | None = None
    finished: Callable[[int], None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A served request, with times in seconds of the virtual clock. `index` is its position among the arrivals.

    Attributes:
        ttft_s: from its arrival to its first token.
        tbt_s: between its tokens, `[num_output_tokens - 1]`.
        num_missing_tokens: requested output tokens that were not generated. 0 unless the maximum length was reached.
        slo_class: the class that the arrival names, if any.
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
    slo_class: str = ""

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.arrival_s

    @property
    def mean_tbt_s(self) -> float:
        """The mean time between its tokens (vLLM's TPOT). 0 for a single token."""
        return sum(self.tbt_s) / len(self.tbt_s) if self.tbt_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """The reason and size of a refused request. A later turn of a conversation counts its own tokens only."""

    reason: str
    num_prompt_tokens: int
    slo_class: str = ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a simulation, with all served and refused requests.

    Attributes:
        served: ordered by arrival index.
        refused: by arrival index.
        makespan_s: from the start to the last token.
        busy_s: seconds per instance in which it had a step to run.
        max_queue: maximum number of waiting requests after planning.
        num_host_hits, num_disk_hits: tokens whose KV was loaded from host memory, and from disk.
        num_swapped_blocks: KV blocks copied between devices and hosts, in both directions.
        transitions: changes between the clusters of alternating phases.
        phase_s: seconds of each phase, see `phase_seconds`.
    """

    served: tuple[Served, ...]
    refused: Mapping[int, Refused]
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
        """Times to first token, by arrival index."""
        return np.array([request.ttft_s for request in self.served])

    @property
    def tpots_s(self) -> NDArray[np.float64]:
        """Mean times between tokens of the requests with at least two output tokens."""
        return np.array([request.mean_tbt_s for request in self.served if request.tbt_s])

    @property
    def tbts_s(self) -> NDArray[np.float64]:
        """Times between tokens, of all requests together."""
        return np.concatenate([np.frombuffer(r.tbt_s) for r in self.served if r.tbt_s] or [np.empty(0)])

    @property
    def num_tokens(self) -> int:
        return sum(request.num_prompt_tokens + request.num_output_tokens for request in self.served)

    @property
    def truncated(self) -> tuple[Served, ...]:
        """The requests with fewer output tokens than requested."""
        return tuple(request for request in self.served if request.num_missing_tokens)

    def num_good(self, level: ServiceLevel) -> int:
        """Count the requests that met the bounds of their class."""
        return sum(
            level.of(request.slo_class, request.num_prompt_tokens).met_by(
                ttft_s=request.ttft_s, mean_tbt_s=request.mean_tbt_s
            )
            for request in self.served
        )

    def by_class(self, level: ServiceLevel) -> dict[str, Result]:
        """Return the requests of each class of a service level, with the makespan of the whole run."""
        served, refused = defaultdict[str, list[Served]](list), defaultdict[str, dict[int, Refused]](dict)
        for request in self.served:
            served[level.of(request.slo_class, request.num_prompt_tokens).name].append(request)
        for index, other in self.refused.items():
            refused[level.of(other.slo_class, other.num_prompt_tokens).name][index] = other
        names = [*(slo_class.name for slo_class in level.classes), DEFAULT_CLASS]
        return {
            name: replace(self, served=tuple(served[name]), refused=refused[name])
            for name in names
            if name in served or name in refused
        }

    def attainment(self, level: ServiceLevel) -> float:
        """Return the fraction of all requests, including refused requests, that met a service level."""
        return self.num_good(level) / max(1, len(self.served) + len(self.refused))

    def summary(self, level: ServiceLevel | None = None) -> dict[str, float | int | None]:
        """Return the metrics that `longspan simulate --json` prints. A metric without data is None.

        TPOT is a request's mean time between tokens, of requests with at least two, as in vLLM's benchmark. TBT is of
        all tokens together. Throughput counts the tokens of prompts and answers. Utilisation is the fraction of the
        makespan in which an instance had a step to run, averaged over all instances. With a service level, goodput
        counts the requests that met it, per second of the makespan.
        """
        makespan_s, ttft, tbt, tpot = self.makespan_s, self.ttfts_s, self.tbts_s, self.tpots_s
        num_output_tokens = sum(request.num_output_tokens for request in self.served)
        good: dict[str, float | int | None] = {}
        if level is not None and level.is_given:
            good["goodput_requests_per_s"] = self.num_good(level) / makespan_s if makespan_s else None
            good["slo_attainment"] = self.attainment(level)
        return good | {
            "ttft_mean_s": mean(ttft),
            "ttft_p50_s": percentile(ttft, 50),
            "ttft_p99_s": percentile(ttft, 99),
            "tpot_mean_s": mean(tpot),
            "tpot_p50_s": percentile(tpot, 50),
            "tpot_p99_s": percentile(tpot, 99),
            "tbt_p50_s": percentile(tbt, 50),
            "tbt_p99_s": percentile(tbt, 99),
            "e2e_p50_s": percentile(np.array([request.e2e_s for request in self.served]), 50),
            "throughput_requests_per_s": len(self.served) / makespan_s if makespan_s else None,
            "throughput_output_tokens_per_s": num_output_tokens / makespan_s if makespan_s else None,
            "throughput_tokens_per_s": self.num_tokens / makespan_s if makespan_s else None,
            "max_queue": self.max_queue,
            "utilisation": sum(self.busy_s) / len(self.busy_s) / makespan_s if makespan_s else None,
            "num_completed": len(self.served),
            "makespan_s": makespan_s,
            "num_refused": len(self.refused),
            "num_truncated": len(self.truncated),
            "num_preemptions": self.num_preemptions,
            "num_prompt_tokens": sum(request.num_prompt_tokens for request in self.served),
            "num_output_tokens": num_output_tokens,
            "num_cached_tokens": sum(request.num_cached_tokens for request in self.served),
        }


def mean(values: NDArray[np.float64]) -> float | None:
    """Return the mean. None without values."""
    return float(np.mean(values)) if len(values) else None


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """Return numpy's interpolated percentile. None without values."""
    return float(np.percentile(values, percent)) if len(values) else None


def simulate(
    arrivals: Sequence[Arrival],
    config: EngineConfig,
    policy: Policy,
    cost: StepCost,
    *,
    clients: Clients | None = None,
    faults: Faults | None = None,
    watch: Observers | None = None,
) -> Result:
    """Serve all arrivals, and return the results.

    Args:
        clients: send the requests in order, in a closed loop. None: they arrive at their times.

    Raises:
        ValueError: if the longest request does not fit the KV pools, or a fault names an unknown instance.
    """
    faults = faults or Faults()
    faults.check(config.cluster.num_instances)
    watch = watch or Observers()
    simulation = _Simulation(arrivals, config, policy, cost, clients=clients, faults=faults, watch=watch)
    with _frozen_objects(arrivals):
        return simulation.run()


@contextmanager
def _frozen_objects(arrivals: Sequence[Arrival]) -> Iterator[None]:
    """Keep existing objects out of garbage collection, if there are many arrivals."""
    if len(arrivals) < _MANY:
        yield
        return
    gc.collect()  # for example an earlier engine, which is in a cycle
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
        *,
        clients: Clients | None,
        faults: Faults,
        watch: Observers,
    ) -> None:
        self._arrivals, self._cost, self._faults, self._watch = arrivals, cost, faults, watch
        self._clock = VirtualClock()
        self._engine = Engine(policy=policy, executor=self._executor(0.0), clock=self._clock, config=config)
        self._served: list[Served] = []
        self._refused: dict[int, Refused] = {}
        self._indices: dict[int, int] = {}
        self._num_pending = len(arrivals)
        self._histories: dict[int, tuple[Sequence[int], ...]] = {}  # by later turn: the previous prompt and answer
        self._next_turns: dict[int, list[int]] = defaultdict(list)
        self._events: list[tuple[float, int, int]] = [(at_s, _LOSS, 0) for at_s in faults.lost_at_s]
        """Time, kind, and the index of an arrival."""
        first_turns = [index for index, arrival in enumerate(arrivals) if arrival.follows is None]
        for index, arrival in enumerate(arrivals):
            if arrival.follows is not None:
                self._next_turns[arrival.follows].append(index)
        self._loop = None if clients is None else ClosedLoop(clients, first_turns)
        begin = first_turns if self._loop is None else self._loop.begin()
        self._events += [(arrivals[index].due_s, _ARRIVAL, index) for index in begin]
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
        """Step the engine until all requests are finished."""
        engine, clock, watch, max_queue = self._engine, self._clock, self._watch, 0
        while engine.has_unfinished or self._num_pending:
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
        makespan_s = max((request.finished_s for request in self._served), default=0.0)
        return Result(
            served=tuple(sorted(self._served, key=lambda request: request.index)),
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
        """Deliver due arrivals and worker losses to the engine."""
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
        arrival, history = self._arrivals[index], self._histories.pop(index, ())
        prompt = TokenText([*history, arrival.prompt]) if history else arrival.prompt
        try:
            request = self._engine.add(prompt, _params(arrival.output_len), cache_salt=arrival.cache_salt)
        except ValueError as error:
            self._refuse(index, str(error), len(prompt))
            self._end_conversation(self._clock.now())
            return
        self._num_pending -= 1
        self._indices[request.id] = index
        if self._watch.admitted is not None:
            self._watch.admitted(request.id, index)

    def _refuse(self, index: int, reason: str, num_tokens: int) -> None:
        """Refuse a request, and all later turns of its conversation."""
        slo_class = self._arrivals[index].slo_class
        self._refused[index] = Refused(reason=reason, num_prompt_tokens=num_tokens, slo_class=slo_class)
        self._num_pending -= 1
        for next_turn in self._next_turns.pop(index, ()):
            self._refuse(next_turn, reason, len(self._arrivals[next_turn].prompt))

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
            slo_class=self._arrivals[index].slo_class,
        )
        self._served.append(served)
        turns = self._next_turns.pop(index, ())
        for turn in turns:
            self._histories[turn] = (request.prompt, tuple(request.output))
            heapq.heappush(self._events, (served.finished_s + self._arrivals[turn].due_s, _ARRIVAL, turn))
        if not turns:
            self._end_conversation(served.finished_s)
        if self._watch.finished is not None:
            self._watch.finished(len(self._served) + len(self._refused))

    def _end_conversation(self, at_s: float) -> None:
        """In a closed loop, let idle clients begin their next conversations."""
        if self._loop is not None:
            for turn in self._loop.ended():
                heapq.heappush(self._events, (at_s + self._loop.think_s, _ARRIVAL, turn))


@cache
def _params(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, seed=0)
