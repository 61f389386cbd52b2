"""The sampler against plain numpy and the logits warpers of transformers. No row depends on another."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from draws import CHI_SQUARE_999, VOCAB, Case, case, cases, expected_token, logits_of, probabilities
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from without_waits import WaitError, without_waits

from longspan.core.steps import Sampling
from longspan.runtime import random_tokens, sampling
from longspan.runtime.random_tokens import largest, uniforms, weights
from longspan.runtime.sampling import Draw, sample


def sampled(logits: Tensor, asked: list[Case]) -> list[int]:
    return sample(logits, [one.draw(logits.shape[-1]) for one in asked])


@given(st.integers(0, 10**6), st.lists(cases, min_size=1, max_size=6), st.booleans())
@settings(deadline=None, max_examples=300)
def test_equals_plain_inversion(seed: int, asked: list[Case], with_ties: bool) -> None:
    logits = logits_of(seed, len(asked))
    logits = logits.round() if with_ties else logits
    assert sampled(logits, asked) == [expected_token(*pair) for pair in zip(logits, asked, strict=True)]


@given(
    st.integers(0, 10**6),
    st.lists(cases, min_size=1, max_size=6),
    st.randoms(use_true_random=False),
    st.sampled_from([1, 1500, 10**6]),
    st.sampled_from([1, 20, 10**4]),
)
@settings(deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(
    seed: int, asked: list[Case], shuffle: random.Random, tile_numbers: int, prefix: int
) -> None:
    """Nor on how many rows are worked on at once, nor on how many tokens top_p looks at first."""
    logits = logits_of(seed, len(asked), vocab=700)
    before = logits.clone()
    together = sampled(logits, asked)
    assert torch.equal(logits, before), "the reported logits are left alone"
    order = list(range(len(asked)))
    shuffle.shuffle(order)
    with patch.object(sampling, "_CPU_NUMBERS", tile_numbers), patch.object(random_tokens, "_PREFIX", prefix):
        assert sampled(logits[order], [asked[row] for row in order]) == [together[row] for row in order]
    assert [sampled(logits[row : row + 1], [asked[row]])[0] for row in range(len(asked))] == together


def test_rows_of_a_real_vocabulary_do_not_depend_on_their_neighbours() -> None:
    logits = logits_of(11, 24, vocab=49_152)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 50},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 3.0, "top_p": 0.95},
        {"temperature": 1.0, "top_k": 3000, "top_p": 0.5, "min_p": 0.01, "repetition_penalty": 1.2},
    ]
    asked = [case(**kinds[row % 6], seed=row, prompt=tuple(range(row, 9000, 7)), output=(row,)) for row in range(24)]
    together = sampled(logits, asked)
    assert [sampled(logits[row : row + 1], [asked[row]])[0] for row in range(24)] == together
    assert sampled(logits.flip(0), asked[::-1]) == together[::-1]
    assert together == [expected_token(*pair) for pair in zip(logits, asked, strict=True)]


@pytest.mark.parametrize("temperature", [0.2, 1.0, 1.7])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("top_k", [-1, 1, 3, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 1.0])
def test_weights_equal_the_warpers_of_transformers(temperature: float, min_p: float, top_k: int, top_p: float) -> None:
    logits = logits_of(7, 20, vocab=64)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k > 0 else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    ours = weights(logits, [Sampling(seed=0, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)] * 20)
    theirs = scores.double().softmax(-1)
    seen = theirs / theirs.amax(-1, keepdim=True) > 2**-47  # half of the least weight
    assert torch.equal(ours > 0, seen), "the same tokens stay"
    np.testing.assert_allclose(ours / ours.sum(-1, keepdim=True), theirs, rtol=1e-4, atol=1e-6)


@given(st.integers(0, 10**6), cases.filter(lambda one: one.sampling.temperature > 0), st.integers(1, 400))
@settings(deadline=None)
def test_weights_are_whole_numbers_with_exact_sums(seed: int, asked: Case, vocab: int) -> None:
    found = weights(logits_of(seed, 1, vocab), [asked.sampling])[0]
    assert torch.equal(found, found.round()) and found.max() == 2.0 ** (53 - vocab.bit_length())
    exact = sum(int(weight) for weight in found.tolist())
    assert exact <= 2**53
    assert [int(found[torch.randperm(vocab)].cumsum(0)[-1]) for _ in range(3)] == [exact] * 3


@given(st.integers(0, 10**6), st.integers(1, 300), st.data())
@settings(deadline=None)
def test_largest_is_the_head_of_the_sorted_row(seed: int, vocab: int, data: st.DataObject) -> None:
    logits = logits_of(seed, 3, vocab).round()
    count = data.draw(st.integers(1, vocab))
    assert torch.equal(largest(logits, count), logits.sort(dim=-1, descending=True).values[:, :count])


KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 4},
    {"top_p": 0.7},
    {"min_p": 0.25},
    {"top_k": 5, "top_p": 0.8, "temperature": 2.0},
    {"min_p": 0.2, "top_k": 6, "top_p": 0.9, "repetition_penalty": 1.3, "prompt": (0, 2), "output": (1, 1, 7)},
    {"frequency_penalty": 0.4, "presence_penalty": -0.5, "output": (0, 0, 5)},
    {"logit_bias": ((7, 3.0), (0, -1.0))},
    {"banned": (0, 3)},
]


VARIED = [
    pytest.param(asked, varied, id=f"{varied}-{asked}", marks=[pytest.mark.full] if number % 3 != place else [])
    for place, varied in enumerate(("position", "seed", "choice"))
    for number, asked in enumerate(KINDS)
]
"""Each kind with one variation, and each variation with several kinds. The other pairs are `full`."""


@pytest.mark.parametrize(("asked", "varied"), VARIED)
def test_frequencies_are_the_probabilities(asked: dict[str, Any], varied: str) -> None:
    """Chi-square over 4,000 positions of one request, 4,000 seeds at one position, 4,000 choices of one seed."""
    logits = torch.tensor([2.0, 1.5, 1.2, 1.0, 0.5, 0.2, 0.0, -0.5])
    expected = probabilities(logits, case(**asked)) * 4000
    rows = [case(**{**asked, varied: number}) for number in range(1, 4001)]
    counts = Counter(sampled(logits.expand(4000, -1), rows))
    kept = np.flatnonzero(expected)
    assert set(counts) <= set(kept.tolist())
    assert (
        sum((counts[int(token)] - expected[token]) ** 2 / expected[token] for token in kept)
        < CHI_SQUARE_999[len(kept) - 1]
    )


def test_choices_of_a_prompt_have_nothing_in_common() -> None:
    """Chi-square test: the draws of two choices at a position are independent."""
    numbers = np.array([uniforms((5, choice, position) for position in range(4000)) for choice in range(2)])
    table = np.histogram2d(numbers[0], numbers[1], bins=4, range=[(0, 1), (0, 1)])[0]
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / 4000
    assert ((table - expected) ** 2 / expected).sum() < CHI_SQUARE_999[9]
    assert len(np.unique(numbers)) == 8000


def test_random_numbers_are_keyed_and_even() -> None:
    numbers = uniforms((seed, 0, position) for seed in range(40) for position in range(40))
    assert len(set(numbers)) == 1600
    assert all(0 <= number < 1 for number in numbers)
    counts = np.histogram(numbers, bins=8, range=(0, 1))[0]
    assert ((counts - 200) ** 2 / 200).sum() < CHI_SQUARE_999[7]
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.1, "neighbouring positions have nothing in common"
    first, again, other = uniforms([(3, 1, 4), (3, 1, 4), (3, 4, 1)])
    assert first == again != other


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 10**4), st.integers(0, 2**40)), max_size=5))
@settings(deadline=None)
def test_random_numbers_are_those_of_numpy(keys: list[tuple[int, int, int]]) -> None:
    theirs = [np.random.Generator(np.random.Philox(key=key[:2], counter=key[2])).random() for key in keys]
    assert uniforms(keys) == theirs == [uniforms([key])[0] for key in keys]


def test_near_equals_may_change_places() -> None:
    """Another order of summation changes logits by as much. Drawn tokens must not follow their ranks."""
    logits = torch.full((2000, VOCAB), 1.0) + logits_of(0, 1) * 1e-7
    other = torch.full((2000, VOCAB), 1.0) + logits_of(1, 1) * 1e-7
    assert (logits[0].argsort() != other[0].argsort()).sum() > VOCAB / 2
    asked = [case(seed=row) for row in range(2000)]
    assert sampled(logits, asked) == sampled(other, asked)


def test_greedy_takes_the_best_and_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]] * 2)
    assert sampled(logits, [case(temperature=0.0), case(temperature=0.0, banned=(1,))]) == [1, 2]


def test_below_minimum_decides_on_banned() -> None:
    logits = torch.tensor([[0.0, 3.0]])
    asked = Sampling(seed=0, banned=(1,))
    assert [sampled(logits, [Case(sampling=asked, below_minimum=below)]) for below in (True, False)] == [[0], [1]]


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1e-3},
        {"temperature": 1e-30},
        {"temperature": 5e-324},
        {"temperature": 1e-30, "top_k": 7, "top_p": 0.9, "min_p": 0.1},
        {"top_p": 1e-12},
        {"top_p": 5e-324},
        {"top_p": 1e-300, "temperature": 50.0},
        {"top_k": 1, "temperature": 1e6},
        {"min_p": 1.0, "temperature": 2.0},
    ],
    ids=str,
)
def test_extremes_keep_the_best(asked: dict[str, Any]) -> None:
    logits = logits_of(3, 50, vocab=1000)
    assert sampled(logits, [case(**asked, seed=row) for row in range(50)]) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e9, 1e308])
def test_a_huge_temperature_makes_all_alike(temperature: float) -> None:
    logits = logits_of(3, 1, vocab=8).expand(4000, -1)
    counts = Counter(sampled(logits, [case(temperature=temperature, seed=row) for row in range(4000)]))
    assert sum((counts[token] - 500) ** 2 / 500 for token in range(8)) < CHI_SQUARE_999[7]


@pytest.mark.parametrize("asked", [{"top_k": 3}, {"top_p": 0.3}, {"top_k": 2, "top_p": 0.1}], ids=str)
def test_exact_equals_stay_together(asked: dict[str, Any]) -> None:
    """The sort orders equal logits arbitrarily. Seven equal tokens stay although k or p need fewer."""
    logits = torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 0.5]).expand(400, -1)
    assert set(sampled(logits, [case(**asked, seed=row) for row in range(400)])) == {1, 2, 3, 5, 6, 7, 8}


@pytest.mark.parametrize("asked", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"temperature": 0.0}], ids=str)
def test_a_row_without_a_distribution_is_taken_for_greedy(asked: dict[str, Any]) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1.0, 2.0, 3.0], [-inf, -inf, -inf], [0.0, inf, 1.0], [0.0, 1.0, nan], [9.0, 0.0, 0.0]])
    rows = [case(**asked), case(**asked), case(**asked), case(**asked), case(**asked, banned=(0, 1, 2))]
    alone = sampled(logits[:1], rows[:1])
    assert sampled(logits, rows) == [*alone, 0, 1, 2, 0]


def test_top_p_is_reached_exactly() -> None:
    """At such a temperature all probabilities are 1/4: two reach 0.5, and a third is needed for more."""
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0]).expand(200, -1)
    for top_p, kept in ((0.5, {1, 3}), (0.5 + 1e-9, {1, 2, 3})):
        assert set(sampled(logits, [case(temperature=1e300, top_p=top_p, seed=row) for row in range(200)])) == kept


@pytest.mark.parametrize(("quantile", "token"), [(0.0, 1), (1 - 2**-53, 3)])
def test_the_ends_of_the_quantiles_are_allowed_tokens(quantile: float, token: int) -> None:
    with patch("longspan.runtime.random_tokens.uniforms", return_value=[quantile]):
        assert sampled(torch.zeros(1, 5), [case(banned=(0, 4))]) == [token]


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20, "min_p": 0.1},
    {"temperature": 0.0, "logit_bias": ((3, 2.0), (5, -1.0))},
]


def test_sampling_on_a_device_does_not_wait_for_it() -> None:
    """Each request alone and all together. Some have banned tokens, until they have a minimum of tokens."""
    params = [Sampling(seed=1, banned=(7, 8), **given) for given in SAMPLINGS]
    draws = [Draw(sampling=one, position=9, banned=one.banned if row % 2 else ()) for row, one in enumerate(params)]
    for own in [*([draw] for draw in draws), draws]:
        with without_waits():
            tokens = sampling.sample_on_device(torch.empty(len(own), 5000, device="meta"), own)
        assert tokens.device.type == "meta" and tokens.shape == (len(own),)


def test_waits_for_a_device_are_found() -> None:
    meta, numbers = torch.device("meta"), torch.empty(3, device="meta")
    for wait in (
        lambda: torch.tensor([1, 2], device=meta),
        lambda: numbers.new_tensor([1.0]),
        lambda: torch.tensor([1, 2]).to(meta),
        lambda: numbers[[0, 1]],
        lambda: bool(numbers.any()),
    ):
        with pytest.raises((WaitError, RuntimeError)), without_waits():
            wait()


def test_no_rows_no_tokens() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
