"""Laws of tuned files: fitted values, held-out prompts, and losses."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import msgspec
import pytest
from invented_tuned import RATES, TINY_SHAPE, invented_points, invented_tuned

from longspan.core.sparse import is_tuned
from longspan.cost.csa_pipeline import LinkSpeed
from longspan.policy.csps.objective import NO_LOSS
from longspan.policy.csps.search import Group
from longspan.policy.csps.tuned import HELD_OUT_EVERY, Point, Tuned, fit_rates, pair_shares, split, tuned

GROUP = Group(shape=TINY_SHAPE, hosts=(0, 0, 1, 1), rates=RATES)


def test_fitted_speeds_equal_the_true_speeds() -> None:
    """Also when some runs were much slower on a shared machine."""
    timed = [one for one in invented_points(GROUP) if one.ttft_s]
    slow = [
        msgspec.structs.replace(one, ttft_s=3 * one.ttft_s, attention_s=9.0) if i % 6 == 1 else one
        for i, one in enumerate(timed)
    ]
    for points in (timed, slow):
        unknown = replace(GROUP, rates=msgspec.structs.replace(RATES, pairs_per_s=1.0, rest_s=0.0))
        found = fit_rates(unknown, points)
        assert found.pairs_per_s == pytest.approx(RATES.pairs_per_s, rel=0.06)
        assert found.rest_s == pytest.approx(RATES.rest_s, rel=0.1)
        assert (found.inside, found.between) == (RATES.inside, RATES.between)


def test_held_out_points_do_not_change_the_fit() -> None:
    points = invented_points(GROUP)
    fitted, held_out = split(points)
    assert len(held_out) == sum(one.levels > 1 for one in points) // HELD_OUT_EVERY == 12
    assert not [one for one in held_out if one.levels == 1 or one in fitted]
    spoiled = [msgspec.structs.replace(one, scores=(0.0, 0.0)) if one in held_out else one for one in points]
    about = {"tuned_for": "x", "dtype": "float32", "machine": "", "data": ""}
    good, bad = tuned(points, GROUP, **about), tuned(spoiled, GROUP, **about)
    assert good.loss == bad.loss
    assert good.held_out.accuracy > 0.99
    assert bad.held_out.accuracy < 0.6
    assert good.held_out.num_points == 12
    assert good.held_out.time_error is not None and good.held_out.time_error < 0.05


def test_a_loss_is_of_score_or_of_perplexity() -> None:
    exact = Point(num_tokens=9, levels=1, drop=0, mode="kv", scores=(1.0, 0.8), num_found=2, nll=(2.0, 2.0))
    forgets = msgspec.structs.replace(exact, scores=(0.9, 0.5))
    babbles = msgspec.structs.replace(exact, nll=(2.1, 2.3))
    assert forgets.loss(exact) == pytest.approx(20)
    assert babbles.gains(exact) == pytest.approx([100 * math.expm1(0.1), 100 * math.expm1(0.3)])
    assert babbles.loss(exact) == pytest.approx(sum(babbles.gains(exact)) / 2)
    assert msgspec.structs.replace(babbles, scores=(0.9, 0.5)).loss(exact) == babbles.loss(exact)
    assert exact.loss(exact) == 0


def test_nineteen_of_twenty_prompts_stay_within_the_predicted_gain() -> None:
    """Prompts gain from a quarter to four times as much as the mean. A fit of the mean alone covers half of them."""
    rng = random.Random(0)
    points = []
    for point in invented_points(GROUP, kv=0.0, qkv=0.0):
        mean = 12 * sum(ratio**2 for ratio in GROUP.mean_drop(point.configuration)) if point.levels > 1 else 0.0
        gains = (mean * 4 ** rng.uniform(-1, 1) for _ in point.nll)
        nll = tuple(2 + math.log1p(gain / 100) for gain in gains)
        points.append(msgspec.structs.replace(point, nll=nll, scores=(0.9, 0.8)))
    found = tuned(points, GROUP, tuned_for="x", dtype="float32", machine="", data="")
    exact = {point.num_tokens: point for point in points if point.levels == 1}
    covered = {True: 0, False: 0}
    pairs = [(point, gain) for point in points if point.levels > 1 for gain in point.gains(exact[point.num_tokens])]
    for point, gain in pairs:
        for margin in covered:
            loss = found.loss.predict(point.num_tokens, GROUP.mean_drop(point.configuration), point.mode, margin=margin)
            covered[margin] += gain <= max(NO_LOSS, loss)
    assert found.loss.margin > 1.5
    assert covered[False] < 0.85 * len(pairs)
    assert covered[True] >= 0.9 * len(pairs)
    assert found.held_out.covered >= 0.85


def test_files_are_read_as_they_were_written() -> None:
    found = invented_tuned()
    assert Tuned.from_json(found.to_json()) == found
    assert found.brief.points == () and Tuned.from_json(found.brief.to_json(indent=0)) == found.brief
    assert is_tuned(found.to_json()) and is_tuned(found.brief.to_json(indent=0))
    assert not is_tuned('{"levels": 3}') and not is_tuned("off")
    with pytest.raises(ValueError, match="not a file of longspan tune csa"):
        Tuned.from_json('{"tuned_for": 1}')


def test_pairs_meet_at_one_level_each() -> None:
    """So with their own partition's they are all pairs."""
    for hosts in ((0, 1), (0, 0, 0), (0, 0, 1, 1), (0,) * 8, (0, 0, 0, 0, 1, 1, 1, 1)):
        for levels in (2, 3):
            if len(pair_shares(hosts, levels)) == levels - 1:
                assert sum(pair_shares(hosts, levels)) == pytest.approx(1 - 1 / len(hosts))
    assert pair_shares((0, 0, 1, 1), 3) == (0.25, 0.5)


def test_a_ratio_never_counts_less_on_another_group() -> None:
    """Eight members have more pairs beyond their own partitions than four. Two have fewer, but drop as large a part."""
    found = invented_tuned()
    four, two, eight = (found.loss_in(hosts, "kv")(2048, (0.4,)) for hosts in ((0, 0, 1, 1), (0, 1), (0,) * 8))
    assert four == pytest.approx(found.loss.predict(2048, (0.4,), "kv"))
    assert 0 < two == four < eight
    assert found.loss_in((0, 0, 1, 1), "kv")(2048, (0.1, 0.2, 0.3)) == math.inf


def test_the_largest_ratio_without_loss() -> None:
    """40 points by the square of the mean ratio, and half of the layers drop any: a point at about 0.32."""
    found = invented_tuned()
    most = found.max_drop_without_loss(2048, 2, "kv")
    assert most is not None and 0.26 <= most <= 0.32
    of_queries = found.max_drop_without_loss(2048, 2, "qkv")
    assert of_queries is not None and of_queries < most
    assert found.max_drop_without_loss(2048, 3, "kv") is None, "level 3 drops half at least"
    assert invented_tuned(kv=0.0).max_drop_without_loss(2048, 2, "kv") == 0.98


def test_links_are_left_as_they_were_measured() -> None:
    link = LinkSpeed(123.0, 4.0)
    slow = replace(GROUP, rates=msgspec.structs.replace(RATES, inside=link, between=link))
    found = fit_rates(slow, [one for one in invented_points(slow) if one.ttft_s])
    assert (found.inside, found.between) == (link, link)
