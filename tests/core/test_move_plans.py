"""The heads that a move sends to each rank, and the ranks that a step waits for."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_part import forward

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.splits import split_heads
from longspan.core.steps import MoveKV, MoveWay
from longspan.runtime.block_messages import head_routes
from longspan.runtime.executor.in_flight import InFlight
from longspan.runtime.messages import Done, Moved


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 12), st.integers(1, 12))
def test_each_target_gets_each_of_its_heads_once(kv_heads: int, readers: int, source_tp: int, target_tp: int) -> None:
    heads = kv_heads * readers
    has, needs = ([s.kv_heads for s in split_heads(heads, kv_heads, tp)] for tp in (source_tp, target_tp))
    got: list[Counter[int]] = [Counter() for _ in needs]
    load: dict[int, Counter[int]] = {head: Counter() for head in range(kv_heads)}
    for route in head_routes(heads, kv_heads, source_tp, target_tp):
        sent = [has[route.source][i] for i in route.source_heads]
        assert sent == [needs[route.target][i] for i in route.target_heads]
        got[route.target].update(sent)
        for head in sent:
            load[head][route.source] += 1
    assert got == [Counter(one) for one in needs]
    for head, counts in load.items():
        loads = [counts[place] for place, heads in enumerate(has) if head in heads]
        assert max(loads) - min(loads) <= 1, "ranks with the same head send it equally often"


def test_instances_that_are_split_alike_send_from_place_to_place() -> None:
    for tp in range(1, 9):
        routes = head_routes(8, 2, tp, tp)
        assert [(route.source, route.target) for route in routes] == [(place, place) for place in range(tp)]


CLUSTER = Cluster.of("2", "tp2")
"""Ranks 0 and 1 prefill, 2 and 3 decode together."""


def move(number: int, *sources: int) -> MoveKV:
    return MoveKV(number=number, request_id=0, copies=tuple((BlockRef(one, 0), BlockRef(2, one)) for one in sources))


def done(rank: int, number: int) -> Done:
    return Done(rank=rank, number=number, sampled=(), scored=(), bytes_sent={("ring_kv", "same_host"): 1})


def moved(rank: int, number: int, num_bytes: int = 0) -> Moved:
    return Moved(rank=rank, number=number, bytes_sent={("kv_transfer", "same_host"): num_bytes})


def test_a_move_by_itself() -> None:
    """Sources start at once, targets when all sources have sent. The last report completes the move."""
    steps = InFlight(CLUSTER)
    assert steps.busy_since_s() is None
    steps.begin(move(1, 0, 1), 10.0)
    assert (steps.stalled(10.0), steps.busy_since_s()) == ([0, 1], 10.0)
    assert steps.take(moved(0, 1, 5), 11.0) is None
    assert steps.stalled(99.0) == [1]
    assert steps.take(moved(1, 1, 6), 12.0) is None
    assert (steps.stalled(99.0), steps.busy_since_s()) == ([2, 3, 0, 1], 12.0), "no part has left"
    steps.sent(0, 1)
    assert steps.stalled(99.0) == [2, 3, 1]
    steps.sent(1, 1)
    assert steps.stalled(99.0) == [2, 3]
    assert steps.take(moved(3, 1), 13.0) is None
    completion = steps.take(moved(2, 1), 14.0)
    assert completion is not None and completion.number == 1
    assert completion.bytes_sent == {("kv_transfer", "same_host"): 11}
    assert completion.reported_s == {0: 11.0, 1: 12.0, 3: 13.0, 2: 14.0}
    assert steps.busy_since_s() is None


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_move_to_or_from_a_host(way: MoveWay) -> None:
    """All ranks of the instance work at once."""
    steps = InFlight(CLUSTER)
    ends = (BlockRef(2, 0), BlockRef(CLUSTER.host_pool(2), 0))
    steps.begin(MoveKV(number=1, request_id=0, copies=(ends if way == "out" else ends[::-1],), way=way), 10.0)
    assert steps.stalled(10.0) == [2, 3]
    assert steps.take(moved(3, 1, 5), 11.0) is None
    assert steps.stalled(99.0) == [2]
    completion = steps.take(moved(2, 1, 6), 12.0)
    assert completion is not None and completion.bytes_sent == {("kv_transfer", "same_host"): 11}
    assert steps.busy_since_s() is None


@pytest.mark.parametrize("early", [False, True], ids=["after the Forward", "before"])
def test_streams(early: bool) -> None:
    """Targets are not late while the Forward runs. Each stream has a completion of its own."""
    steps = InFlight(CLUSTER)
    steps.begin(forward(1, (0, 1), move(2, 0), move(3, 1)), 10.0)
    steps.begin(forward(4, (2,)), 10.0)
    steps.take(done(2, 4), 11.0)
    steps.take(done(3, 4), 11.0)
    assert steps.stalled(99.0) == [0, 1]
    assert steps.take(done(0, 1), 12.0) is None
    assert steps.stalled(99.0) == [1, 2, 3, 0], "messages of rank 0 have not left"
    steps.sent(0, 2)
    assert steps.stalled(99.0) == [1, 2, 3], "messages of rank 0 could have arrived"
    steps.take(moved(2, 2), 13.0)
    assert steps.take(moved(3, 2), 13.0) is not None
    assert steps.stalled(99.0) == [1]
    if early:
        steps.take(moved(2, 3), 14.0)
        assert steps.take(moved(3, 3), 14.0) is not None
        assert steps.stalled(99.0) == [1]
    completion = steps.take(done(1, 1), 15.0)
    assert completion is not None and completion.number == 1
    steps.sent(1, 3)  # of which the executor may have heard that it is done
    if not early:
        assert steps.stalled(99.0) == [2, 3]
        steps.take(moved(2, 3), 16.0)
        assert steps.take(moved(3, 3), 16.0) is not None
    assert steps.busy_since_s() is None


def test_a_source_that_reports_is_not_late() -> None:
    """Its part has not left, but it goes on with other steps."""
    steps = InFlight(CLUSTER)
    steps.begin(move(1, 0), 10.0)
    steps.begin(forward(2, (0,)), 10.0)
    steps.begin(forward(3, (0,)), 10.0)
    for rank in steps.ranks([0]):
        steps.take(moved(rank, 1), 10.0)
        steps.take(done(rank, 2), 15.0)
    assert steps.stalled(12.0) == [2, 3]
