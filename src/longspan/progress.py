"""The progress of long runs in words, for a stderr that is no terminal and shows no progress bar."""

from __future__ import annotations

import time
from collections.abc import Callable

_INTERVAL_S = 60.0
Say = Callable[[str], object]
"""Prints a line for the user."""


class MinuteLines:
    """Says at most once a minute how far a run is, and how long the rest will take at the same speed."""

    def __init__(self, name: str, say: Say, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._say, self._clock = name, say, clock
        self._begun_s = self._said_s = clock()

    def update(self, share: float, done: str) -> None:
        """Say it with the words `done`, if a minute has passed. `share` is the part of the work that is done."""
        now_s = self._clock()
        if now_s < self._said_s + _INTERVAL_S:
            return
        self._said_s, spent_s = now_s, now_s - self._begun_s
        left = f"; about {duration(spent_s * (1 - share) / share)} left" if 0 < share <= 1 else ""
        self._say(f"{self._name}: {done} in {duration(spent_s)}{left}")


def duration(seconds: float) -> str:
    """Format a duration in whole seconds or minutes."""
    if seconds < _INTERVAL_S:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
