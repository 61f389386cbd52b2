"""The in-order transport finds hangs and mismatched messages of calls without tags. Exchanges have neither."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from in_order import Fabric, InOrderTransport, QueueOf, own_queue, shared_queues

from longspan.attn.check import EXCHANGES, Request, attend, member_call
from longspan.attn.collectives import all_reduce
from longspan.attn.comm import CommError, Group, Message, Pending, Transport
from longspan.attn.exchanges.chain import chain, chain_start
from longspan.attn.memory import MemoryTransport, Wires
from longspan.attn.routing import AnnouncedTransport, DirectedTransport
from longspan.attn.spec import AttnSpec
from longspan.core.layouts import shard_span

SPEC = AttnSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=None, softcap=None)
Work = Callable[[int], object]


def run_ranks(number: int, work: Work, fabric: Fabric) -> list[object]:
    """Run `work(rank)` on a thread per rank, and return each result or error. A rank that raises is closed."""
    results: list[object] = [TimeoutError("it hangs")] * number

    def rank(index: int) -> None:
        try:
            results[index] = work(index)
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            results[index] = error
            fabric.close(index)

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def message(value: float = 0.0, size: int = 4) -> Message:
    return Message.of([torch.full((size,), float(value))])


def test_in_order_matching_calls_are_delivered() -> None:
    fabric = Fabric()

    def work(rank: int) -> float:
        group = Group(InOrderTransport(fabric, rank, "lane"), range(2), rank)
        room = message()
        for hop in range(3):
            group.start(sends={1 - rank: message(rank + hop)}, receives={1 - rank: room}, hop=hop).wait()
        return float(room.tensors[0][0])

    assert run_ranks(2, work, fabric) == [3.0, 2.0] and not fabric.left


def test_in_order_a_circle_is_told() -> None:
    """Each rank waits for a message that the peer would send after its own receive. The second calls never run."""
    fabric = Fabric()

    def work(rank: int) -> None:
        group = Group(InOrderTransport(fabric, rank, "lane"), range(2), rank)
        pending = group.start(sends={}, receives={1 - rank: message()}, hop=0)
        group.start(sends={1 - rank: message()}, receives={}, hop=0)
        pending.wait()

    results = run_ranks(2, work, fabric)
    assert all(isinstance(result, CommError) for result in results)
    assert any("no call can go on: rank" in str(result) and "which waits for rank" in str(result) for result in results)


def test_in_order_a_circle_over_two_lanes_is_told() -> None:
    """Neither rank has made the call that the peer waits for, and neither will."""
    fabric = Fabric()

    def work(rank: int) -> None:
        groups = [Group(InOrderTransport(fabric, rank, lane), range(2), rank) for lane in ("first", "second")]
        for group in groups if rank else reversed(groups):
            group.start(sends={}, receives={1 - rank: message()}, hop=0).wait()
            group.start(sends={1 - rank: message()}, receives={}, hop=0).wait()

    results = run_ranks(2, work, fabric)
    assert all(isinstance(result, CommError) for result in results)
    assert any("first" in str(result) and "second" in str(result) for result in results)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in one order", "in two orders"])
@pytest.mark.parametrize("number", [1, 2, None])
def test_in_order_a_waiting_call_blocks_the_calls_behind_it_in_its_queue(
    number: int | None, order: tuple[int, int]
) -> None:
    """The lanes share a hardware queue, and the ranks call them in one order or in two. Nothing waits in between."""
    names = ("lane c", "lane d")
    fabric = Fabric(queue_of=own_queue if number is None else shared_queues(number))
    is_shared = len(set(map(fabric.queue_of, names))) == 1
    assert is_shared == (number == 1)

    def work(rank: int) -> list[float]:
        groups = [Group(InOrderTransport(fabric, rank, name), range(2), rank) for name in names]
        rooms = [message(), message()]
        pending = [
            groups[lane].start(sends={1 - rank: message(lane)}, receives={1 - rank: rooms[lane]}, hop=0)
            for lane in (order if rank else (0, 1))
        ]
        for transfer in pending:
            transfer.wait()
        return [float(room.tensors[0][0]) for room in rooms]

    results = run_ranks(2, work, fabric)
    if is_shared and order != (0, 1):
        assert any("no call can go on" in str(result) and "lane c" in str(result) for result in results)
    else:
        assert results == [[0.0, 1.0]] * 2 and not fabric.left


@pytest.mark.parametrize(("hop", "size"), [(1, 4), (0, 5)], ids=["tag", "size"])
def test_in_order_mismatched_messages_are_reported(hop: int, size: int) -> None:
    fabric = Fabric()

    def work(rank: int) -> None:
        group = Group(InOrderTransport(fabric, rank, "lane"), range(2), rank)
        if rank:
            group.start(sends={}, receives={0: message()}, hop=0).wait()
        else:
            group.start(sends={1: message(size=size)}, receives={}, hop=hop).wait()

    results = run_ranks(2, work, fabric)
    assert any("reaches rank 1's call 0" in str(result) for result in results)


SUMMED = ((0, 1), (2, 3), (0, 1, 2, 3))


def test_in_order_sums_of_some_ranks() -> None:
    """Each set has a communicator, and sums in the order of its calls. Terms become sums."""
    fabric = Fabric()

    def work(rank: int) -> list[float]:
        fabric.open(rank, 4, SUMMED)
        lane = InOrderTransport(fabric, rank, "inside", summing=4)
        found = []
        for members in (SUMMED[rank // 2], SUMMED[2], SUMMED[rank // 2]):
            group, term = Group(lane, members, members.index(rank)), torch.full((3, 4), 10.0**rank)
            assert all_reduce(group, term) is term
            assert group.sent.total() == 2 * (group.size - 1) * term.nbytes / group.size
            found.append(float(term.mean()))
        return found

    wanted = [[11.0, 1111.0, 11.0]] * 2 + [[1100.0, 1111.0, 1100.0]] * 2
    assert run_ranks(4, work, fabric) == wanted and not fabric.left


@pytest.mark.parametrize(("first", "words"), [(("sum", "message"), "no call can go"), (("message", "message"), None)])
def test_in_order_sums_and_messages_have_one_order(first: tuple[str, str], words: str | None) -> None:
    """Each rank ends its first before it begins its second, and so do devices: a circle if these are not alike."""
    fabric = Fabric()

    def work(rank: int) -> None:
        fabric.open(rank, 2, [(0, 1)])
        group = Group(InOrderTransport(fabric, rank, "inside", summing=2), range(2), rank)
        for kind in sorted(("sum", "message"), key=lambda kind: kind != first[rank]):
            if kind == "sum":
                all_reduce(group, torch.zeros(4))
            else:
                group.start(sends={1 - rank: message()}, receives={1 - rank: message()}, hop=0).wait()

    results = run_ranks(2, work, fabric)
    assert [isinstance(result, CommError) for result in results] == [words is not None] * 2
    assert words is None or any(words in str(result) for result in results)


@pytest.mark.parametrize("fault", ["shape", "order", "not opened"])
def test_in_order_sums_that_do_not_fit_are_told(fault: str) -> None:
    fabric = Fabric()

    def work(rank: int) -> None:
        groups = [(0, 1), (0, 1, 2)]
        fabric.open(rank, 3, groups[::-1] if fault == "order" and rank else groups[: 1 if fault == "not opened" else 2])
        lane = InOrderTransport(fabric, rank, "inside", summing=3)
        all_reduce(Group(lane, range(3), rank), torch.zeros(4 + (fault == "shape" and rank)))

    words = {"shape": "adds what is not alike", "order": "opens (0, 1, 2) where another opens (0, 1)"}
    results = run_ranks(3, work, fabric)
    if fault == "not opened":
        assert all(isinstance(result, AssertionError) for result in results)
    else:
        assert any(words[fault] in str(result) for result in results)


def requests(num_members: int) -> list[Request]:
    """Two requests of which the members have cached some, and one new token of a third, which `ring_q` is made for."""
    found = []
    for start, stop, layout in ((0, 40, "contiguous"), (30, 70, "contiguous"), (20, 21, "single")):
        cached = shard_span("contiguous", 0, start, num_members) if start else ((),) * num_members
        new = shard_span(layout, start, stop, num_members)
        kv_runs = tuple((*old, *more) for old, more in zip(cached, new, strict=True))
        found.append(Request(q_runs=new, kv_runs=kv_runs, seed=stop))
    return found


QUEUES = pytest.mark.parametrize("queue_of", [own_queue, shared_queues(1)], ids=["own queues", "one queue"])


@QUEUES
@pytest.mark.parametrize("num_members", [2, 3])
def test_in_order_every_exchange_is_exact(num_members: int, queue_of: QueueOf) -> None:
    fabric = Fabric(queue_of=queue_of)
    batch = requests(num_members)

    def work(rank: int) -> None:
        group = Group(InOrderTransport(fabric, rank, "lane"), range(num_members), rank)
        wanted = torch.cat([request.wanted(rank, SPEC) for request in batch], dim=1)
        for number, exchange in enumerate(EXCHANGES.values()):
            out = attend(member_call(exchange, group, batch, SPEC, seed=number))
            torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=0)

    assert run_ranks(num_members, work, fabric) == [None] * num_members and not fabric.left


class EagerGroup:
    """A group that posts the receives of a chain a layer ahead, on a lane of their own, as if messages had tags."""

    def __init__(self, inner: Group, ahead: Group) -> None:
        self.inner, self.ahead, self.tagged = inner, ahead, True
        self.rank, self.size, self.peers = inner.rank, inner.size, inner.peers

    def start(self, *, sends: Mapping[int, Message], receives: Mapping[int, Message], hop: int) -> Pending:
        assert hop in range(2), "cached keys, then new ones"
        return (self.ahead if hop else self.inner).start(sends=sends, receives=receives, hop=hop)


def run_step(fabric: Fabric, orders: Sequence[Sequence[int]], ahead: Callable[[int], Transport] | None = None) -> None:
    """Runs two layers of a step: a `ring_q`, then a chain along each order of the ranks, begun a layer ahead.

    Args:
        ahead: the lane of an `EagerGroup` for chains.
    """
    size = len(orders[0])

    def work(rank: int) -> None:
        shared = InOrderTransport(fabric, rank, "exchange")
        calls = []
        for index, (name, order) in enumerate([("ring_q", range(size)), *(("chain", order) for order in orders)]):
            ends = order, list(order).index(rank)
            group: Any = Group(shared, *ends, tags=range(100 * index, 100 * index + 50))
            if ahead is not None and name == "chain":
                group = EagerGroup(group, Group(ahead(rank), *ends, tags=range(100 * index + 50, 100 * index + 100)))
            calls.append(member_call(EXCHANGES[name], group, requests(size), SPEC, seed=index))
        ring, *chains = calls

        def begin() -> list[object]:
            return [chain_start(call.group, call.parts, call.kv, SPEC) for call in chains]

        started = begin()
        for layer in range(2):
            attend(ring)
            for call, begun in zip(chains, started, strict=True):
                chain(replace(call, started=begun))
            started = begin() if layer == 0 else []

    for result in run_ranks(size, work, fabric):
        if isinstance(result, Exception):
            raise result


def directed(fabric: Fabric, rank: int) -> Transport:
    lanes = [InOrderTransport(fabric, rank, f"early {way}", is_grouped=False) for way in ("up", "down")]
    return DirectedTransport(rank, *lanes)


CHAINS: list[list[tuple[int, ...]]] = [[(0, 1)], [(0, 1), (1, 0)], [(0, 1, 2), (2, 0, 1), (1, 0, 2)]]


@QUEUES
@pytest.mark.parametrize("orders", CHAINS, ids=str)
def test_in_order_chains_are_begun_ahead(orders: Sequence[Sequence[int]], queue_of: QueueOf) -> None:
    """They share a lane with other exchanges, since a receive starts when its member needs the message."""
    fabric = Fabric(queue_of=queue_of)
    run_step(fabric, orders)
    assert not fabric.left


@pytest.mark.parametrize("orders", CHAINS, ids=str)
def test_in_order_receives_a_layer_ahead_block_other_calls_of_a_shared_queue(orders: Sequence[Sequence[int]]) -> None:
    """A lane of their own is not enough: the receive is in the device's queue before a call that its sender needs."""
    fabric = Fabric()
    run_step(fabric, orders, lambda rank: directed(fabric, rank))
    assert not fabric.left
    fabric = Fabric(queue_of=shared_queues(1))
    with pytest.raises(CommError, match=r"no call can go on|is gone"):
        run_step(fabric, orders, lambda rank: directed(fabric, rank))


