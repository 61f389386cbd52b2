"""Completions in the order of steps.

A step is complete when its last rank has reported. Ranks work first in, first out, but each at its own pace: one that
is done early may go on with a later step, in which others have no part, and complete it before.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque

from longspan.core.steps import Completion, Forward


class StepOrder:
    """The steps that were sent, and those of their completions that must wait for earlier ones."""

    def __init__(self) -> None:
        self._sent: dict[int, Forward] = {}
        self._queues: defaultdict[int, deque[int]] = defaultdict(deque)  # of each instance, without those ready
        self._early: dict[int, Completion] = {}
        self._ready: deque[Completion] = deque()

    def __bool__(self) -> bool:
        return bool(self._sent)

    def send(self, forward: Forward) -> None:
        """A step with the highest number so far."""
        self._sent[forward.number] = forward
        for instance in forward.instances:
            self._queues[instance].append(forward.number)

    def complete(self, done: Completion) -> None:
        """What `take` gives from now on: all completions that wait for no earlier step on one of their instances."""
        self._early[done.number] = done
        candidates = [done.number]
        while candidates:
            number = heapq.heappop(candidates)
            if number not in self._early:
                continue
            queues = [self._queues[instance] for instance in self._sent[number].instances]
            if any(queue[0] != number for queue in queues):
                continue
            self._ready.append(self._early.pop(number))
            for queue in queues:
                queue.popleft()
                if queue:
                    heapq.heappush(candidates, queue[0])

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
        self._queues.clear()
        self._early.clear()
        self._ready.clear()
        return steps
