"""The messages of exchanges: several tensors in one buffer, a transport between ranks, and a group's view of it.

Both ends of a message know its shapes by arithmetic, so no sizes travel. A trailer repeats tag and size, because gloo
accepts a receive that is longer than the send, and stale data on a reused tag, without a word.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.core.cluster import cut_evenly
from longspan.core.steps import Link

_TRAILER_BYTES = 16
OUTBOX_BYTES = 256 * 2**20
"""Sends that may be under way besides those of the latest call. They keep memory until their peers have taken them."""

Shape = tuple[tuple[int, ...], torch.dtype]
"""Shape and type of one tensor of a message."""


class CommError(RuntimeError):
    """A message is not the one that was expected, or a peer is gone."""


class Message:
    """One buffer with a view per tensor: fill `tensors` before sending, read them after receiving."""

    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in shapes]
        self.payload_bytes = sum(sizes)
        trailer_at = -(-self.payload_bytes // 8) * 8
        self.buffer = torch.empty(trailer_at + _TRAILER_BYTES, dtype=torch.uint8, device=device)
        self.tensors: list[Tensor] = []
        offset = 0
        for (shape, dtype), size in zip(shapes, sizes, strict=True):
            assert offset % dtype.itemsize == 0, "wider types come first in a message"
            self.tensors.append(self.buffer[offset : offset + size].view(dtype).view(shape))
            offset += size
        self._trailer = self.buffer[trailer_at:].view(torch.int64)

    @classmethod
    def empty(cls, shapes: Iterable[tuple[int, ...]], like: Tensor) -> Self:
        """Allocates a message for tensors of these shapes, with the type and device of `like`."""
        return cls([(shape, like.dtype) for shape in shapes], like.device)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        message = cls([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], tensors[0].device)
        for room, tensor in zip(message.tensors, tensors, strict=True):
            room.copy_(tensor)
        return message

    def seal(self, tag: int) -> None:
        """Writes the trailer. On a CUDA device this waits for the device, and so does `verify`."""
        self._trailer.copy_(torch.tensor([tag, self.payload_bytes]))

    def verify(self, tag: int) -> None:
        """Raises CommError unless the trailer is that of message `tag`."""
        found = self._trailer.tolist()
        if found != [tag, self.payload_bytes]:
            raise CommError(f"expected message {tag} of {self.payload_bytes} bytes, but its trailer says {found}")


Calls = Sequence[tuple[int, Tensor]]
"""Peers, and the buffers that they get or fill."""


class Pending(Protocol):
    """A transfer that has started and may not be done yet."""

    def wait(self) -> None:
        """Waits until the receives are done; raises CommError when a peer is gone."""


Sums = Callable[[Sequence[int], Tensor], Tensor]
"""Returns the sum, the same bits for each of these ranks, of a tensor of each, which it may write to.

