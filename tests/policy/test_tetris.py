"""Policies `tetris` and `fixed-sp` on simulated clusters, whose every step is checked (`cluster.py`)."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from forced_plans import Wandering, forced
from hypothesis import strategies as st
from linear_cost import LinearCost
from refusals import refused
from workloads import assert_lawful, finishes_lawfully, repeats, setups_of

from longspan.core.cluster import Cluster as Instances
from longspan.core.config import EngineConfig
from longspan.core.engine import Engine
from longspan.core.exchange import ALLTOALL, RING_KV, RING_Q
from longspan.core.locations import Location
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.cost.profile import Prefill, Profile
from longspan.cost.profile_key import ProfileKey
from longspan.cost.shape import Hardware, ModelShape
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.policy.tetris import expected_times, measured_times, sp_times
from longspan.policy.tetris.rates import RateTable, RateWatch
from longspan.sim.executor import SimExecutor, VirtualClock

GROUPS: list[dict[str, str]] = [
    {},
    {"layout": "striped", "rotate": "token"},
    {"exchange": "alltoall", "decode": "alltoall"},
    {"exchange": "ring_q", "decode": "ring_kv"},
]


def machine(*sizes: int, start_s: float = 0.01) -> Facts:
    """0.5 ms a token on one instance, as simulated ones take, even shares, and a start for each member."""
    profile = Profile(
        profile_key=ProfileKey(model="m", dtype="d", device="d", tp=1, threads=1, kernel="k", machine="m")
    )
    for size, new in itertools.product(sizes, (100, 1000)):
        times = Prefill(
            members=size,
            exchange="local" if size == 1 else "ring_kv",
            new_tokens=new,
            cached_tokens=0,
            seconds=(start_s * size + new * 5e-4 / size,),
        )
        profile = profile.with_measured(times)
    return Facts(profile=profile)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_instances = draw(st.integers(1, 4))
    options = dict(draw(st.sampled_from(GROUPS)))
    policy = draw(st.sampled_from(["tetris", "tetris", "fixed-sp"]))
    if policy == "fixed-sp":
        options["sp"] = str(draw(st.sampled_from([size for size in (1, 2, 3, 4) if num_instances % size == 0])))
    else:
        options["improvement_rate"] = str(draw(st.sampled_from([0, 0.05, 0.3])))
        options["chunking"] = draw(st.sampled_from(["true", "true", "false"]))
        options["min_chunk"] = str(draw(st.sampled_from([1, 8])))
        if draw(st.booleans()):
            sizes = draw(st.sets(st.integers(1, num_instances), min_size=1))
            options["sp_sizes"] = ",".join(map(str, sorted(sizes)))
    setup = draw(setups_of(policy, num_instances, options))
    num_hosts = draw(st.integers(1, 2))
    locations = tuple(Location(host=i % num_hosts, device=i) for i in range(num_instances))
    facts = draw(st.sampled_from([setup.facts, machine(*range(1, num_instances + 1), start_s=0.0)]))
    setup = replace(setup, facts=facts, locations=locations)
    made = make_policy(policy, num_instances=num_instances, options=options, facts=setup.facts)
    assert setup.max_model_len is not None
    capacity = made.capacity_on(setup.cluster) * setup.num_blocks * setup.block_size
    return replace(setup, max_model_len=min(setup.max_model_len, capacity))


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


# ---------------------------------------------------------------- groups that grow


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("max_num_seqs", [2, 5])
def test_groups_that_change_at_any_step(seed: int, max_num_seqs: int) -> None:
    """Members that join later, also for a decode, get the whole state. No instance exceeds its request slots."""
    cluster = Cluster(Setup(num_instances=4, max_num_seqs=max_num_seqs, block_size=4, uneven=seed, num_blocks=500))
    cluster.engine.set_policy(Wandering(4, seed))
    requests = [cluster.add([n] * (5 + 40 * n), max_tokens=30, presence_penalty=0.5) for n in range(6)]
    cluster.run()
    assert_lawful(cluster)
    growths = [
        (before, after)
        for request in requests
        for before, after in itertools.pairwise(cluster.parts_of(request))
        if not set(after.group) <= set(before.group)
    ]
    assert any(part.new_output for _, part in growths)
    assert any(part.unknown_on is not None for _, part in growths)


def test_a_waiting_prompt_is_overtaken_by_a_started_one() -> None:
    """The second prompt waits for blocks on instance 1. They are reserved for the third, which has started."""
    cluster = Cluster(Setup(num_instances=2, num_blocks=10, max_num_batched_tokens=64))
    plans = {100: [(100, (1,))], 128: [(128, (1,))], 192: [(64, (0,)), (128, (0, 1))]}
    cluster.engine.set_policy(forced(plans, 2))
    first, second, third = (cluster.add([n] * length, max_tokens=30) for n, length in enumerate(plans))
    cluster.run()
    assert_lawful(cluster)
    assert last_step(cluster, first) < last_step(cluster, third) < first_step(cluster, second)


# ---------------------------------------------------------------- turns


def tetris(*, facts: Facts | None = None, num_blocks: int = 1000, **options: str) -> Cluster:
    """Four instances, on which two shorten a prompt of 1,000 tokens by a third, and four hardly more."""
    return Cluster(
        Setup(
            num_instances=4,
            num_blocks=num_blocks,
            policy="tetris",
            options={"improvement_rate": "0.2", **options},
            facts=facts or machine(1, 2, 4, start_s=0.05),
            max_num_batched_tokens=500,
        )
    )


def chunks_of(cluster: Cluster, request: Request) -> list[tuple[tuple[int, ...], int]]:
    """The groups of a prompt in order, and where each stopped."""
    parts = [part for part in cluster.parts_of(request) if part.start < len(request.prompt)]
    return [(group, max(part.stop for part in of)) for group, of in itertools.groupby(parts, key=lambda p: p.group)]


def first_step(cluster: Cluster, request: Request) -> int:
    return next(f.number for f in cluster.forwards if any(p.request_id == request.id for p in f.parts))


def last_step(cluster: Cluster, request: Request) -> int:
    """Of its prompt."""
    parts = ((f.number, part) for f in cluster.forwards for part in f.parts if part.request_id == request.id)
    return next(number for number, part in parts if part.stop >= len(request.prompt))


def test_a_long_prompt_begins_on_free_instances_and_grows_to_all() -> None:
    cluster = tetris()
    short, long = cluster.add(range(1000), max_tokens=1), cluster.add([7] * 8000, max_tokens=3)
    cluster.run()
    assert chunks_of(cluster, short) == [((0, 1), 1000)]
    assert chunks_of(cluster, long) == [((2, 3), 992), ((0, 1, 2, 3), 8000)], "1,000 tokens, in blocks of 16"
    assert first_step(cluster, long) < last_step(cluster, short)
    assert long.output == cluster.expected_output(long)


def test_without_chunks_it_waits_for_all() -> None:
    cluster = tetris(chunking="false")
    short, long = cluster.add(range(1000), max_tokens=1), cluster.add([7] * 8000, max_tokens=1)
    cluster.run()
    assert chunks_of(cluster, long) == [((0, 1, 2, 3), 8000)]
    assert first_step(cluster, long) > last_step(cluster, short)


def mean_ttft_s(chunking: str, seed: int) -> float:
    """Return the mean TTFT of prompts of mixed lengths that keep eight instances busy. Outputs are not checked."""
    options, clock = {"improvement_rate": "0.05", "min_chunk": "16", "chunking": chunking}, VirtualClock()
    engine = Engine(
        policy=make_policy("tetris", num_instances=8, options=options, facts=machine(1, 2, 4, 8, start_s=0.002)),
        executor=SimExecutor(clock=clock, vocab_size=64, cost=LinearCost(base_s=0.0)),
        clock=clock,
        config=EngineConfig(
            cluster=Instances.of("8", num_blocks=[3000] * 8),
            block_size=16,
            max_model_len=5000,
            max_num_batched_tokens=400,
            prefix_caching=False,
        ),
    )
    draw, requests = random.Random(seed), []
    for number in range(200):
        prompt = (number % 64,) * draw.choice([400, 400, 400, 800, 1600, 4000])
        requests.append(engine.add(prompt, SamplingParams(max_tokens=1)))
        arrival_s = clock.now() + draw.expovariate(13)
        while clock.now() < arrival_s:
            engine.step(arrival_s - clock.now())
            if not engine.has_unfinished:
                clock.advance_to(arrival_s)
    while engine.has_unfinished:
        engine.step()
    return statistics.mean(request.metrics.ttft_s or 0.0 for request in requests)


def test_chunks_shorten_the_wait() -> None:
    """The same prompts at the same times, with chunks and without, near the capacity of the instances."""
    with_chunks, without = (sum(mean_ttft_s(chunking, seed) for seed in range(3)) for chunking in ("true", "false"))
    assert with_chunks < 0.95 * without


def test_a_later_prompt_does_not_overtake_on_the_same_instances() -> None:
    """A prompt that is planned behind a long one on all instances waits for it, and for no other prompt."""
    cluster = tetris()
    first, second, third = (cluster.add([n] * length, max_tokens=1) for n, length in enumerate((8000, 400, 400)))
    cluster.run()
    assert [len(group) for group, _ in chunks_of(cluster, first)] == [4]
    assert min(first_step(cluster, one) for one in (second, third)) > last_step(cluster, first)


def test_a_decode_continues_alongside_prompts() -> None:
    """Every step of the prompt has the decode of its instances in it."""
    cluster = tetris()
    decoding = cluster.add(range(100), max_tokens=40)
    for _ in range(3):
        cluster.step()
    long = cluster.add([7] * 8000, max_tokens=1)
    cluster.run()
    both = [{part.request_id for part in forward.parts} for forward in cluster.forwards]
    assert sum(long.id in ids for ids in both) >= 4
    assert all(decoding.id in ids for ids in both if long.id in ids)


def test_a_conversation_goes_on_where_its_beginning_is() -> None:
    cluster = tetris()
    first = cluster.add(range(1000), max_tokens=5)
    cluster.run()
    second = cluster.add([*first.prompt, *first.output, *range(100)], max_tokens=1)
    cluster.run()
    assert second.metrics.num_cached_tokens == 1004
    assert chunks_of(cluster, second)[0][0] == (0, 1)


def test_a_cached_beginning_is_computed_again_where_that_is_sooner() -> None:
    """100 tokens are cached on an instance that is busy for seconds."""
    cluster = tetris(facts=machine(1))
    first = cluster.add(range(100), max_tokens=1)
    cluster.run()
    for instance in (1, 2, 3):
        other = cluster.add([instance] * 200, max_tokens=1)
        cluster.run()
        assert chunks_of(cluster, other)[0][0] == (instance,)
    long, second = cluster.add([7] * 8000, max_tokens=1), cluster.add([*range(100), 5], max_tokens=1)
    cluster.run()
    assert [chunks_of(cluster, one)[0][0] for one in (first, long, second)] == [(0,), (0,), (1,)]
    assert second.metrics.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("per_host", "options", "expected"), [(8, {}, 8), (4, {}, 4), (2, {}, 8), (1, {}, 8), (4, {"sp_sizes": "1,8"}, 8)]
)
def test_groups_end_with_their_host_if_it_has_enough(per_host: int, options: dict[str, str], expected: int) -> None:
    """So that no decode waits for another host's."""
    locations, facts = tuple(Location(host=i // per_host, device=i) for i in range(8)), machine(1, 2, 4, 8)
    cluster = Cluster(
        Setup(
            num_instances=8,
            policy="tetris",
            options={"improvement_rate": "0", **options},
            facts=facts,
            locations=locations,
        )
    )
    requests = [cluster.add([number] * 4000, max_tokens=20) for number in range(3)]
    cluster.run()
    for request in requests:
        assert [len(group) for group, _ in chunks_of(cluster, request)] == [expected]
        assert len({locations[i].host for i in chunks_of(cluster, request)[0][0]}) == max(1, expected // per_host)


def test_fixed_groups() -> None:
    setup = Setup(num_instances=4, policy="fixed-sp", options={"sp": "2"}, facts=machine(1, 2, 4))
    cluster = Cluster(setup)
    requests = [cluster.add([number] * 900, max_tokens=2) for number in range(4)]
    cluster.run()
    assert [chunks_of(cluster, request) for request in requests] == [[((0, 1), 900)], [((2, 3), 900)]] * 2


# ---------------------------------------------------------------- options and rates


@pytest.mark.parametrize(
    ("name", "options", "facts", "parameter"),
    [
        ("tetris", {"improvement_rate": "1"}, None, "improvement_rate"),
        ("tetris", {"improvement_rate": "much"}, None, "improvement_rate"),
        ("tetris", {"improvement_rate": "0.3", "improvement_rates": "1:0.3"}, None, "improvement_rates"),
        ("tetris", {"improvement_rates": "1:0.3,0.5"}, None, "improvement rates"),
        ("tetris", {"improvement_rates": "1:0.3,0.5:0.1"}, None, "request rates"),
        ("tetris", {"improvement_rates": "1:1.3"}, None, "improvement_rate"),
        ("tetris", {"chunking": "perhaps"}, None, "chunking"),
        ("tetris", {"min_chunk": "0"}, None, "min_chunk"),
        ("tetris", {"sp_sizes": "1,two"}, None, "sp_sizes"),
        ("tetris", {"sp_sizes": "2,1"}, None, "sp_sizes"),
        ("tetris", {"sp_sizes": "1,8"}, None, "sp size"),
        ("tetris", {"sp_sizes": "1,4"}, machine(1, 2), "sp size"),
        ("tetris", {"exchange": "chain"}, None, "exchange"),
        ("fixed-sp", {"sp": "3"}, None, "sp"),
        ("fixed-sp", {"sp": "3"}, machine(1, 2, 4), "sp"),
        ("fixed-sp", {"sp": "0"}, None, "sp"),
        ("fixed-sp", {}, None, "sp"),
        ("fixed-sp", {"sp": "8"}, None, "sp"),
        ("fixed-sp", {"improvement_rate": "0.1"}, None, "improvement_rate"),
    ],
)
def test_invalid_values_are_refused(name: str, options: dict[str, str], facts: Facts | None, parameter: str) -> None:
    with refused(parameter):
        make_policy(name, num_instances=4, options=options, facts=facts)


@pytest.mark.parametrize(
    ("instances", "facts", "given", "expected"),
    [
        (1, Facts(), "auto", (1,)),
        (6, Facts(), "auto", (1, 2, 4)),
        (16, Facts(), "auto", (1, 2, 4, 8, 16)),
        (4, machine(1, 3, 4), "auto", (1, 4)),
        (4, machine(1, 3, 4), "1,3", (1, 3)),
        (3, Facts(), "3", (3,)),
    ],
)
def test_sizes(instances: int, facts: Facts, given: str, expected: tuple[int, ...]) -> None:
    assert tuple(sp_times(facts, [RING_KV], given, instances)) == expected


def test_measured_times_are_those_of_the_quickest_exchange() -> None:
    facts = machine(1, 2)
    assert facts.profile is not None
    profile = facts.profile
    for new in (100, 1000):
        slower = Prefill(members=2, exchange="ring_q", new_tokens=new, cached_tokens=0, seconds=(new * 4e-4,))
        sparse = Prefill(members=2, exchange="alltoall_sparse", new_tokens=new, cached_tokens=0, seconds=(new * 1e-6,))
        profile = profile.with_measured(slower).with_measured(sparse)
    facts = Facts(profile=profile)
    seconds = {
        exchanges: measured_times(facts, exchanges)[2].seconds(1000)
        for exchanges in ((RING_KV, RING_Q), (RING_Q,), (RING_KV,), (ALLTOALL,))
    }
    assert list(seconds.values()) == pytest.approx([0.27, 0.4, 0.27, 0.27]), "prompts with drops count for none"
    assert measured_times(Facts(), ["ring_kv"]) == {}


def test_expected_times_shrink_with_the_group_and_grow_with_the_prompt() -> None:
    shape = ModelShape(num_layers=4, hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8, bytes_per_element=4)
    for facts in (Facts(), Facts(shape=shape, hardware=Hardware(flops_per_s=1e9, bytes_per_s=1e9))):
        times = expected_times(facts, [1, 2, 4])
        for cached in (0, 10_000):
            by_size = [times[size].seconds(100_000, cached) for size in (1, 2, 4)]
            assert by_size == sorted(by_size, reverse=True)
        assert times[1].seconds(100_000, 10_000) > times[1].seconds(100_000) > times[1].seconds(10_000)


def test_the_nearest_request_rate_counts() -> None:
    table = RateTable.parse("0.5:0.05,1:0.3,4:0.75")
    assert str(table) == "0.5:0.05,1:0.3,4:0.75"
    assert [table.nearest(rate) for rate in (0, 0.7, 0.8, 2.4, 2.6, 100)] == [0.05, 0.05, 0.3, 0.3, 0.75, 0.75]


def test_the_improvement_rate_follows_the_arrivals_of_the_last_30_s() -> None:
    watch = RateWatch(RateTable.parse("0:0.05,1:0.3,4:0.75"))
    seen = []
    for tick in range(1200):
        now_s = tick / 10
        if (30 <= now_s < 60 and tick % 10 == 0) or (60 <= now_s < 90 and tick % 2 == 0):
            watch.arrived(now_s)
        watch.renew(now_s)
        seen.append(watch.improvement_rate)
    assert [rate for rate, _ in itertools.groupby(seen)] == [0.05, 0.3, 0.75]
    assert (seen.index(0.3), seen.index(0.75)) == (600, 900)
    watch.renew(121.0)
    assert watch.improvement_rate == 0.05


def test_before_the_first_window_is_over_the_arrivals_so_far_count() -> None:
    watch = RateWatch(RateTable.parse("0:0.05,1:0.3,4:0.75"))
    seen = []
    for number in range(40):
        now_s = number / 4
        watch.arrived(now_s)
        watch.renew(now_s)
        seen.append(watch.improvement_rate)
    assert [(rate, len(list(same))) for rate, same in itertools.groupby(seen)] == [(0.05, 7), (0.75, 33)]


def test_a_policy_counts_each_arrival_once() -> None:
    cluster = tetris(improvement_rate="auto", improvement_rates="0:0.75,0.5:0")
    cluster.add([1], max_tokens=1)
    cluster.run()
    cluster.clock.advance_to(10.0)
    for number in range(40):
        cluster.add([number] * 50, max_tokens=30)
    cluster.run()
    rates = []
    for time_s in (31.0, 62.0):
        cluster.clock.advance_to(time_s)
        late = cluster.add([int(time_s)] * 3000, max_tokens=1)
        cluster.run()
        rates.append(len(chunks_of(cluster, late)[-1][0]))
    assert rates == [4, 1], "40 in 30 s were many, 1 is few"
