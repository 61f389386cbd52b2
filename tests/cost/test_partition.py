"""Partitions of a prompt: cut by fractions, searched, looked up."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable

import pytest
from chains import LayerCost, chain
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from longspan.core.layouts import shard_span
from longspan.cost.partition_table import Entry, PartitionTable, parse_fractions
from longspan.cost.partitions import Partition, cut, even, search

LENGTHS, ALIGNS = st.integers(1, 3000), st.sampled_from([1, 16, 128])
PAPER = (0.350, 0.255, 0.210, 0.185)  # KV-Runahead §5, 10K tokens on 4 GPUs


@st.composite
def fractions(draw: st.DrawFn, members: int | None = None) -> tuple[float, ...]:
    number = members or draw(st.integers(1, 6))
    parts = draw(st.lists(st.floats(0.01, 1), min_size=number, max_size=number))
    return tuple(part / sum(parts) for part in parts)


def assert_aligned(partition: Partition, length: int, members: int, align: int) -> None:
    assert len(partition) == members
    assert sum(partition) == length
    assert all(piece % align == 0 for piece in partition[:-1])
    assert min(partition) >= 0


@given(LENGTHS, st.integers(1, 6), ALIGNS)
def test_even_pieces_are_those_of_the_contiguous_layout(length: int, members: int, align: int) -> None:
    partition = even(length, members, align)
    assert_aligned(partition, length, members, align)
    assert list(partition) == [
        sum(map(len, runs)) for runs in shard_span("contiguous", 0, length, members, align=align)
    ]


@given(fractions(), LENGTHS, ALIGNS)
def test_every_cut_is_the_block_border_next_to_its_fraction(shares: tuple[float, ...], length: int, align: int) -> None:
    partition = cut(shares, length, align)
    assert_aligned(partition, length, len(shares), align)
    whole = length // align * align
    for stop, share in zip(itertools.accumulate(partition[:-1]), itertools.accumulate(shares[:-1]), strict=True):
        wanted = min(share * length, whole)
        assert abs(stop - wanted) <= align / 2 + 1e-6


def test_the_paper_s_fractions() -> None:
    assert parse_fractions("0.35,0.255,0.21,0.185") == PAPER
    assert cut(PAPER, 10_000, 1) == (3500, 2550, 2100, 1850)
    assert cut(PAPER, 10_000, 256) == (3584, 2560, 2048, 1808)
    assert parse_fractions("0.333, 0.333, 0.333") == (0.333,) * 3
    assert cut((0.333,) * 3, 9, 1) == (3, 3, 3)


@pytest.mark.parametrize("text", ["a,b", "", "0.5,0.4", "1.5,-0.5", "1,0", "nan,1", "inf,1"])
def test_bad_fractions_are_named(text: str) -> None:
    with refused("fractions"):
        parse_fractions(text)


def limited(
    ttft: Callable[[Partition], float], length: int, members: int, align: int, seed: Partition | None = None
) -> tuple[Partition, Counter[Partition]]:
    """A search whose evaluations are checked: aligned, none twice, and no more than the docstring's bound."""
    asked: Counter[Partition] = Counter()

    def asking(partition: Partition) -> float:
        assert_aligned(partition, length, members, align)
        assert min(partition) > 0
        asked[partition] += 1
        return ttft(partition)

    best = search(asking, length, members, align, seed)
    blocks = -(-length // align)
    if 1 < members <= blocks:
        m, levels = members, 1 + int(math.log2(blocks / members))
        levels = levels if seed is None else max(1, levels - 2)
        assert len(asked) <= 1 + levels * (m - 1) * (m * (m - 1) * (m * m - m + 2) // 4)
        assert set(asked.values()) == {1}
        assert best in asked
    else:
        assert not asked
    return best, asked


@given(st.integers(2, 4000), ALIGNS, st.floats(0, 1), st.floats(0.1, 10))
def test_two_members_find_the_bottom(length: int, align: int, bottom: float, slope: float) -> None:
    """Of any time that falls and then rises, as in Fig. 6 (a)."""

    def ttft(partition: Partition) -> float:
        distance = partition[0] - bottom * length
        return slope * distance if distance > 0 else -distance

    best, _ = limited(ttft, length, 2, align)
    cuts = range(align, length, align)
    if cuts:
        assert ttft(best) == min(ttft((stop, length - stop)) for stop in cuts)


CHAINS = st.builds(
    LayerCost,
    qkv_s=st.just(1e-6),
    rest_s=st.just(3e-6),
    attention_s=st.floats(1e-10, 3e-9),
    kv_bytes=st.just(4096),
    bytes_per_s=st.floats(1e9, 1e11),
    latency_s=st.just(1e-5),
    dense=st.booleans(),
)


@given(CHAINS, st.integers(2, 5), st.integers(1, 6000), ALIGNS)
def test_a_searched_chain_is_never_slower_than_an_even_one(
    cost: LayerCost, members: int, length: int, align: int
) -> None:
    def ttft(partition: Partition) -> float:
        return chain(cost, 4, partition).ttft_s

    best, _ = limited(ttft, length, members, align)
    assert ttft(best) <= ttft(even(length, members, align))


@given(CHAINS)
def test_a_searched_chain_is_close_to_the_best(cost: LayerCost) -> None:
    """Against all partitions of 24 blocks for 3 members, and of 16 for 4."""

    def ttft(partition: Partition) -> float:
        return chain(cost, 8, partition).ttft_s

    for members, blocks in ((3, 24), (4, 16)):
        best, _ = limited(ttft, blocks * 256, members, 256)
        cuts = itertools.combinations(range(1, blocks), members - 1)
        everything = ([256 * (b - a) for a, b in itertools.pairwise([0, *stops, blocks])] for stops in cuts)
        assert ttft(best) <= 1.05 * min(ttft(tuple(partition)) for partition in everything)


@pytest.mark.parametrize("members", [9, 16])
def test_many_members_are_searched_in_a_bearable_time(members: int) -> None:
    """One stride changes hands at a time: fewer neighbours, and far better than even pieces all the same."""
    asked = Counter[Partition]()

    def ttft(partition: Partition) -> float:
        """Each member computes its tokens and sees earlier keys. The slowest counts, and a little of all members."""
        asked[partition] += 1
        ends = list(itertools.accumulate(partition))
        times = [size + size * end / 10_000 for size, end in zip(partition, ends, strict=True)]
        return max(times) + 1e-3 * sum(times)

    best = search(ttft, 64_000, members, 64)
    assert ttft(best) < 0.72 * ttft(even(64_000, members, 64))
    levels = 1 + int(math.log2(1000 / members))
    assert len(asked) <= 1 + levels * (members - 1) * members * (members - 1)


def test_a_seed_near_the_bottom_saves_evaluations() -> None:
    """The partition interpolated between two lengths, as for KVR-P, and the chain's time around it."""
    cost = LayerCost(
        qkv_s=1e-6, rest_s=3e-6, attention_s=2e-9, kv_bytes=4096, bytes_per_s=1e10, latency_s=1e-5, dense=True
    )

    def ttft(partition: Partition) -> float:
        return chain(cost, 16, partition).ttft_s

    table = PartitionTable()
    for length in (8192, 12288):
        shares = [piece / length for piece in search(ttft, length, 4, 128)]
        table = table.with_entry(Entry(model="m", members=4, length=length, fractions=tuple(shares)))
    predicted = table.predict("m", 4, 10_240)
    assert predicted is not None
    seed = cut(predicted, 10_240, 128)
    unseeded, all_asked = limited(ttft, 10_240, 4, 128)
    seeded, asked = limited(ttft, 10_240, 4, 128, seed)
    assert len(asked) < len(all_asked)
    assert ttft(seeded) <= ttft(seed) <= 1.03 * ttft(unseeded)
    assert ttft(seeded) <= 1.01 * ttft(unseeded)


@given(st.integers(2, 4), st.integers(4, 100), st.integers(0, 2**32))
def test_noise_does_not_break_the_search(members: int, blocks: int, seed: int) -> None:
    """The result has the best measured time, and the same times give the same result."""

    def measured() -> tuple[Partition, dict[Partition, float]]:
        noise, times = random.Random(seed), {}

        def ttft(partition: Partition) -> float:
            times[partition] = max(partition) * noise.uniform(0.5, 1.5)
            return times[partition]

        return limited(ttft, blocks * 16, members, 16)[0], times

    best, times = measured()
    assert times[best] == min(times.values())
    assert measured() == (best, times)


def test_a_noisy_search_asks_the_best_again() -> None:
    """The first measurement of an uneven cut is too good. The second is not."""
    asked: Counter[Partition] = Counter()

    def ttft(partition: Partition) -> float:
        asked[partition] += 1
        lucky = asked[partition] == 1 and partition[0] == 640
        return max(partition) - (500 if lucky else 0)

    assert search(ttft, 1024, 2, 64) == (640, 384)
    asked.clear()
    assert search(ttft, 1024, 2, 64, noisy=True) == (512, 512)
    assert sorted(asked.values())[-3:] == [2, 2, 2] and sum(asked.values()) == len(asked) + 3


def test_partitions_that_do_not_fit_are_left() -> None:
    """Infinity for everything but a narrow strip, which holds the even pieces."""
    best, _ = limited(lambda p: abs(p[0] - 600) if p[0] >= 500 else math.inf, 1024, 2, 16)
    assert best[0] in (592, 608)


def test_too_few_blocks_are_not_searched() -> None:
    assert limited(lambda _: 0.0, 40, 3, 16)[0] == even(40, 3, 16)
    assert search(lambda _: 1 / 0, 40, 4, 16) == even(40, 4, 16)
    assert search(lambda _: 1 / 0, 40, 1, 16) == (40,)


def entry(length: int, shares: tuple[float, ...], model: str = "llama") -> Entry:
    return Entry(model=model, members=len(shares), length=length, fractions=shares)


def test_a_length_between_two_known_ones_is_interpolated() -> None:
    table = PartitionTable((entry(12_000, (0.6, 0.4)), entry(8_000, (0.7, 0.3)), entry(16_000, (0.52, 0.48))))
    assert table.predict("llama", 2, 10_000) == pytest.approx((0.65, 0.35))
    assert table.predict("llama", 2, 13_000) == pytest.approx((0.58, 0.42))
    assert table.predict("llama", 2, 8_000) == (0.7, 0.3)
    assert table.predict("llama", 2, 12_000) == pytest.approx((0.6, 0.4))


def test_a_length_outside_is_that_of_the_nearest_and_an_unknown_case_is_none() -> None:
    table = PartitionTable((entry(8_000, (0.7, 0.3)), entry(16_000, (0.52, 0.48))))
    assert table.predict("llama", 2, 5) == (0.7, 0.3)
    assert table.predict("llama", 2, 10**6) == (0.52, 0.48)
    assert table.predict("llama", 3, 8_000) is None
    assert table.predict("falcon", 2, 8_000) is None


@given(st.data(), st.integers(1, 5), st.lists(st.integers(1, 10**6), min_size=1, max_size=5, unique=True))
def test_predictions_can_be_cut(data: st.DataObject, members: int, lengths: list[int]) -> None:
    """Between any entries: fractions are positive, add up to 1, and lie between those of the neighbours."""
    shares = [data.draw(fractions(members=members)) for _ in lengths]
    table = PartitionTable(tuple(map(entry, lengths, shares)))
    length = data.draw(st.integers(1, 10**6))
    predicted = table.predict("llama", members, length)
    assert predicted is not None
    assert sum(predicted) == pytest.approx(1)
    assert_aligned(cut(predicted, length, 16), length, members, 16)
    for column, share in zip(zip(*shares, strict=True), predicted, strict=True):
        assert min(column) - 1e-9 <= share <= max(column) + 1e-9


def test_a_table_survives_a_file_and_replaces_entries() -> None:
    table = PartitionTable().with_entry(entry(8_000, PAPER)).with_entry(entry(8_000, (0.7, 0.3)))
    table = table.with_entry(entry(8_000, (0.6, 0.4))).with_entry(entry(8_000, (0.5, 0.5), model="falcon"))
    assert [e.fractions for e in table.partitions] == [PAPER, (0.6, 0.4), (0.5, 0.5)]
    assert PartitionTable.from_json(table.to_json()) == table
    assert PartitionTable.from_json(PartitionTable().to_json()) == PartitionTable()


GOOD = entry(8_000, (0.7, 0.3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a table of partitions: Input data was truncated"),
        ('{"partitions": [', "truncated"),
        ("[]", "Expected `object`"),
        ('{"partitions": [], "more": 1}', "unknown field `more`"),
        ('{"partitions": [{"model": "m", "members": 2, "length": 8}]}', r"missing required field `fractions` - at"),
        (PartitionTable((GOOD,)).to_json().replace("0.7", "0.8"), r"0.8,0.3 add up to 1.1.* at `\$.partitions\[0\]`"),
        (PartitionTable((GOOD,)).to_json().replace('"members": 2', '"members": 3'), "2 fractions given for 3 members"),
        (PartitionTable((GOOD,)).to_json().replace("8000", "0"), "Expected `int` >= 1"),
        ('{"partitions": [%s, %s]}' % (("{}",) * 2), "missing required field"),
    ],
)
def test_broken_files_name_the_mistake(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PartitionTable.from_json(text)


def test_two_entries_of_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="two partitions for model 'llama', 2 members and 8000 tokens: keep one"):
        PartitionTable((GOOD, GOOD))
