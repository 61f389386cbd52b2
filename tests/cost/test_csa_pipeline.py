"""Laws of the simulated pipeline of sparse attention, and of the enumeration of its configurations."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.layouts import shard_span
from longspan.core.runs import Run
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import Heads, ratios_by_rule, segments_of, work_of_layer
from longspan.cost.csa_pipeline import (
    Duplex,
    LinkSpeed,
    Members,
    MemberWork,
    Rates,
    Traffic,
    layer_time,
    member_works,
    whole_prompt,
)
from longspan.cost.csa_price import behind, mean_ratios, prompt_s
from longspan.cost.shape import ModelShape
from longspan.policy.csps.search import Configuration, Grid, Group, least_loss, least_ttft

SHAPE = ModelShape(num_layers=8, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, bytes_per_element=2)
FREE = LinkSpeed(1e30)
RATES = Rates(
    inside=LinkSpeed(100e9), between=LinkSpeed(5e9), pairs_per_s=4e11, qkv_s=2.5e-7, linear_s=1.7e-7, rest_s=1e-6
)
GROUP = Group(shape=SHAPE, hosts=(0, 0, 1, 1), rates=RATES)
SMALL = Grid(drops=(0.0, 0.2, 0.4, 0.6, 0.8), near_pieces=(1, 2, 4), far_pieces=(1, 3))


def setting_of(group: Group, num_tokens: int, levels: int, drop: float) -> SparseSetting:
    return SparseSetting(
        partition=group.partition(num_tokens),
        segments=segments_of(len(group.hosts), group.hosts, levels),
        drop=((ratios_by_rule(drop, levels),),),
        mode=group.mode,
    )


def works_of(group: Group, num_tokens: int, levels: int, drop: float) -> tuple[SparseSetting, tuple[MemberWork, ...]]:
    setting = setting_of(group, num_tokens, levels, drop)
    runs = whole_prompt(num_tokens, setting.partition, len(group.hosts))
    return setting, member_works(setting, runs, runs, group.hosts, group.shape)


def two_members(coming: float, results: float, near: int = 0, at_once: float = 0, by_piece: float = 0) -> MemberWork:
    """Return work of one level above the first, over the link inside the host. Queries and keys are one message."""
    return MemberWork(
        num_tokens=1,
        near_pairs=near,
        at_once={2: at_once},
        by_piece={2: by_piece},
        tokens={(2, "inside"): Traffic(Duplex(coming, 0, 1), ((), ()), 0)},
        results={(2, "inside"): Duplex(results, 0, 1)},
        samples={},
        rated_pairs=0,
    )


UNIT = Rates(inside=LinkSpeed(1.0), between=LinkSpeed(1.0), pairs_per_s=1.0, qkv_s=3.0, linear_s=2.0)


@pytest.mark.parametrize("mode", ["qkv", "kv"])
@pytest.mark.parametrize("start", [0, 70, 1500])
@pytest.mark.parametrize(
    ("hosts", "num_tokens", "levels"),
    [((0, 0, 1, 1), 4096, 3), ((0,) * 5, 1001, 4), ((0, 0, 0, 1, 1, 1), 3000, 3), ((0,) * 5, 81, 2)],
)
def test_the_work_of_members_is_that_of_the_layer(mode, start, hosts, num_tokens, levels) -> None:
    """The sums are those of `work_of_layer`, which tests compare with the bytes that are sent.

    The first step of a prompt has whole partitions. Later steps have even pieces, behind even pieces of earlier ones.
    """
    group, members = replace(GROUP, hosts=hosts, mode=mode), len(hosts)
    setting = setting_of(group, num_tokens, levels, 0.22)
    if start == 0:
        q_runs = kv_runs = whole_prompt(num_tokens, setting.partition, members)
    else:
        start = min(start, num_tokens - 7)
        q_runs = shard_span("contiguous", start, num_tokens, members, head=0)
        earlier = shard_span("contiguous", 0, start, members, head=0)
        kv_runs = tuple((*old, *new) for old, new in zip(earlier, q_runs, strict=True))
    works = member_works(setting, q_runs, kv_runs, hosts, group.shape)
    layer = work_of_layer(setting, q_runs, kv_runs, 3, [range(8)], Heads(32, 8), 128, 2)
    assert sum(work.near_pairs for work in works) == layer.near_pairs
    assert sum(sum(work.at_once.values()) + sum(work.by_piece.values()) for work in works) == layer.far_pairs
    for way in range(2):
        tokens = [duplex for work in works for traffic in work.tokens.values() for duplex in traffic.cut(3)]
        samples = [duplex for work in works for duplex in work.samples.values()]
        assert sum(duplex[way] for duplex in tokens + samples) == layer.sent_bytes
        assert sum(duplex[way] for work in works for duplex in work.results.values()) == layer.returned_bytes


@pytest.mark.parametrize("levels", [2, 3])
def test_steps_attend_the_pairs_of_their_prompt(levels) -> None:
    setting = setting_of(replace(GROUP, mode="kv"), 4096, levels, 0.25)
    whole = whole_prompt(4096, setting.partition, 4)
    steps = [(whole, whole)]
    for start in range(0, 4096, 1024):
        q_runs = shard_span("contiguous", start, start + 1024, 4, head=0)
        steps.append((q_runs, behind(start, q_runs)))
    whole_pairs, *pairs = (
        sum(
            work.near_pairs + sum(work.at_once.values()) + sum(work.by_piece.values())
            for work in member_works(setting, *step, GROUP.hosts, SHAPE)
        )
        for step in steps
    )
    assert sum(pairs) == whole_pairs


def test_keys_of_the_own_partition_on_other_members_are_awaited_first() -> None:
    work = two_members(coming=0, results=0, near=7)
    waits = replace(work, tokens={(1, "inside"): Traffic(Duplex(5, 0, 1), ((), ()), 0)})
    assert layer_time(work, (1,), UNIT) == 3 + 7 + 2
    assert layer_time(waits, (1,), UNIT) == 3 + 5 + 7 + 2


def test_nothing_overlaps_without_a_partition_of_its_own() -> None:
    """One piece, and all of attention waits for it: the sum of the five times of Eq. 7."""
    assert layer_time(two_members(coming=7, results=5, by_piece=11), (1,), UNIT) == 3 + 7 + 11 + 5 + 2


def test_exact_attention_of_one_level_overlaps_nothing() -> None:
    runs = whole_prompt(4096, 1024, 4)
    work = member_works(None, runs, runs, (0, 0, 0, 0), SHAPE)[0]
    heads, own = 8, 1024
    vectors = (heads + 2 * 2) * 3 * own * 256
    pairs = heads * 4096 * 4097 // 2
    seconds = [own * RATES.qkv_s, vectors / 100e9, pairs / 4e11, 3 * own * heads * 256 / 100e9, own * RATES.linear_s]
    assert layer_time(work, (1,), RATES, rated=False, samples=False) == pytest.approx(sum(seconds))


def test_transfers_are_hidden_by_attention_to_the_own_partition() -> None:
    assert layer_time(two_members(coming=7, results=0, near=7, at_once=4, by_piece=11), (1,), UNIT) == 3 + 7 + 15 + 2
    assert layer_time(two_members(coming=8, results=0, near=7, by_piece=11), (1,), UNIT) == 3 + 8 + 11 + 2


def test_results_travel_while_the_last_piece_is_attended() -> None:
    """Four parts of 3 s each, whose results take 2 s each: only those of the last are waited for."""
    assert layer_time(two_members(coming=0, results=8, by_piece=48), (4,), UNIT) == 3 + 48 + 2 + 2
    slow_s = layer_time(two_members(coming=0, results=40, by_piece=48), (4,), UNIT)
    assert slow_s == 3 + 36 + 3 + 4 * 10 + 2, "one after another"


def test_keys_that_are_there_are_attended_with_the_first_piece() -> None:
    """So results of a level whose keys are all there wait until all is attended, into however many they are cut."""
    times = [layer_time(two_members(0, 8, at_once=48), (pieces,), UNIT) for pieces in (1, 2, 8)]
    assert times == [3 + 48 + 8 + 2] * 3


def test_links_of_hosts_and_between_them_work_at_the_same_time() -> None:
    work = two_members(coming=7, results=0, by_piece=11)
    across = replace(work, tokens={**work.tokens, (2, "between"): Traffic(Duplex(6, 0, 1), ((), ()), 0)})
    assert layer_time(across, (1,), UNIT) == layer_time(work, (1,), UNIT)


def msg_rates(inside: LinkSpeed, between: LinkSpeed) -> Rates:
    return Rates(inside=inside, between=between, pairs_per_s=RATES.pairs_per_s, qkv_s=2.5e-7)


@given(
    st.sampled_from([2, 3]), st.sampled_from([0.0, 0.3, 0.7]), st.floats(1e8, 1e12), st.integers(1, 16),
    st.integers(1, 8),
)  # fmt: skip
def test_micro_partitions_are_never_slower_than_none_without_latency(levels, drop, speed, near, far) -> None:
    """No law holds between two numbers of micro-partitions: with more, less attention hides the last results."""
    rates = msg_rates(LinkSpeed(speed), LinkSpeed(speed / 10))
    for work in works_of(GROUP, 16384, levels, drop)[1]:
        cut = layer_time(work, (near, far)[: levels - 1], rates)
        assert cut <= layer_time(work, (1, 1)[: levels - 1], rates) * (1 + 1e-9)


@pytest.mark.parametrize("levels", [2, 3])
def test_doubling_micro_partitions_is_never_slower_where_results_weigh_nothing(levels) -> None:
    for work in works_of(GROUP, 65536, levels, 0.25)[1]:
        light = replace(work, results={})
        times = [layer_time(light, (pieces,) * (levels - 1), RATES) for pieces in (1, 2, 4, 8, 16)]
        assert all(more <= less * (1 + 1e-9) for less, more in pairwise(times))


def test_messages_that_take_long_to_start_are_better_few() -> None:
    group = replace(GROUP, rates=msg_rates(LinkSpeed(100e9, 0.1), LinkSpeed(100e9, 0.1)))
    assert Grid().quickest(group, 65536, Configuration(3))[1].micro_partitions == (1, 1)


def test_free_links_leave_computation_alone() -> None:
    for work in works_of(GROUP, 65536, 3, 0.2)[1]:
        pairs = work.rated_pairs + work.near_pairs + sum(work.at_once.values()) + sum(work.by_piece.values())
        computed_s = 2.5e-7 * work.num_tokens + pairs / RATES.pairs_per_s
        assert layer_time(work, (4, 2), msg_rates(FREE, FREE)) == pytest.approx(computed_s)


def test_ttft_is_that_of_layers_and_the_rest() -> None:
    """Layers other than the first and the last rate keys and drop some. A layer before one of these sends samples."""
    num_tokens, pieces = 16384, (4, 2)
    setting, dropped = works_of(GROUP, num_tokens, 3, 0.4)
    runs = whole_prompt(num_tokens, setting.partition, len(GROUP.hosts))
    exact = member_works(setting.exact, runs, runs, GROUP.hosts, SHAPE)

    def slowest(works: tuple[MemberWork, ...], **kinds: bool) -> float:
        return layer_time(max(works, key=lambda work: layer_time(work, (1, 1), RATES)), pieces, RATES, **kinds)

    layers = [slowest(exact, rated=False, samples=True), *[slowest(dropped)] * 5]
    layers += [slowest(dropped, samples=False), slowest(exact, rated=False, samples=False)]
    found = GROUP.ttft_s(num_tokens, Configuration(3, 0.4, pieces))
    assert found == pytest.approx(sum(layers) + 1e-6 * num_tokens)


# -------------------------------------------------------------------- configurations


def test_levels_go_by_where_members_are() -> None:
    assert replace(GROUP, hosts=(0,) * 8).levels() == (1, 2)
    assert replace(GROUP, hosts=(0,) * 4 + (1,) * 4).levels() == (2, 3)
    assert replace(GROUP, hosts=(0,) * 4 + (1,) * 4, racks=2).levels() == (3, 4)
    assert replace(GROUP, hosts=(0, 1)).levels() == (2,), "two members have no third level"


DEVIATIONS = tuple((one, 2 * one) for one in (9.0, 1.0, 1.5, 1.0, 0.5, 1.0, 1.0, 9.0))


def near_ratios(group: Group, drop: float) -> list[list[float]]:
    """Return the ratios of level 2 by layer and KV head."""
    return [[near for near, _ in heads] for heads in group.table(Configuration(3, drop))]


def test_ratios_of_layers_and_heads_follow_deviations() -> None:
    group = replace(GROUP, deviations=DEVIATIONS)
    ratios = near_ratios(group, 0.2)
    assert ratios[2] == pytest.approx([1.5 * one for one in ratios[1]], abs=0.021)
    assert ratios[4] == pytest.approx([0.5 * one for one in ratios[3]], abs=0.021)
    assert all(second == pytest.approx(2 * first, abs=0.021) for first, second in ratios[1:-1])
    assert group.mean_drop(Configuration(3, 0.2))[0] == pytest.approx(0.2 * 6 / 8, abs=0.01)
    assert group.table(Configuration(3, 0.2))[1][0] == ratios_by_rule(ratios[1][0], 3)
    far = near_ratios(replace(GROUP, deviations=((1.0,), (1.0,), (100.0,), *((1.0,),) * 5)), 0.4)
    assert far[2] == pytest.approx([0.6])
    assert far[1] == far[3] == pytest.approx([0.2])
    pairs = zip(near_ratios(group, 0.4), near_ratios(group, 0.42), strict=True)
    assert all(one <= more for heads in pairs for one, more in zip(*heads, strict=True))
    with pytest.raises(ValueError, match="3 standard deviations given for 8 layers"):
        replace(GROUP, deviations=((1.0,), (2.0,), (3.0,)))


def test_ratios_of_layers_and_heads_cost_as_much_as_their_mean() -> None:
    """Of mode `kv`, whose counts are linear in the ratios."""
    group = replace(GROUP, deviations=DEVIATIONS, mode="kv")
    configuration = Configuration(3, 0.3, (2, 1))
    setting = group.setting(16384, configuration)
    assert setting is not None
    same = setting._replace(drop=((mean_ratios(setting, 8),),))
    assert mean_ratios(setting, 8) == pytest.approx([8 / 6 * ratio for ratio in group.mean_drop(configuration)])
    members = Members(GROUP.hosts, SHAPE, RATES)
    times = [prompt_s(one, 16384, setting.partition, members) for one in (setting, same)]
    assert times[0] == pytest.approx(times[1], rel=1e-3)
    runs = tuple((Run(4096 * member, 4096 * member + 4096),) for member in range(4))
    pairs, mean_pairs = (
        sum(work_of_layer(one, runs, runs, layer, [range(8)], Heads(32, 8), 128, 2).num_pairs for layer in range(1, 7))
        for one in (setting._replace(drop=four_times(setting.drop)), same)
    )
    assert pairs == pytest.approx(mean_pairs, rel=1e-3), "the exchange drops as much"


def four_times(drop: tuple[tuple[tuple[float, ...], ...], ...]) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the ratios of two heads for eight."""
    return tuple(heads * 4 for heads in drop)


