"""Distributions of lengths: by quantiles, or between bounds with a mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Protocol

import numpy as np

_NORMAL = NormalDist()
_SIGMAS_OF_RANGE = 6
_FURTHEST = 4  # sigmas from the range to where the mean of the uncut logarithm is looked for
_HALVINGS = 60
_MOST = 2.0**40


class Lengths(Protocol):
    """A distribution is its quantile function."""

    def at(self, part: float) -> float:
        """Returns the length below which this part of all lengths lies, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """Lengths by their quantiles; between two of them the logarithm is linear.

    Attributes:
        points: part of all lengths and the length below which it lies, ascending, from part 0 to part 1.

    Raises:
        ValueError: for points that are no such distribution.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        parts, lengths = [part for part, _ in self.points], [length for _, length in self.points]
        if len(parts) < 2 or parts[0] != 0 or parts[-1] != 1 or sorted(set(parts)) != parts:
            raise ValueError(f"quantiles ascend from 0 to 1, but there are those of {parts}: give at least 0 and 1")
        if sorted(lengths) != lengths or not 1 <= lengths[0] <= lengths[-1] <= _MOST:
            raise ValueError(
                f"lengths at ascending quantiles ascend, from 1 to {_MOST:.0f} at most, but {lengths} given"
            )

    def at(self, part: float) -> float:
        parts, lengths = zip(*self.points, strict=True)
        return math.exp(float(np.interp(part, parts, np.log(lengths))))


@dataclass(frozen=True, kw_only=True)
class Bounded:
    """A log-normal distribution cut off at `low` and `high`, with this `mean`.

    Range and mean leave one number open: the standard deviation of the logarithm is a sixth of the range's, so that
    without the cut nearly all lengths would lie inside it.

    Raises:
        ValueError: when no such distribution has this mean.
    """

    low: float
    high: float
    mean: float

    def __post_init__(self) -> None:
        if not 1 <= self.low < self.mean < self.high:
            raise ValueError(f"lengths from {self.low:g} to {self.high:g} have no mean of {self.mean:g}")
        _shape(self.low, self.high, self.mean)

    def at(self, part: float) -> float:
        mu, sigma = _shape(self.low, self.high, self.mean)
        low, high = (_NORMAL.cdf((math.log(end) - mu) / sigma) for end in (self.low, self.high))
        inside = min(max(low + part * (high - low), 1e-300), 1 - 1e-16)
        return min(max(math.exp(mu + sigma * _NORMAL.inv_cdf(inside)), self.low), self.high)


@cache
def _shape(low: float, high: float, mean: float) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm, before the cut."""
    sigma = math.log(high / low) / _SIGMAS_OF_RANGE
    least, most = math.log(low) - _FURTHEST * sigma, math.log(high) + _FURTHEST * sigma
    for _ in range(_HALVINGS):
        mu = (least + most) / 2
        least, most = (mu, most) if _mean_of_cut(low, high, mu, sigma) < mean else (least, mu)
    if abs(_mean_of_cut(low, high, mu, sigma) / mean - 1) > 1e-6:
        raise ValueError(f"a mean of {mean:g} is too near an end of {low:g} to {high:g}: widen the range")
    return mu, sigma


def _mean_of_cut(low: float, high: float, mu: float, sigma: float) -> float:
    ends = [(math.log(end) - mu) / sigma for end in (low, high)]
    inside = _NORMAL.cdf(ends[1]) - _NORMAL.cdf(ends[0])
    shifted = _NORMAL.cdf(ends[1] - sigma) - _NORMAL.cdf(ends[0] - sigma)
    return math.exp(mu + sigma**2 / 2) * shifted / inside


def draw_lengths(lengths: Lengths, num: int, rng: np.random.Generator) -> list[int]:
    """Returns `num` whole numbers."""
    return [max(1, round(lengths.at(part))) for part in rng.random(num)]


# Ranges and means of the prompts in the traces of Tetris (§7.1), whose 4k is 4,000 here. It does not say how long
# answers are: these are ours, of the same kind.
NAMED: dict[str, tuple[Lengths, Lengths]] = {
    name: (Bounded(low=low, high=high, mean=mean), Bounded(low=4, high=256, mean=32))
    for name, low, high, mean in (
        ("short", 4_000, 95_000, 23_600),
        ("medium", 8_000, 142_000, 32_800),
        ("long", 16_000, 190_000, 50_100),
    )
}
"""Prompts and answers of a named workload."""


def quantiles(name: str, points: object) -> Quantiles:
    """Makes a distribution of a mapping from parts, as text, to lengths.

    Raises:
        ValueError: for anything else.
    """
    try:
        pairs = sorted((float(part), float(length)) for part, length in points.items())  # type: ignore[attr-defined]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f'{name} is an object of quantiles such as {{"0": 100, "0.5": 800, "1": 9000}}, but {points!r:.80} given'
        ) from None
    return Quantiles(points=tuple(pairs))
