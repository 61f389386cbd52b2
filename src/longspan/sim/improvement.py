"""Which improvement rate is best at which request rate: the offline profiler of Tetris (§5.1, §7.1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from longspan.policy.tetris.rates import GRID_PER_S, IMPROVEMENT_RATES


def request_rates(highest: float) -> tuple[float, ...]:
    """Those of the grid, up to the first that is not below `highest`.

    Raises:
        ValueError: when there is none.
    """
    if not 0 < highest <= 1000:
        raise ValueError(f"request rates to profile are above 0 and at most 1000 per second, but {highest:g} given")
    rates = [GRID_PER_S]
    while rates[-1] < highest:
        rates.append(GRID_PER_S * (len(rates) + 1))
    return tuple(rates)


def best_improvement_rate(mean_ttft_s: Callable[[float], float]) -> tuple[float, Mapping[float, float]]:
    """The improvement rate with the least mean TTFT, the lowest of equals, and what all of them gave."""
    found = {rate: mean_ttft_s(rate) for rate in IMPROVEMENT_RATES}
    return min(found, key=found.__getitem__), found
