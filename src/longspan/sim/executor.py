"""An executor that computes nothing: a step takes as long as its cost says, and its tokens are invented."""

from __future__ import annotations

import heapq
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from longspan.core.steps import Completion, Forward, Part, Sample, Sampled, Step
from longspan.sim.clock import VirtualClock


@dataclass(frozen=True, kw_only=True)
class LinearCost:
    """Seconds of a Forward: `base_s` plus `per_token_s` for every token of its busiest instance."""

    base_s: float = 0.01
    per_token_s: float = 0.0005

    def seconds(self, forward: Forward) -> float:
        """Duration from the moment all its instances are free."""
        tokens: Counter[int] = Counter()
        for part in forward.parts:
            for instance, runs in zip(part.group, part.runs, strict=True):
                tokens[instance] += sum(len(run) for run in runs)
        return self.base_s + self.per_token_s * max(tokens.values())


class SimExecutor:
    """Implements `Executor` on a virtual clock. Instances work one step at a time, in order of step numbers.

    `lag_s(instance, step)` is how much longer than its cost an instance takes for a step; its peers do not wait for it.
    """

    def __init__(
        self,
        *,
        clock: VirtualClock,
        vocab_size: int,
        cost: LinearCost | None = None,
        lag_s: Callable[[int, int], float] = lambda instance, step: 0.0,  # noqa: ARG005
    ) -> None:
        self._clock, self._vocab_size, self._cost, self._lag_s = clock, vocab_size, cost or LinearCost(), lag_s
        self._free_at: dict[int, float] = {}
        self._due: list[tuple[float, int, Forward]] = []
        self._banned: dict[int, tuple[int, ...]] = {}

    def submit(self, step: Step) -> None:
        """Plans a Forward's completion; a Free costs nothing."""
        if isinstance(step, Forward):
            begun = {part.request_id: part.sampling for part in step.parts if part.sampling is not None}
            self._banned.update((request_id, sampling.banned) for request_id, sampling in begun.items())
            start = max(self._clock.now(), *(self._free_at.get(i, 0.0) for i in step.instances))
            done = start + self._cost.seconds(step)
            ends = {instance: done + self._lag_s(instance, step.number) for instance in step.instances}
            self._free_at.update(ends)
            heapq.heappush(self._due, (max(ends.values()), step.number, step))
        else:
            for request_id in step.request_ids:
                self._banned.pop(request_id, None)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Moves the clock to the next completion, but no further than `timeout_s`."""
        now = self._clock.now()
        if not self._due or (timeout_s is not None and self._due[0][0] > now + timeout_s):
            self._clock.advance_to(now + (timeout_s or 0.0))
            return []
        end = self._due[0][0]
        self._clock.advance_to(end)
        done = []
        while self._due and self._due[0][0] == end:
            _, _, forward = heapq.heappop(self._due)
            sampled = tuple(self._invent(part, part.sample) for part in forward.parts if part.sample is not None)
            done.append(Completion(number=forward.number, sampled=sampled, bytes_sent={}))
        return done

    def _invent(self, part: Part, sample: Sample) -> Sampled:
        """A token that depends on the request and the position only, so that recomputation gives it again."""
        token = zlib.crc32(f"{part.request_id} {sample.position}".encode()) % self._vocab_size
        while sample.below_minimum and token in self._banned[part.request_id]:
            token = (token + 1) % self._vocab_size
        return Sampled(request_id=part.request_id, token=token)
