"""Improvement rates by request rate: at higher rates, larger groups must save more time (Tetris §5.1, §7.1)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Self

_WINDOW_S = 30.0
"""Seconds over which arrivals are counted, and between two look-ups. A longer window follows the load later."""
_MIN_ARRIVALS = 8
"""Arrivals that are enough to estimate a rate before the end of the first window."""
IMPROVEMENT_RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))
"""The improvement rates to try for each request rate: 0.05 to 0.75."""


@dataclass(frozen=True, kw_only=True)
class RateTable:
    """The best improvement rates that a simulation found, by request rate.

    Attributes:
        entries: pairs of requests per second, ascending, and improvement rate.
    """

    entries: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        requests = [request_rate for request_rate, _ in self.entries]
        finite = all(math.isfinite(request_rate) for request_rate in requests)
        if not requests or not finite or requests != sorted(set(requests)) or requests[0] < 0:
            raise ValueError(f"request rates must ascend from 0 or more and be finite, but {requests} given")
        for _, improvement_rate in self.entries:
            check_improvement_rate(improvement_rate)

    def nearest(self, requests_per_s: float) -> float:
        """Return the improvement rate of the nearest request rate. Of two, the lower one counts."""
        return min(self.entries, key=lambda entry: abs(entry[0] - requests_per_s))[1]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `0.5:0.1,1:0.3`: at 0.5 requests per second 0.1, at 1 request per second 0.3."""
        try:
            pairs = [tuple(map(float, entry.split(":"))) for entry in text.split(",")]
            entries = tuple((requests, improvement) for requests, improvement in pairs)
        except ValueError as error:
            raise ValueError(
                f"improvement rates by request rate look like 0.5:0.1,1:0.3, but {text!r} given"
            ) from error
        return cls(entries=entries)

    def __str__(self) -> str:
        return ",".join(f"{requests:g}:{improvement:g}" for requests, improvement in self.entries)


def check_improvement_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"improvement_rate must be at least 0 and below 1, but {rate} given")


class RateWatch:
    """Counts arrivals, and looks up the improvement rate every 30 seconds.

    In the first window, it looks it up each time the number of arrivals has doubled.

    Attributes:
        table: the rates to look up.
        requests_per_s: by the latest look. 0 before.
        improvement_rate: the rate of the table for it.
    """

    def __init__(self, table: RateTable) -> None:
        self.table = table
        self._arrivals: deque[float] = deque()
        self._started_at_s: float | None = None
        self._renewed_at_s = 0.0
        self._next_look = _MIN_ARRIVALS
        self.requests_per_s = 0.0
        self.improvement_rate = table.nearest(0.0)

    def use(self, table: RateTable) -> None:
        """Use another table from now on, and look up the last request rate in it."""
        self.table = table
        self._look_up(self.requests_per_s)

    def arrived(self, time_s: float) -> None:
        self._arrivals.append(time_s)

    def renew(self, now_s: float) -> None:
        """Look up the rate again, if a window has ended or arrivals have doubled."""
        if self._started_at_s is None:
            self._started_at_s = self._renewed_at_s = now_s
        if (elapsed_s := now_s - self._started_at_s) < _WINDOW_S:
            if elapsed_s > 0 and len(self._arrivals) >= self._next_look:
                self._next_look = 2 * len(self._arrivals)
                self._look_up((len(self._arrivals) - 1) / elapsed_s)
        elif now_s - self._renewed_at_s >= _WINDOW_S:
            self._renewed_at_s = now_s
            while self._arrivals and self._arrivals[0] <= now_s - _WINDOW_S:
                self._arrivals.popleft()
            self._look_up(len(self._arrivals) / _WINDOW_S)

    def _look_up(self, requests_per_s: float) -> None:
        self.requests_per_s = requests_per_s
        self.improvement_rate = self.table.nearest(requests_per_s)
