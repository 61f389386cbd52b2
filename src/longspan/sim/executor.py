"""An executor on a virtual clock: a step takes as long as its cost says, and its tokens are invented."""

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
from longspan.cost.flows import alone_s
from longspan.cost.step_cost import StepCost
from longspan.sim.links import Links


class VirtualClock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Moves on; never back."""
        assert time_s >= self._now_s, "virtual time does not go back"
        self._now_s = time_s


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """A step as it ran, or will.

    Attributes:
        stages: begin and end of each pipeline stage of each instance.
        start_s: when all instances were free.
        ends_s: when each is done with it.
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
    """A transfer as it ran: when it began, and when all of it was there."""

    move: MoveKV
    start_s: float
    end_s: float


class SimExecutor:
    """Runs steps on a virtual clock. Each stage of an instance works one step at a time, in order of step numbers.

    A stage of all instances of a step starts at once: when the last has ended the stage before, and is free. Each ends
    by its own time. The step is complete when the last has ended; of steps that end at the same moment the one with the
    lower number completes first. A token that is not known yet is there once the step that samples it has ended.

    KV moves beside that, from each instance to each other in the order of the steps, as in `Links`. A `MoveKV` begins
    once its source has done the Forwards before it; out to a host, and in from there, at once. One that a Forward
    streams begins with that, and ends one layer's time after it at the soonest.

    Args:
        slow: by which factor an instance computes slowly, see `apply_slowdown`.
        ready_s: no step starts before.
        watch: is told of each step when its times are settled.
        watch_moves: is told of each transfer when it has ended.
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
        """By number, the transfers under way and when they began, if they are watched."""
        self._free_at = defaultdict[tuple[int, int], float](lambda: ready_s)
        self._sampled_at: dict[int, float] = {}
        """By request, when its latest token is there: of instances with stages, whose first does not wait for that."""
        self._links = Links()
        self._leaving: dict[int, tuple[int, float]] = {}
        """By the number of a move, how many of its flows have not left, and when the latest of the others is there."""
        self._due: list[tuple[float, int, Forward | None]] = []
        """When a step is complete, its number, and the step if it is a Forward."""
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
            self._send(step, ready_s=max([self._clock.now(), self._ready_s, *ends_s]))
        elif isinstance(step, Reshard):
            self._regroup(step)
        else:
            for request_id in step.request_ids:
                self._banned.pop(request_id, None)
                self._sampled_at.pop(request_id, None)

    def close(self) -> None: ...

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Moves the clock to the next completion, but no further than `timeout_s`."""
        limit = math.inf if timeout_s is None else self._clock.now() + timeout_s
        due, links = self._due, self._links
        done: list[Completion] = []
        while not done and (at_s := min(due[0][0] if due else math.inf, links.next_s)) <= limit and at_s < math.inf:
            self._clock.advance_to(at_s)
            for number, there_s in links.advance(at_s):
                self._leave(number, there_s)
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
        """Begins when all is computed; later steps are those of the other cluster."""
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
            layer_s = alone_s(self._cost.flows(move)) / self._cost.num_layers
            self._send(move, ready_s=start, least_s=max(ends[source] for source in move.sources) + layer_s)
        if self._watch is not None:
            self._watch(timing)

    def _run_stages(self, forward: Forward) -> tuple[dict[tuple[int, int], tuple[float, float]], float]:
        """Returns begin and end of each stage of each instance, and when all have ended."""
        taken_s, free_at, start = self._cost.stage_seconds(forward), self._free_at, self._clock.now()
        assert len(taken_s) == len(forward.instances), "each instance that takes part has its times"
        num_stages = max(map(len, taken_s.values()))
        if num_stages > 1:
            unknown = [part.request_id for part in forward.parts if part.unknown_on is not None]
            start = max([start, *(self._sampled_at.get(request_id, 0.0) for request_id in unknown)])
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for stage in range(num_stages):
            own_s = {instance: stages[stage] for instance, stages in taken_s.items() if stage < len(stages)}
            if self._slow:
                own_s = apply_slowdown(forward, own_s, self._slow)
            start = max([start, *[free_at[instance, stage] for instance in own_s]])
            for instance, seconds in own_s.items():
                free_at[instance, stage] = end = start + seconds
                found[instance, stage] = start, end
            start += max(own_s.values())
        if num_stages > 1:
            self._sampled_at.update({part.request_id: start for part in forward.parts if part.sample is not None})
        return found, start

    def _send(self, move: MoveKV, *, ready_s: float, least_s: float = 0.0) -> None:
        flows = self._cost.flows(move)
        self._leaving[move.number] = len(flows), 0.0
        if self._watch_moves is not None:
            self._moving[move.number] = move, ready_s
        for flow in flows:
            self._links.send(move.number, flow, ready_s=ready_s, least_s=least_s)

    def _leave(self, number: int, there_s: float) -> None:
        """Takes a flow of a move that has left: the move is complete when the latest is there."""
        num_flows, latest_s = self._leaving.pop(number)
        latest_s = max(latest_s, there_s)
        if num_flows > 1:
            self._leaving[number] = num_flows - 1, latest_s
        else:
            heapq.heappush(self._due, (latest_s, number, None))

    def _invent(self, part: Part, sample: Sample) -> Sampled:
        """Derives a token from request and position only, so that recomputation gives the same."""
        token = zlib.crc32(b"%d %d" % (part.request_id, sample.position)) % self._vocab_size
        while sample.below_minimum and token in self._banned.get(part.request_id, ()):
            token = (token + 1) % self._vocab_size
        return Sampled(request_id=part.request_id, token=token)


def apply_slowdown(forward: Forward, own_s: Mapping[int, float], factors: Mapping[int, float]) -> dict[int, float]:
    """Scales the seconds of each instance in a step by its factor, what it waits and samples included; links stay fast.

    The delay of an instance reaches all others of its ring, and those behind it in a chain. A delay that came by one
    chain is not passed on to another chain of the step. A delay is the time beyond that of the least factor in the
    step: instances that are equally slow do not delay each other.
    """
    found = {i: seconds * factors.get(i, 1.0) for i, seconds in own_s.items()}
    least = min(factors.get(i, 1.0) for i in own_s)
    own_s = {i: least * seconds for i, seconds in own_s.items()}
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
