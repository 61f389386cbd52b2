"""The fitted rule of Context Parallelism's Appendix D, which lives with the benchmarks of papers."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from longspan.core.exchange import RING_KV, RING_Q
from longspan.cost.profile import Prefill, Profile
from longspan.cost.profile_key import ProfileKey

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "papers"))
from appendix_d import AppendixD, RingSample, fit_appendix_d, ring_rule

TOKENS = st.integers(1, 2_000_000)
CACHED = st.integers(0, 2_000_000)


@given(st.floats(0, 3), st.floats(-3, 3), st.floats(-40, 40), TOKENS, TOKENS, CACHED)
def test_the_empirical_rule_is_monotone_when_neither_alpha_nor_its_sum_with_beta_is_negative(
    alpha: float, beta: float, gamma: float, new: int, more: int, cached: int
) -> None:
    rule = AppendixD(alpha=alpha, beta=max(beta, -alpha), gamma=gamma)
    assert rule.score(new + more, cached) >= rule.score(new, cached) - 1e-9


def test_the_empirical_rule_need_not_be_monotone() -> None:
    """A negative alpha, as in the paper's figure: `ring_kv` is left again when new tokens outnumber the cached ones."""
    rule = AppendixD(alpha=-1.0, beta=1.2, gamma=12.2)
    assert [rule.choose(new, 100_000) for new in (50, 20_000, 100_000)] == [RING_Q, RING_KV, RING_Q]


GRID = [(new, cached) for new in (64, 256, 1024, 4096, 16384) for cached in (0, 512, 8192, 131_072)]


def sample(new: int, cached: int, score: float) -> RingSample:
    """Times whose ratio has the sign of the score, and grows with it."""
    return RingSample(
        new_tokens=new, cached_tokens=cached, ring_kv_s=1.0, ring_q_s=math.exp(min(0.7, max(-0.7, score / 10)))
    )


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(-10, 10))
@example(0.0, 1.0, 0.0)
@example(1.0, 0.0, -5.0)
def test_samples_on_two_sides_of_a_line_are_separated(alpha: float, beta: float, gamma: float) -> None:
    truth = AppendixD(alpha=alpha, beta=beta, gamma=gamma)
    samples = [sample(new, cached, score) for new, cached in GRID if abs(score := truth.score(new, cached)) > 0.05]
    assume(samples)
    fit = fit_appendix_d(samples)
    assert fit.missed == ()
    for taken in samples:
        assert fit.rule.choose(taken.new_tokens, taken.cached_tokens) == taken.better


def test_samples_that_no_line_separates_are_named() -> None:
    """The rule follows the relevant samples and names the remaining ones."""
    truth = AppendixD(alpha=1.0, beta=0.5, gamma=-5.0)
    samples = [sample(new, cached, truth.score(new, cached)) for new, cached in GRID]
    noise = RingSample(new_tokens=16384, cached_tokens=0, ring_kv_s=1.0, ring_q_s=0.999)
    assert fit_appendix_d([*samples, noise]).missed == (noise,)


def test_a_ring_that_always_won_is_always_chosen() -> None:
    for score, winner in ((1.0, RING_KV), (-1.0, RING_Q)):
        fit = fit_appendix_d([sample(new, cached, score) for new, cached in GRID])
        assert {fit.rule.choose(new, cached) for new, cached in [*GRID, (1, 10**7), (10**7, 0)]} == {winner}
        assert fit.missed == ()


def test_a_tie_is_no_miss() -> None:
    """It does not count as missed, whatever the rule says."""
    tied = sample(64, 0, 0.0)
    assert fit_appendix_d([tied]).missed == ()
    assert fit_appendix_d([tied, sample(64, 8192, -1.0)]).missed == ()


def test_a_profile_has_a_rule_for_groups_that_did_both_rings() -> None:
    key = ProfileKey(model="m", dtype="float32", device="cpu", tp=1, threads=1, kernel="native", machine="x")
    prefills = [
        Prefill(members=2, exchange=exchange, new_tokens=new, cached_tokens=cached, seconds=(seconds,))
        for new, cached in GRID
        for exchange, seconds in (("ring_kv", 1e-4 * (new + cached)), ("ring_q", 2.9e-4 * new))
    ]
    profile = Profile(profile_key=key, prefills=tuple(prefills))
    ring = ring_rule(profile, 2)
    assert ring is not None and ring.missed == ()
    assert [ring.rule.choose(4096, 0), ring.rule.choose(64, 8192)] == [RING_KV, RING_Q]
    assert ring_rule(profile, 1) is None


def test_files_without_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="not a measured prefill"):
        RingSample(new_tokens=1, cached_tokens=0, ring_kv_s=0.0, ring_q_s=1.0)
    with pytest.raises(ValueError, match="measure both rings"):
        fit_appendix_d([])
