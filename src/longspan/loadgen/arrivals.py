"""When requests are due."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(num: int, *, request_rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Returns `num` times in seconds from the start, ascending; all 0 for an infinite rate.

    Gaps are gamma distributed with shape `burstiness` and mean `1 / request_rate`: 1 is a Poisson process, less comes
    in bursts, more is steadier, infinity is regular. As in vLLM, times are stretched so that the last one is at
    `num / request_rate` whatever the seed, or throughputs of different seeds would differ by chance.

    Raises:
        ValueError: for a rate or a shape that is not above 0.
    """
    for flag, value in (("--request-rate", request_rate), ("--burstiness", burstiness)):
        if not value > 0:
            raise ValueError(f"{flag} must be above 0 (inf is allowed), but {value} given")
    if math.isinf(request_rate):
        return [0.0] * num
    gaps = np.ones(num) if math.isinf(burstiness) else rng.gamma(burstiness, size=num)
    times = np.cumsum(gaps)
    if not times[-1] > 0:
        raise ValueError(f"--burstiness {burstiness} is too small: every gap between requests is 0; give a larger one")
    return [float(time) for time in times * (num / request_rate / times[-1])]
