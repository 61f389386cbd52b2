"""What became of simulated requests, the numbers that sum it up, and what is found by several runs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from longspan.core.request import Request
from longspan.policy.tetris.rates import GRID_PER_S, IMPROVEMENT_RATES


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One request, in seconds of the virtual clock; `place` is its place among the arrivals.

    Attributes:
        scheduled_s: when its first step was planned.
        ttft_s: from its arrival to its first token.
        tbt_s: between its tokens, `[num_output_tokens - 1]`.
    """

    place: int
    arrival_s: float
    scheduled_s: float
    ttft_s: float
    tbt_s: array[float]
    finished_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int

    @classmethod
    def of(cls, request: Request, place: int) -> Self:
        """A request that has ended."""
        metrics = request.metrics
        assert metrics.ttft_s is not None and metrics.finished_s is not None and metrics.scheduled_s is not None
        return cls(
            place=place,
            arrival_s=metrics.arrival_s,
            scheduled_s=metrics.scheduled_s,
            ttft_s=metrics.ttft_s,
            tbt_s=array("d", metrics.tbt_s),
            finished_s=metrics.finished_s,
            num_prompt_tokens=len(request.prompt),
            num_output_tokens=len(request.output),
            num_cached_tokens=metrics.num_cached_tokens,
        )

    @property
    def e2e_s(self) -> float:
        """From its arrival to its last token."""
        return self.finished_s - self.arrival_s


@dataclass(frozen=True, kw_only=True)
class Result:
    """A whole simulation.

    Attributes:
        served: by place.
        refused: why requests were not taken, by place.
        makespan_s: from the start to the last token.
        busy_s: of each instance, how long it had a step to run.
        max_queue: most requests that waited at once after what could be started had been.
    """

    served: tuple[Served, ...]
    refused: Mapping[int, str]
    num_arrivals: int
    makespan_s: float
    busy_s: tuple[float, ...]
    max_queue: int
    num_preemptions: int

    @property
    def ttfts_s(self) -> NDArray[np.float64]:
        """Times to first token, by place."""
        return np.array([one.ttft_s for one in self.served])

    @property
    def tbts_s(self) -> NDArray[np.float64]:
        """All times between tokens."""
        return np.concatenate([np.frombuffer(one.tbt_s) for one in self.served if one.tbt_s] or [np.empty(0)])

    @property
    def num_tokens(self) -> int:
        """Of prompts and answers together."""
        return sum(one.num_prompt_tokens + one.num_output_tokens for one in self.served)


def summary(result: Result) -> dict[str, float | int | None]:
    """The numbers of `longspan simulate --json`; null where there is none.

    Throughput counts the tokens of prompts and answers; utilisation is the part of the makespan in which an instance
    had a step to run, over all instances.
    """
    made_s = result.makespan_s
    busy = sum(result.busy_s) / len(result.busy_s)
    ttft, tbt = result.ttfts_s, result.tbts_s
    return {
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p99_s": percentile(ttft, 99),
        "tbt_p50_s": percentile(tbt, 50),
        "tbt_p99_s": percentile(tbt, 99),
        "e2e_p50_s": percentile(np.array([one.e2e_s for one in result.served]), 50),
        "throughput_tokens_per_s": result.num_tokens / made_s if made_s else None,
        "max_queue": result.max_queue,
        "utilisation": busy / made_s if made_s else None,
        "num_completed": len(result.served),
        "makespan_s": made_s,
        "num_refused": len(result.refused),
        "num_preemptions": result.num_preemptions,
        "num_prompt_tokens": sum(one.num_prompt_tokens for one in result.served),
        "num_output_tokens": sum(one.num_output_tokens for one in result.served),
        "num_cached_tokens": sum(one.num_cached_tokens for one in result.served),
    }


def percentile(values: NDArray[np.float64], percent: float) -> float | None:
    """As numpy interpolates it; None of no values."""
    return float(np.percentile(values, percent)) if len(values) else None


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
