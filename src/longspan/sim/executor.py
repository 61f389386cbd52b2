"""An executor on a virtual clock: the cost model gives the duration of a step, and tokens are invented."""

from __future__ import annotations

import heapq
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from longspan.core.blocks import coupled_instances
from longspan.core.steps import BytesSent, Completion, Forward, MoveKV, Part, Reshard, Sample, Sampled, Step
from longspan.cost.flows import Flow, alone_s
from longspan.cost.step_cost import StepCost
from longspan.sim.links import Links


class VirtualClock:
    """A clock that only `advance_to` moves."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Set the time, which never goes back."""
        assert time_s >= self._now_s, "virtual time does not go back"
        self._now_s = time_s


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """The times of a step. They are settled when it is submitted.

    Attributes:
        stages: begin and end, by instance and pipeline stage.
        start_s: begin of the first stage.
        ends_s: end of the last stage, by instance.
    """

    forward: Forward
    stages: Mapping[tuple[int, int], tuple[float, float]]

    @property
    def start_s(self) -> float:
        return min(begin for begin, _ in self.stages.values())

    @cached_property
    def ends_s(self) -> dict[int, float]:
        ends: dict[int, float] = {}
        for (instance, _), (_, end) in self.stages.items():
            ends[instance] = max(end, ends.get(instance, 0.0))
        return ends


@dataclass(frozen=True, kw_only=True)
class MoveTiming:
    """The times of a transfer: when it began, and when all of it had arrived."""

    move: MoveKV
    start_s: float
    end_s: float


