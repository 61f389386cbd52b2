"""How many instances share a prompt and by which exchange, on machines made up of plain numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
from cluster import Cluster, Setup
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_profile import SUBJECT, prefill

from longspan.core.blocks import PrefixHit
from longspan.core.cluster import Cluster as Instances
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_KV, LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.locations import Location
from longspan.core.runs import Run
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.profile import Profile, Transfer, profiled_prompts
from longspan.cost.shape import Hardware, ModelShape
from longspan.policy.choosing import Chooser, ring_kv_or_ring_q, unsharded_weights_pay
from longspan.policy.facts import Facts
from longspan.policy.sharing import SharingOptions
from longspan.profiling.plan import SHARED

SHAPE = ModelShape(num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, bytes_per_element=4)
HARDWARE = Hardware(flops_per_s=1e12, bytes_per_s=1e9)
PROMPTS = profiled_prompts([256, 1024, 4096, 16384], 40_000)
LENGTHS = st.integers(1, 200_000)
ZIGZAG = SharingOptions(layout="zigzag")


def machine(members: int, *, link_s: float, start_s: float = 0.0, exchanges: tuple[Exchange, ...] = SHARED) -> Profile:
    """0.1 ms of compute a token and 10 ns a pair. A token's keys take `link_s`, its query and output 5 * `link_s`."""
    profile = Profile(profile_key=SUBJECT)
    for new, cached in PROMPTS:
        compute_s = 1e-4 * new + 1e-8 * new * (cached + new / 2)
        profile = profile.with_measured(prefill(new, cached, 1e-3 + compute_s, members=1, exchange="local"))
        for exchange in exchanges:
            sent = 5 * new if exchange == RING_Q else (new + cached) * (1 if exchange == RING_KV else 1.5)
            seconds = 1e-3 + start_s + compute_s / members + link_s * sent
            profile = profile.with_measured(prefill(new, cached, seconds, members=members, exchange=str(exchange)))
    return profile


def two_or_four() -> Profile:
    """A group of four starts later than a group of two, and is faster for long prompts. Three were not measured."""
    profile = machine(2, link_s=0.0, start_s=0.05)
    for one in machine(4, link_s=0.0, start_s=0.2).prefills:
        profile = profile if one.members == 1 else profile.with_measured(one)
    return profile


@given(st.integers(2, 8), st.integers(1000, 200_000))
def test_free_links_share_long_prompts(members: int, length: int) -> None:
    chooser = Chooser(members, Facts(profile=machine(members, link_s=0.0)), ZIGZAG)
    assert chooser.members(length) == members


@given(st.integers(2, 8), LENGTHS)
def test_slow_links_share_nothing(members: int, length: int) -> None:
    chooser = Chooser(members, Facts(profile=machine(members, link_s=1e-1)), ZIGZAG)
    assert chooser.members(length) == 1


@given(st.integers(2, 8), LENGTHS, LENGTHS)
def test_a_group_for_a_prompt_is_used_for_longer_prompts(members: int, length: int, more: int) -> None:
    """A group that starts late pays off from some length on."""
    chooser = Chooser(members, Facts(profile=machine(members, link_s=0.0, start_s=0.05)), ZIGZAG)
    assert (chooser.members(64), chooser.members(100_000)) == (1, members)
    assert chooser.members(length) == 1 or chooser.members(length + more) == members


def test_more_members_for_longer_prompts() -> None:
    chooser = Chooser(4, Facts(profile=two_or_four()), ZIGZAG)
    found = [chooser.members(length) for length in (100, 400, 1500, 3000, 10_000, 100_000)]
    assert found == [1, 1, 2, 2, 4, 4]
    assert Chooser(3, Facts(profile=two_or_four()), ZIGZAG).members(100_000) == 2


