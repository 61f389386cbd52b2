"""Tuned files: the measurements of `longspan tune csa`, and the loss and speeds to choose by (CSPS §3.2.6).

A tuned file is one JSON object. The loss is of the model, wherever it runs; speeds are of the machine that measured.
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
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_pipeline import Rates
from longspan.cost.profile_key import Stored
from longspan.policy.csps.models import LossModel, LossSample
from longspan.policy.csps.search import Configuration, Grid, Group, Loss

NO_LOSS = 1.0
"""Points below which a loss counts as none: some prompts do not tell less from nothing."""
HELD_OUT_EVERY = 5
"""One point of so many is kept from the fits, as in the paper."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement of the prompts of one length, with one configuration.

    Attributes:
        levels: 1 for exact attention.
        drop: the ratio of level 2, from which the others follow.
        scores: for each prompt, the probability with which the model answers its pass key.
        num_found: prompts whose key a greedy answer begins with.
        nll: for each prompt, the mean negative log-likelihood of its tokens.
        ttft_s, attention_s: time to the first token of one of the prompts alone, and seconds of attention of all ranks
            together; None where that was not timed.
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

    def points_lost(self, exact: Point) -> float:
        """Returns the mean probability of keys that is lost, in points of 100."""
        return 100 * (statistics.fmean(exact.scores) - statistics.fmean(self.scores))

    def perplexity_gained(self, exact: Point) -> float:
        """Returns by how many per cent perplexity is higher."""
        return 100 * (math.exp(statistics.fmean(self.nll) - statistics.fmean(exact.nll)) - 1)

    def loss(self, exact: Point) -> float:
        """Returns A_d in points: of the score that is lost, or per cent of perplexity, whichever are more.

        A model that answers pass keys with hardly any of its attention may have lost much else.
        """
        return max(self.points_lost(exact), self.perplexity_gained(exact))


class HeldOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The errors of models at points that they were not fitted to.

    Attributes:
        accuracy: 1 - the mean absolute error of the loss, of 100 points.
        time_error: the median relative error of times to first token; None where none was timed.
    """

    num_points: int
    accuracy: float
    time_error: float | None


class Tuned(Stored, frozen=True, kw_only=True):
    """The content of a tuned file.

    Attributes:
        tuned_for: the model.
        hosts: the host of each member of the group that measured.
        machine, data: where, and on which text.
        rates: of a member of that group, while all members compute.
        points: all that were measured, in order; none where only choices are to be made.
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
    points: tuple[Point, ...] = ()

    @property
    def brief(self) -> Tuned:
        """The same without points."""
        return msgspec.structs.replace(self, points=())

    def levels(self) -> set[int]:
        """Returns the numbers of levels whose loss is known; exact attention has 1."""
        return {1, *(fit.num_ratios + 1 for fit in self.loss.fits)}

    def modes(self) -> list[DropMode]:
        return sorted({fit.mode for fit in self.loss.fits})

    def most_without_loss(self, num_tokens: int, levels: int, mode: DropMode) -> float | None:
        """Returns the largest drop ratio of level 2 of which no loss is predicted; None if any loses something."""
        group = Group(shape=self.shape, hosts=self.hosts, rates=self.rates)
        loss, found = self.loss_in(self.hosts, mode), None
        for ratio in Grid().drops:
            if loss(num_tokens, group.mean_drop(Configuration(levels, ratio))) > NO_LOSS:
                break
            found = ratio
        return found

    def loss_in(self, hosts: tuple[int, ...], mode: DropMode) -> Loss:
        """Returns A_d for another group: what counts is the part of all pairs that a level has there.

        It is infinite for numbers of levels that were not measured.
        """
        known = self.levels()

        def loss(num_tokens: int, mean_drop: tuple[float, ...]) -> float:
            levels = len(mean_drop) + 1
            if levels not in known:
                return math.inf
            here, there = pair_shares(hosts, levels), pair_shares(self.hosts, levels)
            alike = tuple(ratio * own / of for ratio, own, of in zip(mean_drop, here, there, strict=True))
            return self.loss.predict(num_tokens, alike, mode)

        return loss