class SimExecutor:
    """Runs steps on a virtual clock. A stage of an instance executes one step at a time, in order of step numbers.

    All instances of a step start a stage at the same time, when each has finished the previous stage and is idle. Each
    ends after its own duration. The step is complete when the last instance has ended. Of steps that end at the same
    time, the lowest number completes first. An unknown token is available when the step that samples it has ended.

    KV moves run concurrently with computation, between two instances in the order of the steps, see `Links`. A `MoveKV`
    begins when its sources have finished all earlier Forwards. Copies to and from hosts begin immediately. A stream of
    a Forward begins with it, and ends at least one layer's transfer time after it.

    Args:
        slow: slowdown factors by instance, see `apply_slowdown`.
        ready_s: the earliest start of a step.
        watch: called with each step when its times are settled.
        watch_moves: called with each transfer when it has ended.
    """

    wakeup = None

    def __init__(
        self,
        *,
        clock: VirtualClock,
        vocab_size: int,
        cost: StepCost,
        slow: Mapping[int, float] | None = None,
        ready_s: float = 0.0,
        watch: Callable[[StepTiming], None] | None = None,
        watch_moves: Callable[[MoveTiming], None] | None = None,
    ) -> None:
        self._clock, self._vocab_size, self._cost = clock, vocab_size, cost
        self._slow, self._ready_s, self._watch = slow or {}, ready_s, watch
        self._watch_moves = watch_moves
        self._moving: dict[int, tuple[MoveKV, float]] = {}
        """The transfers in flight and their begin, by number, if they are watched."""
        self._free_at = defaultdict[tuple[int, int], float](lambda: ready_s)
        self._sampled_at: dict[int, float] = {}
        """By request, when its latest token is available. Only for instances with several stages."""
        self._links = Links()
        self._sending: dict[int, tuple[int, float]] = {}
        """By move number: the number of flows in flight, and the latest arrival of the finished flows."""
        self._due: list[tuple[float, int, Forward | None]] = []
        """Completions: time, step number, and the step if it is a Forward."""
        self._copied: dict[int, BytesSent] = {}
        self._banned: dict[int, tuple[int, ...]] = {}

    def submit(self, step: Step) -> None:
        if isinstance(step, Forward):
            for part in step.parts:
                if part.sampling is not None and part.sampling.banned:
                    self._banned[part.request_id] = part.sampling.banned
            self._run(step)
        elif isinstance(step, MoveKV):
            sources = step.sources if step.way == "across" else ()
            ends_s = [end_s for (instance, _), end_s in self._free_at.items() if instance in sources]
            self._send(step, self._cost.flows(step), ready_s=max([self._clock.now(), self._ready_s, *ends_s]))
        elif isinstance(step, Reshard):
            self._regroup(step)
        else:
            for request_id in step.request_ids:
                self._banned.pop(request_id, None)
                self._sampled_at.pop(request_id, None)

    def close(self) -> None: ...

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Advance the clock to the next completion, but at most by `timeout_s`."""
        limit = math.inf if timeout_s is None else self._clock.now() + timeout_s
        due, links = self._due, self._links
        done: list[Completion] = []
        while not done and (at_s := min(due[0][0] if due else math.inf, links.next_s)) <= limit and at_s < math.inf:
            self._clock.advance_to(at_s)
            for number, arrives_s in links.advance(at_s):
                self._finish_flow(number, arrives_s)
            while due and due[0][0] == at_s:
                _, number, forward = heapq.heappop(due)
                done.append(self._completion(number, () if forward is None else forward.parts))
        if not done and timeout_s is not None:
            self._clock.advance_to(limit)
        return done

    def _completion(self, number: int, parts: Sequence[Part]) -> Completion:
        if self._watch_moves is not None and number in self._moving:
            move, start_s = self._moving.pop(number)
            self._watch_moves(MoveTiming(move=move, start_s=start_s, end_s=self._clock.now()))
        sampled = tuple([self._invent(part, part.sample) for part in parts if part.sample is not None])
        return Completion(number=number, sampled=sampled, bytes_sent=self._copied.pop(number, {}))

    def _regroup(self, step: Reshard) -> None:
        """Start the Reshard when all earlier computation has ended. Later steps run on the new cluster."""
        start_s = max([self._clock.now(), self._ready_s, *self._free_at.values()])
        cost = self._cost.reshard(step.cluster)
        end_s = start_s + cost.seconds
        self._cost = self._cost.resharded(step.cluster)
        self._free_at.clear()
        self._copied[step.number] = {("weights_copy", "same_host"): round(cost.copied_bytes)}
        heapq.heappush(self._due, (end_s, step.number, None))

    def _run(self, forward: Forward) -> None:
        stages, done_s = self._run_stages(forward)
        heapq.heappush(self._due, (done_s, forward.number, forward))
        if not forward.streams and self._watch is None:
            return
        timing = StepTiming(forward=forward, stages=stages)
        start, ends = timing.start_s, timing.ends_s
        for move in forward.streams:
            layer_s = alone_s(flows := self._cost.flows(move)) / self._cost.num_layers
            self._send(move, flows, ready_s=start, earliest_s=max([ends[source] for source in move.sources]) + layer_s)
        if self._watch is not None:
            self._watch(timing)

    def _run_stages(self, forward: Forward) -> tuple[dict[tuple[int, int], tuple[float, float]], float]:
        """Return begin and end by instance and stage, and the end of the step."""
        durations, free_at, start = self._cost.stage_seconds(forward), self._free_at, self._clock.now()
        assert len(durations) == len(forward.instances), "every instance of the step has durations"
        num_stages = max(map(len, durations.values()))
        if num_stages > 1:
            unknown = [part.request_id for part in forward.parts if part.unknown_on is not None]
            start = max([start, *(self._sampled_at.get(request_id, 0.0) for request_id in unknown)])
        times: dict[tuple[int, int], tuple[float, float]] = {}
        for stage in range(num_stages):
            own_s = {instance: stages[stage] for instance, stages in durations.items() if stage < len(stages)}
            if self._slow:
                own_s = apply_slowdown(forward, own_s, self._slow)
            start = max([start, *[free_at[instance, stage] for instance in own_s]])
            for instance, seconds in own_s.items():
                free_at[instance, stage] = end = start + seconds
                times[instance, stage] = start, end
            start += max(own_s.values())
        if num_stages > 1:
            self._sampled_at.update({part.request_id: start for part in forward.parts if part.sample is not None})
        return times, start

    def _send(self, move: MoveKV, flows: Sequence[Flow], *, ready_s: float, earliest_s: float = 0.0) -> None:
        self._sending[move.number] = len(flows), 0.0
        if self._watch_moves is not None:
            self._moving[move.number] = move, ready_s
        for flow in flows:
            self._links.send(move.number, flow, ready_s=ready_s, earliest_s=earliest_s)

    def _finish_flow(self, number: int, arrives_s: float) -> None:
        """Record that a flow of a move was sent. The move completes when its latest flow arrives."""
        num_flows, latest_s = self._sending.pop(number)
        latest_s = max(latest_s, arrives_s)
        if num_flows > 1:
            self._sending[number] = num_flows - 1, latest_s
        else:
            heapq.heappush(self._due, (latest_s, number, None))

    def _invent(self, part: Part, sample: Sample) -> Sampled:
        """Derive a token from request and position only, so that recomputation gives the same token."""
        token = zlib.crc32(b"%d %d" % (part.request_id, sample.position)) % self._vocab_size
        while sample.below_minimum and token in self._banned.get(part.request_id, ()):
            token = (token + 1) % self._vocab_size
        return Sampled(request_id=part.request_id, token=token)


def apply_slowdown(forward: Forward, own_s: Mapping[int, float], factors: Mapping[int, float]) -> dict[int, float]:
    """Scale the seconds of each instance in a step by its factor, including its waits and sampling. Links stay fast.

    An instance delays all other members of its ring, and the later members of its chain. A delay from one chain is not
    passed on to another chain of the step. Delays are relative to the smallest factor in the step, so equally slow
    instances do not delay each other.
    """
    scaled_s = {i: seconds * factors.get(i, 1.0) for i, seconds in own_s.items()}
    smallest = min(factors.get(i, 1.0) for i in own_s)
    own_s = {i: smallest * seconds for i, seconds in own_s.items()}
    parts = [part for part in forward.parts if len(part.group) > 1]
    for part in parts:
        if part.exchange.traits.skewed:
            late_s = -math.inf
            for instance in part.group:
                scaled_s[instance] = max(scaled_s[instance], own_s[instance] + late_s)
                late_s = max(late_s, scaled_s[instance] - own_s[instance])
    for coupled in coupled_instances({part.group for part in parts if not part.exchange.traits.skewed}):
        late_s = max(scaled_s[instance] - own_s[instance] for instance in coupled)
        scaled_s.update({instance: max(scaled_s[instance], own_s[instance] + late_s) for instance in coupled})
    return scaled_s
