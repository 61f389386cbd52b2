"""Requests that outgrow their device: their oldest blocks are offloaded to the host, and attention reads them there."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, add, assert_lawful, jobs, play, setups_of

from longspan.core.config import capacity_tokens
from longspan.core.exchange import RING_Q
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.kv.copies import Copy
from longspan.core.regrouping import Change
from longspan.core.request import ContextLengthError, Request
from longspan.core.splits import ParallelSpec
from longspan.core.steps import MoveKV, Step
from longspan.policy.registry import make_policy

SMALL = Setup(num_blocks=6, block_size=4, policy="chunked", max_num_batched_tokens=8, host_blocks=(60,))
"""24 tokens fit on the device, and 240 on the host."""
TWO_HOSTS = locations_of_ranks(4, "2")


def test_a_request_longer_than_its_device() -> None:
    cluster = Cluster(SMALL)
    request = cluster.add(range(200), max_tokens=30)
    cluster.run()
    assert request.output == cluster.expected_output(request)
    assert request.metrics.num_preemptions == 0
    assert request.metrics.num_computed_tokens == 229
    assert max(sum(part.hosted) for part in cluster.parts_of(request)) >= 229 // 4 - 6


def test_only_blocks_beyond_the_device_pool_are_offloaded() -> None:
    cluster = Cluster(replace(SMALL, num_blocks=40))
    request = cluster.add(range(180), max_tokens=1)
    cluster.run()
    assert sum(len(swap.copies) for swap in cluster.swaps if swap.number < cluster.forwards[-1].number) <= 45 - 40 + 3
    assert request.metrics.num_computed_tokens == 180


def test_the_longest_prompt_fills_device_and_host_pools() -> None:
    cluster = Cluster(SMALL)
    capacity = (6 + 60) * 4
    with pytest.raises(ContextLengthError, match=f"maximum context length is {capacity} tokens"):
        cluster.add(range(capacity))
    request = cluster.add(range(capacity - 1))
    cluster.run()
    assert request.output == cluster.expected_output(request)


@pytest.mark.parametrize("policy", ["runahead", "csps"])
def test_policies_that_read_no_host_blocks_refuse_a_prompt_beyond_the_devices(policy: str) -> None:
    cluster = Cluster(replace(SMALL, num_instances=2, policy=policy))
    with pytest.raises(ContextLengthError, match="maximum context length is 48 tokens"):
        cluster.add(range(60))


GROUPS = ["context", "tetris", "auto"]


@pytest.mark.parametrize("policy", GROUPS)
@pytest.mark.parametrize("num_instances", [2, 3])
def test_a_request_longer_than_all_devices(policy: str, num_instances: int) -> None:
    """Three times as long. Members of a group share the pool of their host."""
    cluster = Cluster(replace(SMALL, num_instances=num_instances, policy=policy, host_blocks=(100,)))
    most = 24 * num_instances
    request = cluster.add(range(3 * most), max_tokens=30)
    cluster.run()
    assert_lawful(cluster)
    assert request.metrics.num_preemptions == 0
    assert request.metrics.num_computed_tokens == 3 * most + 29
    last = cluster.parts_of(request)[-1]
    assert len(last.group) == cluster.policy.capacity and last.exchange == RING_Q
    assert sum(last.hosted) >= (3 * most + 29) // 4 - 6 * cluster.policy.capacity


@pytest.mark.parametrize("policy", GROUPS)
def test_members_on_two_hosts_read_their_own(policy: str) -> None:
    cluster = Cluster(replace(SMALL, num_instances=4, policy=policy, locations=TWO_HOSTS, host_blocks=(40, 40)))
    request = cluster.add(range(288), max_tokens=30)
    cluster.run()
    assert_lawful(cluster)
    [*_, last] = cluster.parts_of(request)
    assert all(number > 0 for number in last.hosted)


@pytest.mark.parametrize("policy", GROUPS)
def test_the_longest_prompt_of_a_group_fills_all_pools(policy: str) -> None:
    cluster = Cluster(replace(SMALL, num_instances=4, policy=policy, locations=TWO_HOSTS, host_blocks=(20, 20)))
    capacity = (4 * 6 + 2 * 20) * 4
    with pytest.raises(ContextLengthError, match=f"maximum context length is {capacity} tokens"):
        cluster.add(range(capacity))
    request = cluster.add(range(capacity - 1))
    cluster.run()
    assert request.output == cluster.expected_output(request)


@pytest.mark.parametrize("policy", GROUPS)
def test_the_next_turn_reads_host_blocks_of_a_group(policy: str) -> None:
    cluster = Cluster(replace(SMALL, num_instances=2, policy=policy))
    first = cluster.add(range(150), max_tokens=9)
    cluster.run()
    turn = cluster.add([*first.prompt, *first.output, 5, 6, 7], max_tokens=5)
    cluster.run()
    assert_lawful(cluster)
    assert turn.metrics.num_cached_tokens >= 152
    assert not any(swap.way == "in" for swap in cluster.swaps)


@pytest.mark.parametrize("policy", GROUPS)
def test_short_requests_progress_during_a_long_answer_of_a_group(policy: str) -> None:
    cluster = Cluster(replace(SMALL, num_instances=2, policy=policy, num_blocks=16, host_blocks=(80,)))
    long = cluster.add(range(180), max_tokens=60)
    while not long.output:
        cluster.step()
    short = [cluster.add([number] * 8, max_tokens=3) for number in range(4)]
    cluster.run()
    assert_lawful(cluster)
    assert max(one.metrics.last_token_s or 0.0 for one in short) < (long.metrics.last_token_s or 0.0)


@pytest.mark.parametrize(("policy", "num_instances"), [("chunked", 1), ("context", 2), ("auto", 2), ("tetris", 2)])
def test_host_blocks_are_loaded_once_device_blocks_are_free(policy: str, num_instances: int) -> None:
    """The devices are full until other requests end. The long request then reads its loaded blocks on devices."""
    cluster = Cluster(
        replace(SMALL, num_instances=num_instances, policy=policy, num_blocks=40, host_blocks=(200,), max_num_seqs=4)
    )
    others = [cluster.add([number] * 60, max_tokens=60) for number in range(num_instances)]
    while not all(one.output for one in others):
        cluster.step()
    long = cluster.add(range(num_instances * 165), max_tokens=150)
    cluster.run()
    assert_lawful(cluster)
    hosted = [sum(part.hosted) for part in cluster.parts_of(long)]
    assert sum(max(0, before - after) for before, after in pairwise(hosted)) > 5
    assert any(swap.way == "in" and swap.request_id == long.id for swap in cluster.swaps)


def test_host_blocks_that_a_lost_step_reads_are_freed() -> None:
    """The step still reads host blocks of which device copies were loaded. They are freed although the step is lost."""
    cluster = Cluster(replace(SMALL, policy="chunked", num_blocks=40, host_blocks=(200,), max_num_seqs=4))
    others = cluster.add([0] * 60, max_tokens=60)
    while not others.output:
        cluster.step()
    long = cluster.add(range(165), max_tokens=150)
    offload = cluster.engine.kv.swaps.offload
    while not any(ref.pool == 1 for ref in offload.read_blocks):
        cluster.step()
    cluster.restart()
    cluster.run()
    assert long.output == cluster.expected_output(long)
    cluster.assert_at_rest()
    assert all(pool.num_free == pool.num_blocks for pool in map(cluster.engine.kv.pool, (0, 1)))


@pytest.mark.parametrize(("policy", "num_instances"), [("chunked", 1), ("context", 2)])
def test_a_prompt_of_several_steps_is_admitted_during_a_long_decode(policy: str, num_instances: int) -> None:
    """Offloads free the blocks that the first waiting request needs, one step at a time."""
    cluster = Cluster(replace(SMALL, num_instances=num_instances, policy=policy, num_blocks=16, host_blocks=(120,)))
    long = cluster.add(range(200), max_tokens=120)
    while not long.output:
        cluster.step()
    medium, short = cluster.add([5] * 40, max_tokens=3), cluster.add([6] * 8, max_tokens=3)
    cluster.run()
    assert_lawful(cluster)
    last_s = max(one.metrics.last_token_s or 0.0 for one in (medium, short))
    assert last_s < 0.7 * (long.metrics.last_token_s or 0.0)


@pytest.mark.parametrize("policy", GROUPS)
def test_rotation_by_token_reads_no_host_blocks(policy: str) -> None:
    options = {"rotate": "token"}
    cluster = Cluster(replace(SMALL, num_instances=2, policy=policy, options=options))
    with pytest.raises(ContextLengthError, match="maximum context length is 48 tokens"):
        cluster.add(range(60))


def test_short_requests_progress_during_a_long_answer() -> None:
    """Its blocks are offloaded to free device blocks, and no request is preempted."""
    cluster = Cluster(replace(SMALL, num_blocks=16))
    long = cluster.add(range(100), max_tokens=60)
    while not long.output:
        cluster.step()
    short = [cluster.add([number] * 8, max_tokens=3) for number in range(4)]
    cluster.run()
    assert_lawful(cluster)
    assert max(one.metrics.last_token_s or 0.0 for one in short) < (long.metrics.last_token_s or 0.0)
    assert not any(one.metrics.num_preemptions for one in (long, *short))


def test_the_next_turn_reads_host_blocks_without_loading_them() -> None:
    cluster = Cluster(SMALL)
    first = cluster.add(range(120), max_tokens=9)
    cluster.run()
    num_swaps = len(cluster.swaps)
    turn = cluster.add([*first.prompt, *first.output, 5, 6, 7], max_tokens=5)
    cluster.run()
    assert_lawful(cluster)
    assert turn.metrics.num_cached_tokens >= 124
    assert not any(swap.way == "in" for swap in cluster.swaps[num_swaps:])


def test_a_turn_with_host_blocks_is_not_delayed_by_running_requests() -> None:
    """A turn whose prefix lies on the host needs few device blocks."""
    cluster = Cluster(replace(SMALL, num_blocks=20))
    first = cluster.add(range(120), max_tokens=9)
    cluster.run()
    others = cluster.add([1, 2, 3], max_tokens=40)
    while not others.output:
        cluster.step()
    turn = cluster.add([*first.prompt, *first.output, 5, 6, 7], max_tokens=5)
    cluster.run()
    assert_lawful(cluster)
    assert (turn.metrics.last_token_s or 0.0) < (others.metrics.last_token_s or 0.0)


def test_a_device_of_one_block() -> None:
    """It holds the end of the previous turn, and the next turn writes on in it."""
    cluster = Cluster(replace(SMALL, num_blocks=1, block_size=16, max_num_batched_tokens=64))
    first = cluster.add(range(60), max_tokens=9)
    cluster.run()
    turn = cluster.add([*first.prompt, *first.output, *range(30)], max_tokens=5)
    cluster.run()
    assert_lawful(cluster)
    assert turn.metrics.num_cached_tokens == 68


def test_a_running_request_is_not_preempted_when_later_requests_fill_the_host() -> None:
    """The first request outgrows the device while the host is full of blocks of later requests."""
    cluster = Cluster(replace(SMALL, num_blocks=12, host_blocks=(8,), max_num_batched_tokens=64))
    first = cluster.add(range(8), max_tokens=60)
    others = [cluster.add([number] * 8, max_tokens=20) for number in range(3)]
    cluster.run()
    assert all(one.output == cluster.expected_output(one) for one in (first, *others))
    assert sum(one.metrics.num_preemptions for one in others) > 0
    assert first.metrics.num_preemptions == 0


def test_short_steps_run_ahead_while_a_long_prompt_waits_for_blocks() -> None:
    """The device cannot hold two chunks of the long prompt in addition to the short request."""
    cluster = Cluster(replace(SMALL, num_blocks=5))
    short = cluster.add([1, 2], max_tokens=6)
    long = cluster.add(range(100), max_tokens=2)
    ahead = False
    while cluster.engine.has_unfinished:
        cluster.step()
        named = [{part.request_id for part in step.parts} for step in cluster.executor.in_flight.values()]
        ahead = ahead or (long.num_scheduled < 80 and named == [{short.id, long.id}, {short.id}])
    assert ahead


def test_the_device_keeps_the_end_of_a_long_prefix() -> None:
    """As many blocks as leave enough for a step."""
    cluster = Cluster(replace(SMALL, num_blocks=20))
    first = cluster.add(range(120), max_tokens=9)
    cluster.run()
    turn = cluster.add([*first.prompt, *first.output, 5, 6, 7], max_tokens=1)
    cluster.run()
    assert cluster.parts_of(turn)[0].hosted[0] == 128 // 4 - (20 - 3)


def test_host_blocks_of_preempted_requests_are_evicted_for_a_running_request() -> None:
    """Preempted requests fill the host. The long request, which arrived before half of them, needs host blocks."""
    cluster = Cluster(replace(SMALL, num_blocks=30, host_blocks=(40,), max_num_batched_tokens=64))
    others = [cluster.add([number] * 30, max_tokens=60) for number in range(3)]
    long = cluster.add(range(200), max_tokens=20)
    more = [cluster.add([9, number] * 15, max_tokens=60) for number in range(3)]
    cluster.run()
    assert all(one.output == cluster.expected_output(one) for one in (long, *others, *more))


def copy_of(cluster: Cluster, step: MoveKV) -> Copy:
    [copy] = (copy for copy in cluster.engine.kv.swaps.copies if copy.move.number == step.number)
    return copy


def test_answers_to_a_long_prompt_share_its_host_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(replace(SMALL, num_blocks=12))
    params = {"n": 3, "temperature": 1.0, "seed": 1, "max_tokens": 20}
    first = cluster.add(range(100), **params)
    others = [cluster.follow(first, choice) for choice in (1, 2)]
    submit, num_offloaded = cluster.executor.submit, 0

    def check(step: Step) -> None:
        nonlocal num_offloaded
        submit(step)
        if isinstance(step, MoveKV) and (copy := copy_of(cluster, step)).owner is not None:
            pool = cluster.engine.kv.pool(0)
            assert all(pool.references(ref.block) == 1 for ref in copy.pinned), (
                "blocks with other readers stay on the device"
            )
            num_offloaded += len(copy.pinned)

    monkeypatch.setattr(cluster.executor, "submit", check)
    cluster.run()
    assert num_offloaded > 0
    assert all(one.output == cluster.expected_output(one) for one in (first, *others))
    assert all(one.metrics.num_cached_tokens >= 80 for one in others)


def test_workers_lost_while_blocks_lie_on_the_host() -> None:
    cluster = Cluster(SMALL)
    request = cluster.add(range(150), max_tokens=20)
    while request.hosted.total() < 20:
        cluster.step()
    cluster.restart()
    cluster.run()
    assert request.output == cluster.expected_output(request)
    assert request.metrics.num_computed_tokens < 2 * 150 - 40, "tokens of host blocks are not computed again"


POLICIES = [
    ("chunked", 1),
    ("chunked", 2),
    ("prefill-first", 2),
    ("decode-first", 1),
    ("context", 1),
    ("context", 2),
    ("context", 3),
    ("tetris", 2),
    ("tetris", 3),
    ("auto", 2),
    ("auto", 3),
]


@st.composite
def tight(draw: st.DrawFn, policy: str, num_instances: int) -> Setup:
    """Few blocks on devices, more on the host, and requests of up to all of them."""
    setup, host_blocks = draw(setups_of(policy, num_instances, {})), draw(st.integers(1, 60))
    num_blocks, disk_blocks = draw(st.integers(1, 8)), draw(st.sampled_from([(), (), (30,)]))
    members = {"context": num_instances, "auto": num_instances, "tetris": 2}.get(policy, 1)
    most = max(2, min(150, (members * num_blocks + host_blocks) * setup.block_size))
    changes = {"num_blocks": num_blocks, "disk_blocks": disk_blocks, "prefix_caching": True, "max_model_len": most}
    return replace(setup, host_blocks=(host_blocks,), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("policy", "num_instances"), POLICIES)
@settings(RANDOM_RUNS, max_examples=60)
@given(st.data())
def test_any_workload_ends_lawfully(policy: str, num_instances: int, data: st.DataObject) -> None:
    setup, work = data.draw(tight(policy, num_instances)), data.draw(st.lists(jobs(), min_size=1, max_size=8))
    assert_lawful(play(setup, work, random.Random(data.draw(st.integers(0, 99)))))


@pytest.mark.parametrize(
    ("policy", "num_instances"),
    [pytest.param(*one, marks=[pytest.mark.full] if one[1] == 3 else []) for one in POLICIES],
)
@settings(RANDOM_RUNS, max_examples=30)
@given(st.data())
def test_workers_are_lost_at_any_time(policy: str, num_instances: int, data: st.DataObject) -> None:
    """At most 20 times, since the longest prompts take more steps than workers live on average."""
    cluster = Cluster(data.draw(tight(policy, num_instances)))
    requests = [add(cluster, job) for job in data.draw(st.lists(jobs(), min_size=1, max_size=8))]
    randoms, num_losses = random.Random(data.draw(st.integers(0, 99))), 0
    for _ in range(20_000):
        if not cluster.engine.has_unfinished:
            break
        cluster.step(0.0 if randoms.random() < 0.3 else None)
        if num_losses < 20 and randoms.random() < 0.03:
            num_losses += 1
            cluster.restart()
    cluster.assert_at_rest()
    assert all(request.output == cluster.expected_output(request) for request in requests)


@pytest.mark.full
def test_random_operations_change_no_answer() -> None:
    """At least 2,000 answers, among losses of workers and re-shards, equal those of runs alone.

    An answer is a prefix of that if a smaller cluster could not hold more.
    """
    num_answers = num_hosted = num_reshards = seed = 0
    while num_answers < 2000 or num_hosted < 1000 or num_reshards < 50:
        cluster, requests = _random_run(random.Random(seed))
        seed, num_reshards = seed + 1, num_reshards + len(cluster.engine.transitions)
        cluster.assert_at_rest()
        for request in (one for one in requests if one.error is None):
            alone, found = cluster.expected_output(request), request.output
            assert found == alone or (cluster.engine.transitions and found and found == alone[: len(found)]), seed
            num_answers += 1
            num_hosted += any(part.hosted for part in cluster.parts_of(request))


def _random_run(draw: random.Random) -> tuple[Cluster, list[Request]]:
    """Runs random requests, some beyond all devices, on a random cluster that loses workers or changes its split."""
    policy, num_instances, hosts = draw.choice(["chunked", *GROUPS]), draw.choice([2, 3, 4]), draw.choice([1, 1, 2])
    num_blocks, host_blocks, size = (
        draw.randint(1, draw.choice([8, 40])),
        draw.randint(1, 60),
        draw.choice([1, 2, 4, 8]),
    )
    cluster = Cluster(
        Setup(
            num_instances=num_instances,
            num_blocks=num_blocks,
            block_size=size,
            policy=policy,
            max_num_batched_tokens=draw.choice([size * 2, 16, 64]),
            max_num_seqs=draw.choice([2, 4, 16]),
            host_blocks=(host_blocks,) * hosts,
            disk_blocks=draw.choice([(), (30,) * hosts]),
            locations=locations_of_ranks(num_instances, "2") if hosts == 2 else (),
            max_steps_in_flight=draw.choice([1, 2]),
        )
    )
    capacity = capacity_tokens(cluster.policy, (cluster.setup.cluster,), size)
    longest, loses, splits = min(200, capacity), draw.random() < 0.3, draw.random() < 0.4
    shared, requests, left = [draw.randrange(99) for _ in range(longest)], list[Request](), draw.randint(1, 7)
    for _ in range(30_000):
        while left and (draw.random() < 0.3 or not cluster.engine.has_unfinished):
            left, length = left - 1, draw.randint(1, max(1, longest - 1))
            same = draw.choice([0, 0, length // 2, length])
            prompt = shared[:same] + [draw.randrange(99) for _ in range(length - same)]
            with suppress(ContextLengthError):  # a smaller cluster cannot hold it
                requests.append(cluster.add(prompt, max_tokens=draw.randint(1, 20)))
                requests += [cluster.follow(requests[-1], 1)] if draw.random() < 0.2 else []
        if not (left or cluster.engine.has_unfinished):
            return cluster, requests
        if splits and hosts == 1 and num_instances != 3 and draw.random() < 0.01:
            _split_otherwise(cluster)
        if loses and draw.random() < 0.02:
            cluster.restart()
        cluster.step(0.0 if draw.random() < 0.3 else None)
    raise AssertionError("it never ends")


def _split_otherwise(cluster: Cluster) -> None:
    """Changes to instances of twice as many ranks, or back, unless a change is under way."""
    setup = cluster.setup
    whole, halves = ParallelSpec(instances=setup.num_instances), ParallelSpec(instances=setup.num_instances // 2, tp=2)
    other = setup.split(halves if cluster.engine.config.cluster.spec == whole else whole)
    facts, number = replace(setup.facts, cluster=other), other.num_instances
    policy = make_policy(setup.policy, num_instances=number, options=setup.options, facts=facts, is_resized=True)
    with suppress(RuntimeError):
        cluster.engine.reshard(Change(cluster=other, policy=policy))
