"""Log-probabilities and ranks against torch and plain numpy in float64."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from draws import logits_of
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.steps import TokenLogprobs
from longspan.runtime import sampling
from longspan.runtime.sampling import token_logprobs

rows = st.lists(st.tuples(st.integers(0, 29), st.integers(0, 30)), min_size=1, max_size=7)


@given(st.integers(0, 10**6), rows, st.booleans())
@settings(deadline=None, max_examples=200)
def test_equals_plain_numpy(seed: int, asked: list[tuple[int, int]], with_ties: bool) -> None:
    logits = logits_of(seed, len(asked), vocab=30)
    logits = logits.round() if with_ties else logits
    before = logits.clone()
    found = token_logprobs(logits, [token for token, _ in asked], [num_top for _, num_top in asked])
    assert torch.equal(logits, before)
    for row, (token, num_top), one in zip(logits.double().numpy(), asked, found, strict=True):
        logprobs = row - np.log(np.exp(row).sum())
        best = np.argsort(-row, kind="stable")[:num_top]
        assert one.rank == 1 + (row > row[token]).sum()
        assert one.top_ids == tuple(best), "best first, of equals the lowest id first"
        np.testing.assert_allclose([one.logprob, *one.top_logprobs], logprobs[[token, *best]], atol=1e-5)


@given(st.integers(0, 10**6), rows, st.sampled_from([1, 60, 10**6]))
@settings(deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(seed: int, asked: list[tuple[int, int]], tile_numbers: int) -> None:
    logits = logits_of(seed, len(asked), vocab=30).round()
    together = token_logprobs(logits, *zip(*asked, strict=True))
    with patch.object(sampling, "_CPU_NUMBERS", tile_numbers):
        assert token_logprobs(logits, *zip(*asked, strict=True)) == together
    for row, (token, num_top) in enumerate(asked):
        assert token_logprobs(logits[row : row + 1], [token], [num_top]) == [together[row]]


def test_log_probabilities_are_those_of_torch() -> None:
    logits = logits_of(5, 20, vocab=49_152)
    chosen = torch.randint(49_152, (20,), generator=torch.Generator().manual_seed(1))
    theirs = logits.log_softmax(-1)
    found = token_logprobs(logits, chosen.tolist(), [3] * 20)
    assert [one.logprob for one in found] == theirs.gather(1, chosen[:, None])[:, 0].tolist()
    best = theirs.topk(3)
    assert [list(one.top_ids) for one in found] == best.indices.tolist()
    assert [list(one.top_logprobs) for one in found] == best.values.tolist()


def test_zeros_are_equal_and_impossible_tokens_are_last() -> None:
    logits = torch.tensor([[-torch.inf, -0.0, 0.0, -1.5, 2.0, -torch.inf]])
    (found,) = token_logprobs(logits, [0], [6])
    assert found.top_ids == (4, 1, 2, 3, 0, 5)
    assert found.logprob == found.top_logprobs[-1] == -torch.inf and found.rank == 5
    assert token_logprobs(logits, [2], [0])[0].rank == 2


def test_nothing_asked_nothing_reported() -> None:
    assert token_logprobs(torch.empty(0, 5), [], []) == []
    assert token_logprobs(torch.zeros(1, 1), [0], [0]) == [TokenLogprobs(logprob=0.0, rank=1)]


@pytest.mark.parametrize("num_top", [1, 5])
def test_probabilities_of_all_tokens_sum_to_one(num_top: int) -> None:
    logits = logits_of(2, 1, vocab=50).expand(50, -1)
    found = token_logprobs(logits, range(50), [num_top] * 50)
    assert sum(np.exp(one.logprob) for one in found) == pytest.approx(1.0, abs=1e-5)
    assert sorted(one.rank for one in found) == list(range(1, 51))
