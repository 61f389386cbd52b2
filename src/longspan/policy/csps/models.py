"""Models fitted to measurements and enumerations: the loss of accuracy, and the time by configuration (§3.2.6).

The loss is stored as JSON. The paper trains regression models for the best configuration itself. Here a table of one
group has the least time for each number of levels and drop ratio, by prompt length, and is interpolated. One table
therefore serves both objectives, any constraint and any model of the loss.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from longspan.core.sparse import DropMode
from longspan.policy.csps.objective import NO_LOSS
from longspan.policy.csps.search import Choice, Configuration, Grid, Group, Loss

_POWERS = ((1, 2), (1, 2, 4))
"""Powers of the ratios that a fit may use, the smaller set first."""
_CHECKED_EVERY = 4
"""Every fourth option of a table is checked halfway between points. Neighbouring options differ little."""
_MAX_ROUNDS = 5000
"""Upper bound for the rounds of coordinate descent in a fit."""
_MAX_LENGTHS = 4
"""Upper bound for the lengths of a fit with weights of their own."""
_SAMPLES_PER_WEIGHT = {"score": 5, "perplexity": 30}
"""Lower bound for the samples per weight, so that the fit does not follow noise. Prompts of one length are few, and
each has many samples of perplexity. With fewer samples per weight, the fit of a length follows its prompts."""
_MIN_RATIOS, _UNKNOWN_WITHIN = 20, 2.2
"""Prompts that show within which factor losses stay, and the least factor with fewer: as in the shipped file."""
COVERED = 0.95
"""Share of the prompts whose perplexity may not rise more than predicted. A larger share drops fewer tokens."""
_OTHER_TEXTS = 5.0
"""Factor by which texts of other kinds gain more perplexity than prompts of the measured text. A larger one drops fewer
tokens. Of 20 texts, one gained 10 times the mean (docs/experiments/2026-11-27-accuracy-bound.md)."""
_MARGIN_RANGE = (NO_LOSS / 4, 4 * NO_LOSS)
"""Predicted points of the samples that give the margin. Smaller samples are mostly noise, and larger ones are rarely
chosen."""

Measure = Literal["score", "perplexity"]


class LossSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measured loss in points, by tokens and mean drop ratio of each level from 2 on.

    Attributes:
        measure: `score` is the lost mean score of a point. `perplexity` is the gain of a single prompt in per cent.
    """

    num_tokens: int
    mean_drop: tuple[float, ...]
    mode: DropMode
    loss: float
    measure: Measure = "score"


class _LossFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fit of one measure, number of levels and mode: a weight for each level, power and length."""

    measure: Measure
    num_ratios: int
    mode: DropMode
    powers: tuple[int, ...]
    lengths: list[int]
    weights: list[float]

    def predict(self, num_tokens: int, mean_drop: Sequence[float]) -> float:
        features = _features(num_tokens, mean_drop, self.powers, self.lengths)
        return sum(feature * weight for feature, weight in zip(features, self.weights, strict=True))


class LossModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model of A_d = F(L_in, N_v, p): sums of powers of mean drop ratios, with weights of at least 0.

    The loss therefore never falls when a ratio rises. Weights are linear in the logarithm of the length between
    measured lengths, and constant beyond them. Each measure, number of levels and mode has its own fit. The loss is the
    larger of both measures.

    Attributes:
        rms: the root mean square of the residuals of all fits, in points.
        margin: the factor by which the perplexity of a text may rise more than the mean over prompts: `_OTHER_TEXTS`
            times the factor within which `COVERED` of the fitted prompts stay.
    """

    fits: list[_LossFit]
    rms: float
    margin: float = 1.0

    @classmethod
    def fit(cls, samples: Sequence[LossSample]) -> Self:
        """Fit all samples by least squares."""
        by_kind: dict[tuple[Measure, int, DropMode], list[LossSample]] = {}
        for one in samples:
            if one.mean_drop:
                by_kind.setdefault((one.measure, len(one.mean_drop), one.mode), []).append(one)
        fits, squares, ratios = [], 0.0, list[float]()
        for _, own in sorted(by_kind.items()):
            fits.append(_best_fit(own))
            expected = [fits[-1].predict(one.num_tokens, one.mean_drop) for one in own]
            squares += sum((predicted - one.loss) ** 2 for predicted, one in zip(expected, own, strict=True))
            low, high = _MARGIN_RANGE
            ratios += [
                one.loss / predicted
                for predicted, one in zip(expected, own, strict=True)
                if one.measure == "perplexity" and low <= predicted <= high
            ]
        least = 1.0 if len(ratios) >= _MIN_RATIOS else _UNKNOWN_WITHIN
        within = max(least, sorted(ratios)[math.ceil(COVERED * len(ratios)) - 1]) if ratios else least
        margin = _OTHER_TEXTS * within
        return cls(fits=fits, rms=math.sqrt(squares / max(1, len(samples))), margin=margin)

    def predict(self, num_tokens: int, mean_drop: tuple[float, ...], mode: DropMode, *, margin: bool = True) -> float:
        """Predict the lost points. Exact attention loses none.

        Args:
            margin: predict a bound for single texts. False is the mean over prompts.

        Raises:
            ValueError: for a number of levels or a mode that was not measured.
        """
        if not mean_drop:
            return 0.0
        losses = [
            fit.predict(num_tokens, mean_drop) * (self.margin if margin and fit.measure == "perplexity" else 1.0)
            for fit in self.fits
            if (fit.num_ratios, fit.mode) == (len(mean_drop), mode)
        ]
        if not losses:
            raise ValueError(f"no loss was measured with {len(mean_drop) + 1} levels and drops of {mode}: measure some")
        return max(losses)