All of them call it in the same order.
"""


class Transport(Protocol):
    """Moves buffers between ranks.

    Attributes:
        tagged: messages are matched by tag, may overtake each other, and may be mistaken: their trailers are checked.
    """

    tagged: bool

    @property
    def sums(self) -> Sums | None:
        """Adds up tensors of several ranks by itself; None where sums are made of messages."""

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        """Starts all sends and receives as one grouped call; blocks only to bound the memory of old sends."""

    def complete_sends(self) -> None:
        """Waits until every send has left its buffer; its peer receives it in the same step."""


_ANY_TAG = range(2**31)


class Group:
    """The members of an exchange, in ring order, as one of them sees it.

    Args:
        tags: those of its hops; nobody else who may send at the same time has them.
        early: carries what is received long before it is sent; by default `transport` does, which then has to be tagged
            or to carry nothing else meanwhile.

    Attributes:
        rank: this member's index in the group.
        size: the number of members.
        hosts: the host of each member.
        sent: payload bytes sent so far, by exchange name and link; shared by the groups of a rank.
    """

    def __init__(
        self,
        transport: Transport,
        members: Sequence[int],
        rank: int,
        *,
        hosts: Sequence[int] | None = None,
        name: str = "",
        tags: range = _ANY_TAG,
        sent: Counter[tuple[str, Link]] | None = None,
        early: Transport | None = None,
    ) -> None:
        self.rank, self.size = rank, len(members)
        self.hosts = (0,) * self.size if hosts is None else tuple(hosts)
        assert len(self.hosts) == self.size, "every member has a host"
        self.sent = Counter() if sent is None else sent
        self._transport, self._early = transport, early or transport
        self._members, self._name, self._tags = tuple(members), name, tags

    @property
    def peers(self) -> list[int]:
        """The members beside this one, ascending."""
        return [member for member in range(self.size) if member != self.rank]

    def link(self, member: int) -> Link:
        """Tells whether what goes to a member leaves this host."""
        return "same_host" if self.hosts[member] == self.hosts[self.rank] else "other_host"

    def start(
        self, *, sends: Mapping[int, Message], receives: Mapping[int, Message], hop: int, early: bool = False
    ) -> Pending:
        """Sends and receives between members; both ends skip empty messages.

        Args:
            hop: numbers the call in the exchange.
            early: whether receivers call before the sender has computed what it sends, and both do other calls between.
                All ranks start such calls from one rank to another in the same order.
        """
        assert hop < len(self._tags), f"hop {hop} of {self._name}, which has tags for {len(self._tags)}"
        tag, transport = self._tags[hop], self._early if early else self._transport
        outgoing = {member: message for member, message in sends.items() if message.payload_bytes}
        incoming = {member: message for member, message in receives.items() if message.payload_bytes}
        if not outgoing and not incoming:
            return _Transfers(())
        for member, message in outgoing.items():
            if transport.tagged:
                message.seal(tag)
            self.sent[self._name, self.link(member)] += message.payload_bytes
        pending = transport.start(
            [(self._members[member], message.buffer) for member, message in outgoing.items()],
            [(self._members[member], message.buffer) for member, message in incoming.items()],
            tag,
        )
        return _Verified(pending, list(incoming.values()), tag) if transport.tagged else pending

    def sum(self, tensor: Tensor) -> Tensor | None:
        """Returns the sum of a tensor of each member, if the transport makes sums, else None; see `Sums`.

        What is sent counts as in a ring: each member sends all but its own piece on, and later all but another.
        """
        if self._transport.sums is None:
            return None
        start, stop = cut_evenly(tensor.numel(), self.size)[self.rank]
        passed_on = 2 * (tensor.numel() - (stop - start)) * tensor.itemsize
        self.sent[self._name, self.link((self.rank + 1) % self.size)] += passed_on
        return self._transport.sums(self._members, tensor)


class _Nobody:
    """The transport of a rank that is alone: nothing is ever sent."""

    tagged = False
    sums = None

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        raise AssertionError(f"nobody else is there: {len(sends)} sends, {len(receives)} receives, tag {tag}")

    def complete_sends(self) -> None: ...


NO_PEERS = _Nobody()
ALONE = Group(NO_PEERS, (0,), 0)
"""The group of one member."""


class RoutedTransport:
    """Reaches some ranks by one transport, and all others by another. Both are tagged."""

    tagged = True
    sums = None

    def __init__(self, near: Transport, neighbours: Container[int], far: Transport) -> None:
        assert near.tagged and far.tagged, "they are told apart by ranks, not by the order of calls"
        self._near, self._neighbours, self._far = near, neighbours, far

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        (near_sends, far_sends), (near_receives, far_receives) = self._split(sends), self._split(receives)
        return _Both(
            self._near.start(near_sends, near_receives, tag),
            self._far.start(far_sends, far_receives, tag),
        )

    def complete_sends(self) -> None:
        self._near.complete_sends()
        self._far.complete_sends()

    def _split(self, calls: Calls) -> tuple[Calls, Calls]:
        near = [(peer, buffer) for peer, buffer in calls if peer in self._neighbours]
        return near, [(peer, buffer) for peer, buffer in calls if peer not in self._neighbours]


class DirectedTransport:
    """Carries messages to higher ranks by one transport, and those to lower ones by another.

    For what runs a rank's calls one after the other: what goes one way does not wait for what goes the other.
    """

    sums = None

    def __init__(self, rank: int, up: Transport, down: Transport) -> None:
        assert up.tagged == down.tagged, "they are of one kind"
        self._rank, self._up, self._down, self.tagged = rank, up, down, up.tagged

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        pending = []
        for transport, sign in ((self._up, 1), (self._down, -1)):
            leaving = [(peer, buffer) for peer, buffer in sends if sign * (peer - self._rank) > 0]
            coming = [(peer, buffer) for peer, buffer in receives if sign * (peer - self._rank) < 0]
            if leaving or coming:
                pending.append(transport.start(leaving, coming, tag))
        return _Both(*pending)

    def complete_sends(self) -> None:
        self._up.complete_sends()
        self._down.complete_sends()


class _Both:
    def __init__(self, *pending: Pending) -> None:
        self._pending = pending

    def wait(self) -> None:
        for one in self._pending:
            one.wait()


class _Verified:
    """Checks the trailers once the messages are there."""

    def __init__(self, pending: Pending, messages: Sequence[Message], tag: int) -> None:
        self._pending, self._messages, self._tag = pending, messages, tag

    def wait(self) -> None:
        self._pending.wait()
        for message in self._messages:
            message.verify(self._tag)


def meet(store: str, rank: int, world_size: int, *, backend: str = "gloo", timeout_s: float | None = None) -> None:
    """Makes the process group of all ranks of this host, who meet through the file `store`.

    gloo listens on the loopback interface only. `timeout_s` is how long a transfer may take, by default PyTorch's.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    file = dist.FileStore(store, world_size)  # type: ignore[attr-defined]  # public, but not in its __all__
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    with polite_threads():
        dist.init_process_group(backend, store=file, rank=rank, world_size=world_size, timeout=timeout)
    dist.barrier()


