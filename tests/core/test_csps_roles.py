"""Policy `csps` with roles: the KV of a long prompt goes to several instances, which decode it with short ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from hypothesis import given
from hypothesis import strategies as st
from test_roles import check_sources
from workloads import MACHINES, assert_lawful, finishes_lawfully, repeats, setups_of

from longspan.core.request import Request
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.policy.routing import shares_by


def disaggregated(num_prefill: int = 2, num_decode: int = 2, backends: int = 2, **wishes: object) -> Cluster:
    setup = Setup(
        num_instances=num_prefill + num_decode,
        policy="csps",
        options={"threshold": "50"},
        roles=Roles(num_prefill=num_prefill, num_decode=num_decode, backends=backends),
    )
    return Cluster(replace(setup, **wishes))  # type: ignore[arg-type]


def tokens(length: int, first: int = 0) -> list[int]:
    return [(first + position * position) % 61 for position in range(length)]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_prefill, num_decode = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    roles = Roles(num_prefill=num_prefill, num_decode=num_decode, backends=draw(st.integers(1, 4)))
    sizing = draw(
        st.sampled_from([("threshold", "0"), ("threshold", "30"), ("partition", "20"), ("partition", "memory")])
    )
    csa = draw(st.sampled_from(["off", '{"levels": 3, "drop": 0.2}']))
    options = dict([sizing, ("rotate", draw(st.sampled_from(["block", "token"]))), ("csa", csa)])
    setup = replace(
        draw(setups_of("csps", num_prefill, options)),
        num_instances=num_prefill + num_decode,
        roles=roles,
        decode_blocks=draw(st.none() | st.integers(2, 20)),
        facts=draw(st.sampled_from([Facts(), Facts(profile=MACHINES[num_prefill])])),
        pp=1,
        host_blocks=(draw(st.sampled_from([0, 0, 5, 60])),),
        max_model_len=None,
    )
    return replace(setup, max_model_len=min(100, Cluster(setup).engine.config.max_model_len))


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


@pytest.mark.parametrize("seed", range(30))
def test_aborts_choices_further_turns_and_lost_workers(seed: int) -> None:
    draw = random.Random(seed)
    cluster = disaggregated(
        *(draw.randint(1, 3), draw.randint(2, 3), draw.randint(1, 4)),
        num_blocks=draw.choice((20, 60)),
        decode_blocks=draw.choice((8, 20, 60)),
        block_size=draw.choice((1, 4)),
        max_num_batched_tokens=draw.choice((4, 16, 64)),
        max_num_seqs=draw.choice((2, 5, 128)),
        options={"threshold": draw.choice(("0", "10"))},
        uneven=seed,
    )
    longest = cluster.engine.config.max_model_len
    requests: list[Request] = []
    for _ in range(10):
        before = draw.choice(requests) if requests and draw.random() < 0.5 else None
        prompt = [] if before is None else [*before.prompt, *before.output]
        prompt = [*prompt, *(draw.randrange(40) for _ in range(draw.choice((1, 5, 40))))][: longest - 2]
        most = draw.randint(1, min(40, longest - len(prompt)))
        request = cluster.add(prompt, max_tokens=most, ignore_eos=True, presence_penalty=draw.choice((0.0, 0.5)))
        requests += [request, *(cluster.follow(request, choice) for choice in range(1, draw.choice((1, 1, 3))))]
        for _ in range(draw.choice((0, 5, 30))):
            if cluster.engine.has_unfinished:
                cluster.step(draw.choice((None, 0.0)))
            check_sources(cluster)
            if draw.random() < 0.03:
                cluster.engine.finish(draw.choice(requests), "abort")
        if draw.random() < 0.1:
            cluster.restart()
    cluster.run()
    for request in requests:
        expected = cluster.expected_output(request)
        aborted = request.finish_reason == "abort"
        assert request.output == (expected[: len(request.output)] if aborted else expected)


def test_a_long_request_decodes_on_several_with_short_ones_in_the_same_step() -> None:
    cluster = disaggregated()
    long = cluster.add(tokens(200), max_tokens=30)
    short = [cluster.add(tokens(20, number), max_tokens=30) for number in range(1, 5)]
    cluster.run()
    assert_lawful(cluster)
    parts = [part for part in cluster.parts_of(long) if part.group == (2, 3)]
    assert len(parts) == 29 and all(part.exchange.kind == "ring_q" for part in parts)
    assert [sum(1 for runs in part.runs if runs) for part in parts] == [1] * 29, "one member feeds the token"
    assert {cluster.parts_of(one)[-1].group for one in short} == {(2,), (3,)}
    together = {long.id, *(one.id for one in short)}
    mixed = [f for f in cluster.forwards if together == {part.request_id for part in f.parts if part.start >= 20}]
    assert mixed and all(forward.instances == (2, 3) for forward in mixed)
    moved = [target for move in cluster.moves if move.request_id == long.id for _, target in move.copies]
    assert len(moved) == 13 and {ref.instance for ref in moved} == {2, 3}


def test_shares_go_by_free_blocks() -> None:
    """One decode instance has a request of 10 of 40 blocks already: it gets 3 of 7 parts."""
    cluster = disaggregated(decode_blocks=40)
    cluster.add(tokens(45), max_tokens=150)
    before = cluster.add(tokens(30, 3), max_tokens=120)
    while len(before.output) < 90:
        cluster.step()
    [busy] = {ref.instance for ref in before.table}
    free = {i: cluster.engine.kv.account.num_free(i) for i in (2, 3)}
    long = cluster.add(tokens(400, 5), max_tokens=8)
    while not (shares := cluster.transfers_of(long.id)):
        cluster.step()
    got = {share.target: share.num_blocks for share in shares}
    assert sum(got.values()) == 25 and busy in got
    assert abs(got[2] - 25 * free[2] / (free[2] + free[3])) <= 1
    cluster.run()
    assert_lawful(cluster)


def test_a_request_may_need_the_memory_of_several() -> None:
    cluster = disaggregated(1, 3, 1, decode_blocks=5, num_blocks=30)
    assert cluster.engine.config.max_model_len == 15 * 16
    request = cluster.add(tokens(150), max_tokens=90)
    cluster.run()
    assert_lawful(cluster)
    groups = [part.group for part in cluster.parts_of(request) if part.start >= 150]
    assert groups[0] == (1, 2) and groups[-1] == (1, 2, 3), "two instances cannot hold all of the output"


def test_a_request_that_outgrows_its_instance_decodes_on_more() -> None:
    cluster = disaggregated(1, 2, 1, decode_blocks=5, num_blocks=30)
    request = cluster.add(tokens(40), max_tokens=100)
    cluster.run()
    assert_lawful(cluster)
    groups = [part.group for part in cluster.parts_of(request) if part.start >= 40]
    assert request.metrics.num_preemptions == 1 and {(1,), (1, 2)} <= {*groups}


def test_the_next_turn_hits_blocks_of_decode_instances() -> None:
    """Of both turns the blocks of the first prompt are moved once."""
    cluster = disaggregated()
    first = cluster.add(tokens(160), max_tokens=10)
    cluster.run()
    num_moves = sum(len(move.copies) for move in cluster.moves)
    second = cluster.add([*first.prompt, *first.output, *tokens(60, 7)], max_tokens=10)
    cluster.run()
    assert_lawful(cluster)
    moved = sum(len(move.copies) for move in cluster.moves) - num_moves
    assert num_moves == 10 and second.metrics.num_cached_tokens >= 160
    assert moved < 15, "some of it lies where it goes"


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.integers(1, 200))
def test_shares_are_proportional_and_within_their_weights(weights: list[int], total: int) -> None:
    shares = shares_by(weights, total)
    assert sum(shares) == total
    for weight, share in zip(weights, shares, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1
        assert share <= weight or total > sum(weights)


def test_all_decode_instances_together_bound_a_request() -> None:
    roles = Roles(num_prefill=2, num_decode=2, backends=1).cluster
    policy = make_policy("csps", num_instances=4, options={}, facts=Facts(cluster=roles))
    assert policy.shards_decodes
    assert not make_policy("tetris", num_instances=4, options={}, facts=Facts(cluster=roles)).shards_decodes


def test_a_request_preempted_on_decode_instances_is_prefilled_again() -> None:
    """Its rotary factors change after 29 tokens, while two instances decode it. Hosts have a pool."""
    cluster = disaggregated(num_blocks=4, rope_switch_length=29, options={"threshold": "0"}, host_blocks=(20,))
    request = cluster.add(tokens(28), max_tokens=20)
    cluster.run()
    assert_lawful(cluster)
    groups = list(dict.fromkeys(part.group for part in cluster.parts_of(request)))
    assert groups == [(0, 1), (2, 3)] and len(request.output) == 20


def test_offloading_from_a_decode_instance_frees_blocks_for_transfers() -> None:
    """Blocks of one request are free when they are copied to the host: only then the next one can come."""
    cluster = disaggregated(1, 1, 1, decode_blocks=8, num_blocks=40, host_blocks=(80,), uneven=3)
    requests = [cluster.add(tokens(100, number), max_tokens=20) for number in range(3)]
    cluster.run()
    assert_lawful(cluster)
    assert all(request.metrics.num_preemptions == 0 for request in requests)
