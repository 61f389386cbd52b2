"""Models that stand in for measurements and enumerations: the loss of accuracy, and the time by configuration (§3.2.6).

Both are values that are kept as JSON. The paper trains regression models for the best configuration itself. Here a
table has the least time for each number of levels and drop ratio, by prompt length and link speed, and is interpolated;
so one table serves both objectives, any constraint and any model of the loss.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from longspan.core.sparse import DropMode
from longspan.cost.csa_search import Choice, Configuration, Grid, Group, Loss

_POWERS = (1, 2, 4)


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
    lengths: list[int]
    weights: list[float]


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
            known = sorted({one.num_tokens for one in own})
            count = min(max_lengths, len(known))
            lengths = sorted({known[round(i * (len(known) - 1) / max(1, count - 1))] for i in range(count)})
            rows = np.array([_features(one.num_tokens, one.mean_drop, lengths) for one in own])
            losses = np.array([one.loss for one in own])
            weights = _least_squares(rows, losses)
            squares += float(((rows @ weights - losses) ** 2).sum())
            fits.append(_LossFit(num_ratios, mode, lengths, weights.tolist()))
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
                features = _features(num_tokens, mean_drop, fit.lengths)
                return sum(feature * weight for feature, weight in zip(features, fit.weights, strict=True))
        raise ValueError(f"no loss was measured with {len(mean_drop) + 1} levels and drops of {mode}: measure some")

    def of_mode(self, mode: DropMode) -> Loss:
        return lambda num_tokens, mean_drop: self.predict(num_tokens, mean_drop, mode)


def _features(num_tokens: int, mean_drop: Sequence[float], lengths: Sequence[int]) -> list[float]:
    shares = [0.0] * len(lengths)
    for index, share in _between(num_tokens, lengths):
        shares[index] += share
    return [share * ratio**power for ratio in mean_drop for power in _POWERS for share in shares]


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
    """Solves for weights of at least 0 (Lawson and Hanson)."""
    weights = np.zeros(rows.shape[1])
    passive = np.zeros(len(weights), dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(rows.T @ values).max()))
    for _ in range(10 * len(weights)):
        slopes = np.where(passive, -np.inf, rows.T @ (values - rows @ weights))
        if slopes.max() <= tolerance:
            break
        passive[slopes.argmax()] = True
        while passive.any():
            solved = np.zeros(len(weights))
            solved[passive] = np.linalg.lstsq(rows[:, passive], values, rcond=None)[0]
            if solved[passive].min() > 0:
                weights = solved
                break
            falling = passive & (solved <= 0)
            step = (weights[falling] / np.maximum(weights[falling] - solved[falling], 1e-300)).min()
            weights += step * (solved - weights)
            passive &= weights > 1e-14 * max(1.0, float(weights.max()))
            weights[~passive] = 0
    return weights


class TimeTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The least time to first token of a group, for each number of levels and drop ratio.

    Attributes:
        lengths: in tokens, ascending.
        links: speeds of the slowest link, in bytes per second, ascending.
        drops: ratios of level 2 by number of levels, ascending.
        ttft_s: by length, link, number of levels and drop.
        micro_partitions: those that took least, likewise.
        mean_drop: of each level from 2 on, by number of levels and drop.
        margin: the largest share by which times in the middle between lengths and links were above those interpolated.
    """

    levels: list[int]
    lengths: list[int]
    links: list[float]
    drops: list[list[float]]
    ttft_s: list[list[list[list[float]]]]
    micro_partitions: list[list[list[list[tuple[int, ...]]]]]
    mean_drop: list[list[tuple[float, ...]]]
    margin: float

    @classmethod
    def train(cls, group: Group, lengths: Sequence[int], links: Sequence[float], grid: Grid) -> Self:
        """Enumerates micro-partitions at each point, and checks halfway between points."""
        levels = group.levels()
        drops = [list(grid.ratios(number)) for number in levels]
        found = [
            [
                [
                    [grid.quickest(group.with_link(link), length, number, drop) for drop in ratios]
                    for number, ratios in zip(levels, drops, strict=True)
                ]
                for link in links
            ]
            for length in lengths
        ]
        table = cls(
            levels=list(levels),
            lengths=list(lengths),
            links=list(links),
            drops=drops,
            ttft_s=[[[[one[0] for one in c] for c in b] for b in a] for a in found],
            micro_partitions=[[[[one[1].micro_partitions for one in c] for c in b] for b in a] for a in found],
            mean_drop=[
                [group.mean_drop(Configuration(number, drop)) for drop in ratios]
                for number, ratios in zip(levels, drops, strict=True)
            ],
            margin=0.0,
        )
        return msgspec.structs.replace(table, margin=table._worst(group))

    def least_ttft(self, num_tokens: int, bytes_per_s: float, loss: Loss, max_loss: float) -> Choice | None:
        """Chooses by Eq. 8; None if every configuration loses more than `max_loss`.

        Raises:
            ValueError: for a length or link speed beyond those of the table.
        """
        times, best = self._times(num_tokens, bytes_per_s), None
        for level, ratios in enumerate(self.mean_drop):
            stop = bisect_right(ratios, max_loss, key=lambda mean_drop: loss(num_tokens, mean_drop))
            for index in range(stop):
                if best is None or times[level][index] < times[best[0]][best[1]]:
                    best = level, index
        return None if best is None else self._choice(num_tokens, bytes_per_s, loss, best, times)

    def least_loss(self, num_tokens: int, bytes_per_s: float, loss: Loss, max_ttft_s: float) -> Choice | None:
        """Chooses by Eq. 9, with the table's margin; None if every configuration takes longer than `max_ttft_s`.

        Raises:
            ValueError: for a length or link speed beyond those of the table.
        """
        times, best = self._times(num_tokens, bytes_per_s), None
        for level, row in enumerate(times):
            in_time = [index for index, ttft_s in enumerate(row) if ttft_s * (1 + self.margin) <= max_ttft_s]
            if in_time:
                lost = loss(num_tokens, self.mean_drop[level][in_time[0]])
                key = lost, row[in_time[0]]
                if best is None or key < best[0]:
                    best = key, (level, in_time[0])
        return None if best is None else self._choice(num_tokens, bytes_per_s, loss, best[1], times)

    def _times(self, num_tokens: int, bytes_per_s: float) -> list[list[float]]:
        """Interpolates logarithms of times between logarithms of lengths and speeds; by number of levels and drop."""
        for what, value, known in (("tokens", num_tokens, self.lengths), ("bytes/s", bytes_per_s, self.links)):
            if not known[0] <= value <= known[-1]:
                raise ValueError(f"{value:g} {what}, but the table has {known[0]:g} to {known[-1]:g}: train another")
        around = list(product(_between(num_tokens, self.lengths), _between(bytes_per_s, self.links)))
        return [
            [
                math.exp(sum(a * b * math.log(self.ttft_s[i][j][level][index]) for (i, a), (j, b) in around))
                for index in range(len(ratios))
            ]
            for level, ratios in enumerate(self.drops)
        ]

    def _choice(
        self, num_tokens: int, bytes_per_s: float, loss: Loss, at: tuple[int, int], times: list[list[float]]
    ) -> Choice:
        level, index = at
        row, _ = max(_between(num_tokens, self.lengths), key=lambda one: one[1])
        column, _ = max(_between(bytes_per_s, self.links), key=lambda one: one[1])
        pieces = self.micro_partitions[row][column][level][index]
        configuration = Configuration(self.levels[level], self.drops[level][index], pieces)
        return Choice(configuration, times[level][index], loss(num_tokens, self.mean_drop[level][index]))

    def _worst(self, group: Group) -> float:
        """Returns the largest share by which a choice halfway between points takes longer than predicted."""
        worst = 0.0
        for length, link in product(_halfway(self.lengths), _halfway(self.links)):
            times, there = self._times(round(length), link), group.with_link(link)
            for level, ratios in enumerate(self.drops):
                for index in range(len(ratios)):
                    made = self._choice(round(length), link, lambda *_: 0.0, (level, index), times)
                    worst = max(worst, there.ttft_s(round(length), made.configuration) / made.ttft_s - 1)
        return worst


def _halfway(known: Sequence[float]) -> list[float]:
    return [math.sqrt(one * other) for one, other in zip(known, known[1:], strict=False)] or list(known)
