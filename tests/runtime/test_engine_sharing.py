"""Long prompts together with short ones on a simulated cluster, and the places of their KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

import pytest
from cluster import VOCAB, Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, in_flight

from longspan.core.exchange import RING_KV, RING_Q
from longspan.core.request import Request

# ---------------------------------------------------------------- long and short side by side


def test_short_requests_stay_on_one_instance_and_long_ones_are_dealt() -> None:
    cluster = Cluster(Setup(num_instances=3, options={"threshold": "100"}))
    short = [cluster.add([number] * 100, max_tokens=3) for number in range(9)]
    long = [cluster.add([number] * 101, max_tokens=3) for number in range(2)]
    cluster.run()
    owners = [{part.group for part in cluster.parts_of(request)} for request in short]
    assert all(len(groups) == 1 for groups in owners)
    assert sorted(group for groups in owners for group in groups) == sorted([(0,), (1,), (2,)] * 3), "spread evenly"
    assert all({part.group for part in cluster.parts_of(request)} == {(0, 1, 2)} for request in long)
    assert {part.exchange for request in long for part in cluster.parts_of(request)} == {RING_KV, RING_Q}


def test_instances_without_common_requests_step_on_their_own() -> None:
    """The shorter steps of one instance do not wait for the longer ones of the other."""
    cluster = Cluster(Setup(num_instances=2))
    cluster.add([1] * 900, max_tokens=1)
    other = cluster.add([2] * 10, max_tokens=20)
    cluster.run()
    assert all(len(forward.instances) == 1 for forward in cluster.forwards)
    prefill, *decodes = cluster.parts_of(other)
    assert prefill.group == (1,)
    assert median(other.metrics.tbt_s) < 0.02
    assert other.metrics.ttft_s is not None and other.metrics.ttft_s < 0.02
    assert len(decodes) == 19


def long_and_short(max_num_batched_tokens: int) -> Iterator[tuple[Cluster, Request, list[Request]]]:
    for late in (False, True):
        setup = Setup(
            num_instances=2, options={"threshold": "100"}, num_blocks=400, max_num_batched_tokens=max_num_batched_tokens
        )
        cluster = Cluster(setup)
        if late:
            long = cluster.add([1] * 5000, max_tokens=5)
            cluster.step()
            short = [cluster.add([2 + number] * 40, max_tokens=8) for number in range(4)]
        else:
            short = [cluster.add([2 + number] * 40, max_tokens=8) for number in range(4)]
            cluster.step()
            long = cluster.add([1] * 5000, max_tokens=5)
        yield cluster, long, short


@pytest.mark.parametrize("max_num_batched_tokens", [64, 100, 256])
def test_short_requests_pass_a_long_prefill(max_num_batched_tokens: int) -> None:
    for cluster, long, short in long_and_short(max_num_batched_tokens):
        cluster.run()
        assert long.metrics.finished_s is not None and long.metrics.ttft_s is not None
        first_token_s = long.metrics.arrival_s + long.metrics.ttft_s
        assert all(r.metrics.finished_s is not None and r.metrics.finished_s < first_token_s for r in short)


@pytest.mark.parametrize("max_num_batched_tokens", [64, 100, 256])
def test_a_long_prefill_progresses_during_a_stream_of_short_requests(max_num_batched_tokens: int) -> None:
    """Short requests keep arriving. Every step of its group still advances the long request."""
    for cluster, long, _ in long_and_short(max_num_batched_tokens):
        turns = 0
        while long.metrics.ttft_s is None:
            cluster.add([turns % VOCAB] * 30, max_tokens=4)
            cluster.step()
            turns += 1
            assert turns < 3 * 5000 / max_num_batched_tokens + 20, "the long prompt starves"
        cluster.run()


def test_a_long_prompt_waits_for_idle_instances_no_longer_than_one_step() -> None:
    cluster = Cluster(Setup(num_instances=2, options={"threshold": "100"}))
    for number in range(3):
        cluster.add([number] * 50, max_tokens=100)
    for _ in range(7):
        cluster.step()
    assert cluster.executor.in_flight, "the instances are out of step"
    long = cluster.add(range(101), max_tokens=2)
    for _ in range(3):
        cluster.step()
    assert cluster.parts_of(long)
    cluster.run()


# ---------------------------------------------------------------- where KV lies


def held_per_instance(cluster: Cluster, request: Request) -> list[int]:
    slots = cluster.executor.live[request.id].slots.of[: request.num_computed]
    counts = Counter(ref.instance for ref, _ in slots)
    return [counts[instance] for instance in range(cluster.setup.num_instances)]


def spreads_of_2000_tokens(cluster: Cluster, request: Request) -> list[int]:
    """After each step of a long decode, by how many tokens the fullest and the emptiest instance differ."""
    spreads = []
    while len(request.output) < 2000:
        cluster.step()
        held = held_per_instance(cluster, request)
        spreads.append(max(held) - min(held))
    assert sum(held) == len(request.prompt) + 1999
    return spreads


@pytest.mark.parametrize("num_instances", [2, pytest.param(3, marks=pytest.mark.full), 4])
def test_the_home_of_a_long_decode_rotates(num_instances: int) -> None:
    cluster = Cluster(Setup(num_instances=num_instances, options={"threshold": "50"}))
    request = cluster.add(range(100), max_tokens=2001)
    spreads = spreads_of_2000_tokens(cluster, request)
    assert max(spreads) <= 2 * 16, "two blocks at most"
    decodes = [part for part in cluster.parts_of(request) if part.start >= 100]
    assert {part.exchange for part in decodes} == {RING_Q}
    assert len({part.sample.instance for part in decodes if part.sample is not None}) == num_instances
    cluster.run()


CHAINED = {"exchange": "chain", "home": "computed"}


@pytest.mark.parametrize(
    ("num_instances", "sharing"),
    [
        (2, {}),
        (3, CHAINED),
        (4, {}),
        pytest.param(2, CHAINED, marks=pytest.mark.full),
        pytest.param(3, {}, marks=pytest.mark.full),
        pytest.param(4, CHAINED, marks=pytest.mark.full),
    ],
)
def test_a_decode_that_rotates_by_token_is_even_to_the_token(num_instances: int, sharing: dict[str, str]) -> None:
    options = {"threshold": "50", "rotate": "token", **sharing}
    cluster = Cluster(Setup(num_instances=num_instances, options=options))
    request = cluster.add(range(100), max_tokens=2001)
    spreads = spreads_of_2000_tokens(cluster, request)
    assert 1 < spreads[0] <= 2 * 16, "the prompt's own deal"
    assert max(spreads[2 * 16 * num_instances :]) <= 1
    owners = Counter(part.sample.instance for part in cluster.parts_of(request)[1:] if part.sample is not None)
    assert max(owners.values()) - min(owners.values()) <= 2 * 16
    cluster.run()


def test_rotation_by_token_keeps_the_prompt_for_the_next_turn() -> None:
    cluster = Cluster(Setup(num_instances=3, options={"threshold": "50", "rotate": "token"}))
    first = cluster.add(range(60), max_tokens=50)
    cluster.run()
    second = cluster.add([*first.prompt, *first.output, 1, 2, 3], max_tokens=5)
    cluster.run()
    third = cluster.add([*second.prompt, *second.output], max_tokens=5)
    cluster.run()
    assert second.metrics.num_cached_tokens == 60, "the tail of the prompt, too, whose block was written on"
    assert third.metrics.num_cached_tokens == len(second.prompt)


@pytest.mark.parametrize("num_instances", [2, 3])
def test_rotation_by_token_leaves_no_blocks_after_preemption_and_abort(num_instances: int) -> None:
    """Requests that grow at the same time with few blocks. Two of them are aborted in flight."""
    options = {"threshold": "20", "rotate": "token"}
    cluster = Cluster(Setup(num_instances=num_instances, num_blocks=12, block_size=8, options=options))
    requests = [cluster.add([number] * (21 + number), max_tokens=60) for number in range(3 * num_instances)]
    short = [cluster.add([number] * 5, max_tokens=40) for number in range(10, 14)]
    gone: list[Request] = []
    while cluster.engine.has_unfinished:
        cluster.step()
        decoding = [r for r in requests if r.rotation is not None and len(r.output) > 15 and r not in gone]
        if len(gone) < 2 and decoding:
            cluster.step(0.0)
            assert in_flight(cluster, decoding[-1])
            gone.append(decoding[-1])
            cluster.engine.finish(gone[-1], "abort")
    cluster.assert_at_rest()
    assert len(gone) == 2
    assert requests[0].metrics.num_preemptions == 0, "the first request is not preempted"
    rotations = [{part.rotation for part in cluster.parts_of(r)} - {None} for r in requests]
    assert any(len(own) > 1 for own in rotations), "another one after a preemption"
    for request in (*requests, *short):
        expected = cluster.expected_output(request)
        assert request.output == (expected[: len(request.output)] if request in gone else expected)


def test_rotation_by_token_waits_for_older_requests() -> None:
    """Its decode instance is full of an older request's blocks. Repeated preemption would not free any of them."""
    options = {"threshold": "50", "rotate": "token"}
    cluster = Cluster(Setup(num_instances=2, num_blocks=4, options=options))
    older, long = cluster.add([1] * 33, max_tokens=15), cluster.add(range(70), max_tokens=20)
    cluster.run()
    assert older.metrics.finished_s is not None and long.metrics.finished_s is not None
    assert older.metrics.finished_s < long.metrics.finished_s
    assert max(long.metrics.tbt_s) > 5 * median(long.metrics.tbt_s), "it has waited"
    assert (older.metrics.num_preemptions, long.metrics.num_preemptions) == (0, 0)


