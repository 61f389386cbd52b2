"""Models that stand in for measurements and enumerations: the loss of accuracy, and the time by configuration (§3.2.6).

Both are values that are kept as JSON. The paper trains regression models for the best configuration itself. Here a
table has the least time for each number of levels and drop ratio, by prompt length and link speed, and is interpolated;
so one table serves both objectives, any constraint and any model of the loss.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from longspan.core.sparse import DropMode
from longspan.cost.csa_search import Choice, Configuration, Grid, Group, Loss

_POWERS = ((1, 2), (1, 2, 4))
"""The powers of ratios, fewer and more."""
_CHECKED_EVERY = 4
"""The options of a table that are checked halfway: neighbours differ little."""
_MOST_ROUNDS = 5000
_PER_WEIGHT = 5
"""Samples that there are for each weight, so that noise is not fitted."""


class LossSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement: points of score that were lost, by tokens and mean drop ratio of each level from 2 on."""

    num_tokens: int
    mean_drop: tuple[float, ...]
    mode: DropMode
    loss: float


class _LossFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fit of one number of levels and mode: by level and power, a weight at each length."""

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

    So it never falls with a ratio, as enumeration needs. Weights are linear in the logarithm of the length, between
    lengths that were measured; beyond those they stay. Each number of levels and mode has a fit of its own.

    Attributes:
        rms: the root mean square of what the fit misses, in points.
    """

    fits: list[_LossFit]
    rms: float

    @classmethod
    def fit(cls, samples: Sequence[LossSample], max_lengths: int = 4) -> Self:
        """Fits all samples by least squares."""
        fits, squares = [], 0.0
        for num_ratios, mode in sorted({(len(one.mean_drop), one.mode) for one in samples} - {(0, "kv"), (0, "qkv")}):
            own = [one for one in samples if (len(one.mean_drop), one.mode) == (num_ratios, mode)]
            fits.append(_best_fit(own, max_lengths))
            squares += sum((fits[-1].predict(one.num_tokens, one.mean_drop) - one.loss) ** 2 for one in own)
        return cls(fits=fits, rms=math.sqrt(squares / max(1, len(samples))))

    def predict(self, num_tokens: int, mean_drop: tuple[float, ...], mode: DropMode) -> float:
        """Predicts the points that are lost; none for exact attention.

        Raises:
            ValueError: for a number of levels or mode that was not measured.
        """
        if not mean_drop:
            return 0.0
        for fit in self.fits:
            if (fit.num_ratios, fit.mode) == (len(mean_drop), mode):
                return fit.predict(num_tokens, mean_drop)
        raise ValueError(f"no loss was measured with {len(mean_drop) + 1} levels and drops of {mode}: measure some")

    def of_mode(self, mode: DropMode) -> Loss:
        return lambda num_tokens, mean_drop: self.predict(num_tokens, mean_drop, mode)


def _best_fit(samples: Sequence[LossSample], max_lengths: int) -> _LossFit:
    """Fits samples of one number of levels and mode, with as many weights as they allow.

    Weights are for lengths that cut the samples evenly, so that each is told by as many.
    """
    known = sorted({one.num_tokens for one in samples})
    allowed = [
        (len(powers) * count, powers, count)
        for powers in _POWERS
        for count in range(1, min(max_lengths, len(known)) + 1)
        if _PER_WEIGHT * len(powers) * count * len(samples[0].mean_drop) <= len(samples)
    ]
    _, powers, count = max(allowed, default=(0, _POWERS[0], 1))
    ordered = sorted(one.num_tokens for one in samples)
    lengths = sorted({ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count)})
    return _fit(samples, powers, lengths)


def _fit(samples: Sequence[LossSample], powers: tuple[int, ...], lengths: list[int]) -> _LossFit:
    rows = np.array([_features(one.num_tokens, one.mean_drop, powers, lengths) for one in samples])
    weights = _least_squares(rows, np.array([one.loss for one in samples]))
    return _LossFit(len(samples[0].mean_drop), samples[0].mode, powers, lengths, weights.tolist())


def _features(
    num_tokens: int, mean_drop: Sequence[float], powers: Sequence[int], lengths: Sequence[int]
) -> list[float]:
    shares = [0.0] * len(lengths)
    for index, share in _between(num_tokens, lengths):
        shares[index] += share
    return [share * ratio**power for ratio in mean_drop for power in powers for share in shares]


