"""Completions in the order of steps.

A step is complete when its last rank has reported. Ranks work first in, first out, but each at its own pace: one that
is done early may go on with a later step, in which others have no part, and complete it before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque

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
        """A step with the highest number so far."""
        number, instances = forward.number, forward.instances
        before = self._before.keys() & map(self._latest.get, instances)
        for earlier in before:
            self._after[earlier].append(number)
        self._latest.update(dict.fromkeys(instances, number))
        self._before[number] = before
        self._sent[number] = forward

    def complete(self, done: Completion) -> None:
        """What `take` gives from now on: all completions that wait for no earlier step on one of their instances."""
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
        """Whether `take` can be called."""
        return bool(self._ready)

    def take(self) -> tuple[Forward, Completion]:
        """The next completion, and its step, which is over."""
        done = self._ready.popleft()
        return self._sent.pop(done.number), done

    def clear(self) -> list[Forward]:
        """Forgets everything; the steps that were not over."""
        steps = list(self._sent.values())
        self._sent.clear()
        self._latest.clear()
        self._before.clear()
        self._after.clear()
        self._early.clear()
        self._ready.clear()
        return steps