def invented(num_tokens: int, mean_drop: tuple[float, ...]) -> float:
    """An invented loss in points: near drops cost more, and long prompts a little more."""
    weights = (4.0, 2.0, 1.0)[: len(mean_drop)]
    costs = [weight * (ratio + 8 * ratio**2) for weight, ratio in zip(weights, mean_drop, strict=True)]
    return sum(costs) * 0.5 * (num_tokens / 65536) ** 0.2


def brute_force(group: Group, num_tokens: int, grid: Grid) -> list[tuple[float, float]]:
    """Lists time and loss of all that the grid has."""
    found = []
    for levels in group.levels():
        pieces = (grid.near_pieces, grid.far_pieces, grid.far_pieces)[: levels - 1]
        for drop, cut in product(grid.drops if levels > 1 else (0.0,), product(*pieces)):
            one = Configuration(levels, drop, cut)
            found.append((group.ttft_s(num_tokens, one), invented(num_tokens, group.mean_drop(one))))
    return found


@pytest.mark.parametrize("hosts", [(0,) * 4, (0, 0, 1, 1)])
@pytest.mark.parametrize("deviations", [(), DEVIATIONS])
def test_enumeration_finds_the_best_of_all(hosts, deviations) -> None:
    group = replace(GROUP, hosts=hosts, deviations=deviations)
    everything = brute_force(group, 40000, SMALL)
    for max_loss in (0.0, 1.0, 3.0, 6.0, 100.0):
        found = least_ttft(SMALL.choices(group, 40000, invented), max_loss)
        assert found is not None
        assert found.ttft_s == min(ttft_s for ttft_s, loss in everything if loss <= max_loss)
        assert found.loss == invented(40000, group.mean_drop(found.configuration)) <= max_loss
    times = sorted(ttft_s for ttft_s, _ in everything)
    for max_ttft_s in (times[0], times[len(times) // 3], times[len(times) // 2], times[-1]):
        found = least_loss(SMALL.choices(group, 40000, invented), max_ttft_s)
        assert found is not None
        best = min((loss, ttft_s) for ttft_s, loss in everything if ttft_s <= max_ttft_s)
        assert (found.loss, found.ttft_s) == best
        assert found.ttft_s == group.ttft_s(40000, found.configuration) <= max_ttft_s


def test_a_constraint_that_no_configuration_meets_is_reported() -> None:
    assert least_loss(SMALL.choices(GROUP, 40000, invented), 1e-9) is None
    across = replace(GROUP, racks=2, hosts=(0, 0, 1, 1))
    assert across.levels() == (3,)
    assert least_ttft(SMALL.choices(across, 40000, invented), 0.0) is None, "by the rule, three levels always drop"
