"""How many steps each instance has been sent and not completed, and for how long it has had any."""

from __future__ import annotations

from collections.abc import Iterable


class Occupancy:
    """Counts steps in flight per instance; with `most` of them an instance is full."""

    def __init__(self, num_instances: int, *, most: int) -> None:
        self._num_instances = num_instances
        self._having: list[set[int]] = [set() for _ in range(most)]  # at place n: who has more than n steps in flight
        self.busy, self.full = self._having[0], self._having[-1]
        self._busy_s, self._busy_since_s = [0.0] * num_instances, [0.0] * num_instances

    @property
    def all_full(self) -> bool:
        """Whether no instance can be sent a step."""
        return len(self.full) == self._num_instances

    def begin(self, instances: Iterable[int], now_s: float) -> None:
        """A step was sent to these."""
        joining = set(instances)
        for i in joining - self.busy:
            self._busy_since_s[i] = now_s
        for having in self._having:
            already = joining & having
            having.update(joining)
            joining = already
        assert not joining, f"instances {sorted(joining)} are full"

    def end(self, instances: Iterable[int], now_s: float) -> None:
        """A step of these is over."""
        leaving = set(instances)
        for having in reversed(self._having):
            last = leaving & having
            having.difference_update(last)
            leaving -= last
        assert not leaving, f"instances {sorted(leaving)} have no step"
        for i in last:
            self._busy_s[i] += now_s - self._busy_since_s[i]

    def busy_s(self, now_s: float) -> list[float]:
        """Seconds in which each instance had a step to run."""
        since = enumerate(zip(self._busy_s, self._busy_since_s, strict=True))
        return [done + (now_s - begun if i in self.busy else 0.0) for i, (done, begun) in since]
