"""Messages of exchanges, the transport protocol, and the group of ranks that exchange.

A message is one buffer with several tensors. Both ends compute its shapes, so no sizes are sent. A trailer repeats the
tag and the size. Without it gloo would accept stale data on a reused tag, and a receive longer than the send.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import torch
from torch import Tensor

from longspan.core.sparse import MAX_PIECES

if TYPE_CHECKING:
    from longspan.core.steps import Link

_TRAILER_BYTES = 16
OUTBOX_BYTES = 256 * 2**20
"""Maximum bytes of unfinished sends besides the latest call. They keep memory until the peers receive them."""

Shape = tuple[tuple[int, ...], torch.dtype]


class CommError(RuntimeError):
    """A message differs from the expected one, or a peer has exited."""


class Message:
    """One buffer with a view per tensor. Fill `tensors` before sending, read them after receiving."""

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
        """Allocate a message for tensors of these shapes, with the type and device of `like`."""
        return cls([(shape, like.dtype) for shape in shapes], like.device)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Self:
        message = cls([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], tensors[0].device)
        for target, tensor in zip(message.tensors, tensors, strict=True):
            target.copy_(tensor)
        return message

    def seal(self, tag: int) -> None:
        """Write the trailer. On a CUDA device this waits for the device, and so does `verify`."""
        self._trailer.copy_(torch.tensor([tag, self.payload_bytes]))

    def verify(self, tag: int) -> None:
        """Raise CommError unless the trailer is that of message `tag`."""
        trailer = self._trailer.tolist()
        if trailer != [tag, self.payload_bytes]:
            raise CommError(f"expected message {tag} of {self.payload_bytes} bytes, but its trailer says {trailer}")


Calls = Sequence[tuple[int, Tensor]]
"""Pairs of a peer and the buffer that is sent to it or received from it."""


class Pending(Protocol):
    """A transfer that has started and may still run."""

    def wait(self) -> None:
        """Wait until the receives are complete. Raises CommError if a peer has exited."""


Sums = Callable[[Sequence[int], Tensor], Tensor]
"""Return the sum of one tensor per rank, with the same bits on each of these ranks. It may overwrite its argument.

All ranks make these calls in the same order.
"""


class Transport(Protocol):
    """Moves buffers between ranks.

    Attributes:
        tagged: messages are matched by tag and may overtake each other. A message may then reach the wrong receive, so
            trailers are checked.
    """

    tagged: bool

    @property
    def sums(self) -> Sums | None:
        """The transport's own all-reduce. None if sums are made of messages."""

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        """Start all sends and receives as one grouped call. It blocks only to bound the memory of earlier sends."""

    def complete_sends(self) -> None:
        """Wait until every send has left its buffer. Its peer receives it in the same step."""


_ANY_TAG = range(2**31)


def gather_hops(size: int) -> int:
    """Count the hops of one `all_gather`. A `reduce_scatter` has two."""
    return 1 + size


def hidden_hops(size: int) -> int:
    """Count the hops of a layer of `gather_hidden`. Of each micro-partition, four are for norms over all heads."""
    return 1 + MAX_PIECES * (gather_hops(size) + 3 + 4)


class Group:
    """The members of an exchange, in ring order, as one of them sees it.

    Args:
        tags: one per hop. No other group that sends at the same time uses them.

    Attributes:
        rank: this member's index in the group.
        size: the number of members.
        tagged: see `Transport`.
        hosts: the host of each member.
        sent: payload bytes sent so far, by exchange name and link. The groups of a rank share it.
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
    ) -> None:
        self.rank, self.size = rank, len(members)
        self.hosts = (0,) * self.size if hosts is None else tuple(hosts)
        assert len(self.hosts) == self.size, "every member has a host"
        self.sent = Counter() if sent is None else sent
        self._transport, self.tagged = transport, transport.tagged
        self._members, self._name, self._tags = tuple(members), name, tags

    @property
    def peers(self) -> list[int]:
        """The members except this one, ascending."""
        return [member for member in range(self.size) if member != self.rank]

    def link(self, member: int) -> Link:
        return "same_host" if self.hosts[member] == self.hosts[self.rank] else "other_host"

    def start(self, *, sends: Mapping[int, Message], receives: Mapping[int, Message], hop: int) -> Pending:
        """Start to send to members and to receive from them. Both ends skip empty messages.

        Args:
            hop: numbers the call in the exchange. Negative numbers count from the last hop.
        """
        assert hop < len(self._tags), f"hop {hop} of {self._name}, which has tags for {len(self._tags)}"
        tag, transport = self._tags[hop], self._transport
        outgoing = {member: message for member, message in sends.items() if message.payload_bytes}
        incoming = {member: message for member, message in receives.items() if message.payload_bytes}
        if not outgoing and not incoming:
            return _Verified(None, (), tag)
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

    def sum(self, tensor: Tensor, num_bytes: int) -> Tensor | None:
        """Return the sum over members made by the transport, see `Sums`. None if the transport makes no sums.

        `num_bytes` counts as sent to the next member.
        """
        if self._transport.sums is None:
            return None
        self.sent[self._name, self.link((self.rank + 1) % self.size)] += num_bytes
        return self._transport.sums(self._members, tensor)


@dataclass(frozen=True)
class _Verified:
    """Checks trailers when the messages have arrived."""

    pending: Pending | None
    messages: Sequence[Message]
    tag: int

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        for message in self.messages:
            message.verify(self.tag)


class _NoPeers:
    """The transport of a group of one, which sends nothing."""

    tagged = False
    sums = None

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        raise AssertionError(f"the group has no peers: {len(sends)} sends, {len(receives)} receives, tag {tag}")

    def complete_sends(self) -> None: ...


NO_PEERS = _NoPeers()
ALONE = Group(NO_PEERS, (0,), 0)