@settings(RANDOM_RUNS, max_examples=60)
@given(st.integers(2, 4), st.integers(101, 1500), st.integers(16, 400), st.sampled_from([1, 4, 16]), st.booleans())
def test_a_dealt_prompt_lies_evenly(num_instances: int, length: int, tokens: int, size: int, alone: bool) -> None:
    """Over all chunks together, whatever their lengths: KV differs by two blocks at most."""
    cluster = Cluster(
        Setup(
            num_instances=num_instances,
            num_blocks=4096 // size,
            block_size=size,
            options={"threshold": "100"},
            max_num_batched_tokens=tokens,
        )
    )
    request = cluster.add([position % VOCAB for position in range(length)])
    if not alone:
        cluster.add([1] * 20, max_tokens=30)
    cluster.run()
    held = request.metrics.kv_tokens_per_instance
    assert sum(held) == length
    blocks = [-(-tokens // size) for tokens in held]
    assert max(blocks) - min(blocks) <= 2


def test_chunks_of_a_dealt_prompt_are_even_work() -> None:
    cluster = Cluster(Setup(num_instances=4, max_num_batched_tokens=128, options={"threshold": "100"}))
    request = cluster.add([1] * 2048)
    cluster.run()
    chunks = [part for part in cluster.parts_of(request) if part.start < 2048]
    assert len(chunks) == 4
    for part in chunks:
        work = [sum(p + 1 for run in runs for p in run.positions) for runs in part.runs]
        assert max(work) == min(work)
    assert request.metrics.kv_tokens_per_instance == [512] * 4