@contextmanager
def polite_threads() -> Iterator[None]:
    """Keeps threads that start in the block from interrupting a rank that computes on one thread when they wake up.

    gloo's thread polls a socket for as long as another thread holds the socket's lock. If it interrupts that one in the
    middle of a send, it polls until the scheduler's next tick, up to 4 ms later. On Linux, and where the system allows
    it. Idle threads of a larger team poll, too, and gloo's thread had better interrupt those.
    """
    is_polite = False
    if hasattr(os, "SCHED_BATCH") and torch.get_num_threads() == 1:
        with suppress(OSError):
            if os.sched_getscheduler(0) == os.SCHED_OTHER:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # which threads inherit
                is_polite = True
    try:
        yield
    finally:
        if is_polite:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


class TorchTransport:
    """Point-to-point on a torch.distributed process group.

    gloo matches messages by tag. NCCL has no tags: each call is one grouped launch, and ranks make their calls in the
    same order.

    Args:
        staged: buffers pass through host memory: for ranks on CUDA devices that gloo connects.
        waits_for_sends: `start` waits for nothing, makes no grouped launch, and what it returns waits for its sends,
            too: for who keeps that, or a thread that has nothing else to do. Else `complete_sends` does.
        sums: see `Transport`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        staged: bool = False,
        waits_for_sends: bool = False,
        sums: Sums | None = None,
    ) -> None:
        self._group, self.staged, self._waits_for_sends, self.sums = process_group, staged, waits_for_sends, sums
        self.tagged = dist.get_backend(process_group) != "nccl"
        self._outbox: deque[tuple[dist.Work, Tensor]] = deque()
        self._outbox_bytes = 0

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        if not self.tagged and not self._waits_for_sends:
            return self._start_grouped(sends, receives)
        coming = []
        leaving = deque[tuple[dist.Work, Tensor]]() if self._waits_for_sends else self._outbox
        with peer_errors():
            for peer, buffer in receives:
                host = torch.empty_like(buffer, device="cpu") if self.staged else buffer
                coming.append((_work(dist.irecv(host, peer, self._group, tag)), host, buffer))
            for peer, buffer in sends:
                host = buffer.cpu() if self.staged else buffer
                leaving.append((_work(dist.isend(host, peer, self._group, tag)), host))
            if self._waits_for_sends:
                return _Transfers([*coming, *((work, host, host) for work, host in leaving)])
            self._outbox_bytes += sum(buffer.nbytes for _, buffer in sends)
            while self._outbox_bytes > OUTBOX_BYTES and len(self._outbox) > len(sends):
                self._await_oldest()
        return _Transfers(coming)

    def complete_sends(self) -> None:
        with peer_errors():
            while self._outbox:
                self._await_oldest()

    def _await_oldest(self) -> None:
        work, host = self._outbox.popleft()
        work.wait()
        self._outbox_bytes -= host.nbytes

    def _start_grouped(self, sends: Calls, receives: Calls) -> Pending:
        ops = [dist.P2POp(dist.isend, buffer, peer, self._group) for peer, buffer in sends]
        ops += [dist.P2POp(dist.irecv, buffer, peer, self._group) for peer, buffer in receives]
        with peer_errors():
            works = dist.batch_isend_irecv(ops)
        buffers = [buffer for _, buffer in (*sends, *receives)]
        return _Transfers(list(zip(works, buffers, buffers, strict=False)))


class _Transfers:
    """Waits for transfers, in their order; each has a buffer on the host and the one that it was asked for."""

    def __init__(self, works: Sequence[tuple[dist.Work, Tensor, Tensor]]) -> None:
        self._works = works

    def wait(self) -> None:
        for work, host, buffer in self._works:
            with peer_errors():
                work.wait()
            if host is not buffer:
                buffer.copy_(host)


@contextmanager
def peer_errors() -> Iterator[None]:
    """torch.distributed says RuntimeError when a connection breaks or a transfer times out."""
    try:
        yield
    except RuntimeError as error:
        raise CommError(str(error)) from error


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is a member of the process group"
    return work
