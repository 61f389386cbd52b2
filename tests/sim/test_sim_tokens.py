"""Prompts that are made when they are looked at, and how long they are."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.sim.experiment import find_max_rate
from longspan.workload.arrivals import TokenText, prompt_of, text
from longspan.workload.requests import draw_lengths, named_lengths, quantiles

RANGES = {"short": (4_000, 95_000, 23_600), "medium": (8_000, 142_000, 32_800), "long": (16_000, 190_000, 50_100)}


@given(st.lists(st.lists(st.integers(0, 9), max_size=5).map(tuple), max_size=5), st.data())
def test_texts_are_one_sequence(parts: list[tuple[int, ...]], data: st.DataObject) -> None:
    plain = [token for part in parts for token in part]
    texts = TokenText([TokenText(parts[:2]), *parts[2:]])
    assert list(texts) == plain and len(texts) == len(plain)
    assert [texts[index] for index in range(-len(plain), len(plain))] == plain + plain
    start, stop = data.draw(st.integers(-12, 30)), data.draw(st.integers(-12, 30))
    assert list(texts[start:stop]) == plain[start:stop]
    assert list(texts[start:][1:3]) == plain[start:][1:3]
    assert array("q", texts).tolist() == plain
    with pytest.raises(IndexError):
        texts[len(plain)]


def test_a_slice_of_one_text_is_no_list() -> None:
    assert text(3, 10**6)[5 : 10**6] == range(text(3, 9)[5], text(3, 9)[0] + 10**6)
    assert isinstance(TokenText([text(1, 600), text(2, 600)])[512:600], range)


@given(st.integers(0, 50), st.integers(0, 50), st.lists(st.integers(0, 3), max_size=3), st.integers(0, 1))
def test_equal_names_are_equal_tokens_and_different_names_are_not(
    length: int, shared: int, blocks: list[int], which: int
) -> None:
    one = list(prompt_of(1, length, shared=which, shared_len=shared, blocks=blocks, block_len=8))
    other = list(prompt_of(2, length, shared=0, shared_len=shared, blocks=blocks, block_len=8))
    assert len(one) == len(other) == length
    common = min(length, shared + 8 * len(blocks))
    assert one[shared:common] == other[shared:common]
    assert set(one[common:]).isdisjoint(other)
    assert (one[: min(shared, length)] == other[: min(shared, length)]) == (which == 0 or not min(shared, length))


# ---------------------------------------------------------------- lengths


@pytest.mark.parametrize("name", RANGES)
def test_named_workloads_have_the_ranges_and_means_of_the_paper(name: str) -> None:
    low, high, mean = RANGES[name]
    lengths = named_lengths(name)
    assert (lengths(0), lengths(1)) == pytest.approx((low, high), rel=1e-3)
    drawn = draw_lengths(lengths, 20_000, np.random.default_rng(0))
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert low <= min(drawn) and max(drawn) <= high
    assert np.mean([lengths((part + 0.5) / 2000) for part in range(2000)]) == pytest.approx(mean, rel=1e-3)


def test_quantiles_are_met_and_between_them_the_logarithm_is_linear() -> None:
    lengths = quantiles("input_len", {"0": 10, "1": 1000, "0.5": 100})
    assert [lengths(part) for part in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx([10, 10**1.5, 100, 10**2.5, 1000])
    drawn = draw_lengths(lengths, 4000, np.random.default_rng(1))
    assert np.median(drawn) == pytest.approx(100, rel=0.1)


WRONG = {"0": 5}, {"0": 5, "0.9": 9}, {"0": 9, "1": 5}, {"0": 0, "1": 5}, {"0": 5, "1": 1e300}, {"0": 5, "1": "nan"}


@pytest.mark.parametrize("points", [*WRONG, [1], {"a": 1}])
def test_invalid_quantiles_are_refused(points: object) -> None:
    with pytest.raises(ValueError, match="quantile"):
        quantiles("input_len", points)


def test_quantiles_need_both_ends() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        quantiles("input_len", {"0.1": 5, "1": 6})


# ---------------------------------------------------------------- the highest rate


@given(st.floats(1e-3, 1e4), st.floats(1e-2, 1e3))
def test_the_highest_rate_is_found_from_anywhere(limit: float, start: float) -> None:
    found = find_max_rate(lambda rate: rate <= limit, start=start)
    assert found is not None and limit / 1.021 <= found <= limit


def test_rates_without_a_limit_or_beyond_reach() -> None:
    assert find_max_rate(lambda _: True, start=1.0) is None
    with pytest.raises(ValueError, match=r"even .* are too many"):
        find_max_rate(lambda _: False, start=1.0)
