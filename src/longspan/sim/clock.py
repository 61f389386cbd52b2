"""Virtual time."""

from __future__ import annotations


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
