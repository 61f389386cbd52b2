"""Tuned files: the measurements of `longspan tune csa`, with fitted loss and speeds (CSPS §3.2.6).

A tuned file is one JSON object. The loss belongs to the model on any machine. Speeds are of the machine that measured.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import ClassVar

import msgspec

from longspan.core.sparse import DropMode, SparseSetting
from longspan.core.sparse_plan import segments_of
from longspan.cost.csa_pipeline import Rates
from longspan.cost.profile_key import Stored
from longspan.cost.shape import ModelShape
from longspan.policy.csps.models import LossModel, LossSample
from longspan.policy.csps.objective import NO_LOSS
from longspan.policy.csps.search import Configuration, Grid, Group, Loss

HELD_OUT_EVERY = 5
"""Every fifth point is held out from the fits, as in the paper."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement of the prompts of one length, with one configuration.

    Attributes:
        levels: 1 for exact attention.
        drop: the ratio of level 2, from which the other ratios follow.
        scores: for each prompt, the probability with which the model answers its pass key.
        num_found: prompts whose greedy answer begins with the key.
        nll: for each prompt, the mean negative log-likelihood of its tokens.
        ttft_s, attention_s: time to the first token of one prompt alone, and seconds of attention summed over ranks.
            None if the point was not timed.
    """

    num_tokens: int
    levels: int
    drop: float
    mode: DropMode
    scores: tuple[float, ...]
    num_found: int
    nll: tuple[float, ...]
    ttft_s: float | None = None
    attention_s: float | None = None

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.levels, self.drop)

    def loss(self, exact: Point) -> float:
        """Return A_d in points: the larger of the lost mean probability of keys, and the mean gain of perplexity.

        A model may answer pass keys with very little of its attention, so the score alone is not enough.
        """
        return max(self.lost_score(exact), statistics.fmean(self.gains(exact)))

    def lost_score(self, exact: Point) -> float:
        """Return the lost mean probability of keys in points. It is negative if the point scores higher."""
        return 100 * (statistics.fmean(exact.scores) - statistics.fmean(self.scores))

    def gains(self, exact: Point) -> list[float]:
        """Return the gain of each prompt's perplexity in per cent."""
        return [100 * math.expm1(own - other) for own, other in zip(self.nll, exact.nll, strict=True)]


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The errors of the fits at held-out points.

    Attributes:
        accuracy: 1 - the mean absolute error of the mean loss, of 100 points.
        covered: the share of prompts whose perplexity rises at most as much as predicted with the margin, or not at all
            by `NO_LOSS`.
        time_error: the median relative error of times to first token. None if no point was timed.
    """

    num_points: int
    accuracy: float
    covered: float
    time_error: float | None


class Tuned(Stored, frozen=True, kw_only=True):
    """The content of a tuned file.

    Attributes:
        tuned_for: the model.
        hosts: the host of each member of the group that measured.
        machine, data: the machine that measured, and its text.
        rates: of a member of that group, while all members compute.
        deviations: of attention scores, as of `Group`.
        points: all measured points, in order. Empty if the file is only used for choices.
    """

    called: ClassVar[str] = "file of longspan tune csa"

    tuned_for: str
    dtype: str
    shape: ModelShape
    hosts: tuple[int, ...]
    machine: str
    data: str
    loss: LossModel
    rates: Rates
    held_out: HeldOut
    deviations: tuple[tuple[float, ...], ...] = ()
    points: tuple[Point, ...] = ()

    @property
    def brief(self) -> Tuned:
        """A copy without points."""
        return msgspec.structs.replace(self, points=())

    @property
    def group(self) -> Group:
        """The group that measured."""
        return Group(shape=self.shape, hosts=self.hosts, rates=self.rates, deviations=self.deviations)

    def levels(self) -> set[int]:
        """Return the numbers of levels whose loss was measured, and 1 for exact attention."""
        return {1, *(fit.num_ratios + 1 for fit in self.loss.fits)}

    def modes(self) -> list[DropMode]:
        return sorted({fit.mode for fit in self.loss.fits})

    def max_drop_without_loss(self, num_tokens: int, levels: int, mode: DropMode) -> float | None:
        """Return the largest drop ratio of level 2 without a predicted loss, or None if every ratio has a loss."""
        group = self.group
        loss, largest = self.loss_in(self.hosts, mode), None
        for ratio in Grid().drops:
            if loss(num_tokens, group.mean_drop(Configuration(levels, ratio))) > NO_LOSS:
                break
            largest = ratio
        return largest

    def loss_in(self, hosts: tuple[int, ...], mode: DropMode) -> Loss:
        """Return A_d for another group. A ratio counts more if a level has a larger share of all pairs there.

        It never counts less: in a smaller group fewer queries drop keys, but each of them drops as large a part. The
        loss is infinite for numbers of levels that were not measured.
        """
        measured = self.levels()

        def loss(num_tokens: int, mean_drop: tuple[float, ...]) -> float:
            levels = len(mean_drop) + 1
            if levels not in measured:
                return math.inf
            here, there = pair_shares(hosts, levels), pair_shares(self.hosts, levels)
            alike = tuple(ratio * max(1.0, own / of) for ratio, own, of in zip(mean_drop, here, there, strict=True))
            return self.loss.predict(num_tokens, alike, mode)

        return loss


@lru_cache(maxsize=256)
def pair_shares(hosts: tuple[int, ...], levels: int) -> tuple[float, ...]:
    """Return the share of all (query, key) pairs that meet at each level from 2 on, for a long prompt."""
    if levels == 1:
        return ()
    count = len(hosts)
    setting = SparseSetting(partition=1, segments=segments_of(count, hosts, levels), drop=((),))
    met = [setting.level(query, key) for query, key in product(range(count), repeat=2) if key < query]
    return tuple(2 * met.count(level) / count**2 for level in range(2, levels + 1))


def tuned(points: Sequence[Point], group: Group, *, tuned_for: str, dtype: str, machine: str, data: str) -> Tuned:
    """Fit the loss and the speeds to points, and measure their errors at the held-out points.

    Args:
        group: the members that measured. Of its rates, only the links are used.
    """
    fitted, held_out = split(points)
    samples = loss_samples(group, fitted, points)
    model = LossModel.fit(samples)
    rates = fit_rates(group, fitted)
    errors, are_covered = [], list[bool]()
    for point, exact in _with_exact(held_out, points):
        at = point.num_tokens, group.mean_drop(point.configuration), point.mode
        errors.append(abs(model.predict(*at, margin=False) - point.loss(exact)))
        bound = max(NO_LOSS, model.predict(*at))
        are_covered += [gain <= bound for gain in point.gains(exact)]
    timed = replace(group, rates=rates)
    time_errors = [_time_error(timed, point) for point in held_out if point.ttft_s is not None]
    return Tuned(
        tuned_for=tuned_for,
        dtype=dtype,
        shape=group.shape,
        hosts=group.hosts,
        machine=machine,
        data=data,
        loss=model,
        rates=rates,
        held_out=HeldOut(
            num_points=len(errors),
            accuracy=1 - statistics.fmean(errors) / 100,
            covered=statistics.fmean(are_covered),
            time_error=statistics.median(time_errors) if time_errors else None,
        ),
        deviations=group.deviations,
        points=tuple(points),
    )


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Return points to fit, and held-out points. Exact points are never held out."""
    sparse = [point for point in points if point.levels > 1]
    held_out = sparse[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [point for point in points if point not in held_out], held_out


def loss_samples(group: Group, points: Sequence[Point], exact: Sequence[Point]) -> list[LossSample]:
    """Return the losses of sparse points: the score of each point, and the perplexity of each of its prompts."""
    samples = []
    for point, of in _with_exact(points, exact):
        sample = LossSample(
            num_tokens=point.num_tokens,
            mean_drop=group.mean_drop(point.configuration),
            mode=point.mode,
            loss=point.lost_score(of),
        )
        gains = (msgspec.structs.replace(sample, loss=gain, measure="perplexity") for gain in point.gains(of))
        samples += [sample, *gains]
    return samples


def _with_exact(points: Sequence[Point], exact: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return the sparse points, each with the exact point of the same length."""
    exact_of = {point.num_tokens: point for point in exact if point.levels == 1}
    return [(point, exact_of[point.num_tokens]) for point in points if point.levels > 1]


def fit_rates(group: Group, points: Sequence[Point]) -> Rates:
    """Fit the speeds of a member: attention to its seconds in exact points, and the rest to times to first token.

    Both are medians, so that single slow runs hardly count.
    """
    shape = group.shape
    heads = shape.num_heads * shape.num_layers
    pairs_per_s = [
        heads * point.num_tokens**2 / 2 / point.attention_s
        for point in points
        if point.levels == 1 and point.attention_s
    ]
    median = statistics.median(pairs_per_s) if pairs_per_s else group.rates.pairs_per_s
    rates = msgspec.structs.replace(group.rates, pairs_per_s=median, qkv_s=0.0, linear_s=0.0, rest_s=0.0)
    rest_s = _rest_s(replace(group, rates=rates), [point for point in points if point.ttft_s is not None])
    return msgspec.structs.replace(rates, rest_s=rest_s)


def _rest_s(group: Group, points: Sequence[Point]) -> float:
    """Return the seconds per token outside of attention with the least error, which is a weighted median."""
    weighted = []
    for point in points:
        assert point.ttft_s is not None, "the point was timed"
        rest_s = point.ttft_s - replace(group, mode=point.mode).ttft_s(point.num_tokens, point.configuration)
        weighted.append((rest_s / point.num_tokens, point.num_tokens / point.ttft_s))
    half = sum(weight for _, weight in weighted) / 2
    for value, weight in sorted(weighted):
        half -= weight
        if half <= 0:
            return max(0.0, value)
    return 0.0


def _time_error(group: Group, point: Point) -> float:
    assert point.ttft_s is not None, "the point was timed"
    return abs(replace(group, mode=point.mode).ttft_s(point.num_tokens, point.configuration) / point.ttft_s - 1)