def test_the_quickest_exchange_is_taken() -> None:
    chooser = Chooser(2, Facts(profile=machine(2, link_s=1e-5)), ZIGZAG)
    assert chooser.exchange(4096, 0, (0, 1)) == RING_KV
    only = Chooser(2, Facts(profile=machine(2, link_s=1e-5)), SharingOptions(exchange=GATHER_KV.kind))
    assert only.exchange(4096, 0, (0, 1)) == GATHER_KV
    chains = Chooser(2, Facts(profile=machine(2, link_s=0.0, exchanges=(CHAIN,))), ZIGZAG)
    assert chains.exchange(4096, 0, (0, 1)) == RING_KV, "a chain needs a layout of its own"
    chains = Chooser(2, Facts(profile=machine(2, link_s=0.0, exchanges=(CHAIN,))), SharingOptions())
    assert chains.exchange(4096, 0, (0, 1)) == CHAIN


@pytest.mark.parametrize(("members", "exchange"), [(2, RING_KV), (4, RING_KV), (5, GATHER_KV), (8, GATHER_KV)])
def test_an_unmeasured_number_of_members_takes_the_exchange_of_the_nearest_measured_one(
    members: int, exchange: Exchange
) -> None:
    profile = machine(2, link_s=1e-5)
    for one in machine(8, link_s=1e-5, exchanges=(GATHER_KV,)).prefills:
        profile = profile if one.members == 1 else profile.with_measured(one)
    chooser = Chooser(8, Facts(profile=profile), ZIGZAG)
    assert chooser.exchange(4096, 0, tuple(range(members))) == exchange


@pytest.mark.parametrize(
    "profile",
    [
        None,
        Profile(profile_key=SUBJECT),
        machine(3, link_s=0.0),
        machine(2, link_s=0.0, exchanges=()),
        machine(2, link_s=0.0, exchanges=(CHAIN,)),
    ],
)
def test_unmeasured_settings_are_unknown(profile: Profile | None) -> None:
    chooser = Chooser(2, Facts(profile=profile), ZIGZAG)
    assert chooser.members(100_000) is None
    assert chooser.exchange(1, 100_000, (0, 1)) == RING_KV


def test_steps_of_one_token_have_none_left_for_prompts() -> None:
    facts = Facts(profile=machine(2, link_s=0.0))
    cluster = Cluster(Setup(num_instances=2, options={"threshold": "3"}, max_num_batched_tokens=1, facts=facts))
    requests = [cluster.add([number] * (5 + number), max_tokens=4) for number in range(4)]
    cluster.run()
    assert all(len(request.output) == 4 for request in requests)


@given(st.integers(1, 5000), st.integers(0, 5000), st.integers(2, 8))
def test_without_measurements_algorithm_5_chooses(new: int, cached: int, members: int) -> None:
    for shape in (SHAPE, replace(SHAPE, num_kv_heads=8)):
        chooser = Chooser(members, Facts(shape=shape, hardware=HARDWARE), ZIGZAG)
        expected = ring_kv_or_ring_q(shape, HARDWARE, new, cached, members)
        assert chooser.exchange(new, cached, tuple(range(members))) == expected


@given(st.integers(1, 100_000), st.integers(2, 8))
def test_a_whole_prompt_sends_keys_and_values_however_many_heads_they_have(length: int, members: int) -> None:
    """Queries and partial outputs are as many bytes then, and fewer of them are hidden."""
    for num_kv_heads in (1, 8):
        chooser = Chooser(members, Facts(shape=replace(SHAPE, num_kv_heads=num_kv_heads), hardware=HARDWARE), ZIGZAG)
        assert chooser.exchange(length, 0, tuple(range(members))) == RING_KV


# ---------------------------------------------------------------- unsharded weights on split instances


SPLIT = replace(SHAPE, num_kv_heads=1)  # eight query heads read one KV head, so that little is swapped inside instances


@given(st.integers(2, 8), st.integers(2, 5000), st.sampled_from((2, 4, 8)))
def test_alltoall_takes_whole_weights_where_they_send_less(members: int, new: int, tp: int) -> None:
    """On CPUs from the host, so that it does not depend on the length."""
    chooser = Chooser(members, Facts(shape=SPLIT, cluster=split(tp)), ZIGZAG)
    pays = unsharded_weights_pay(SPLIT, new, members, tp, "host")
    assert pays == (tp > 2)
    assert chooser.of_step(ALLTOALL, new, members) == (ALLTOALL._replace(weights="host") if pays else ALLTOALL)
    assert chooser.of_step(RING_KV, new, members) == RING_KV


