"""A transport between processes of one host. Messages are in shared memory, and sockets carry only notices of them.

A sender copies a message into its arena, which its peers have mapped, and sends a notice with the offset. A receiver
that has posted the receive copies the message in its next wait and returns the notice. Then the arena reuses the piece.
There is no background thread: the waiting threads read the notices. The sockets also order the memory accesses of both
sides, wake up sleeping ranks, and report a peer that has exited for any reason.

After the ranks have met, the file system has no names of sockets or memory. So a crash leaves nothing behind.
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
"""The tag, size and offset of a message. A receiver returns it with `_TAKEN` as the tag."""
_TAKEN = -1
_HELLO = struct.Struct("=q")
_MAX_UNTAKEN = 128
"""Maximum unreceived messages to one peer. Their notices, and the returned ones, fit into any socket buffer."""
_SOCKET_BYTES = 2**20
_READ_BYTES = 256 * _NOTICE.size
_SPIN_S = 50e-6
"""Seconds that a computing rank polls before it sleeps, about the time of a wake-up."""
_FIRST_BYTES = 64 * 2**20
"""Initial length of an arena's file. The file is sparse: pages take memory when they are first written."""
_IDLE_BYTES = 64 * 2**20
"""Maximum bytes of unused pieces that keep their memory."""
_MEETING_TIMEOUT_S = 1800.0
_MEETING_POLL_S = 0.002


def is_supported() -> bool:
    """Return True if this system has anonymous memory that processes can share, as Linux has."""
    return hasattr(os, "memfd_create")


