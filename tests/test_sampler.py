"""The sampler against plain numpy and against the logits warpers of transformers; no row depends on another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from longspan.core.sampling import SamplingParams
from longspan.core.steps import Sample
from longspan.runtime.sampler import sample, uniform

CHI_SQUARE_999 = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32, 11: 31.26}
"""Exceeded once in 1,000 times, by degrees of freedom."""


def wish(
    *,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    seed: int = 0,
    position: int = 5,
    banned: tuple[int, ...] = (),
) -> Sample:
    return Sample(
        instance=0, position=position, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, banned=banned
    )


def probabilities(logits: Tensor, asked: Sample) -> np.ndarray:
    """What the documentation of `SamplingParams` says, one row, float64, by hand."""
    values = logits.double().numpy().copy()
    values[list(asked.banned)] = -np.inf
    values = (values - values.max()) / asked.temperature
    order = np.argsort(-values, kind="stable")
    kept = order[: asked.top_k] if asked.top_k > 0 else order
    weights = np.exp(values[kept])
    weights /= weights.sum()
    if asked.top_p < 1:
        reached = np.cumsum(weights) - weights
        kept, weights = kept[reached < asked.top_p], weights[reached < asked.top_p]
    out = np.zeros(len(values))
    out[kept] = weights / weights.sum()
    return out


def by_inversion(logits: Tensor, asked: Sample) -> int:
    """The token at the drawn quantile, most likely first."""
    wanted = probabilities(logits, asked)
    order = np.argsort(-wanted, kind="stable")
    return int(order[np.searchsorted(np.cumsum(wanted[order]), uniform(asked.seed, asked.position), side="right")])


wishes = st.builds(
    wish,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 100]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(1, 2**40),
    banned=st.sets(st.integers(0, 15), max_size=4).map(tuple),
)


def logits_of(seed: int, rows: int, vocab: int = 16) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@given(st.integers(0, 10**6), st.lists(wishes, min_size=1, max_size=6))
@settings(deadline=None)
def test_equals_plain_inversion(seed: int, asked: list[Sample]) -> None:
    logits = logits_of(seed, len(asked))
    for row, (one, token) in enumerate(zip(asked, sample(logits, asked), strict=True)):
        if one.temperature:
            assert token == by_inversion(logits[row], one)
        else:
            allowed = logits[row].clone()
            allowed[list(one.banned)] = -torch.inf
            assert token == int(allowed.argmax())
        assert token not in one.banned


@given(st.integers(0, 10**6), st.lists(wishes, min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_a_row_does_not_depend_on_the_batch(seed: int, asked: list[Sample], shuffle: random.Random) -> None:
    logits = logits_of(seed, len(asked), vocab=700)
    before = logits.clone()
    together = sample(logits, asked)
    assert torch.equal(logits, before), "the reported logits are left alone"
    order = list(range(len(asked)))
    shuffle.shuffle(order)
    assert sample(logits[order], [asked[row] for row in order]) == [together[row] for row in order]
    assert [sample(logits[row : row + 1], [asked[row]])[0] for row in range(len(asked))] == together


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [-1, 1, 3, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_reference_equals_the_warpers_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """So the reference above, and with it the sampler, means what everybody means by these words."""
    logits = logits_of(7, 20, vocab=64)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k > 0 else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    theirs = scores.softmax(-1).numpy()
    ours = np.stack([probabilities(row, wish(temperature=temperature, top_k=top_k, top_p=top_p)) for row in logits])
    assert ((ours > 0) == np.isfinite(scores.numpy())).all(), "the same tokens stay"
    np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"top_k": 5, "top_p": 0.8, "temperature": 2.0},
        {"banned": (0, 3)},
    ],
)
def test_frequencies_are_the_probabilities(asked: dict[str, float]) -> None:
    """Chi-square over 4,000 positions of one request, and over 4,000 seeds at one position."""
    logits = torch.tensor([2.0, 1.5, 1.2, 1.0, 0.5, 0.2, 0.0, -0.5])
    expected = probabilities(logits, wish(**asked)) * 4000  # type: ignore[arg-type]
    for varied in ("position", "seed"):
        samples = [wish(**asked, **{varied: number}) for number in range(1, 4001)]  # type: ignore[arg-type]
        counts = Counter(sample(logits.expand(4000, -1), samples))
        kept = np.flatnonzero(expected)
        assert set(counts) <= set(kept.tolist())
        statistic = sum((counts[int(token)] - expected[token]) ** 2 / expected[token] for token in kept)
        assert statistic < critical(len(kept) - 1)


def critical(degrees: int) -> float:
    return next(value for known, value in sorted(CHI_SQUARE_999.items()) if known >= degrees)


def test_random_numbers_are_keyed_and_even() -> None:
    numbers = [uniform(seed, position) for seed in range(40) for position in range(40)]
    assert len(set(numbers)) == 1600
    assert all(0 <= number < 1 for number in numbers)
    counts = np.histogram(numbers, bins=8, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < CHI_SQUARE_999[7]
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1, "neighbouring positions have nothing in common"
    assert uniform(3, 4) == uniform(3, 4)
    assert 0 <= uniform(2**63 - 1, 2**40) < 1


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    assert sample(logits, [wish(temperature=0.0), wish(temperature=0.0, banned=(1,))]) == [1, 2]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1e-3},
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"top_p": 1e-12},
        {"top_p": 1e-300, "temperature": 50.0},
        {"top_k": 1, "temperature": 1e6},
    ],
)
def test_extremes_keep_the_best(asked: dict[str, float]) -> None:
    logits = logits_of(3, 50, vocab=1000)
    samples = [wish(**asked, seed=row) for row in range(50)]  # type: ignore[arg-type]
    assert sample(logits, samples) == logits.argmax(-1).tolist()


def test_a_huge_temperature_makes_all_alike() -> None:
    logits = logits_of(3, 1, vocab=8).expand(4000, -1)
    counts = Counter(sample(logits, [wish(temperature=1e9, seed=row) for row in range(4000)]))
    assert sum((counts[token] - 500) ** 2 / 500 for token in range(8)) < CHI_SQUARE_999[7]


def test_top_k_counts_tokens_even_among_equals() -> None:
    logits = torch.zeros(400, 10)
    assert set(sample(logits, [wish(top_k=3, seed=row) for row in range(400)])) == {0, 1, 2}


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 or more, but -0.1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -2}, "top_k .*but -2"),
        ({"top_p": 0.0}, "top_p .*but 0.0"),
        ({"top_p": 1.1}, "top_p .*but 1.1"),
        ({"top_p": float("nan")}, "top_p"),
        ({"seed": -1}, "seed .*but -1"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a", ""]}, "must not be empty"),
        ({"max_tokens": 0}, "max_tokens .*but 0"),
        ({"min_tokens": -1}, "min_tokens .*but -1"),
        ({"min_tokens": 9, "max_tokens": 8}, r"min_tokens\(9\) must not exceed max_tokens\(8\)"),
    ],
)
def test_what_sampling_params_refuse(wishes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wishes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stop", "strings"), [("ab", ("ab",)), (["a", "b"], ("a", "b")), ((), ())])
def test_stop_strings_take_any_form(stop: str | Sequence[str], strings: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop_strings == strings  # type: ignore[arg-type]
