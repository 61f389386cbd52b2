"""Instances that prefill and instances that decode: handshakes, transfers, and cleanup after ends."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from forced_plans import GrowingPlanner, planned
from hypothesis import strategies as st
from refusals import refused
from test_tetris import GROUPS, machine
from workloads import assert_lawful, finishes_lawfully, repeats, setups_of

from longspan.core.cluster import Cluster as Instances
from longspan.core.config import EngineConfig
from longspan.core.kv.transfers import Holder, holders_to_release
from longspan.core.locations import Location
from longspan.core.options import SchedulingArgs
from longspan.core.request import Request
from longspan.core.steps import MoveKV
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy

ROLES = Roles(num_prefill=2, num_decode=1, backends=2)


def disaggregated(num_prefill: int = 2, num_decode: int = 1, backends: int = 2, **wishes: object) -> Cluster:
    setup = Setup(
        num_instances=num_prefill + num_decode,
        policy="tetris",
        options={"min_chunk": "16", "improvement_rate": "0"},
        facts=machine(*range(1, num_prefill + 1)),
        roles=Roles(num_prefill=num_prefill, num_decode=num_decode, backends=backends),
    )
    return Cluster(replace(setup, **wishes))  # type: ignore[arg-type]


# ---------------------------------------------------------------- anything that can happen


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_prefill, num_decode = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    roles = Roles(num_prefill=num_prefill, num_decode=num_decode, backends=draw(st.integers(1, 4)))
    options = dict(draw(st.sampled_from(GROUPS)))
    policy = draw(st.sampled_from(["tetris", "tetris", "fixed-sp", "auto"]))
    if policy == "fixed-sp":
        options["sp"] = str(draw(st.sampled_from([size for size in (1, 2, 3, 4) if num_prefill % size == 0])))
    elif policy == "tetris":
        options |= {"improvement_rate": draw(st.sampled_from(["0", "0.3"])), "min_chunk": "1"}
        sizes = draw(st.sets(st.integers(1, num_prefill), min_size=1))
        options["sp_sizes"] = ",".join(map(str, sorted(sizes)))
    if policy != "auto":
        options["balance"] = draw(st.sampled_from(["true", "true", "false"]))
    facts = draw(st.sampled_from([Facts(), machine(*range(1, num_prefill + 1), start_s=0.0)]))
    locations = tuple(Location(host=i % 2, device=i) for i in range(num_prefill + num_decode))
    setup = replace(
        draw(setups_of(policy, num_prefill, options)),
        num_instances=num_prefill + num_decode,
        roles=roles,
        decode_blocks=draw(st.none() | st.integers(2, 20)),
        facts=facts,
        locations=locations,
        max_model_len=None,
    )
    return replace(setup, max_model_len=min(100, Cluster(setup).engine.config.max_model_len))


test_any_workload_finishes_lawfully = finishes_lawfully(setups())
test_the_same_input_gives_the_same_steps = repeats(setups())


@pytest.mark.parametrize("seed", range(40))
def test_groups_that_grow_at_random(seed: int) -> None:
    """With aborts, choices that share a prompt, further turns, penalties, preemptions, and workers that are lost."""
    draw = random.Random(seed)
    num_prefill, backends = draw.randint(1, 4), draw.randint(1, 4)
    cluster = disaggregated(
        *(num_prefill, draw.randint(1, 2), backends),
        num_blocks=draw.choice((10, 20, 60)),
        block_size=draw.choice((1, 4)),
        max_num_batched_tokens=draw.choice((4, 16, 64)),
        max_num_seqs=draw.choice((2, 5, 128)),
        max_steps_in_flight=draw.choice((1, 2)),
        prefix_caching=draw.random() < 0.8,
        uneven=seed,
    )
    longest, decode = cluster.engine.config.max_model_len, cluster.setup.cluster.decode
    balance = draw.random() < 0.8
    cluster.engine.set_policy(planned(GrowingPlanner(num_prefill, seed), decode=decode, balance=balance))
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


def check_sources(cluster: Cluster) -> None:
    """Each transfer keeps its sources: with moves in flight, with unsent blocks, and with blocks to come."""
    for request in cluster.requests:
        for transfer in cluster.transfers_of(request.id):
            moving, table = set(transfer.moves.values()), request.table
            places = [i for i in transfer.to_move if i < len(table)]
            unsent = {table[i].instance for i in places if i not in transfer.sent}
            to_come = set(request.kv_owners) if len(table) < transfer.places.stop else set()
            assert (transfer.busy, transfer.sources) == (moving, moving | unsent | to_come)


# ---------------------------------------------------------------- where requests go


def test_a_prompt_moves_to_the_instance_that_decodes_it() -> None:
    cluster = disaggregated()
    request = cluster.add(range(100), max_tokens=5, presence_penalty=0.5)
    cluster.run()
    assert_lawful(cluster)
    parts = cluster.parts_of(request)
    assert [part.group for part in parts[-4:]] == [(2,)] * 4
    assert all(set(part.group) <= {0, 1} for part in parts[:-4])
    assert parts[-4].sampling is not None and parts[-4].new_output == tuple(request.output[:1])
    assert sum(len(move.copies) for move in cluster.moves) == 7, "of 16 tokens"


def test_a_request_that_ends_with_its_first_token_is_not_transferred() -> None:
    cluster = disaggregated()
    cluster.add(range(100), max_tokens=1)
    cluster.run()
    assert not cluster.moves


def test_blocks_stream_while_a_prompt_is_computed() -> None:
    """In chunks of 64: each is sent with its own step, also when the next one is sent ahead."""
    cluster = disaggregated(1, 1, 1, max_num_batched_tokens=64, options={})
    cluster.add(range(200), max_tokens=2)
    cluster.run()
    assert [len(move.copies) for forward in cluster.forwards for move in forward.streams] == [4, 4, 4, 1]
    assert not any(isinstance(step, MoveKV) for step in cluster.executor.steps)


def test_requests_spread_over_decode_instances() -> None:
    cluster = disaggregated(1, 3, 1, options={})
    requests = [cluster.add([number] * 100, max_tokens=50) for number in range(6)]
    cluster.run()
    assert sorted(cluster.parts_of(request)[-1].group for request in requests) == [(1,), (1,), (2,), (2,), (3,), (3,)]


def test_a_preempted_decode_is_prefilled_again() -> None:
    cluster = disaggregated(2, 1, 2, decode_blocks=6, block_size=8)
    requests = [cluster.add([number] * 8, max_tokens=30) for number in range(4)]
    cluster.run()
    assert_lawful(cluster)
    preempted = [request for request in requests if request.metrics.num_preemptions]
    assert preempted and requests[0] not in preempted, "the first request is not preempted"
    for request in preempted:
        groups = [group for group, _ in groupby(part.group for part in cluster.parts_of(request))]
        assert groups.count((2,)) >= 2 and {0, 1}.issuperset(groups[groups.index((2,)) + 1])


# ---------------------------------------------------------------- handshakes


def started(cluster: Cluster) -> list[int]:
    """Ids in the order of their first chunks."""
    return list(dict.fromkeys(part.request_id for forward in cluster.forwards for part in forward.parts))


@pytest.mark.parametrize("num_prefill", [1, 2, 4])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_one_backend_serves_requests_in_the_order_of_their_handshakes(num_prefill: int, steps_in_flight: int) -> None:
    """12 prompts of mixed lengths and groups: a transfer begins after all blocks of the previous one have arrived."""
    cluster = disaggregated(num_prefill, 1, 1, max_steps_in_flight=steps_in_flight, max_num_batched_tokens=256)
    lengths = [1000, 20, 300, 2000, 40, 40, 700, 1500, 20, 100, 900, 60]
    requests = [cluster.add([number] * length, max_tokens=4) for number, length in enumerate(lengths)]
    cluster.run()
    assert_lawful(cluster)
    assert [number for number, _ in groupby(move.request_id for move in cluster.moves)] == started(cluster)
    sources = [
        len({source for move in cluster.moves if move.request_id == r.id for source in move.sources}) for r in requests
    ]
    assert max(sources) == num_prefill, "some prompts lie on all"


def test_the_first_transfer_has_all_backends_it_needs_and_the_next_the_rest() -> None:
    """Two requests on two instances each need two of three backends. A third request needs one."""
    cluster = disaggregated(4, 1, 3, options={"sp": "2"}, policy="fixed-sp", num_blocks=1000)
    requests = [cluster.add([number] * 900, max_tokens=4) for number in range(3)]
    cluster.step(0.0)
    first, second = (cluster.transfers_of(request.id)[0].backends for request in requests[:2])
    assert (first, second) == (2, 1)
    cluster.run()
    assert_lawful(cluster)


def test_a_transfer_without_free_blocks_waits_and_is_not_overtaken() -> None:
    """The second request does not fit together with the first. The third would."""
    cluster = disaggregated(1, 1, 4, decode_blocks=10, options={})
    first, second, third = (cluster.add([n] * length, max_tokens=20) for n, length in enumerate((100, 100, 10)))
    cluster.run()
    assert_lawful(cluster)
    assert all(request.metrics.num_preemptions == 0 for request in (first, second, third))
    assert second.metrics.ttft_s is not None and first.metrics.finished_s is not None
    assert second.metrics.ttft_s < first.metrics.finished_s, "its first token does not wait"
    assert list(dict.fromkeys(move.request_id for move in cluster.moves)) == [first.id, second.id, third.id]
    moved = [move.number for move in cluster.moves if move.request_id == second.id]
    ends = [f.number for f in cluster.forwards if any(part.request_id == first.id for part in f.parts)]
    assert moved[0] > max(ends) and len(second.output) == 20


@pytest.mark.parametrize("batched", [16, 500], ids=["chunks", "whole"])
def test_a_decode_takes_reserved_blocks_from_a_later_transfer(batched: int) -> None:
    """The second fits when it arrives, and no longer when the first has grown. It is sent again."""
    cluster = disaggregated(1, 1, 1, decode_blocks=10, options={}, max_num_batched_tokens=batched)
    first, second = cluster.add([0] * 60, max_tokens=95), cluster.add([1] * 90, max_tokens=20)
    reservations = set()
    while not second.finish_reason:
        cluster.step()
        if (transfer := cluster.transfer_of(second.id)) is not None and transfer.blocks:
            reservations.add(transfer)
    cluster.run()
    assert_lawful(cluster)
    assert len(reservations) == 2
    assert first.metrics.num_preemptions == second.metrics.num_preemptions == 0
    assert first.metrics.finished_s is not None and second.metrics.ttft_s is not None
    assert second.metrics.ttft_s < first.metrics.finished_s, "its first token does not wait"


def test_blocks_are_taken_back_in_mid_transfer() -> None:
    """The decode that needs blocks continues when the moves that name them are done."""
    cluster = disaggregated(2, 1, 2, decode_blocks=12, options={}, max_num_batched_tokens=32, uneven=5)
    requests = [cluster.add([0] * 60, max_tokens=130), *(cluster.add([n] * 120, max_tokens=9) for n in (1, 2, 3))]
    num_taken = num_moving = 0
    while cluster.engine.has_unfinished:
        before = cluster.transfer_of(requests[1].id)
        cluster.step()
        if before is not None and cluster.transfer_of(requests[1].id) not in (None, before):
            num_taken += 1
            num_moving += bool(before.moves)
    cluster.assert_at_rest()
    assert_lawful(cluster)
    assert num_taken == num_moving == 1, "not again before a request ends"
    assert not any(request.metrics.num_preemptions for request in requests)


def test_a_preempted_request_is_prefilled_before_new_requests() -> None:
    """Two requests decode until one is preempted. Three later requests wait for the prefill instance."""
    cluster = disaggregated(1, 1, 1, decode_blocks=6, options={}, max_model_len=90, max_num_batched_tokens=8)
    first, second = cluster.add([0] * 20, max_tokens=60), cluster.add([1] * 20, max_tokens=60)
    while not second.output:
        cluster.step()
    others = [cluster.add([number] * 60, max_tokens=2) for number in (2, 3, 4, 5)]
    while not second.metrics.num_preemptions:
        cluster.step()
    waiting = [request for request in others if request.metrics.scheduled_s is None]
    again = max(forward.number for forward in cluster.forwards)
    cluster.run()
    assert_lawful(cluster)
    assert waiting and not first.metrics.num_preemptions
    order = [part.request_id for f in cluster.forwards if f.number > again for part in f.parts if part.group == (0,)]
    ids = list(dict.fromkeys(order))
    assert all(ids.index(second.id) < ids.index(request.id) for request in waiting)


def test_a_backend_is_given_on_when_a_source_has_nothing_left() -> None:
    """Of two prompts on the same two instances each: the next one begins when the first has one source left."""
    cluster = disaggregated(2, 1, 2, num_blocks=1000, decode_blocks=2000, uneven=2)
    first, second = cluster.add([0] * 1000, max_tokens=4), cluster.add([1] * 1000, max_tokens=4)
    both: set[tuple[int, int]] = set()
    while cluster.engine.has_unfinished:
        cluster.engine.emit()
        mine, other = cluster.transfer_of(first.id), cluster.transfer_of(second.id)
        if mine is not None and mine.blocks:
            assert len(mine.busy) <= mine.backends <= len(mine.sources)
            both.add((mine.backends, 0 if other is None else other.backends))
        cluster.step()
    assert {(2, 0), (1, 1)} <= both
    assert_lawful(cluster)


def test_a_backend_is_free_once_the_moves_of_an_aborted_request_are_done() -> None:
    """The next request uses the only backend then, and not before: the executor checks the moves in flight."""
    cluster = disaggregated(1, 1, 1, options={}, max_num_batched_tokens=32, uneven=1)
    request = cluster.add([0] * 600, max_tokens=4)
    while (transfer := cluster.transfer_of(request.id)) is None or len(transfer.moves) < 2:
        cluster.engine.emit()
        cluster.step()
    assert transfer.busy == {0}
    cluster.engine.finish(request, "abort")
    cluster.add([1] * 600, max_tokens=4)
    cluster.run()
    assert_lawful(cluster)


def test_a_request_slot_is_kept_for_a_transfer() -> None:
    cluster = disaggregated(2, 1, 4, max_num_seqs=2)
    for number in range(8):
        cluster.add([number] * 50, max_tokens=20)
    cluster.run()
    assert_lawful(cluster)


# ---------------------------------------------------------------- endings


def run_until_moving(cluster: Cluster, request: Request, *, by_itself: bool) -> None:
    """Until a move of the request is in flight, with a step of it or `by_itself`."""
    for _ in range(10_000):
        cluster.engine.emit()
        moving = any(one.move.request_id == request.id for one in cluster.executor.moving.values())
        if moving and request.in_flight != by_itself:
            return
        cluster.step()
    raise AssertionError("it never moves")


@pytest.mark.parametrize(
    ("victim", "backends", "by_itself"), [(0, 1, False), (0, 1, True), (0, 4, False), (5, 1, True), (5, 4, True)]
)
def test_an_abort_in_mid_transfer_leaves_nothing(*, victim: int, backends: int, by_itself: bool) -> None:
    cluster = disaggregated(4, 1, backends, max_num_batched_tokens=64, uneven=3)
    requests = [cluster.add([number] * 500, max_tokens=4) for number in range(8)]
    run_until_moving(cluster, requests[victim], by_itself=by_itself)
    cluster.engine.finish(requests[victim], "abort")
    cluster.run()  # which checks that all blocks are free, everywhere
    assert_lawful(cluster)
    assert [request.finish_reason for request in requests].count("abort") == 1


def test_all_abort_while_they_wait_for_each_other() -> None:
    cluster = disaggregated(2, 1, 1, max_num_batched_tokens=64)
    requests = [cluster.add([number] * 300, max_tokens=4) for number in range(12)]
    run_until_moving(cluster, requests[0], by_itself=True)
    for request in requests:
        cluster.engine.finish(request, "abort")
    with pytest.raises(RuntimeError, match="while"):
        cluster.engine.reset_prefix_cache()
    cluster.run()


def test_a_lost_worker_in_mid_transfer() -> None:
    cluster = disaggregated(2, 1, 1, max_num_batched_tokens=64)
    requests = [cluster.add([number] * 300, max_tokens=4) for number in range(6)]
    run_until_moving(cluster, requests[0], by_itself=True)
    cluster.restart()
    cluster.run()
    assert all(request.output == cluster.expected_output(request) for request in requests)


# ---------------------------------------------------------------- blocks on the target


def test_choices_and_further_turns_move_only_new_blocks() -> None:
    cluster = disaggregated(2, 1, 2, num_blocks=500)
    first = cluster.add(range(1000), max_tokens=20)
    others = [cluster.follow(first, choice) for choice in (1, 2)]
    cluster.run()
    further = cluster.add([*first.prompt, *first.output, *range(100)], max_tokens=5)
    cluster.run()
    assert_lawful(cluster)
    moved = [sum(len(m.copies) for m in cluster.moves if m.request_id == r.id) for r in (first, *others, further)]
    assert moved == [63, 1, 1, 70 - 63], "of 16 tokens; 63 whole blocks of the first 1019 are there"
    assert further.metrics.num_cached_tokens >= 992


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("policy", ["chunked", "context", "runahead", "prefill-first"])
def test_policies_without_roles_are_refused(policy: str) -> None:
    with refused("policy"):
        make_policy(policy, num_instances=3, options={}, facts=Facts(cluster=ROLES.cluster))


def test_auto_is_tetris_with_roles() -> None:
    policy = make_policy(
        "auto", num_instances=3, options={"improvement_rate": "0.1"}, facts=Facts(cluster=ROLES.cluster)
    )
    assert policy.capacity_on(ROLES.cluster) == 2


def test_groups_are_of_instances_that_prefill() -> None:
    with refused("sp"):
        make_policy(*("fixed-sp",), num_instances=5, options={"sp": "2"}, facts=Facts(cluster=Instances.of("3", "2")))


def test_the_most_recently_admitted_lose_reserved_blocks() -> None:
    first, second = Holder(1, 4, needs_block=True), Holder(2, 3, needs_block=True)
    coming, late = Holder(3, 0), Holder(4, 1)
    everyone = [late, second, coming, first]
    assert holders_to_release(2, everyone) == []
    assert holders_to_release(1, everyone) == [late]
    assert holders_to_release(0, everyone) == [late, coming], "one is for the first; all of the second's are its own"
    assert holders_to_release(-1, everyone) == [late, coming, second]
    assert holders_to_release(0, [first]) == [], "no reservation is released for a later request, or for its own"
    assert holders_to_release(0, [second, first._replace(needs_block=False)]) == []


def test_a_request_has_to_fit_the_instance_that_decodes_it() -> None:
    cluster = disaggregated(decode_blocks=10)
    assert cluster.engine.config.max_model_len == 160
    wanted = SchedulingArgs(block_size=16, max_model_len=200)
    with refused("max_model_len"):
        EngineConfig.of(wanted, cluster.engine.config.cluster, cluster.policy)
