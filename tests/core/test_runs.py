"""The algebra of runs against brute force over positions."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from longspan.attn.spec import Visibility
from longspan.core.blocks import BlockRef
from longspan.core.layouts import shard_span
from longspan.core.owners import Owners
from longspan.core.runs import Layout, Run, SpanShards, clip, coalesce, relate

STARTS, LENGTHS, STEPS = st.integers(0, 40), st.integers(0, 9), st.integers(1, 5)
LAYOUTS: list[Layout] = ["zigzag", "striped", "contiguous", "single"]


def run_of(start: int, length: int, step: int = 1) -> Run:
    return Run(start, start + length * step, step)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Run, Run]:
    """Two runs that may be related: of one step, or one of them a single token (or none)."""
    queries = run_of(draw(STARTS), draw(LENGTHS), draw(STEPS))
    keys = run_of(draw(STARTS), draw(LENGTHS), draw(STEPS))
    if len(queries) > 1 and len(keys) > 1:
        keys = run_of(keys.start, len(keys), queries.step)
    return queries, keys


@given(pairs(), st.none() | st.integers(1, 30))
@example((Run(10, 11), Run(0, 12, 3)), 4)
@example((Run(9, 21, 4), Run(7, 19, 4)), 1)  # strictly shifted with a window: nothing is visible
def test_relation_is_the_mask(pair: tuple[Run, Run], window: int | None) -> None:
    queries, keys = pair
    mask = [[k <= q and (window is None or q - k < window) for k in keys.positions] for q in queries.positions]
    relation = relate(queries, keys, window)
    if relation.kind == "skip":
        assert not any(map(any, mask))
        return
    by_rule = [[i + relation.lower <= j <= i + relation.upper for j in range(len(keys))] for i in range(len(queries))]
    assert by_rule == mask
    assert any(map(any, mask)), "nothing visible must be named skip"
    causal_only = [[j <= i + relation.upper for j in range(len(keys))] for i in range(len(queries))]
    expected = "full" if all(map(all, mask)) else "diagonal" if mask == causal_only else "band"
    assert relation.kind == expected


VISIBILITIES = st.one_of(
    st.just(Visibility()),
    st.builds(Visibility, window=st.integers(1, 60)),
    st.builds(Visibility, chunk=st.integers(1, 60)),
)


@given(st.integers(0, 200), VISIBILITIES)
def test_the_first_visible_key_is_that_of_the_mask(query: int, visibility: Visibility) -> None:
    window, chunk = visibility.window, visibility.chunk
    visible = [
        key
        for key in range(query + 1)
        if (window is None or query - key < window) and (chunk is None or key // chunk == query // chunk)
    ]
    assert visible == [*range(visibility.first(query), query + 1)]
    assert visibility.max_keys is None or len(visible) <= visibility.max_keys


@given(STARTS, st.integers(0, 60), STEPS, VISIBILITIES)
@example(start=7, length=30, step=5, visibility=Visibility(chunk=3))  # chunks without a query
def test_pieces_of_a_run_are_causal_over_their_own_keys(
    start: int, length: int, step: int, visibility: Visibility
) -> None:
    """With chunks all queries of a piece have the first key in common, so the rest of the mask is causality."""
    run = run_of(start, length, step)
    pieces = [*visibility.pieces(run)]
    assert [position for piece in pieces for position in piece.positions] == [*run.positions]
    if visibility.chunk is not None:
        firsts = [{visibility.first(query) for query in piece.positions} for piece in pieces]
        assert all(len(first) == 1 for first in firsts)
        assert all(a != b for a, b in pairwise(firsts)), "no more pieces than chunks"


def test_windows_and_chunks_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="window 4, chunk 8"):
        Visibility(window=4, chunk=8)


def test_runs_of_different_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="steps 1 and 2"):
        relate(Run(0, 4), Run(0, 8, 2))


@pytest.mark.parametrize(("start", "stop", "step"), [(-1, 2, 1), (3, 2, 1), (0, 2, 0)])
def test_bad_runs_are_refused(start: int, stop: int, step: int) -> None:
    with pytest.raises(ValueError, match="not a run"):
        Run(start, stop, step)


@given(STARTS, LENGTHS, STEPS)
def test_length_counts_positions(start: int, length: int, step: int) -> None:
    run = run_of(start, length, step)
    assert len(run) == length == len(list(run.positions))


@st.composite
def shards(draw: st.DrawFn) -> tuple[Layout, int, int, int, int, int]:
    num_members = draw(st.integers(1, 5))
    start = draw(st.integers(0, 60))
    return (
        draw(st.sampled_from(LAYOUTS)),
        start,
        start + draw(st.integers(0, 200)),
        num_members,
        draw(st.sampled_from([1, 2, 7, 16])),
        draw(st.integers(0, num_members - 1)),
    )


@given(shards())
def test_a_deal_gives_every_position_to_one_member(case: tuple[Layout, int, int, int, int, int]) -> None:
    layout, start, stop, num_members, align, head = case
    sharded = shard_span(layout, start, stop, num_members, align=align, head=head)
    assert len(sharded) == num_members
    owner = owners(sharded)
    assert sorted(owner) == list(range(start, stop))
    for runs in sharded:
        assert all(len(run) for run in runs)
        assert all(a.stop < b.start for a, b in pairwise(runs)), "ascending and joined"
    for position in range(start + 1, stop):
        if owner[position] != owner[position - 1]:
            assert position % align == 0, "cuts fall between blocks"
    if start % align and start < stop:
        assert owner[start] == head, "the rest of a block stays with its holder"
    if layout == "single":
        assert set(owner.values()) <= {head}


def owners(sharded: SpanShards) -> dict[int, int]:
    positions = [(p, member) for member, runs in enumerate(sharded) for run in runs for p in run.positions]
    assert len(positions) == len(dict(positions)), "no position is sharded twice"
    return dict(positions)


@given(st.integers(1, 6), st.integers(1, 20), st.integers(0, 4), st.sampled_from([1, 4, 16]))
def test_equal_zigzag_pieces_are_equal_causal_work(
    num_members: int, piece: int, chunks_before: int, align: int
) -> None:
    quantum = 2 * num_members * piece * align
    start = chunks_before * quantum
    sharded = shard_span("zigzag", start, start + quantum, num_members, align=align)
    work = [sum(p + 1 for run in runs for p in run.positions) for runs in sharded]
    assert len(set(work)) == 1
    assert {sum(map(len, runs)) for runs in sharded} == {2 * piece * align}


@given(st.integers(1, 6), st.integers(0, 300), st.sampled_from([1, 4, 16]))
def test_any_zigzag_is_nearly_even(num_members: int, length: int, align: int) -> None:
    """Pieces differ by a block, so tokens by two blocks, and causal work by two blocks of the longest rows."""
    sharded = shard_span("zigzag", 0, length, num_members, align=align)
    tokens = [sum(map(len, runs)) for runs in sharded]
    work = [sum(p + 1 for run in runs for p in run.positions) for runs in sharded]
    assert max(tokens) - min(tokens) <= 2 * align
    assert max(work) - min(work) <= 2 * align * length


def test_a_zigzag_of_few_blocks_differs_by_at_most_one_block() -> None:
    assert [len(run) for runs in shard_span("zigzag", 0, 595, 2, align=256) for run in runs] == [256, 83, 256]
    for num_members, num_blocks in itertools.product((2, 3, 4), range(1, 40)):
        sharded = shard_span("zigzag", 0, 10 * num_blocks - 5, num_members, align=10)
        most = max(sum(map(len, runs)) for runs in sharded)
        assert most <= 10 * -(-num_blocks // num_members)
        if num_members == 2 and num_blocks % 2:
            assert most == 5 * num_blocks, "the member with one block more has the partial one"


@given(st.integers(1, 24), st.integers(0, 400), st.sampled_from([1, 2]))
@example(24, 77, 2)
def test_a_zigzag_is_rounded_as_if_every_rounding_had_been_tried(num_members: int, length: int, align: int) -> None:
    num_chunks, num_blocks, end = 2 * num_members, -(-length // align), length / align

    def members(phase: int) -> list[list[tuple[float, float]]]:
        cuts = [min(end, (num_blocks * i + phase) // num_chunks) for i in range(num_chunks + 1)]
        chunks = list(pairwise(cuts))
        return [[chunks[member], chunks[-1 - member]] for member in range(num_members)]

    def busiest(phase: int) -> tuple[float, float]:
        tokens = max(sum(b - a for a, b in chunks) for chunks in members(phase))
        return tokens, max(sum(b**2 - a**2 for a, b in chunks) for chunks in members(phase))

    best = members(min(range(num_chunks), key=busiest))
    expected = [coalesce(Run(int(a * align), int(b * align)) for a, b in chunks) for chunks in best]
    assert shard_span("zigzag", 0, length, num_members, align=align) == tuple(expected)


def test_sharding_a_zigzag_takes_work_in_proportion_to_the_members() -> None:
    def num_calls(num_members: int) -> int:
        calls = Counter[str]()
        sys.setprofile(lambda _frame, event, _: calls.update([event]))
        try:
            shard_span("zigzag", 0, 3 * num_members + 1, num_members)
        finally:
            sys.setprofile(None)
        return calls["c_call"] + calls["call"]

    assert num_calls(1000) < 6 * num_calls(250)


def test_zigzag_pairs_first_and_last_chunks() -> None:
    assert shard_span("zigzag", 0, 8, 2, align=2) == ((Run(0, 2), Run(6, 8)), (Run(2, 6),))


@given(st.integers(1, 5), st.integers(0, 200), st.sampled_from([1, 8]))
def test_contiguous_is_in_order_and_even(num_members: int, length: int, align: int) -> None:
    sharded = shard_span("contiguous", 0, length, num_members, align=align)
    assert all(len(runs) <= 1 for runs in sharded)
    assert coalesce(run for runs in sharded for run in runs) == ((Run(0, length),) if length else ())
    assert [run for runs in sharded for run in runs] == sorted(
        (r for runs in sharded for r in runs), key=lambda r: r.start
    )
    blocks = [sum(-(-len(run) // align) for run in runs) for runs in sharded]
    assert max(blocks) - min(blocks) <= 1


@given(st.integers(1, 5), st.integers(0, 200), st.sampled_from([1, 8]))
def test_stripes_deal_single_blocks_round_robin(num_members: int, length: int, align: int) -> None:
    owner = owners(shard_span("striped", 0, length, num_members, align=align))
    assert owner == {position: position // align % num_members for position in range(length)}


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 300), st.sampled_from([1, 8]))
def test_fractions_are_kept_to_half_a_block_at_every_cut(weights: list[int], length: int, align: int) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    sharded = shard_span("contiguous", 0, length, len(weights), align=align, fractions=fractions)
    assert [run for runs in sharded for run in runs] == sorted(
        (r for runs in sharded for r in runs), key=lambda r: r.start
    )
    assert sorted(owners(sharded)) == list(range(length))
    for member in range(1, len(weights)):
        before = sum(len(run) for runs in sharded[:member] for run in runs)
        off = abs(before - length * sum(fractions[:member]))
        assert off <= 0.5 * align + 1e-6 or before == length // align * align, "a block that is not whole is the last's"


def test_the_fractions_of_the_paper() -> None:
    sharded = shard_span("contiguous", 0, 10_000, 4, fractions=[0.35, 0.255, 0.21, 0.185])
    assert [sum(map(len, runs)) for runs in sharded] == [3500, 2550, 2100, 1850]


def test_deal_refuses_impossible_layouts() -> None:
    for layout, fractions in (("zigzag", [0.5, 0.5]), ("contiguous", [1.0])):
        with pytest.raises(ValueError, match="fractions"):
            shard_span(layout, 0, 8, 2, fractions=fractions)  # type: ignore[arg-type]  # a Layout
    with pytest.raises(ValueError, match="at least 1 member, but 0"):
        shard_span("zigzag", 0, 8, 0)
    with pytest.raises(ValueError, match="inside a block of 4"):
        shard_span("zigzag", 2, 8, 2, align=4)


@given(st.sets(st.integers(0, 60)), st.randoms())
def test_coalesce_joins_adjacent_runs(positions: set[int], shuffle: random.Random) -> None:
    runs = [Run(p, p + 1) for p in positions]
    shuffle.shuffle(runs)
    joined = coalesce([*runs, Run(7, 7)])
    assert [p for run in joined for p in run.positions] == sorted(positions)
    assert all(a.stop < b.start for a, b in pairwise(joined))


@given(st.sets(st.integers(0, 60)), st.integers(0, 70))
def test_clip_keeps_later_positions(positions: set[int], start: int) -> None:
    clipped = clip(coalesce(Run(p, p + 1) for p in positions), start)
    assert [p for run in clipped for p in run.positions] == sorted(p for p in positions if p >= start)
    assert all(len(run) for run in clipped)


@given(st.lists(st.integers(0, 2), max_size=12), st.integers(1, 5), st.integers(0, 60))
def test_homes_follow_the_table(instances: list[int], block_size: int, num_tokens: int) -> None:
    assume(num_tokens <= len(instances) * block_size)
    table = [BlockRef(instance, 7) for instance in instances]
    held = Owners(table=table, group=(2, 0, 1), block_size=block_size).held(num_tokens)
    for instance, runs in zip((2, 0, 1), held, strict=True):
        expected = [p for p in range(num_tokens) if instances[p // block_size] == instance]
        assert [p for run in runs for p in run.positions] == expected
        assert runs == coalesce(runs)