@lru_cache(maxsize=256)
def pair_shares(hosts: tuple[int, ...], levels: int) -> tuple[float, ...]:
    """Returns the part of all pairs of a query and a key that meet at each level from 2 on, of a long prompt."""
    if levels == 1:
        return ()
    count = len(hosts)
    setting = SparseSetting(partition=1, segments=segments_of(count, hosts, levels), drop=((),))
    met = [setting.level(query, key) for query, key in product(range(count), repeat=2) if key < query]
    return tuple(2 * met.count(level) / count**2 for level in range(2, levels + 1))


def tuned(points: Sequence[Point], group: Group, *, tuned_for: str, dtype: str, machine: str, data: str) -> Tuned:
    """Fits models to points, but for the held-out ones, and says how well they predict those.

    Args:
        group: the members that measured; of its rates only those of links count.
    """
    fitted, held_out = split(points)
    samples = loss_samples(group, fitted, points)
    model = LossModel.fit(samples)
    rates = fit_rates(group, fitted)
    errors = [
        abs(model.predict(one.num_tokens, one.mean_drop, one.mode) - one.loss)
        for one in loss_samples(group, held_out, points)
    ]
    timed = replace(group, rates=rates)
    time_errors = [_time_error(timed, one) for one in held_out if one.ttft_s is not None]
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
            time_error=statistics.median(time_errors) if time_errors else None,
        ),
        points=tuple(points),
    )


def split(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Returns points to fit, and held-out ones; exact ones are never held out."""
    sparse = [one for one in points if one.levels > 1]
    held_out = sparse[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [one for one in points if one not in held_out], held_out


def loss_samples(group: Group, points: Sequence[Point], exact: Sequence[Point]) -> list[LossSample]:
    """Compares points with the exact ones of their lengths."""
    exact_of = {one.num_tokens: one for one in exact if one.levels == 1}
    return [
        LossSample(
            num_tokens=one.num_tokens,
            mean_drop=group.mean_drop(one.configuration),
            mode=one.mode,
            loss=one.loss(exact_of[one.num_tokens]),
        )
        for one in points
        if one.levels > 1
    ]


def fit_rates(group: Group, points: Sequence[Point]) -> Rates:
    """Finds the speeds of a member: of attention by the seconds that it took in exact points, of the rest by times.

    Both are medians, so that single slow runs hardly count.
    """
    shape = group.shape
    heads = shape.num_heads * shape.num_layers
    pairs_per_s = [
        heads * one.num_tokens**2 / 2 / one.attention_s for one in points if one.levels == 1 and one.attention_s
    ]
    known = statistics.median(pairs_per_s) if pairs_per_s else group.rates.pairs_per_s
    rates = msgspec.structs.replace(group.rates, pairs_per_s=known, qkv_s=0.0, linear_s=0.0, rest_s=0.0)
    rest_s = _rest_s(replace(group, rates=rates), [one for one in points if one.ttft_s is not None])
    return msgspec.structs.replace(rates, rest_s=rest_s)


def _rest_s(group: Group, points: Sequence[Point]) -> float:
    """Returns the seconds per token outside of attention with the least error: a weighted median."""
    found = []
    for one in points:
        assert one.ttft_s is not None, "it was timed"
        rest_s = one.ttft_s - replace(group, mode=one.mode).ttft_s(one.num_tokens, one.configuration)
        found.append((rest_s / one.num_tokens, one.num_tokens / one.ttft_s))
    half = sum(weight for _, weight in found) / 2
    for value, weight in sorted(found):
        half -= weight
        if half <= 0:
            return max(0.0, value)
    return 0.0


def _time_error(group: Group, point: Point) -> float:
    assert point.ttft_s is not None, "it was timed"
    return abs(replace(group, mode=point.mode).ttft_s(point.num_tokens, point.configuration) / point.ttft_s - 1)
