"""Steps that were sent and are not complete: their order, and how many of them each instance has."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from longspan.core.steps import Completion, Forward


class StepOrder:
    """The steps that were sent, and those of their completions that must wait for earlier ones.

    A step waits for the latest that was sent before it to each of its instances: that one waits for those before it.
    """

    def __init__(self) -> None:
        self._sent: dict[int, Forward] = {}
        self._latest: dict[int, int] = {}  # of each instance
        self._before: dict[int, set[int]] = {}  # of each step that is not ready: those it waits for
        self._after: defaultdict[int, list[int]] = defaultdict(list)  # of such a step: those that wait for it
        self._early: dict[int, Completion] = {}
        self._ready: deque[Completion] = deque()

    def __bool__(self) -> bool:
        return bool(self._sent)

    def send(self, forward: Forward) -> None:
        """Takes note of a step with the highest number so far."""
        number, instances = forward.number, forward.instances
        before = self._before.keys() & map(self._latest.get, instances)
        for earlier in before:
            self._after[earlier].append(number)
        self._latest.update(dict.fromkeys(instances, number))
        self._before[number] = before
        self._sent[number] = forward

    def complete(self, done: Completion) -> None:
        """Takes a completion; `take` gives it once it waits for no earlier step on one of its instances."""
        self._early[done.number] = done
        candidates = [done.number]
        while candidates:
            number = heapq.heappop(candidates)
            if number not in self._early or self._before[number]:
                continue
            self._ready.append(self._early.pop(number))
            del self._before[number]
            for later in self._after.pop(number, ()):
                self._before[later].remove(number)
                heapq.heappush(candidates, later)

    @property
    def has_ready(self) -> bool:
        """A completion waits for no other, so that `take` can be called."""
        return bool(self._ready)

    def take(self) -> tuple[Forward, Completion]:
        """Returns the next completion, and its step, which is over."""
        done = self._ready.popleft()
        return self._sent.pop(done.number), done

    def clear(self) -> list[Forward]:
        """Forgets everything; returns the steps that were not over."""
        steps = list(self._sent.values())
        self._sent.clear()
        self._latest.clear()
        self._before.clear()
        self._after.clear()
        self._early.clear()
        self._ready.clear()
        return steps


class Occupancy:
    """Counts steps in flight per instance; `most` has for each instance the number with which it is full."""

    def __init__(self, most: Sequence[int]) -> None:
        self._most, self._counts = most, [0] * len(most)
        self.busy, self.full = set[int](), set[int]()
        self._busy_s, self._busy_since_s = [0.0] * len(most), [0.0] * len(most)

    @property
    def all_full(self) -> bool:
        """No instance can be sent a step."""
        return len(self.full) == len(self._most)

    def begin(self, instances: Iterable[int], now_s: float) -> None:
        """Counts a step that was sent to these."""
        for i in instances:
            assert i not in self.full, f"instance {i} is full"
            self._counts[i] += 1
            if self._counts[i] == 1:
                self.busy.add(i)
                self._busy_since_s[i] = now_s
            if self._counts[i] == self._most[i]:
                self.full.add(i)

    def end(self, instances: Iterable[int], now_s: float) -> None:
        """Counts a step of these as over."""
        for i in instances:
            assert i in self.busy, f"instance {i} has no step"
            self._counts[i] -= 1
            self.full.discard(i)
            if not self._counts[i]:
                self.busy.remove(i)
                self._busy_s[i] += now_s - self._busy_since_s[i]

    def busy_s(self, now_s: float) -> list[float]:
        """Counts the seconds in which each instance had a step to run."""
        since = enumerate(zip(self._busy_s, self._busy_since_s, strict=True))
        return [done + (now_s - begun if i in self.busy else 0.0) for i, (done, begun) in since]
