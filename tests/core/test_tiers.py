"""KV on hosts: preemption by swap, and a second level of the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import RANDOM_RUNS, Job, assert_lawful, jobs, play, setups_of

from longspan.core.kv.account import KvAccount
from longspan.core.locations import Location
from longspan.core.request import Request
from longspan.core.steps import MoveKV

POLICIES: list[tuple[str, int, dict[str, str]]] = [
    ("chunked", 1, {}),
    ("chunked", 3, {}),
    ("prefill-first", 2, {}),
    ("decode-first", 2, {}),
    ("context", 3, {"threshold": "20"}),
    ("context", 2, {"threshold": "20", "rotate": "token"}),
    ("runahead", 2, {}),
    ("tetris", 4, {"improvement_rate": "0.1"}),
    ("auto", 3, {}),
    ("loongserve", 4, {}),
]


def swapping(num_instances: int = 1, host_blocks: int = 1000, **changes: object) -> Cluster:
    """Device KV for 4 of the requests of `crowd` on each instance, and host blocks for all."""
    setup = Setup(
        num_instances=num_instances,
        num_blocks=48,
        block_size=4,
        policy="chunked",
        max_model_len=90,
        max_num_batched_tokens=64,
        host_blocks=(host_blocks,),
    )
    return Cluster(replace(setup, **changes))  # type: ignore[arg-type]


def crowd(cluster: Cluster, number: int = 16) -> list[Request]:
    """Requests with nothing in common, which outgrow the devices while they decode."""
    return [cluster.add([index] * (5 + 3 * index % 11), max_tokens=35 + index % 4) for index in range(number)]


def assert_nothing_computed_twice(requests: Sequence[Request]) -> None:
    """All tokens but the last, once each."""
    for request in requests:
        metrics = request.metrics
        assert metrics.num_cached_tokens + metrics.num_computed_tokens == request.num_tokens - 1


@pytest.mark.parametrize(
    ("policy", "num_instances", "options"),
    [
        ("chunked", 1, {}),
        ("chunked", 2, {}),
        ("prefill-first", 2, {}),
        ("decode-first", 2, {}),
        ("context", 1, {}),
        ("context", 2, {}),
        ("context", 2, {"threshold": "20"}),
        ("context", 3, {"threshold": "20"}),
        ("tetris", 1, {"improvement_rate": "0.1"}),
        ("tetris", 2, {"improvement_rate": "0.1"}),
        ("tetris", 4, {"improvement_rate": "0.1"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("uneven", [0, 3])
def test_no_token_is_computed_twice(
    policy: str, num_instances: int, options: dict[str, str], pp: int, uneven: int
) -> None:
    cluster = swapping(num_instances, policy=policy, options=options, pp=pp, uneven=uneven)
    requests = crowd(cluster, 64)
    cluster.run()
    assert_lawful(cluster)
    assert sum(request.metrics.num_preemptions for request in requests) > 10
    assert_nothing_computed_twice(requests)
    assert cluster.engine.kv.counts.num_hits > 0


@pytest.mark.parametrize(
    ("policy", "num_instances", "pp", "seed"), [("context", 2, 2, 24), ("chunked", 2, 2, 32), ("chunked", 3, 1, 31)]
)
def test_requests_go_on_where_their_kv_has_come(policy: str, num_instances: int, pp: int, seed: int) -> None:
    """Though a new one would be admitted elsewhere. Some polls end before anything is done."""
    cluster, timeouts = swapping(num_instances, policy=policy, pp=pp, uneven=seed), random.Random(seed)
    requests = crowd(cluster, 64)
    while cluster.engine.has_unfinished:
        cluster.step(0.0 if timeouts.random() < 0.3 else None)
    assert_nothing_computed_twice(requests)


@pytest.mark.parametrize("num_instances", [1, 2])
@pytest.mark.parametrize("uneven", [0, 3])
def test_blocks_of_ended_requests_evict_no_offloaded_blocks(num_instances: int, uneven: int) -> None:
    """All requests exceed the host several times. The waiting requests fit."""
    cluster = swapping(num_instances, host_blocks=80 * num_instances, uneven=uneven)
    requests = crowd(cluster, 64)
    cluster.run()
    assert_lawful(cluster)
    assert sum(request.metrics.num_preemptions for request in requests) > 10
    assert sum(request.blocks_for(request.num_tokens) for request in requests) > 600
    assert_nothing_computed_twice(requests)


@pytest.mark.parametrize(("policy", "num_instances", "options"), POLICIES, ids=str)
@settings(RANDOM_RUNS, max_examples=30)
@given(st.data())
def test_full_hosts(policy: str, num_instances: int, options: dict[str, str], data: st.DataObject) -> None:
    """KV without free blocks is computed again. Every block is free at the end, also after aborts and lost workers."""
    host_blocks, disk_blocks = data.draw(st.integers(1, 24)), data.draw(st.sampled_from([(), (1,), (30,)]))
    uneven, num_blocks = data.draw(st.integers(0, 3)), data.draw(st.integers(24, 60))
    changes = {"policy": policy, "options": options, "uneven": uneven, "num_blocks": num_blocks}
    cluster = swapping(num_instances, host_blocks=host_blocks, disk_blocks=disk_blocks, **changes)
    requests = crowd(cluster, data.draw(st.integers(4, 24)))
    randoms = random.Random(data.draw(st.integers(0, 99)))
    loses, aborts = data.draw(st.booleans()), data.draw(st.booleans())
    for _ in range(20_000):
        if not cluster.engine.has_unfinished:
            break
        cluster.step(0.0 if randoms.random() < 0.3 else None)
        if loses and randoms.random() < 0.01:
            cluster.restart()
        if aborts and randoms.random() < 0.02:
            cluster.engine.finish(randoms.choice(requests), "abort")
    cluster.assert_at_rest()
    for request in requests:
        expected = cluster.expected_output(request)
        assert request.output == (expected if request.finish_reason == "length" else expected[: len(request.output)])


def test_without_a_host_they_are() -> None:
    """Else the test above would say nothing."""
    cluster = swapping(host_blocks=0)
    assert not cluster.setup.cluster.host_blocks[0]
    requests = crowd(cluster, 64)
    cluster.run()
    with pytest.raises(AssertionError):
        assert_nothing_computed_twice(requests)


@pytest.mark.parametrize(("policy", "num_instances", "options"), POLICIES, ids=str)
@settings(RANDOM_RUNS, max_examples=60)
@given(st.data())
def test_hosts_change_no_output(policy: str, num_instances: int, options: dict[str, str], data: st.DataObject) -> None:
    """Of any workload, though there may be too few blocks for all, or ranks on several hosts."""
    setup = data.draw(setups_of(policy, num_instances, options))
    two = data.draw(st.booleans()) and setup.pp == 1
    locations = tuple(Location(host=rank % 2, device=rank) for rank in range(num_instances)) if two else ()
    num_hosts = 2 if two and num_instances > 1 else 1
    host_blocks = tuple(data.draw(st.integers(1, 60)) for _ in range(num_hosts))
    disk_blocks = tuple(data.draw(st.integers(1, 90)) for _ in range(num_hosts)) if data.draw(st.booleans()) else ()
    work: list[Job] = data.draw(st.lists(jobs(), min_size=1, max_size=10))
    timeouts, damages = (random.Random(data.draw(st.integers(0, 99))) for _ in range(2))
    has_damages = data.draw(st.booleans())

    def damaged(move: MoveKV) -> tuple[int, ...]:
        return tuple(i for i in range(len(move.copies)) if has_damages and damages.random() < 0.3)

    setup = replace(setup, host_blocks=host_blocks, disk_blocks=disk_blocks, locations=locations)
    cluster = play(setup, work, timeouts, damaged=damaged)
    assert_lawful(cluster)


def test_roles() -> None:
    """A request that is preempted on a decode instance is loaded on a prefill instance."""
    cluster = swapping(
        3, policy="tetris", options={"improvement_rate": "0.1"}, roles=Roles(num_prefill=2, num_decode=1, backends=2)
    )
    requests = crowd(cluster, 24)
    cluster.run()
    assert_lawful(cluster)
    assert sum(request.metrics.num_preemptions for request in requests) > 2


@pytest.mark.parametrize("changes", [{"max_num_seqs": 4}, {"max_num_batched_tokens": 16}])
def test_the_number_of_lookups_does_not_grow_with_the_queue(changes: dict[str, int]) -> None:
    """The pool is larger than the request slots and the tokens of a step."""

    def num_looked_up(length: int) -> int:
        cluster = swapping(2, num_blocks=10_000, **changes)
        crowd(cluster, length)
        with patch.object(
            KvAccount, "find_common_prefix", autospec=True, side_effect=KvAccount.find_common_prefix
        ) as find_common_prefix:
            cluster.engine.emit()
        return find_common_prefix.call_count

    assert num_looked_up(60) == num_looked_up(600)


@pytest.mark.parametrize("seed", range(3))
def test_hits_equal_moved_tokens(seed: int) -> None:
    """The member on the host with the blocks may have no free blocks, although other members have."""
    locations = tuple(Location(host=instance, device=instance) for instance in range(2))
    changes = {"policy": "context", "options": {"threshold": "20"}, "num_blocks": 20, "uneven": seed}
    cluster = Cluster(replace(swapping(2, **changes).setup, host_blocks=(500, 500), locations=locations))
    lengths = random.Random(seed)
    for index in range(40):
        cluster.add([index] * lengths.randint(3, 55), max_tokens=30)
    cluster.run()
    num_blocks = sum(len(move.copies) for move in cluster.swaps if move.way == "in")
    assert 0 < cluster.engine.kv.counts.num_hits <= 4 * num_blocks


def test_two_that_want_the_same_copy_it_once() -> None:
    cluster = swapping()
    first = cluster.add([1] * 60, max_tokens=4)
    cluster.run()
    crowd(cluster)
    cluster.run()
    num_swaps = len(cluster.swaps)
    again = [cluster.add([*first.prompt, number], max_tokens=2) for number in range(4)]
    cluster.run()
    assert_lawful(cluster)
    assert [len(move.copies) for move in cluster.swaps[num_swaps:] if move.way == "in"] == [15]
    assert all(request.metrics.num_cached_tokens == 60 for request in again)


def test_offloaded_blocks_are_found_on_the_host() -> None:
    cluster = swapping()
    first = cluster.add([1] * 30, max_tokens=4)
    cluster.run()
    others = crowd(cluster)
    cluster.run()
    again = cluster.add([*first.prompt, *first.output, 5, 6, 7], max_tokens=2)
    cluster.run()
    assert_lawful(cluster)
    assert again.metrics.num_cached_tokens == 33
    assert_nothing_computed_twice([first, *others])


def test_a_turn_leaves_no_second_copy_of_its_last_block() -> None:
    """The block that a turn ends in begins like the one in its place after the next turn."""
    cluster = swapping(disk_blocks=(1000,))
    prompt = [1, 2, 3, 4, 5]
    for _ in range(5):
        request = cluster.add(prompt, max_tokens=5)
        cluster.run()
        load = cluster.engine.load()
        assert load.host_blocks == load.disk_blocks == request.blocks_for(request.num_tokens - 1)
        prompt = [*request.prompt, *request.output, 6]
    num_swaps = len(cluster.swaps)
    cluster.add([*request.prompt, *request.output][:31], max_tokens=1)
    cluster.run()
    assert len(cluster.swaps) == num_swaps, "the host has more than this"
    assert_lawful(cluster)


@pytest.mark.parametrize("way", ["out", "in"])
def test_workers_lost_in_mid_copy(way: str) -> None:
    """Earlier copies are kept, and all requests continue."""
    cluster = swapping()
    requests = crowd(cluster)
    while not any(moving.move.way == way for moving in cluster.executor.moving.values()):
        cluster.step()
    moving = cluster.executor.moving
    is_there = any(move.way == "out" and move.number not in moving for move in cluster.swaps)
    cluster.restart()
    cluster.run()
    assert all(request.output == cluster.expected_output(request) for request in requests)
    assert cluster.engine.kv.counts.num_hits or not is_there


def test_the_same_steps_are_taken_again() -> None:
    def steps() -> list[object]:
        cluster = swapping(2, uneven=2)
        crowd(cluster)
        cluster.run()
        return list(cluster.executor.steps)

    assert steps() == steps()


@dataclass(frozen=True)
class Price:
    """A copy of a block takes so long, and a token a second."""

    block_s: float
    load_s: float = 0.0

    def recompute_s(self, new_tokens: int, cached_tokens: int) -> float:
        """See `SwapCost`."""
        del cached_tokens
        return float(new_tokens)


@pytest.mark.parametrize("group", [(0,), (0, 1)])
@pytest.mark.parametrize(("block_s", "pays"), [(3.9, True), (4.1, False)])
def test_members_share_copies_and_computation(block_s: float, pays: bool, group: tuple[int, ...]) -> None:
    cluster = swapping(2, swap=Price(block_s))
    first = cluster.add([1] * 30, max_tokens=4)
    crowd(cluster)
    cluster.run()
    hit = cluster.engine.kv.account.match(cluster.add(first.prompt, max_tokens=1), group)
    assert (hit.num_tokens, hit.num_loaded) == ((28, 7) if pays else (0, 0)), "seven blocks of four tokens"


@pytest.mark.parametrize(("block_s", "comes"), [(3.9, True), (40.1, False)])
def test_blocks_whose_load_does_not_pay_are_computed_again(block_s: float, comes: bool) -> None:
    """Blocks are of four tokens."""
    cluster = swapping(swap=Price(block_s))
    requests = crowd(cluster)
    cluster.run()
    assert_lawful(cluster)
    assert (cluster.engine.kv.counts.num_hits > 0) == comes
    assert sum(request.metrics.num_preemptions for request in requests) > 2


def test_hosts_are_forgotten_with_the_prefix_cache() -> None:
    cluster = swapping()
    first = cluster.add([1] * 30, max_tokens=4)
    cluster.run()
    assert cluster.engine.load().host_blocks == 9
    cluster.engine.reset_prefix_cache()
    assert cluster.engine.load().host_blocks == 0
    again = cluster.add(first.prompt, max_tokens=4)
    cluster.run()
    assert again.metrics.num_cached_tokens == 0


# ---------------------------------------------------------------- disks


def saved_and_forgotten(**changes: object) -> tuple[Cluster, Request, Cluster]:
    """A cluster that has answered a request and ended, and another one with its disk."""
    before = swapping(disk_blocks=(1000,), **changes)
    first = before.add([1, 2, 3, 4, 5] * 8, max_tokens=4)
    before.run()
    return before, first, Cluster(replace(before.setup, num_instances=2, pp=2), before=before)


def test_a_later_run_hits_blocks_on_the_disk() -> None:
    """The layout does not matter. Two requests at once load a block once."""
    before, first, after = saved_and_forgotten()
    assert [move.way for move in before.swaps] == ["out", "save"]
    again = [after.add([*first.prompt, *first.output, 6, number], max_tokens=3) for number in range(2)]
    after.run()
    assert_lawful(after)
    assert all(request.metrics.num_cached_tokens == 43 for request in again)
    loaded = sum(len(move.copies) for move in after.swaps if move.way == "load")
    assert loaded == 12, "each has the last block, on which it writes, of its own"
    assert after.engine.kv.counts.num_disk_hits == 40 + 2 * 3


def test_unreadable_disk_blocks_are_computed_and_saved_again() -> None:
    """Blocks before it are used. The last block had fewer tokens."""
    _, first, after = saved_and_forgotten()
    after.executor.damaged = lambda move: (4,) if move.way == "load" else ()
    again = after.add([*first.prompt, *first.output, 6], max_tokens=3)
    after.run()
    assert_lawful(after)
    assert again.metrics.num_cached_tokens == 16
    ways = [(move.way, len(move.copies)) for move in after.swaps]
    assert ways == [("load", 11), ("in", 4), ("out", 3), ("save", 3)]


def test_only_blocks_that_fit_on_the_host_are_loaded() -> None:
    before, first, _ = saved_and_forgotten()
    after = Cluster(replace(before.setup, host_blocks=(5,)), before=before)
    again = after.add(first.prompt, max_tokens=3)
    after.run()
    assert_lawful(after)
    assert again.metrics.num_cached_tokens == 20


@pytest.mark.parametrize(("load_s", "comes"), [(3.0, True), (4.0, False)])
def test_loading_pays_or_not(load_s: float, comes: bool) -> None:
    """Blocks are of four tokens."""
    _, first, after = saved_and_forgotten(swap=Price(0.5, load_s))
    after.add(first.prompt, max_tokens=3)
    after.run()
    assert (after.engine.kv.counts.num_disk_hits > 0) == comes


def test_the_least_recently_used_disk_block_is_evicted() -> None:
    cluster = swapping(disk_blocks=(20,), num_blocks=24)
    first, second = (cluster.add([number] * 30, max_tokens=4) for number in (1, 2))
    for prompt in (first.prompt, [3] * 30):  # the first is used again, so that the third replaces the second
        cluster.run()
        cluster.add(prompt, max_tokens=4)
    cluster.run()
    after = Cluster(cluster.setup, before=cluster)
    again = [after.add(request.prompt, max_tokens=4) for request in (first, second)]
    after.run()
    assert_lawful(after)
    assert again[0].metrics.num_cached_tokens == 28 > again[1].metrics.num_cached_tokens


def test_workers_lost_while_a_disk_is_read() -> None:
    _, first, after = saved_and_forgotten()
    again = after.add(first.prompt, max_tokens=4)
    after.engine.emit()
    assert [moving.move.way for moving in after.executor.moving.values()] == ["load"]
    after.restart()
    after.run()
    assert again.output == after.expected_output(again)
    assert again.metrics.num_cached_tokens == 39


def test_an_engine_that_is_about_to_end_waits_for_its_disk() -> None:
    cluster = swapping(disk_blocks=(1000,))
    request = cluster.add([1] * 30, max_tokens=4)
    while request.finish_reason is None:
        cluster.step()
    while not cluster.swaps:
        cluster.step()
    assert cluster.engine.settle(100.0)
    assert cluster.engine.load().disk_blocks == 9
    cluster.run()
