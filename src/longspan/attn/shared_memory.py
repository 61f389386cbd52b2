"""A transport between processes of one host: messages lie in shared memory, and sockets carry only notices of them.

A sender copies a message into its arena, which the others have mapped, and tells the receiver where it is. The receiver
copies it out as soon as it has asked for it and waits for anything, and says so; then the arena lends the memory again.
No thread runs beside those that call: whoever waits reads the notices. The sockets also order what both sides do in
memory, wake up who sleeps, and tell when a peer is gone, however it ended.

Nothing of it has a name once the ranks have met, so that nothing is left behind.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from longspan.attn.comm import OUTBOX_BYTES, Calls, CommError, Pending

_NOTICE = struct.Struct("=qqq")
"""The tag, size and place of a message. A receiver returns it with `_TAKEN` as the tag."""
_TAKEN = -1
_HELLO = struct.Struct("=q")
_MOST_UNTAKEN = 128
"""Messages to one peer that may be under way: so many notices, and as many answers, fit into any socket."""
_SOCKET_BYTES = 2**20
_READ_BYTES = 256 * _NOTICE.size
_SPIN_S = 50e-6
"""A rank that computes asks for so long whether something has come before it sleeps: waking up takes as long."""
_FIRST_BYTES = 64 * 2**20
"""An arena's file is as long at first. It has holes: only what was written to takes memory."""
_IDLE_BYTES = 64 * 2**20
"""An arena keeps so much memory that is not lent."""
_MEETING_TIMEOUT_S = 1800.0
_MEETING_POLL_S = 0.002


def is_supported() -> bool:
    """Tells whether this system has memory without a name that processes can share. Linux has."""
    return hasattr(os, "memfd_create")