@pytest.mark.parametrize("source", ["host", "peers"])
def test_whole_weights_can_be_forced(source: Literal["host", "peers"]) -> None:
    """This holds for prompts. A single token is computed with the shares of heads."""
    chooser = Chooser(2, Facts(cluster=split(2)), SharingOptions(exchange=ALLTOALL.kind, weights=source))
    assert chooser.of_step(ALLTOALL, 2, 2) == ALLTOALL._replace(weights=source)
    assert chooser.of_step(ALLTOALL, 1, 2) == ALLTOALL
    for cluster in (None, split(1)):
        assert (
            Chooser(2, Facts(cluster=cluster), SharingOptions(exchange=ALLTOALL.kind)).of_step(ALLTOALL, 100, 2)
            == ALLTOALL
        )


@pytest.mark.parametrize(
    ("host_s", "peer_s", "length", "expected"),
    [
        (1e-9, 1e-8, 3000, ALLTOALL._replace(weights="host")),
        (1e-8, 1e-9, 3000, ALLTOALL._replace(weights="peers")),
        (1e-8, 1e-9, 30, ALLTOALL),  # too few tokens for weights that links carry
        (None, 1e-9, 30, ALLTOALL._replace(weights="host")),
    ],
)
def test_on_accelerators_measured_links_decide(
    host_s: float | None, peer_s: float, length: int, expected: Exchange
) -> None:
    """`host_s` and `peer_s` are seconds per byte from the host and from a peer."""
    profile = Profile(profile_key=structs.replace(SUBJECT, device="cuda"))
    for size in (10**4, 10**6):
        if host_s is not None:
            seconds = (host_s * size,)
            profile = profile.with_transfer(Transfer(kind="host_copy", members=1, num_bytes=size, seconds=seconds))
        seconds = (peer_s * size,)
        profile = profile.with_transfer(Transfer(kind="point_to_point", members=2, num_bytes=size, seconds=seconds))
    chooser = Chooser(2, Facts(shape=SPLIT, profile=profile, cluster=split(4)), ZIGZAG)
    assert chooser.of_step(ALLTOALL, length, 2) == expected


def split(tp: int) -> Instances:
    return Instances.of(f"2xtp{tp}")


def test_decodes_keep_shares_of_heads() -> None:
    options = {"exchange": "alltoall", "decode": "alltoall", "threshold": "20", "weights": "peers"}
    cluster = Cluster(Setup(num_instances=2, options=options, tp=2))
    request = cluster.add(range(100), max_tokens=5)
    cluster.run()
    assert [part.exchange for part in cluster.parts_of(request)] == [
        ALLTOALL._replace(weights="peers"),
        *[ALLTOALL] * 4,
    ]
    assert request.metrics.exchanges == {"prefill": {"alltoall": 1}, "decode": {"alltoall": 4}}


# ---------------------------------------------------------------- the policy


def groups(profile: Profile | None, options: dict[str, str], *lengths: int) -> list[tuple[int, str]]:
    """How many instances begin with prompts of these lengths, and by which exchange."""
    cluster = Cluster(Setup(num_instances=2, num_blocks=4096, options=options, facts=Facts(profile=profile)))
    requests = [cluster.add(range(length), max_tokens=1) for length in lengths]
    cluster.run()
    parts = [cluster.parts_of(request)[0] for request in requests]
    return [(len(part.group), part.exchange) for part in parts]


def test_the_policy_goes_by_the_profile() -> None:
    assert groups(machine(2, link_s=0.0), {}, 300, 3000)[1][0] == 2
    assert groups(machine(2, link_s=1e-1), {}, 300, 3000) == [(1, LOCAL)] * 2
    late = machine(2, link_s=1e-6, start_s=0.2)
    assert groups(late, {}, 3000, 6000) == [(1, LOCAL), (2, RING_KV)]


