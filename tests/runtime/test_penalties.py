"""Bias, ban and penalties against transformers and dense numpy. Histories count all given tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draws import VOCAB, Case, case, cases, changed, logits_of, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from longspan.core.steps import Sampling
from longspan.runtime.logit_changes import TokenCounts, adjusted
from longspan.runtime.sampling import Draw


@given(st.integers(0, 10**6), st.lists(cases, min_size=1, max_size=6))
@settings(deadline=None, max_examples=300)
def test_equals_dense_numpy(seed: int, asked: list[Case]) -> None:
    logits = logits_of(seed, len(asked))
    before = logits.clone()
    found = adjusted(logits, [one.draw() for one in asked])
    assert torch.equal(logits, before)
    for row, one in enumerate(asked):
        np.testing.assert_allclose(found[row], changed(logits[row], one), rtol=1e-6, atol=1e-6)
        alone = adjusted(logits[row : row + 1], [one.draw()])
        assert torch.equal(alone[0], found[row]), "a row does not depend on its neighbours"


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_equals_that_of_transformers(penalty: float) -> None:
    logits = logits_of(1, 1, vocab=50)
    prompt, output = (1, 2, 3, 30), (3, 4, 4, 49)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([[*prompt, *output]]), logits.clone())
    draw = case(repetition_penalty=penalty, prompt=prompt, output=output).draw(vocab=50)
    torch.testing.assert_close(adjusted(logits, [draw]), theirs, rtol=0, atol=0)


def test_frequency_and_presence_look_at_the_output_alone() -> None:
    logits = torch.zeros(2, 4)
    asked = [
        case(frequency_penalty=0.5, prompt=(0, 0), output=(1, 2, 2)),
        case(presence_penalty=0.75, prompt=(0, 0), output=(1, 2, 2)),
    ]
    found = adjusted(logits, [one.draw(vocab=4) for one in asked])
    assert found.tolist() == [[0.0, -0.5, -1.0, 0.0], [0.0, -0.75, -0.75, 0.0]]


def test_a_ban_outweighs_a_bias_and_a_bias_comes_before_penalties() -> None:
    logits = torch.full((1, 3), -1.0)
    asked = case(logit_bias=((0, 100.0), (1, 5.0)), banned=(0,), repetition_penalty=2.0, prompt=(0, 1, 2))
    assert adjusted(logits, [asked.draw(vocab=3)]).tolist() == [[-torch.inf, 2.0, -2.0]]


def test_rows_that_ask_for_nothing_cost_no_copy() -> None:
    idle = Draw(sampling=Sampling(seed=0, banned=(1,)), position=3)
    assert not any(draw.changes_logits for draw in (idle, case(top_k=3, top_p=0.5, min_p=0.1).draw()))


def test_expanded_logits_are_left_alone() -> None:
    """Rows that share memory get changes of their own."""
    logits = torch.zeros(3).expand(2, -1)
    found = adjusted(logits, [case(banned=(0,)).draw(), case(logit_bias=((1, 2.0),)).draw()])
    assert found.tolist() == [[-torch.inf, 0, 0], [0, 2, 0]] and not logits.any()


@given(st.lists(tokens), st.lists(st.lists(tokens, max_size=5), max_size=5))
@settings(deadline=None)
def test_histories_count(prompt: list[int], outputs: list[list[int]]) -> None:
    history = TokenCounts(VOCAB, prompt, "cpu")
    for output in outputs:
        history.add(output)
    flat = [token for output in outputs for token in output]
    assert history.tokens.tolist() == list(dict.fromkeys([*prompt, *flat]))
    assert history.counts.tolist() == [flat.count(token) for token in history.tokens.tolist()]


def test_internal_mistakes_are_assertions() -> None:
    for token in (-1, VOCAB):
        with pytest.raises(AssertionError, match=f"tokens {token} to {token}"):
            TokenCounts(VOCAB, [], "cpu").add([token])
