"""Every query head goes to one member, with the KV head that it reads, and no member has more than necessary."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.splits import split_heads, spread_heads, uniform_pieces


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 40))
def test_deal(num_kv_heads: int, readers: int, num_members: int) -> None:
    shares = split_heads(num_kv_heads * readers, num_kv_heads, num_members)
    assert len(shares) == num_members
    assert [head for share in shares for head in share.heads] == list(range(num_kv_heads * readers))
    for share in shares:
        assert set(share.kv_heads) == {head // readers for head in share.heads}
        assert len(share.heads) == 0 or len(share.heads) % len(share.kv_heads) == 0
    copies = sum(len(share.kv_heads) for share in shares)
    most, fewest = (extreme(len(share.heads) for share in shares) for extreme in (max, min))
    if num_members <= num_kv_heads:
        assert copies == num_kv_heads
        assert most - fewest in (0, readers)
    else:  # a member reads one KV head, so some KV head has but `num_members // num_kv_heads` members
        assert all(len(share.kv_heads) <= 1 for share in shares)
        assert most == -(-readers // (num_members // num_kv_heads))
        assert copies == sum(len(share.heads) > 0 for share in shares)
        assert fewest >= readers // -(-num_members // num_kv_heads)


@pytest.mark.parametrize(
    ("case", "counts", "kv_heads"),
    [
        ((9, 3, 2), [6, 3], [(0, 1), (2,)]),
        ((6, 2, 3), [2, 1, 3], [(0,), (0,), (1,)]),
        ((3, 1, 2), [2, 1], [(0,), (0,)]),
        ((2, 2, 3), [1, 0, 1], [(0,), (), (1,)]),
        ((1, 1, 3), [1, 0, 0], [(0,), (), ()]),
    ],
)
def test_examples(case: tuple[int, int, int], counts: list[int], kv_heads: list[tuple[int, ...]]) -> None:
    shares = split_heads(*case)
    assert [len(share.heads) for share in shares] == counts
    assert [tuple(share.kv_heads) for share in shares] == kv_heads


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 40))
def test_spread(num_kv_heads: int, readers: int, num_members: int) -> None:
    shares = spread_heads(num_kv_heads * readers, num_kv_heads, num_members)
    counts = [len(share.heads) for share in shares]
    assert [head for share in shares for head in share.heads] == list(range(num_kv_heads * readers))
    assert max(counts) - min(counts) <= 1
    for share in shares:
        assert set(share.kv_heads) == {head // readers for head in share.heads}
        pieces = uniform_pieces(share, readers)
        assert [head for piece in pieces for head in piece.heads] == list(share.heads)
        assert len(pieces) <= 3
        for piece in pieces:
            read = Counter(head // readers for head in piece.heads)
            assert set(read) == set(piece.kv_heads) and len(set(read.values())) == 1
    if num_kv_heads % num_members == 0:
        assert shares == split_heads(num_kv_heads * readers, num_kv_heads, num_members)


@pytest.mark.parametrize("case", [(5, 2, 2), (4, 0, 2), (0, 1, 1), (4, 2, 0)])
def test_impossible_deals_are_refused(case: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        split_heads(*case)
