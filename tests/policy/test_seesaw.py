"""Seesaw's estimate of what is still to be decoded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.policy.seesaw import drain


def test_requests_alike_end_at_once() -> None:
    assert drain([7] * 5) == [(5, 7)]


def test_few_long_answers_decode_in_a_small_batch_at_the_end() -> None:
    assert drain([10] * 7 + [1000]) == [(8, 10), (1, 990)]


@given(st.lists(st.integers(min_value=0, max_value=4000), max_size=200))
def test_pieces_last_until_the_longest_answer_and_decode_every_token(left: list[int]) -> None:
    pieces = drain(left)
    duration = sum(num_tokens for _, num_tokens in pieces)
    assert duration == max(left, default=0)
    assert [number for number, _ in pieces] == sorted((number for number, _ in pieces), reverse=True)
    assert sum(number * num_tokens for number, num_tokens in pieces) == pytest.approx(sum(left), abs=duration / 2)
