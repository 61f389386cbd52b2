"""Transports that pass messages to other transports."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch

from longspan.attn.comm import Calls, Pending, Transport

_IsFirst = Callable[[int], bool]


class _TwoTransports:
    """Uses `first` for sends to peers of `sends_first` and receives from peers of `receives_first`, else `second`."""

    sums = None

    def __init__(self, first: Transport, second: Transport, sends_first: _IsFirst, receives_first: _IsFirst) -> None:
        assert first.tagged == second.tagged, "both match messages in the same way"
        self._first, self._second, self.tagged = first, second, first.tagged
        self._sends_first, self._receives_first = sends_first, receives_first

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        pending = []
        for transport in (self._first, self._second):
            is_first = transport is self._first
            outgoing = [(peer, buffer) for peer, buffer in sends if self._sends_first(peer) == is_first]
            incoming = [(peer, buffer) for peer, buffer in receives if self._receives_first(peer) == is_first]
            if outgoing or incoming:
                pending.append(transport.start(outgoing, incoming, tag))
        return _All(pending)

    def complete_sends(self) -> None:
        self._first.complete_sends()
        self._second.complete_sends()


class RoutedTransport(_TwoTransports):
    """Reaches neighbours by one transport and all other ranks by another. Both are tagged."""

    def __init__(self, near: Transport, neighbours: Container[int], far: Transport) -> None:
        super().__init__(near, far, lambda peer: peer in neighbours, lambda peer: peer in neighbours)
        assert self.tagged, "each rank orders the calls of two transports by itself, so messages need tags"


class DirectedTransport(_TwoTransports):
    """Carries messages to higher ranks by one transport, and messages to lower ranks by another.

    For transports that run the calls of a rank one after the other: messages in one direction do not wait for messages
    in the other.
    """

    def __init__(self, rank: int, up: Transport, down: Transport) -> None:
        super().__init__(up, down, lambda peer: peer > rank, lambda peer: peer < rank)


class AnnouncedTransport:
    """Posts a receive when its sender has announced the message, so that no receive waits for a computation.

    A receive that waits on a device occupies it, and may block other calls there. Use this in threads that do nothing
    else, since the wait for an announcement blocks the thread.

    Args:
        notices: carries the announcements. It is tagged.
    """

    sums = None

    def __init__(self, inner: Transport, notices: Transport) -> None:
        assert notices.tagged, "threads wait for announcements in any order"
        self._inner, self._notices, self.tagged = inner, notices, inner.tagged

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        for _, buffer in sends:
            if buffer.is_cuda:
                torch.cuda.current_stream(buffer.device).synchronize()  # the message is complete
        announced = self._notices.start([(peer, _notice()) for peer, _ in sends], [], tag)
        self._notices.start([], [(peer, _notice()) for peer, _ in receives], tag).wait()
        return _All([announced, self._inner.start(sends, receives, tag)])

    def complete_sends(self) -> None:
        self._notices.complete_sends()
        self._inner.complete_sends()


def _notice() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)


@dataclass(frozen=True)
class _All:
    pending: Sequence[Pending]

    def wait(self) -> None:
        for transfer in self.pending:
            transfer.wait()