class Arena:
    """Shared memory of one rank, from which messages get pieces. It grows with the number of concurrent messages.

    The sizes of pieces are powers of two. The piece that was released last is reused first, since caches may have it.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("longspan", os.MFD_CLOEXEC)
        self._stop = self._idle_bytes = 0
        self._free = defaultdict[int, list[tuple[int, bool]]](
            list
        )  # by size: offsets, and True if their pages are kept
        self._grow(_FIRST_BYTES)

    def lend(self, num_bytes: int) -> tuple[int, Tensor]:
        """Return the offset of a piece, and its memory `[num_bytes]`."""
        size = _size_of(num_bytes)
        if self._free[size]:
            offset, is_backed = self._free[size].pop()
            self._idle_bytes -= size * is_backed
        else:
            offset = self._stop
            self._stop += size
            if self._stop > len(self._memory):
                self._grow(max(self._stop, 2 * len(self._memory)))
        return offset, self._memory[offset : offset + num_bytes]

    def take_back(self, offset: int, num_bytes: int) -> None:
        """Release a piece after its last reader."""
        size = _size_of(num_bytes)
        is_backed = self._idle_bytes + size <= _IDLE_BYTES
        if is_backed:
            self._idle_bytes += size
        else:
            self._file.madvise(mmap.MADV_REMOVE, offset, size)
        self._free[size].append((offset, is_backed))

    def close(self) -> None:
        os.close(self.descriptor)

    def _grow(self, num_bytes: int) -> None:
        os.ftruncate(self.descriptor, num_bytes)
        self._file = mmap.mmap(self.descriptor, num_bytes)
        self._memory = torch.frombuffer(self._file, dtype=torch.uint8)


def _size_of(num_bytes: int) -> int:
    return max(mmap.PAGESIZE, 1 << (num_bytes - 1).bit_length())


class Link:
    """A connection to a peer: a socket, and the arena of the peer."""

    def __init__(self, connection: socket.socket, descriptor: int) -> None:
        self.socket, self._descriptor = connection, descriptor
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        self._memory = torch.empty(0, dtype=torch.uint8)

    def view(self, offset: int, num_bytes: int) -> Tensor:
        """Return a piece of the peer's arena, `[num_bytes]`."""
        if offset + num_bytes > len(self._memory):
            file = mmap.mmap(self._descriptor, os.fstat(self._descriptor).st_size)
            self._memory = torch.frombuffer(file, dtype=torch.uint8)
        return self._memory[offset : offset + num_bytes]

    def notify(self, tag: int, num_bytes: int, offset: int) -> None:
        """Send a notice. Raises OSError if the peer has closed the socket."""
        sent = self.socket.send(_NOTICE.pack(tag, num_bytes, offset))
        assert sent == _NOTICE.size, "a socket buffer has space for all notices"

    def notices(self) -> Iterator[tuple[int, int, int]]:
        """Yield the received notices. Raises OSError if the peer has closed the socket and all notices are read."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionResetError("the peer has closed the socket")
        yield from _NOTICE.iter_unpack(data)

    def close(self) -> None:
        self.socket.close()
        os.close(self._descriptor)


@dataclass(eq=False)
class _Sent:
    """A sent message: its piece of the arena, and the ranks that have not received it yet."""

    num_bytes: int
    offset: int
    readers: set[int]


@dataclass(eq=False)
class _Receive:
    """A posted receive, and its target buffer."""

    peer: int
    tag: int
    out: Tensor
    is_done: bool = False
    error: CommError | None = None


class SharedMemoryTransport:
    """One rank's links to peers of its host, for one kind of work. Several threads may use it.

    Args:
        links: by rank.
        waits_for_sends: the result of `start` waits until its messages are received, and waits do not poll. For threads
            that run in addition to a computing one. Otherwise sends need no wait, since messages are copied.
        timeout_s: maximum seconds without any notice during a wait.
    """

    tagged = True
    sums = None

    def __init__(
        self, links: Mapping[int, Link], arena: Arena, *, waits_for_sends: bool = False, timeout_s: float | None = None
    ) -> None:
        self._links, self._arena, self._waits_for_sends, self._timeout_s = links, arena, waits_for_sends, timeout_s
        self._changed = threading.Condition()  # its lock guards all attributes below
        self._is_reading = False
        self._poll = select.poll()
        self._peers = {link.socket.fileno(): peer for peer, link in links.items()}
        for descriptor in self._peers:
            self._poll.register(descriptor, select.POLLIN)
        self._gone: set[int] = set()
        self._sent: dict[int, _Sent] = {}  # by offset
        self._num_untaken: Counter[int] = Counter()
        self._sent_bytes = 0
        self._expected: dict[tuple[int, int], _Receive] = {}  # by peer and tag
        self._unexpected = defaultdict[tuple[int, int], deque[tuple[int, int]]](deque)  # sizes and offsets

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        with self._changed:
            incoming = [self._post(peer, buffer, tag) for peer, buffer in receives]
            if self._sent and not self._is_reading:
                self._read(self._poll.poll(0))  # releases received messages
            readers: dict[int, set[int]] = defaultdict(set)
            for peer, buffer in sends:
                readers[id(buffer)].add(peer)
            buffers = {id(buffer): buffer for _, buffer in sends}
            outgoing = [self._send(buffer, readers[key], tag) for key, buffer in buffers.items()]
            self._until(partial(self._is_within_bounds, sum(sent.num_bytes for sent in outgoing)))
        return _Transfers(self, incoming, outgoing if self._waits_for_sends else ())

    def complete_sends(self) -> None:
        """Return at once, since sent messages are copied."""

    def close(self) -> None:
        """Close the links. Both ends must be unused."""
        for link in self._links.values():
            link.close()
        self._arena.close()

    def finish(self, receives: Sequence[_Receive], sends: Sequence[_Sent]) -> None:
        """Wait until messages are received, and sent ones are received by peers. Raises CommError if a peer exits."""
        with self._changed:
            for receive in receives:
                self._until(partial(self._is_received, receive))
            for sent in sends:
                self._until(partial(self._is_taken, sent))

    # ---------------------------------------------------------------- conditions of waits

    def _is_received(self, receive: _Receive) -> bool:
        if receive.error is not None:
            raise receive.error
        if not receive.is_done:
            self._check({receive.peer})
        return receive.is_done

    def _is_taken(self, sent: _Sent) -> bool:
        self._check(sent.readers)
        return not sent.readers

    def _is_within_bounds(self, latest_bytes: int) -> bool:
        """Return True if memory and notices are below their bounds. The latest call does not count as memory."""
        num_untaken = max(self._num_untaken.values(), default=0)
        if self._sent_bytes - latest_bytes <= OUTBOX_BYTES and num_untaken <= _MAX_UNTAKEN:
            return True
        for sent in self._sent.values():
            self._check(sent.readers)
        return False

    def _check(self, peers: set[int]) -> None:
        for peer in peers & self._gone:
            raise CommError(f"rank {peer} is gone")

    # ---------------------------------------------------------------- notices

    def _until(self, is_true: Callable[[], bool]) -> None:
        """Wait for a condition. One thread reads notices for all waiting threads."""
        while not is_true():
            if self._is_reading:
                if not self._changed.wait(self._timeout_s):
                    raise CommError(f"no message arrived for {self._timeout_s} s")
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
            raise CommError(f"no message arrived for {self._timeout_s} s")
        return ready

    def _read(self, ready: Iterable[tuple[int, int]]) -> None:
        """Handle the notices of some links: receive messages, and release received ones."""
        for descriptor, _ in ready:
            peer = self._peers[descriptor]
            try:
                for tag, num_bytes, offset in self._links[peer].notices():
                    if tag == _TAKEN:
                        self._release(peer, offset)
                    elif (receive := self._expected.pop((peer, tag), None)) is not None:
                        self._take(receive, num_bytes, offset)
                    else:
                        self._unexpected[peer, tag].append((num_bytes, offset))
            except ConnectionError:
                self._poll.unregister(descriptor)
                self._gone.add(peer)

    def _post(self, peer: int, out: Tensor, tag: int) -> _Receive:
        """Receive a message now if its notice has arrived, else when the notice arrives."""
        receive = _Receive(peer, tag, out)
        if waiting := self._unexpected.get((peer, tag)):
            self._take(receive, *waiting.popleft())
            if not waiting:
                del self._unexpected[peer, tag]
        else:
            assert (peer, tag) not in self._expected, "a tag is unique among unreceived messages of two ranks"
            self._expected[peer, tag] = receive
        return receive

    def _take(self, receive: _Receive, num_bytes: int, offset: int) -> None:
        """Copy a message out of the sender's arena."""
        peer, tag, out = receive.peer, receive.tag, receive.out
        if num_bytes != out.nbytes:
            receive.error = CommError(
                f"expected message {tag} of rank {peer} with {out.nbytes} bytes, but it has {num_bytes}"
            )
            return
        out.copy_(self._links[peer].view(offset, num_bytes))
        receive.is_done = True
        with suppress(ConnectionError):  # a peer that has exited needs no notice
            self._links[peer].notify(_TAKEN, num_bytes, offset)

    def _send(self, buffer: Tensor, readers: set[int], tag: int) -> _Sent:
        """Copy a message into the arena, once for all its readers, and notify them."""
        self._check(readers)
        offset, piece = self._arena.lend(buffer.nbytes)
        piece.copy_(buffer)
        sent = self._sent[offset] = _Sent(buffer.nbytes, offset, readers)
        self._sent_bytes += sent.num_bytes
        for peer in sorted(readers):
            self._num_untaken[peer] += 1
            try:
                self._links[peer].notify(tag, sent.num_bytes, offset)
            except ConnectionError as error:
                raise CommError(f"rank {peer} is gone") from error
        return sent

    def _release(self, peer: int, offset: int) -> None:
        """Release the memory of a message after its last reader."""
        sent = self._sent[offset]
        sent.readers.remove(peer)
        self._num_untaken[peer] -= 1
        if not sent.readers:
            del self._sent[offset]
            self._sent_bytes -= sent.num_bytes
            self._arena.take_back(offset, sent.num_bytes)