def test_the_policy_takes_a_chain_where_the_layout_lets_it() -> None:
    chained = machine(2, link_s=0.0, exchanges=(CHAIN,))
    assert groups(chained, {}, 3000) == groups(chained, {"layout": "contiguous"}, 3000) == [(2, CHAIN)]
    assert groups(chained, {"layout": "zigzag"}, 3000) == [(2, RING_KV)]


def test_a_chain_that_was_chosen_is_cut_as_was_searched_and_decodes_alone() -> None:
    table = PartitionTable((Entry(model="m", members=2, length=3200, fractions=(0.75, 0.25)),))
    facts = Facts(profile=machine(2, link_s=0.0, exchanges=(CHAIN,)), model="m", partitions=table)
    cluster = Cluster(Setup(num_instances=2, num_blocks=4096, facts=facts, max_num_batched_tokens=4000))
    request = cluster.add(range(3200), max_tokens=20)
    cluster.run()
    prefill, *decodes = cluster.parts_of(request)
    assert prefill.runs == ((Run(0, 2400),), (Run(2400, 3200),))
    assert {(part.exchange, part.group) for part in decodes} == {(LOCAL, (1,))}
    assert request.metrics.kv_tokens_per_instance == [0, 3200]


def test_chains_end_on_instances_with_free_blocks() -> None:
    """Each leaves all its KV on one instance: 12 of 19 blocks and more on 4 times 60, so none is preempted."""
    options = {"exchange": "chain", "threshold": "100"}
    cluster = Cluster(Setup(num_instances=4, num_blocks=60, options=options, max_num_batched_tokens=200))
    requests = [cluster.add(range(first, first + 200), max_tokens=100) for first in range(12)]
    cluster.run()
    assert {request.metrics.num_preemptions for request in requests} == {0}
    held = [sum(column) for column in zip(*(r.metrics.kv_tokens_per_instance for r in requests), strict=True)]
    assert held == [600] * 4


@pytest.mark.parametrize("options", [{}, {"home": "computed"}])
@pytest.mark.parametrize("num_instances", [2, 3])
def test_further_turns_of_a_chain_that_is_too_large_for_its_last_member(
    num_instances: int, options: dict[str, str]
) -> None:
    """All members keep the KV that the end of the chain cannot keep."""
    setup = Setup(
        num_instances=num_instances, num_blocks=10, options={"exchange": "chain", "threshold": "20", **options}
    )
    for length in range(1, 41):
        cluster = Cluster(setup)
        request = cluster.add(range(170), max_tokens=10)
        cluster.run()
        turn = cluster.add([*request.prompt, *request.output, *range(length)], max_tokens=3)
        cluster.run()
        assert turn.output == cluster.expected_output(turn)


@pytest.mark.parametrize("options", [{"layout": "contiguous"}, {"exchange": "chain", "home": "computed"}])
def test_a_prompt_that_happens_to_lie_with_the_last_is_decoded_by_all(options: dict[str, str]) -> None:
    cluster = Cluster(Setup(num_instances=3, options={"threshold": "0", **options}))
    request = cluster.add(range(5), max_tokens=400)
    cluster.run()
    held = Counter(ref.instance for part in cluster.parts_of(request) for ref in part.blocks)
    assert max(held.values()) - min(held[i] for i in range(3)) <= 1


def test_a_long_line_is_looked_through_quickly() -> None:
    """Of waiting requests only the first has its prefix looked up."""
    cluster = Cluster(Setup(num_instances=2, num_blocks=4096, max_num_seqs=2, options={"threshold": "100"}))
    cluster.add(range(2000), max_tokens=1)
    cluster.run()
    for number in range(50):
        cluster.add([*range(2000), number], max_tokens=1)
    account, calls = cluster.engine.kv.account, 0
    match = account.match

    def counted(*arguments: object) -> PrefixHit:
        nonlocal calls
        calls += 1
        return match(*arguments)  # type: ignore[arg-type]

    account.match = counted  # type: ignore[method-assign]
    cluster.step()
    assert 0 < calls < 40


