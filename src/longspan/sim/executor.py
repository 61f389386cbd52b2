"""An executor on a virtual clock: a step takes as long as its cost says, and its tokens are invented."""

from __future__ import annotations

import heapq
import math
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from longspan.core.steps import Completion, Forward, MoveKV, Part, Sample, Sampled, Step
from longspan.cost.step_cost import StepCost


class VirtualClock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds since the start of the simulation."""
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Moves on; never back."""
        assert time_s >= self._now_s, "virtual time does not go back"
        self._now_s = time_s


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """`base_s` plus `per_token_s` for every token of the busiest instance; all take that long.

    A transfer takes `per_block_s` for every block.
    """

    base_s: float = 0.01
    per_token_s: float = 0.0005
    num_layers: int = 1
    per_block_s: float = 0.001

    def seconds(self, forward: Forward) -> dict[int, float]:
        """Prices it as `StepCost` says."""
        tokens: Counter[int] = Counter()
        for part in forward.parts:
            for instance, runs in zip(part.group, part.runs, strict=True):
                tokens[instance] += sum(len(run) for run in runs)
        return dict.fromkeys(forward.instances, self.base_s + self.per_token_s * max(tokens.values()))

    def move_s(self, move: MoveKV) -> float:
        """Prices it as `StepCost` says."""
        return self.per_block_s * len(move.copies)

    def received_s(self, move: MoveKV) -> float:
        """Prices it as `StepCost` says."""
        return self.move_s(move)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stream:
    """A move that begins when its Forward does."""

    move: MoveKV
    forward_end_s: float


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A step as it ran, or will.

    Attributes:
        start_s: when all its instances were free, on the virtual clock.
        ends_s: when each was done with it.
    """

    forward: Forward
    start_s: float
    ends_s: Mapping[int, float]


class SimExecutor:
    """Implements `Executor` on a virtual clock. Instances work one step at a time, in order of step numbers.

    All instances of a step start together, once the last is free, and each ends by its own time. The step is complete
    when the last has ended; of steps that end at the same moment the one with the lower number completes first.

    KV moves beside that: an instance sends one `MoveKV` after the other, in the order in which they could begin; what
    it receives takes its own links for as long as the bytes need there, from however many it comes. One that a Forward
    streams begins with it, and ends one layer's time after it at the soonest.

    Args:
        cost: what steps take.
        ready_s: no step starts before.
        watch: is told of each step when its times are settled.
    """

    wakeup = None

    def __init__(
        self,
        *,
        clock: VirtualClock,
        vocab_size: int,
        cost: StepCost | None = None,
        ready_s: float = 0.0,
        watch: Callable[[Ran], None] | None = None,
    ) -> None:
        self._clock, self._vocab_size, self._cost = clock, vocab_size, cost or LinearCost()
        self._ready_s, self._watch = ready_s, watch
        self._free_at = defaultdict[int, float](lambda: ready_s)
        self._sent_at: dict[int, float] = {}
        self._received_at: dict[int, float] = {}
        self._due: list[tuple[float, int, Forward | MoveKV | _Stream]] = []
        self._banned: dict[int, tuple[int, ...]] = {}

    def submit(self, step: Step) -> None:
        """Plans the completions of a Forward or a MoveKV; a Free costs nothing."""
        if isinstance(step, Forward):
            for part in step.parts:
                if part.sampling is not None and part.sampling.banned:
                    self._banned[part.request_id] = part.sampling.banned
            self._run(step)
        elif isinstance(step, MoveKV):
            self._move(step, max(self._clock.now(), self._ready_s), 0.0)
        else:
            for request_id in step.request_ids:
                self._banned.pop(request_id, None)

    def close(self) -> None:
        """Has nothing to end."""

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Moves the clock to the next completion, but no further than `timeout_s`."""
        limit = math.inf if timeout_s is None else self._clock.now() + timeout_s
        due, done = self._due, list[Completion]()
        while not done and due and due[0][0] <= limit:
            at_s = due[0][0]
            self._clock.advance_to(at_s)
            while due and due[0][0] == at_s:
                _, _, what = heapq.heappop(due)
                if isinstance(what, _Stream):
                    self._move(what.move, at_s, what.forward_end_s)
                else:
                    done.append(self._completion(what))
        if not done and timeout_s is not None:
            self._clock.advance_to(limit)
        return done

    def _completion(self, step: Forward | MoveKV) -> Completion:
        parts = step.parts if isinstance(step, Forward) else ()
        sampled = tuple([self._invent(part, part.sample) for part in parts if part.sample is not None])
        return Completion(number=step.number, sampled=sampled, bytes_sent={})

    def _run(self, forward: Forward) -> None:
        start = max(self._clock.now(), *map(self._free_at.__getitem__, forward.instances))
        ends = {instance: start + seconds for instance, seconds in self._cost.seconds(forward).items()}
        assert len(ends) == len(forward.instances), "each instance that takes part has its time"
        self._free_at.update(ends)
        heapq.heappush(self._due, (max(ends.values()), forward.number, forward))
        for move in forward.streams:
            stream = _Stream(move=move, forward_end_s=max(ends[source] for source in move.sources))
            heapq.heappush(self._due, (start, move.number, stream))
        if self._watch is not None:
            self._watch(Ran(forward=forward, start_s=start, ends_s=ends))

    def _move(self, move: MoveKV, ready_s: float, forward_end_s: float) -> None:
        """It begins now or when those before it have ended, and takes its lanes for the time of its bytes."""
        seconds, received_s = self._cost.move_s(move), self._cost.received_s(move)
        start = max(ready_s, *(self._sent_at.get(source, 0.0) for source in move.sources))
        received_at = max(start, *(self._received_at.get(target, 0.0) for target in move.targets)) + received_s
        end = max(start + seconds, received_at)
        self._sent_at.update(dict.fromkeys(move.sources, end))
        self._received_at.update(dict.fromkeys(move.targets, received_at))
        if forward_end_s:
            end = max(end, forward_end_s + seconds / self._cost.num_layers)
        heapq.heappush(self._due, (end, move.number, move))

    def _invent(self, part: Part, sample: Sample) -> Sampled:
        """Makes up a token by request and position only, so that recomputation gives it again."""
        token = zlib.crc32(b"%d %d" % (part.request_id, sample.position)) % self._vocab_size
        while sample.below_minimum and token in self._banned.get(part.request_id, ()):
            token = (token + 1) % self._vocab_size
        return Sampled(request_id=part.request_id, token=token)
