"""The highest rate of requests that a cluster keeps up with."""

from __future__ import annotations

import math
from collections.abc import Callable

MOST_TIMES_LIGHT = 25
"""A rate is too high when the 99th percentile of TTFT is so many times that of light load (Tetris §7.2)."""

_MOST_DOUBLINGS = 24
_PRECISION = 1.02


def find_max_rate(keeps_up: Callable[[float], bool], *, start: float, precision: float = _PRECISION) -> float | None:
    """The highest rate, to a `precision` of 2 %, at which `keeps_up` holds, looked for from `start` by doubling and
    halving.

    None when all requests at once are not too many either: it takes more of them to find a rate.

    Raises:
        ValueError: when no rate does.
    """
    if keeps_up(math.inf):
        return None
    low = start
    for _ in range(_MOST_DOUBLINGS):
        if keeps_up(low):
            break
        low /= 2
    else:
        raise ValueError(f"not even {low:g} requests per second leave TTFT near that of light load")
    high = 2 * low
    while low >= start and keeps_up(high):
        low, high = high, 2 * high
    while high / low > precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low