def _best_fit(samples: Sequence[LossSample]) -> _LossFit:
    """Fit samples of one measure, number of levels and mode, with as many weights as the number of samples allows.

    The lengths of weights split the sorted samples evenly, so that each weight is fitted to equally many samples.
    """
    measured = sorted({sample.num_tokens for sample in samples})
    allowed = [
        (len(powers) * count, powers, count)
        for powers in _POWERS
        for count in range(1, min(_MAX_LENGTHS, len(measured)) + 1)
        if _SAMPLES_PER_WEIGHT[samples[0].measure] * len(powers) * count * len(samples[0].mean_drop) <= len(samples)
    ]
    _, powers, count = max(allowed, default=(0, _POWERS[0], 1))
    ordered = sorted(sample.num_tokens for sample in samples)
    lengths = sorted({ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)})
    return _fit(samples, powers, lengths)


def _fit(samples: Sequence[LossSample], powers: tuple[int, ...], lengths: list[int]) -> _LossFit:
    rows = np.array([_features(one.num_tokens, one.mean_drop, powers, lengths) for one in samples])
    weights = _least_squares(rows, np.array([one.loss for one in samples]))
    first = samples[0]
    return _LossFit(first.measure, len(first.mean_drop), first.mode, powers, lengths, weights.tolist())


def _features(
    num_tokens: int, mean_drop: Sequence[float], powers: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    """Return the powers of all ratios, split over the lengths next to `num_tokens`."""
    shares = [0.0] * len(lengths)
    for index, share in _between(num_tokens, lengths):
        shares[index] += share
    return [share * ratio**power for ratio in mean_drop for power in powers for share in shares]


def _between(value: float, points: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yield the indices of the two points around a value, and their shares by logarithm. At an end, yield the end."""
    right = bisect_right(points, value)
    if right in {0, len(points)}:
        yield max(0, right - 1), 1.0
        return
    share = math.log(value / points[right - 1]) / math.log(points[right] / points[right - 1])
    yield right - 1, 1 - share
    yield right, share


def _least_squares(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve for weights of at least 0 by coordinate descent, until changes are below 1e-6 of the largest weight."""
    gram, goal = rows.T @ rows, rows.T @ values
    weights = np.zeros(len(goal))
    for _ in range(_MAX_ROUNDS):
        before = weights.copy()
        for index in np.flatnonzero(gram.diagonal()):
            step = (goal[index] - gram[index] @ weights) / gram[index, index]
            weights[index] = max(0.0, weights[index] + step)
        if np.abs(weights - before).max() <= 1e-6 * weights.max():
            break
    return weights


@dataclass(frozen=True, kw_only=True)
class TimeTable:
    """The least time to first token of a group by levels and drop ratio, for some lengths.

    Attributes:
        lengths: in tokens, ascending.
        options: levels and drop ratios.
        cells: seconds and quickest micro-partitions, by length and option.
        margin: the largest relative error of interpolated times halfway between lengths.
    """

    group: Group
    lengths: Sequence[int]
    options: list[Configuration]
    cells: list[list[tuple[float, Configuration]]]
    margin: float = 0.0

    @classmethod
    def train(cls, group: Group, lengths: Sequence[int], grid: Grid) -> Self:
        """Make a table by enumeration, and check interpolated times halfway between its points."""
        options = grid.options(group)
        cells = [[grid.quickest(group, length, option) for option in options] for length in lengths]
        table = cls(group=group, lengths=lengths, options=options, cells=cells)
        return replace(table, margin=table._worst())

    def choices(self, num_tokens: int, loss: Loss) -> list[Choice]:
        """Return each option with its interpolated time, its loss, and the micro-partitions of the nearest cell.

        Logarithms of times are interpolated between logarithms of lengths.

        Raises:
            ValueError: for a length beyond the table.
        """
        shortest, longest = self.lengths[0], self.lengths[-1]
        if not shortest <= num_tokens <= longest:
            raise ValueError(f"{num_tokens} tokens, but the table has {shortest} to {longest}: train another")
        around = [(share, self.cells[index]) for index, share in _between(num_tokens, self.lengths)]
        _, nearest = max(around, key=lambda weighted: weighted[0])
        choices = []
        for index, drops in enumerate(self._mean_drops):
            ttft_s = math.exp(sum(share * math.log(cell[index][0]) for share, cell in around))
            choices.append(Choice(nearest[index][1], self.group.mode, ttft_s, loss(num_tokens, drops)))
        return choices

    @cached_property
    def _mean_drops(self) -> list[tuple[float, ...]]:
        return [self.group.mean_drop(option) for option in self.options]

    def _worst(self) -> float:
        """Return the largest share by which the simulated time of an option exceeds the interpolated time."""
        return max(
            0.0,
            *(
                self.group.ttft_s(length, choice.configuration) / choice.ttft_s - 1
                for length in (int(math.sqrt(a * b)) for a, b in pairwise(self.lengths))
                for choice in self.choices(length, lambda *_: 0.0)[::_CHECKED_EVERY]
            ),
        )
