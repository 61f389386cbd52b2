"""How many steps each instance has been sent and not completed, and for how long it has had any."""

from __future__ import annotations

from collections.abc import Iterable


class Occupancy:
    """Counts steps in flight per instance; with `most` of them an instance is full."""

    def __init__(self, num_instances: int, *, most: int) -> None:
        self.busy: set[int] = set()
        self.full: set[int] = set()
        self._num_instances, self._most = num_instances, most
        self._num_in_flight = [0] * num_instances
        self._busy_s, self._busy_since_s = [0.0] * num_instances, [0.0] * num_instances

    @property
    def all_full(self) -> bool:
        """Whether no instance can be sent a step."""
        return len(self.full) == self._num_instances

    def begin(self, instances: Iterable[int], now_s: float) -> None:
        """A step was sent to these."""
        for i in instances:
            if not self._num_in_flight[i]:
                self._busy_since_s[i] = now_s
                self.busy.add(i)
            self._num_in_flight[i] += 1
            if self._num_in_flight[i] >= self._most:
                self.full.add(i)

    def end(self, instances: Iterable[int], now_s: float) -> None:
        """A step of these is over."""
        for i in instances:
            self._num_in_flight[i] -= 1
            self.full.discard(i)
            if not self._num_in_flight[i]:
                self._busy_s[i] += now_s - self._busy_since_s[i]
                self.busy.discard(i)

    def busy_s(self, now_s: float) -> list[float]:
        """Seconds in which each instance had a step to run."""
        since = zip(self._num_in_flight, self._busy_s, self._busy_since_s, strict=True)
        return [done + (now_s - begun if steps else 0.0) for steps, done, begun in since]