def _between(value: float, known: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Yields the indices of the values around one, ascending, and their shares by logarithm; at an end only that."""
    right = bisect_right(known, value)
    if right in {0, len(known)}:
        yield max(0, right - 1), 1.0
        return
    share = math.log(value / known[right - 1]) / math.log(known[right] / known[right - 1])
    yield right - 1, 1 - share
    yield right, share


def _least_squares(rows: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solves for weights of at least 0, one after another until none changes much."""
    gram, goal = rows.T @ rows, rows.T @ values
    weights = np.zeros(len(goal))
    for _ in range(_MOST_ROUNDS):
        before = weights.copy()
        for index in np.flatnonzero(gram.diagonal()):
            step = (goal[index] - gram[index] @ weights) / gram[index, index]
            weights[index] = max(0.0, weights[index] + step)
        if np.abs(weights - before).max() <= 1e-6 * weights.max():
            break
    return weights


class TimeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least time to first token of a group by levels and drop ratio, for some lengths and speeds of a link.

    Attributes:
        lengths: in tokens, ascending.
        links: speeds of the slowest link, in bytes per second, ascending.
        options: levels and drop ratios that may be chosen.
        mean_drop: of each option, by level from 2 on.
        cells: by length, link and option: seconds, and the micro-partitions that take least.
        margin: the largest share by which times halfway between lengths and links were above those interpolated.
    """

    lengths: list[int]
    links: list[float]
    options: list[Configuration]
    mean_drop: list[tuple[float, ...]]
    cells: list[list[list[tuple[float, tuple[int, ...]]]]]
    margin: float = 0.0

    @classmethod
    def train(cls, group: Group, lengths: Sequence[int], links: Sequence[float], grid: Grid) -> Self:
        """Makes a table by enumeration, and checks it halfway between its points."""
        options = [Configuration(levels, drop) for levels in group.levels() for drop in grid.ratios(levels)]
        cells = []
        for length in lengths:
            row = []
            for there in map(group.with_link, links):
                best = (grid.quickest(there, length, option.levels, option.drop) for option in options)
                row.append([(ttft_s, found.micro_partitions) for ttft_s, found in best])
            cells.append(row)
        drops = [group.mean_drop(option) for option in options]
        table = cls(lengths=list(lengths), links=list(links), options=options, mean_drop=drops, cells=cells)
        return msgspec.structs.replace(table, margin=table._worst(group))

    def least_ttft(self, num_tokens: int, bytes_per_s: float, loss: Loss, max_loss: float) -> Choice | None:
        """Chooses by Eq. 8; None if every option loses more than `max_loss`.

        Raises:
            ValueError: for a length or speed beyond those of the table.
        """
        choices = self._choices(num_tokens, bytes_per_s)
        for ttft_s, configuration, mean_drop in sorted(choices, key=lambda one: one[0]):
            lost = loss(num_tokens, mean_drop)
            if lost <= max_loss:
                return Choice(configuration, ttft_s, lost)
        return None

    def least_loss(self, num_tokens: int, bytes_per_s: float, loss: Loss, max_ttft_s: float) -> Choice | None:
        """Chooses by Eq. 9, and leaves the margin; None if every option takes longer than `max_ttft_s`.

        Raises:
            ValueError: for a length or speed beyond those of the table.
        """
        found = [
            Choice(configuration, ttft_s, loss(num_tokens, mean_drop))
            for ttft_s, configuration, mean_drop in self._choices(num_tokens, bytes_per_s)
            if ttft_s * (1 + self.margin) <= max_ttft_s
        ]
        return min(found, key=lambda one: (one.loss, one.ttft_s), default=None)

    def _choices(self, num_tokens: int, bytes_per_s: float) -> list[tuple[float, Configuration, tuple[float, ...]]]:
        """Interpolates logarithms of times between logarithms of lengths and speeds; micro-partitions are the nearest.

        Returns:
            Seconds, configuration and mean drop ratios of each option.
        """
        for what, value, known in (("tokens", num_tokens, self.lengths), ("bytes/s", bytes_per_s, self.links)):
            if not known[0] <= value <= known[-1]:
                raise ValueError(f"{value:g} {what}, but the table has {known[0]:g} to {known[-1]:g}: train another")
        around = [
            (a * b, self.cells[i][j])
            for i, a in _between(num_tokens, self.lengths)
            for j, b in _between(bytes_per_s, self.links)
        ]
        _, nearest = max(around, key=lambda one: one[0])
        found = []
        for index, option in enumerate(self.options):
            ttft_s = math.exp(sum(share * math.log(cell[index][0]) for share, cell in around))
            configuration = Configuration(option.levels, option.drop, nearest[index][1])
            found.append((ttft_s, configuration, self.mean_drop[index]))
        return found

    def _worst(self, group: Group) -> float:
        """Returns the largest share by which some options halfway between points take longer than interpolated."""
        halfway = product(*(_halfway(known) for known in (self.lengths, self.links)))
        return max(
            0.0,
            *(
                group.with_link(link).ttft_s(int(length), configuration) / ttft_s - 1
                for length, link in halfway
                for ttft_s, configuration, _ in self._choices(int(length), link)[::_CHECKED_EVERY]
            ),
        )


def _halfway(known: Sequence[float]) -> list[float]:
    """Returns the values between neighbours, by logarithm; the value itself, if there is one."""
    return [math.sqrt(a * b) for a, b in pairwise(known)] or list(known)