class Arena:
    """Shared memory of one rank. It lends pieces to messages, and grows with those that are under way at once.

    Pieces have sizes that are powers of two. The one returned last is lent first: a cache may still have it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("longspan", os.MFD_CLOEXEC)
        self._stop = self._idle_bytes = 0
        self._free = defaultdict[int, list[tuple[int, bool]]](list)  # places by size, and whether they have memory
        self._grow(_FIRST_BYTES)

    def lend(self, num_bytes: int) -> tuple[int, Tensor]:
        """Returns memory `[num_bytes]`, and its place."""
        size = _size_of(num_bytes)
        if self._free[size]:
            place, is_backed = self._free[size].pop()
            self._idle_bytes -= size * is_backed
        else:
            place = self._stop
            self._stop += size
            if self._stop > len(self._memory):
                self._grow(max(self._stop, 2 * len(self._memory)))
        return place, self._memory[place : place + num_bytes]

    def take_back(self, place: int, num_bytes: int) -> None:
        """Takes a piece back that nobody reads any more."""
        size = _size_of(num_bytes)
        is_backed = self._idle_bytes + size <= _IDLE_BYTES
        if is_backed:
            self._idle_bytes += size
        else:
            self._file.madvise(mmap.MADV_REMOVE, place, size)
        self._free[size].append((place, is_backed))

    def close(self) -> None:
        os.close(self.descriptor)

    def _grow(self, num_bytes: int) -> None:
        os.ftruncate(self.descriptor, num_bytes)
        self._file = mmap.mmap(self.descriptor, num_bytes)
        self._memory = torch.frombuffer(self._file, dtype=torch.uint8)


def _size_of(num_bytes: int) -> int:
    return max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())


class Link:
    """One rank's connection to another: a socket, and the other's arena."""

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self.socket, self._descriptor = connection, descriptor
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def view(self, place: int, num_bytes: int) -> Tensor:
        """Returns a piece of the other's arena, `[num_bytes]`."""
        if place + num_bytes > len(self._memory):
            file = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
            self._memory = torch.frombuffer(file, dtype=torch.uint8)
        return self._memory[place : place + num_bytes]

    def tell(self, tag: int, num_bytes: int, place: int) -> None:
        """Sends a notice; raises OSError when nobody is there to read it."""
        sent = self.socket.send(_NOTICE.pack(tag, num_bytes, place))
        assert sent == _NOTICE.size, "few notices are under way"

    def notices(self) -> Iterator[tuple[int, int, int]]:
        """Yields what has come; raises OSError when the other end is gone and nothing of it is left."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the other end is closed")
        yield from _NOTICE.iter_unpack(data)

    def close(self) -> None:
        self.socket.close()
        os.close(self._descriptor)


@dataclass(eq=False)
class _Sent:
    """A message under way: its piece of the arena, and who has not taken it yet."""

    num_bytes: int
    place: int
    readers: set[int]


@dataclass(eq=False)
class _Receive:
    """Room for a message that is waited for, or will be."""

    peer: int
    tag: int
    room: Tensor
    is_done: bool = False
    error: CommError | None = None


class SharedMemoryTransport:
    """One rank's links to others of its host, for one kind of work. Several threads may use it.

    Args:
        links: by rank.
        waits_for_sends: what `start` returns waits until its messages were taken, and nobody asks again and again
            whether something has come: for threads beside one that computes. Else nothing waits for sends, since what
            is sent has been copied.
        timeout_s: how long a wait may last in which nothing comes.
    """

    tagged = True
    sums = None

    def __init__(
        self,
        links: Mapping[int, Link],
        arena: Arena,
        *,
        waits_for_sends: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self._links, self._arena, self._waits_for_sends, self._timeout_s = links, arena, waits_for_sends, timeout_s
        self._changed = threading.Condition()  # with whose lock all of this is used
        self._is_reading = False
        self._poll = select.poll()
        self._peers = {link.socket.fileno(): peer for peer, link in links.items()}
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)
        self._gone: set[int] = set()
        self._sent: dict[int, _Sent] = {}  # by place
        self._num_untaken: Counter[int] = Counter()
        self._sent_bytes = 0
        self._asked: dict[tuple[int, int], _Receive] = {}  # by peer and tag
        self._unasked = defaultdict[tuple[int, int], deque[tuple[int, int]]](deque)  # sizes and places

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        with self._changed:
            coming = [self._ask(peer, buffer, tag) for peer, buffer in receives]
            if self._sent and not self._is_reading:
                self._read(self._poll.poll(0))  # what was taken is lent again
            readers: dict[int, set[int]] = defaultdict(set)
            for peer, buffer in sends:
                readers[id(buffer)].add(peer)
            buffers = {id(buffer): buffer for _, buffer in sends}
            leaving = [self._send(buffer, readers[key], tag) for key, buffer in buffers.items()]
            self._until(partial(self._has_room, sum(sent.num_bytes for sent in leaving)))
        return _Transfers(self, coming, leaving if self._waits_for_sends else ())

    def complete_sends(self) -> None:
        """Returns at once: what was sent has been copied."""

    def close(self) -> None:
        """Closes the links; nobody uses them at either end."""
        for link in self._links.values():
            link.close()
        self._arena.close()

    def finish(self, receives: Sequence[_Receive], sends: Sequence[_Sent]) -> None:
        """Waits until some messages are here, and others were taken; raises CommError when a peer is gone."""
        with self._changed:
            for receive in receives:
                self._until(partial(self._is_here, receive))
            for sent in sends:
                self._until(partial(self._is_taken, sent))

    # ---------------------------------------------------------------- conditions to wait for

    def _is_here(self, receive: _Receive) -> bool:
        if receive.error is not None:
            raise receive.error
        if not receive.is_done:
            self._check({receive.peer})
        return receive.is_done

    def _is_taken(self, sent: _Sent) -> bool:
        self._check(sent.readers)
        return not sent.readers

    def _has_room(self, latest_bytes: int) -> bool:
        """Tells whether memory and sockets are bounded; what the latest call sends takes no memory here."""
        most_untaken = max(self._num_untaken.values(), default=0)
        if self._sent_bytes - latest_bytes <= OUTBOX_BYTES and most_untaken <= _MOST_UNTAKEN:
            return True
        for sent in self._sent.values():
            self._check(sent.readers)
        return False

    def _check(self, peers: set[int]) -> None:
        for peer in peers & self._gone:
            raise CommError(f"rank {peer} is gone")

    # ---------------------------------------------------------------- notices

    def _until(self, is_true: Callable[[], bool]) -> None:
        """Waits for a condition. One thread reads notices for all that wait."""
        while not is_true():
            if self._is_reading:
                if not self._changed.wait(self._timeout_s):
                    raise CommError(f"nothing has come for {self._timeout_s} s")
                continue
            self._is_reading = True
            self._changed.release()
            try:
                ready = self._await_notices()
            finally:
                self._changed.acquire()
                self._is_reading = False
                self._changed.notify_all()
            self._read(ready)

    def _await_notices(self) -> list[tuple[int, int]]:
        stop_s = time.perf_counter() + (0.0 if self._waits_for_sends else _SPIN_S)
        while time.perf_counter() < stop_s:
            if ready := self._poll.poll(0):
                return ready
        ready = self._poll.poll(None if self._timeout_s is None else self._timeout_s * 1000)
        if not ready:
            raise CommError(f"nothing has come for {self._timeout_s} s")
        return ready

    def _read(self, ready: Iterable[tuple[int, int]]) -> None:
        """Does what the notices of some links ask for."""
        for descriptor, _ in ready:
            peer = self._peers[descriptor]
            try:
                for tag, num_bytes, place in self._links[peer].notices():
                    if tag == _TAKEN:
                        self._let_go(peer, place)
                    elif (receive := self._asked.pop((peer, tag), None)) is not None:
                        self._take(receive, num_bytes, place)
                    else:
                        self._unasked[peer, tag].append((num_bytes, place))
            except ConnectionError:
                self._poll.unregister(descriptor)
                self._gone.add(peer)

    def _ask(self, peer: int, room: Tensor, tag: int) -> _Receive:
        """Takes a message that has come, or will when it does."""
        receive = _Receive(peer, tag, room)
        if waiting := self._unasked.get((peer, tag)):
            self._take(receive, *waiting.popleft())
            if not waiting:
                del self._unasked[peer, tag]
        else:
            assert (peer, tag) not in self._asked, "a tag is unique among the messages of two ranks under way"
            self._asked[peer, tag] = receive
        return receive

    def _take(self, receive: _Receive, num_bytes: int, place: int) -> None:
        """Copies a message out of the sender's arena."""
        peer, tag, room = receive.peer, receive.tag, receive.room
        if num_bytes != room.nbytes:
            receive.error = CommError(
                f"expected message {tag} of rank {peer} with {room.nbytes} bytes, but it has {num_bytes}"
            )
            return
        room.copy_(self._links[peer].view(place, num_bytes))
        receive.is_done = True
        with suppress(ConnectionError):  # who is gone needs not know
            self._links[peer].tell(_TAKEN, num_bytes, place)

    def _send(self, buffer: Tensor, readers: set[int], tag: int) -> _Sent:
        """Copies a message into the arena, once for all its readers, and tells them."""
        self._check(readers)
        place, piece = self._arena.lend(buffer.nbytes)
        piece.copy_(buffer)
        sent = self._sent[place] = _Sent(buffer.nbytes, place, readers)
        self._sent_bytes += sent.num_bytes
        for peer in sorted(readers):
            self._num_untaken[peer] += 1
            try:
                self._links[peer].tell(tag, sent.num_bytes, place)
            except ConnectionError as error:
                raise CommError(f"rank {peer} is gone") from error
        return sent

    def _let_go(self, peer: int, place: int) -> None:
        """Takes back the memory of a message when the last of its readers has taken it."""
        sent = self._sent[place]
        sent.readers.remove(peer)
        self._num_untaken[peer] -= 1
        if not sent.readers:
            del self._sent[place]
            self._sent_bytes -= sent.num_bytes
            self._arena.take_back(place, sent.num_bytes)