@pytest.mark.parametrize("facts", [Facts(), Facts(profile=machine(4, link_s=1e-5))], ids=["unmeasured", "measured"])
def test_a_short_turn_stays_with_the_instance_that_has_the_conversation(facts: Facts) -> None:
    cluster = Cluster(Setup(num_instances=4, num_blocks=4096, options={"exchange": "chain"}, facts=facts))
    request = cluster.add(range(3000), max_tokens=20)
    cluster.run()
    first, *_, last = cluster.parts_of(request)
    assert (len(first.group), last.group) == (4, (3,))
    turn = cluster.add([*request.prompt, *request.output, *range(30)], max_tokens=2)
    cluster.run()
    assert [(part.group, part.exchange) for part in cluster.parts_of(turn)] == [((3,), LOCAL)] * 2
    assert turn.metrics.num_cached_tokens > 2900


def test_groups_are_in_order_of_proximity_and_on_as_few_hosts_as_can_be() -> None:
    locations = tuple(Location(host=host, device=i) for i, host in enumerate((1, 0, 1, 0, 2)))
    facts = Facts(profile=two_or_four())
    cluster = Cluster(Setup(num_instances=5, num_blocks=4096, facts=facts, locations=locations))
    requests = [cluster.add(range(first, first + 3000), max_tokens=50) for first in range(2)]
    cluster.run()
    assert [cluster.parts_of(request)[0].group for request in requests] == [(1, 3), (0, 2)]
    long = cluster.add(range(2, 20_000), max_tokens=1)
    cluster.run()
    assert cluster.parts_of(long)[0].group == (1, 3, 0, 2)


def test_groups_hold_the_prefix_or_have_the_least_load() -> None:
    cluster = Cluster(Setup(num_instances=4, num_blocks=4096, facts=Facts(profile=two_or_four())))
    first, second = cluster.add(range(3000), max_tokens=50), cluster.add(range(1, 3001), max_tokens=50)
    cluster.run()
    assert [cluster.parts_of(request)[0].group for request in (first, second)] == [(0, 1), (2, 3)]
    turn = cluster.add([*second.prompt, *second.output, 5], max_tokens=1)
    long = cluster.add(range(2, 20_000), max_tokens=1)
    cluster.run()
    assert cluster.parts_of(turn)[0].group == (2, 3)
    assert turn.metrics.num_cached_tokens > 3000
    assert cluster.parts_of(long)[0].group == (0, 1, 2, 3)


def test_a_group_that_is_too_small_grows_to_all() -> None:
    """Two pools hold 2,048 tokens: a prompt of 3,000 would be quickest on two instances, but does not fit."""
    cluster = Cluster(Setup(num_instances=4, num_blocks=64, facts=Facts(profile=two_or_four())))
    fits, large = cluster.add(range(2000), max_tokens=100), cluster.add(range(1, 3000), max_tokens=1)
    cluster.run()
    assert fits.output == cluster.expected_output(fits)
    groups = [part.group for part in cluster.parts_of(fits)]
    assert (len(groups[0]), len(groups[-1])) == (2, 4)
    assert len(cluster.parts_of(large)[0].group) == 4


def test_without_a_profile_the_threshold_is_1024() -> None:
    assert groups(None, {}, 1024, 1025) == [(1, LOCAL), (2, RING_KV)]
    assert groups(None, {"threshold": "auto"}, 1024, 1025) == [(1, LOCAL), (2, RING_KV)]


def test_a_threshold_counts_before_the_profile() -> None:
    assert groups(machine(2, link_s=1e-1), {"threshold": "500"}, 500, 501) == [(1, LOCAL), (2, RING_KV)]


def test_an_exchange_that_was_asked_for_is_predicted_alone() -> None:
    """With ring_q five times as many bytes move, so sharing pays off later, or never."""
    slow = machine(2, link_s=1.5e-5)
    assert groups(slow, {}, 2000) == [(2, RING_KV)]
    assert groups(slow, {"exchange": "ring_q"}, 2000) == [(1, LOCAL)]