def test_in_order_receives_a_layer_ahead_need_a_lane_of_their_own() -> None:
    """On the lane of other exchanges, the receive gets another message of the peer, or hangs."""
    fabric = Fabric()
    with pytest.raises(CommError, match=r"reaches|no call can go on|is gone"):
        run_step(fabric, [(0, 1)], lambda rank: InOrderTransport(fabric, rank, "exchange"))


@pytest.mark.parametrize("is_announced", [True, False])
def test_in_order_an_announced_move_blocks_no_step(is_announced: bool) -> None:
    """Rank 1 expects a move that rank 0 sends after an exchange, which rank 1 makes later. All share a queue."""
    fabric, wires = Fabric(queue_of=shared_queues(1)), Wires(timeout_s=10)
    is_expected = threading.Event()

    def work(rank: int) -> float:
        exchange = Group(InOrderTransport(fabric, rank, "exchange"), range(2), rank)
        lane: Transport = directed(fabric, rank)
        if is_announced:
            lane = AnnouncedTransport(lane, MemoryTransport(wires, rank, waits_for_sends=True))
        moves, moved = Group(lane, range(2), rank), message(5.0 if rank == 0 else 0.0)
        errors: list[Exception] = []

        def receive() -> None:
            try:
                if not is_announced:
                    pending = moves.start(sends={}, receives={0: moved}, hop=0)
                is_expected.set()
                if is_announced:
                    pending = moves.start(sends={}, receives={0: moved}, hop=0)
                pending.wait()
            except CommError as error:
                errors.append(error)

        thread = threading.Thread(target=receive, daemon=True)
        if rank:
            thread.start()
        assert is_expected.wait(10)
        exchange.start(sends={1 - rank: message()}, receives={1 - rank: message()}, hop=0).wait()
        if rank == 0:
            moves.start(sends={1: moved}, receives={}, hop=0).wait()
        else:
            thread.join(10)
        if errors:
            raise errors[0]
        return float(moved.tensors[0][0])

    results = run_ranks(2, work, fabric)
    if is_announced:
        assert results == [5.0, 5.0] and not fabric.left
    else:
        assert any("no call can go on" in str(result) for result in results)


@pytest.mark.parametrize("is_directed", [True, False])
def test_in_order_blocks_move_both_ways_at_once(is_directed: bool) -> None:
    """Each rank's threads receive before they send. A pair of ranks has one communicator per lane."""
    fabric = Fabric(timeout_s=10)

    def work(rank: int) -> float:
        lane = directed(fabric, rank) if is_directed else InOrderTransport(fabric, rank, "moves", is_grouped=False)
        group, room = Group(lane, range(2), rank), message()
        coming = group.start(sends={}, receives={1 - rank: room}, hop=0)
        leaving = group.start(sends={1 - rank: message(rank + 1)}, receives={}, hop=0)
        coming.wait()
        leaving.wait()
        return float(room.tensors[0][0])

    results = run_ranks(2, work, fabric)
    if is_directed:
        assert results == [2.0, 1.0]
    else:
        assert any("no call can go on" in str(result) for result in results)
