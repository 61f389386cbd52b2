"""Messages through shared memory: whatever their sizes, tags and order, between ranks that may be late, or gone."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from longspan.attn import shared_memory
from longspan.attn.comm import CommError
from longspan.attn.shared_memory import Arena, SharedMemoryTransport, meet_on_host

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not shared_memory.is_supported(), reason="Linux only"),
]
_LIMIT_S = 20.0
PAGE = 4096


@contextmanager
def ranks_of(num_ranks: int, *, waits_for_sends: bool = False) -> Iterator[list[SharedMemoryTransport]]:
    """Connect ranks that are threads of this process. A message that is never sent is an error after a timeout."""
    found: dict[int, SharedMemoryTransport] = {}

    def meet(rank: int, prefix: str) -> None:
        others = [other for other in range(num_ranks) if other != rank]
        found[rank] = meet_on_host(prefix, rank, others, waits_for_sends=waits_for_sends, timeout_s=_LIMIT_S)

    with tempfile.TemporaryDirectory() as folder:
        in_threads([partial(meet, rank, f"{folder}/met") for rank in range(num_ranks)])
        assert not list(Path(folder).iterdir()), "no name is left"
    try:
        yield [found[rank] for rank in range(num_ranks)]
    finally:
        for transport in found.values():
            transport.close()


def in_threads(calls: Sequence[partial[None]]) -> None:
    """Make calls concurrently, and raise the error of a failed one."""
    errors: list[Exception] = []

    def run(call: partial[None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * _LIMIT_S)
        assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def filled(num_bytes: int, value: int) -> Tensor:
    return torch.full((num_bytes,), value % 251, dtype=torch.uint8)


def is_clean(transport: SharedMemoryTransport) -> bool:
    """Whether nothing is under way, once the last answers were read."""
    transport.start([], [], 0)
    return not (transport._sent or transport._expected or transport._unexpected or transport._sent_bytes)


SIZES = st.one_of(st.integers(1, 64), st.integers(PAGE - 2, PAGE + 2), st.integers(1, 20 * PAGE))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    num_ranks=st.integers(2, 3),
    sizes=st.lists(SIZES, min_size=1, max_size=25),
    bounds=st.sampled_from([(2**28, 128), (10 * PAGE, 128), (2**28, 2), (0, 0)]),
    data=st.data(),
)
def test_messages_arrive_in_any_order(
    num_ranks: int, sizes: list[int], bounds: tuple[int, int], data: st.DataObject
) -> None:
    """Each rank posts all receives and sends its messages, in an order of its own. Memory may be short."""
    ends = data.draw(st.lists(st.permutations(range(num_ranks)), min_size=len(sizes), max_size=len(sizes)))
    messages = list(enumerate(zip(ends, sizes, strict=True)))
    orders = [data.draw(st.permutations(messages)) for _ in range(num_ranks)]

    def run(transport: SharedMemoryTransport, rank: int) -> None:
        rooms = {tag: filled(size, 255) for tag, ((_, target, *_), size) in messages if target == rank}
        asked = {tag: transport.start([], [(ends[tag][0], room)], tag) for tag, room in rooms.items()}
        for tag, ((source, target, *_), size) in orders[rank]:
            if source == rank:
                sent = filled(size, tag)
                transport.start([(target, sent)], [], tag)
                sent.fill_(254)  # it has left
        for tag, room in rooms.items():
            asked[tag].wait()
            assert torch.equal(room, filled(len(room), tag))

    with (
        mock.patch.multiple(shared_memory, OUTBOX_BYTES=bounds[0], _MAX_UNTAKEN=bounds[1], _FIRST_BYTES=PAGE),
        ranks_of(num_ranks) as transports,
    ):
        in_threads([partial(run, transport, rank) for rank, transport in enumerate(transports)])
        assert all(is_clean(transport) for transport in transports)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(sizes=st.lists(SIZES, min_size=1, max_size=40), data=st.data())
def test_an_arena_lends_each_place_once_and_keeps_little(sizes: list[int], data: st.DataObject) -> None:
    kept = 8 * PAGE
    with mock.patch.multiple(shared_memory, _FIRST_BYTES=PAGE, _IDLE_BYTES=kept):
        arena = Arena()
    lent: dict[int, tuple[Tensor, int]] = {}
    for number, size in enumerate(sizes):
        place, piece = arena.lend(size)
        piece.fill_(number)
        lent[number] = piece, place
        for other in data.draw(st.lists(st.sampled_from(sorted(lent)), unique=True)):
            piece, place = lent.pop(other)
            assert torch.equal(piece, filled(len(piece), other)), "no other piece has written there"
            with mock.patch.object(shared_memory, "_IDLE_BYTES", kept):
                arena.take_back(place, len(piece))
        in_use = sum(max(PAGE, 2 * len(piece)) for piece, _ in lent.values())
        assert os.fstat(arena.descriptor).st_blocks * 512 <= in_use + kept
    arena.close()


def test_an_arena_counts_the_memory_that_it_keeps_and_not_released_memory() -> None:
    kept = 8 * PAGE
    with mock.patch.multiple(shared_memory, _IDLE_BYTES=kept):
        arena = Arena()
        for sizes in ([16 * PAGE], [16 * PAGE], [16 * PAGE], [8 * PAGE] * 4):
            lent = [arena.lend(size) for size in sizes]
            for place, piece in lent:
                piece.fill_(1)
                arena.take_back(place, len(piece))
            assert os.fstat(arena.descriptor).st_blocks * 512 <= kept
        arena.close()


def test_one_copy_serves_all_readers() -> None:
    with ranks_of(3) as transports:
        message, rooms = filled(5 * PAGE, 7), [filled(5 * PAGE, 0) for _ in range(2)]
        transports[0].start([(1, message), (2, message)], [], 3)
        [sent] = transports[0]._sent.values()
        assert sent.readers == {1, 2}
        for rank, room in zip((1, 2), rooms, strict=True):
            assert not is_clean(transports[0])
            transports[rank].start([], [(0, room)], 3).wait()
            assert torch.equal(room, message)
        assert is_clean(transports[0])


def test_a_sender_waits_when_too_much_is_under_way() -> None:
    """Until its peer has received a message, and without an error if no receive is possible before the next message."""
    with ranks_of(2) as (first, second), mock.patch.multiple(shared_memory, _MAX_UNTAKEN=4):
        started: list[int] = []

        def send() -> None:
            for tag in range(20):
                first.start([(1, filled(PAGE, tag))], [], tag)
                started.append(tag)

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        for tag in reversed(range(5)):  # the fifth is there while its sender waits
            room = filled(PAGE, 255)
            second.start([], [(0, room)], tag).wait()
            assert torch.equal(room, filled(PAGE, tag))
            assert len(started) <= 9 - tag
        for tag in range(5, 20):
            second.start([], [(0, filled(PAGE, 255))], tag).wait()
        sender.join(_LIMIT_S)
        assert started == list(range(20)) and is_clean(first)


def test_threads_that_wait_for_sends_share_a_transport() -> None:
    """As for moves: a thread per peer sends, one more waits until messages are received, and two receive."""
    with ranks_of(3, waits_for_sends=True) as transports:

        def send(rank: int, peer: int) -> None:
            for number in range(30):
                tag = 1000 * rank + number
                transports[rank].start([(peer, filled(PAGE + number, tag))], [], tag).wait()
                assert not transports[rank]._num_untaken[peer]

        def receive(rank: int, peer: int) -> None:
            for number in range(30):
                tag, room = 1000 * peer + number, filled(PAGE + number, 0)
                transports[rank].start([], [(peer, room)], tag).wait()
                assert torch.equal(room, filled(PAGE + number, tag))

        pairs = [(rank, peer) for rank in range(3) for peer in range(3) if rank != peer]
        in_threads([partial(call, *pair) for pair in pairs for call in (send, receive)])
        assert all(is_clean(transport) for transport in transports)


def test_messages_sent_before_a_rank_ended_arrive_and_nothing_else() -> None:
    with ranks_of(3) as transports:
        rooms = [filled(9, 0) for _ in range(3)]
        pending = [transports[1].start([], [(0, room)], tag) for tag, room in enumerate(rooms)]
        transports[0].start([(1, filled(9, 4))], [], 0)
        transports[0].start([(1, filled(9, 5))], [], 1)
        transports[0]._links[1].socket.close()
        for tag in (1, 0):
            pending[tag].wait()
            assert rooms[tag].unique().tolist() == [4 + tag]
        with pytest.raises(CommError, match="rank 0 is gone"):
            pending[2].wait()
        with pytest.raises(CommError, match="rank 0 is gone"):
            transports[1].start([(0, rooms[0])], [], 7)
        transports[2].start([(1, filled(9, 6))], [], 8)  # the other ranks continue
        transports[1].start([], [(2, rooms[0])], 8).wait()
        assert rooms[0].unique().tolist() == [6]


@pytest.mark.parametrize("act", ["receives", "sends", "has sent too much"])
def test_every_wait_for_a_rank_ends_with_the_rank(act: str) -> None:
    waits_for_sends, most = act == "sends", 1 if act == "has sent too much" else 128
    with (
        ranks_of(2, waits_for_sends=waits_for_sends) as (first, second),
        mock.patch.multiple(shared_memory, _MAX_UNTAKEN=most),
    ):

        def end() -> None:
            while not (first._is_reading):
                time.sleep(0.001)
            second._links[0].socket.close()

        threading.Thread(target=end, daemon=True).start()
        calls = [(1, filled(100, 1))]
        with pytest.raises(CommError, match="rank 1 is gone"):  # noqa: PT012 - in one of three calls
            if act == "receives":
                first.start([], calls, 5).wait()
            first.start(calls, [], 5).wait()
            first.start(calls, [], 6)


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_message_of_another_length_is_an_error(is_asked_first: bool) -> None:
    with ranks_of(2) as (first, second):
        if not is_asked_first:
            first.start([(1, filled(40, 1))], [], 12)
            second.start([(0, filled(1, 1))], [], 1)
        pending = second.start([], [(0, filled(48, 1))], 12)
        if is_asked_first:
            first.start([(1, filled(40, 1))], [], 12)
        with pytest.raises(CommError, match="expected message 12 of rank 0 with 48 bytes, but it has 40"):
            pending.wait()


def test_a_wait_ends_when_nothing_comes() -> None:
    with ranks_of(2) as (first, _):
        first._timeout_s = 0.05
        with pytest.raises(CommError, match=r"no message arrived for 0.05 s"):
            first.start([], [(1, filled(1, 1))], 1).wait()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_peers_raises(rank: int, tmp_path: Path) -> None:
    with pytest.raises(CommError, match=r"no rank listens|does not connect"):
        meet_on_host(f"{tmp_path}/met", rank, [1 - rank], timeout_s=0.05)
    assert not list(tmp_path.iterdir())