@dataclass(frozen=True)
class _Transfers:
    transport: SharedMemoryTransport
    receives: Sequence[_Receive]
    sends: Sequence[_Sent]

    def wait(self) -> None:
        self.transport.finish(self.receives, self.sends)


# ---------------------------------------------------------------- how ranks meet


def meet_on_host(
    prefix: str, rank: int, neighbours: Iterable[int], *, waits_for_sends: bool = False, timeout_s: float | None = None
) -> SharedMemoryTransport:
    """Connect the ranks of a host, which all make this call, by sockets whose paths begin with `prefix`.

    The paths are removed when all ranks have met.

    Raises:
        CommError: if a rank does not connect before the timeout.
    """
    peers, arena, links = sorted(neighbours), Arena(), {}
    deadline_s = time.monotonic() + (_MEETING_TIMEOUT_S if timeout_s is None else timeout_s)
    path = f"{prefix}-{rank}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(len(peers))
        Path(f"{path}.new").rename(path)  # from now on no connection is refused
        try:
            called = [(peer, _call(f"{prefix}-{peer}", deadline_s)) for peer in peers if peer < rank]
            for _, connection in called:
                socket.send_fds(connection, [_HELLO.pack(rank)], [arena.descriptor])
            for _ in range(len(peers) - len(called)):
                connection = _accept(listener, deadline_s)
                peer, descriptor = _introduction(connection, deadline_s)
                socket.send_fds(connection, [_HELLO.pack(rank)], [arena.descriptor])
                links[peer] = Link(connection, descriptor)
            for peer, connection in called:
                introduced, descriptor = _introduction(connection, deadline_s)
                assert introduced == peer, "each rank listens at its own path"
                links[peer] = Link(connection, descriptor)
        finally:
            Path(path).unlink()
    return SharedMemoryTransport(links, arena, waits_for_sends=waits_for_sends, timeout_s=timeout_s)


def _call(path: str, deadline_s: float) -> socket.socket:
    """Connect to a rank as soon as it listens."""
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
        except FileNotFoundError:
            connection.close()
            if time.monotonic() > deadline_s:
                raise CommError(f"no rank listens at {path}") from None
            time.sleep(_MEETING_POLL_S)
        else:
            return connection


def _accept(listener: socket.socket, deadline_s: float) -> socket.socket:
    listener.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        return listener.accept()[0]
    except TimeoutError as error:
        raise CommError("a rank of this host does not connect") from error


def _introduction(connection: socket.socket, deadline_s: float) -> tuple[int, int]:
    """Return the rank of the peer, and the descriptor of its arena."""
    connection.settimeout(max(0.001, deadline_s - time.monotonic()))
    try:
        data, descriptors, *_ = socket.recv_fds(connection, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC)
    except (TimeoutError, ConnectionError) as error:
        raise CommError("a rank of this host does not introduce itself") from error
    if not descriptors:
        raise CommError("a rank of this host is gone")
    return _HELLO.unpack(data)[0], descriptors[0]
