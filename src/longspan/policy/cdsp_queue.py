"""When instances are expected to be done with the prompts that were given to them: the queueing times of Tetris."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_TOLERANCE = 0.02
"""The part of the longest wait that estimates may be old: with many prompts waiting, looking at each takes time."""


class QueueTimes:
    """Keeps the second at which each instance is free of prompts. Estimates err; `correct` puts in what was seen."""

    def __init__(self, num_instances: int) -> None:
        self._free_at_s = [0.0] * num_instances
        self._seen_at_s = 0.0

    def waits_s(self, now_s: float) -> list[float]:
        """Of every instance, from now on."""
        return [max(0.0, free_at_s - now_s) for free_at_s in self._free_at_s]

    def book(self, group: Iterable[int], end_s: float) -> None:
        """A group is given a prompt, and busy with it or waiting for it until `end_s`."""
        for instance in group:
            self._free_at_s[instance] = end_s

    def is_old(self, now_s: float) -> bool:
        """Whether it is time to `correct`."""
        return now_s - self._seen_at_s >= _TOLERANCE * max(self.waits_s(now_s))

    def correct(self, now_s: float, prompts: Iterable[Sequence[tuple[float, tuple[int, ...]]]]) -> None:
        """Starts afresh from what is left to do: for each prompt, in order of their turns, its chunks' seconds and
        groups. A chunk begins when the one before is done and all of its group are.
        """
        self._seen_at_s = now_s
        free_at_s = [now_s] * len(self._free_at_s)
        for chunks in prompts:
            end_s = now_s
            for seconds, group in chunks:
                end_s = max(end_s, *(free_at_s[instance] for instance in group)) + seconds
                for instance in group:
                    free_at_s[instance] = end_s
        self._free_at_s = free_at_s