class _Transfers:
    """Messages on their way, and the transport that knows about them."""

    def __init__(self, transport: SharedMemoryTransport, coming: Sequence[_Receive], leaving: Sequence[_Sent]) -> None:
        self._transport, self._coming, self._leaving = transport, coming, leaving

    def wait(self) -> None:
        self._transport.finish(self._coming, self._leaving)


# ---------------------------------------------------------------- how ranks meet


def meet_on_host(
    prefix: str, rank: int, neighbours: Iterable[int], *, waits_for_sends: bool = False, timeout_s: float | None = None
) -> SharedMemoryTransport:
    """Connects a rank with others of its host, who call the same; they meet at sockets whose paths begin with `prefix`.

    The sockets lose their names when all have met.

    Raises:
        CommError: when one does not come.
    """
    others, arena, links = sorted(neighbours), Arena(), {}
    deadline_s = time.monotonic() + (_MEETING_TIMEOUT_S if timeout_s is None else timeout_s)
    path = f"{prefix}-{rank}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(len(others))
        Path(f"{path}.new").rename(path)  # now that nobody is refused
        try:
            called = [(peer, _call(f"{prefix}-{peer}", deadline_s)) for peer in others if peer < rank]
            for _, connection in called:
                socket.send_fds(connection, [_HELLO.pack(rank)], [arena.descriptor])
            for _ in range(len(others) - len(called)):
                connection = _accept(listener, deadline_s)
                peer, descriptor = _introduction(connection, deadline_s)
                socket.send_fds(connection, [_HELLO.pack(rank)], [arena.descriptor])
                links[peer] = Link(connection, descriptor)
            for peer, connection in called:
                found, descriptor = _introduction(connection, deadline_s)
                assert found == peer, "it listens at its own path"
                links[peer] = Link(connection, descriptor)
        finally:
            Path(path).unlink()
    return SharedMemoryTransport(links, arena, waits_for_sends=waits_for_sends, timeout_s=timeout_s)


def _call(path: str, deadline_s: float) -> socket.socket:
    """Connects to a rank as soon as it listens."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except FileNotFoundError:
            connection.close()
            if time.monotonic() > deadline_s:
                raise CommError(f"nobody listens at {path}") from None
            time.sleep(_MEETING_POLL_S)
        else:
            return connection


def _accept(listener: socket.socket, deadline_s: float) -> socket.socket:
    listener.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        return listener.accept()[0]
    except TimeoutError as error:
        raise CommError("a rank of this host does not call") from error


def _introduction(connection: socket.socket, deadline_s: float) -> tuple[int, int]:
    """Returns the rank at the other end, and the descriptor of its arena."""
    connection.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        data, descriptors, *_ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    except (TimeoutError, ConnectionError) as error:
        raise CommError("a rank of this host does not introduce itself") from error
    if not descriptors:
        raise CommError("a rank of this host is gone")
    return _HELLO.unpack(data)[0], descriptors[0]
