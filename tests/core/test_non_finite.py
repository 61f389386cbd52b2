"""A request with NaN or infinite numbers ends with an error and does not affect other requests."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, Job, assert_lawful, jobs, play, setups_of

POLICIES: list[tuple[str, int, dict[str, str]]] = [
    ("chunked", 1, {}),
    ("chunked", 2, {}),
    ("prefill-first", 2, {}),
    ("context", 3, {"threshold": "20"}),
    ("context", 2, {"threshold": "20", "rotate": "token"}),
    ("runahead", 2, {}),
    ("tetris", 4, {"improvement_rate": "0.1"}),
    ("loongserve", 4, {}),
    ("auto", 3, {}),
]
POISON = st.sets(st.integers(0, 63), max_size=4)


@st.composite
def tiers(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    host_blocks = draw(st.sampled_from([(), (2,), (40,)]))
    return {"host_blocks": host_blocks, "disk_blocks": draw(st.sampled_from([(), (30,)])) if host_blocks else ()}


@pytest.mark.parametrize(("policy", "num_instances", "options"), POLICIES, ids=str)
@settings(RANDOM_RUNS, max_examples=60)
@given(st.data(), st.lists(jobs(), min_size=1, max_size=10), POISON)
def test_poison_ends_its_request_alone_and_no_block_keeps_it(
    policy: str, num_instances: int, options: dict[str, str], data: st.DataObject, work: list[Job], poison: set[int]
) -> None:
    """Requests share prefixes before and behind poison, are aborted and preempted, see `CheckedExecutor`."""
    setup = data.draw(setups_of(policy, num_instances, options))
    setup = replace(setup, **data.draw(tiers()))
    timeouts = random.Random(data.draw(st.integers(0, 99)))
    assert_lawful(play(setup, work, timeouts, poison=poison))


@pytest.mark.parametrize(("policy", "num_decode"), [("tetris", 1), ("tetris", 2), ("csps", 2)])
@settings(RANDOM_RUNS, max_examples=60)
@given(st.data(), st.lists(jobs(), min_size=1, max_size=10), POISON)
def test_poison_is_cleared_where_it_was_transferred(
    policy: str, num_decode: int, data: st.DataObject, work: list[Job], poison: set[int]
) -> None:
    """KV streams to decode instances before its step is known to be finite."""
    setup = Setup(
        num_instances=2 + num_decode,
        roles=Roles(num_prefill=2, num_decode=num_decode, backends=data.draw(st.integers(1, 3))),
        policy=policy,
        num_blocks=data.draw(st.integers(10, 40)),
        block_size=data.draw(st.sampled_from([2, 4])),
        max_model_len=20,
        max_num_batched_tokens=data.draw(st.integers(2, 40)),
        max_num_seqs=data.draw(st.integers(1, 6)),
        uneven=data.draw(st.integers(0, 3)),
    )
    timeouts = random.Random(data.draw(st.integers(0, 99)))
    assert_lawful(play(setup, work, timeouts, poison=poison))


def test_a_begun_block_is_withdrawn_when_its_owner_writes_poison_behind_the_prompt() -> None:
    """The end of a prompt is offered while the answer is written, and taken back with the answer's NaN."""
    setup = Setup(num_blocks=8, block_size=8, max_num_batched_tokens=64)
    cluster = Cluster(setup)
    first = cluster.add([1, 2, 3, 4], max_tokens=20)
    cluster.executor.poison = cluster.expected_output(first)[1:2]
    while first.finish_reason is None:
        cluster.step()
    assert first.error == "non_finite"
    clean = cluster.add([1, 2, 3, 4, 5], max_tokens=1)
    cluster.run()
    assert clean.metrics.num_cached_tokens == 0


def test_finite_chunks_before_poison_stay_shared() -> None:
    setup = Setup(num_blocks=16, block_size=4, max_num_batched_tokens=8)
    cluster = Cluster(setup)
    cluster.executor.poison = [60]
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    dirty = cluster.add([*prompt, 9, 60, 10], max_tokens=4)
    cluster.run()
    assert dirty.error == "non_finite" and dirty.output == []
    clean = cluster.add([*prompt, 9, 11], max_tokens=4)
    cluster.run()
    assert clean.metrics.num_cached_tokens == len(prompt)
    assert_lawful(cluster)


def one_decode_instance(*, backends: int, **sizes: Any) -> Cluster:
    """Return a cluster of a prefill and a decode instance, with blocks of 2 tokens. Token 60 gives NaN."""
    roles = Roles(num_prefill=1, num_decode=1, backends=backends)
    cluster = Cluster(Setup(num_instances=2, roles=roles, policy="tetris", block_size=2, **sizes))
    cluster.executor.poison = [60]
    return cluster


def test_blocks_received_for_an_aborted_request_are_cleared() -> None:
    """When the request is aborted, its chunk with NaN is in flight, and its KV streams to a decode instance."""
    cluster = one_decode_instance(backends=1, max_num_batched_tokens=40)
    request = cluster.add([60, 1, 2, 3, 4], max_tokens=4)
    cluster.step(timeout_s=0.0)
    assert request.in_flight
    cluster.engine.finish(request, "abort")
    cluster.run()
    assert not cluster.executor.non_finite_blocks


def test_blocks_of_an_ended_transfer_are_cleared_before_the_next_transfer_fills_them() -> None:
    """NaN ends a request whose second chunk is in flight. Cached KV of another request takes its decode blocks."""
    cluster = one_decode_instance(backends=4, num_blocks=64, decode_blocks=12, max_num_batched_tokens=8)
    prompt = [1, 2, 3, 4]
    cluster.add(prompt, max_tokens=1)
    cluster.run()
    dirty = cluster.add([60, *range(20, 41)], max_tokens=2)
    clean = cluster.add([*prompt, 9], max_tokens=2)
    while dirty.finish_reason is None:
        cluster.step()
    cluster.step(timeout_s=0.0)
    assert dirty.in_flight and any(move.request_id == clean.id for move in cluster.moves)
    cluster.run()
    assert_lawful(cluster)


def test_blocks_of_a_transfer_are_cleared_when_a_decoding_request_takes_them() -> None:
    """The chunk with NaN is in flight, and its KV streams to these blocks."""
    cluster = one_decode_instance(backends=1, num_blocks=64, decode_blocks=65, max_num_batched_tokens=200)
    decoding = cluster.add([1, 2, 3, 4], max_tokens=30)
    while len(decoding.output) < 4:
        cluster.step()
    dirty = cluster.add([60, *range(1, 40), *range(1, 40), *range(1, 41)], max_tokens=2)
    while (transfer := cluster.transfer_of(dirty.id)) is None or not transfer.blocks:
        cluster.step()
    while (transfer := cluster.transfer_of(dirty.id)) is not None and transfer.blocks:
        cluster.step()
    assert transfer is not None and dirty.in_flight, "its blocks are freed before its chunk has ended"
    cluster.run()
    assert_lawful(cluster)
