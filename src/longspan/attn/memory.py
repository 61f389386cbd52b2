"""A transport between ranks that are threads of one process: mailboxes in memory.

Messages are matched by (source, destination, tag) in the order of the sends. A buffer is copied when it is received,
not when it is sent, and a receive may be longer than its message. Both are as with gloo, so this transport also finds a
sender that writes to a message before it is received, and a wrong length.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longspan.attn.comm import Calls, CommError, Pending


@dataclass(eq=False)
class _Sent:
    destination: int
    buffer: Tensor
    is_taken: bool = False


class Wires:
    """The mailboxes of all ranks on one channel. `timeout_s` bounds every wait. None waits until a rank is closed."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._changed = defaultdict[int, threading.Condition](lambda: threading.Condition(self._lock))  # by rank
        self._boxes: defaultdict[tuple[int, int, int], deque[_Sent]] = defaultdict(deque)
        self._closed: set[int] = set()

    def post(self, source: int, destination: int, tag: int, buffer: Tensor) -> _Sent:
        with self._lock:
            for rank in {source, destination} & self._closed:
                raise CommError(f"rank {rank} is gone")
            sent = _Sent(destination, buffer)
            self._boxes[source, destination, tag].append(sent)
            self._changed[destination].notify_all()
            return sent

    def take(self, source: int, destination: int, tag: int, out: Tensor) -> None:
        """Wait for a message and copy it to the beginning of `out`. Raises CommError if its sender is closed."""
        key = source, destination, tag
        with self._lock:
            box, gone = self._boxes[key], self._closed
            if not self._changed[destination].wait_for(lambda: box or gone & {source, destination}, self._timeout_s):
                raise CommError(f"rank {destination} waited {self._timeout_s} s for message {tag} of rank {source}")
            if not box:
                raise CommError(f"rank {source if source in gone else destination} is gone")
            sent = box.popleft()
            if not box:
                del self._boxes[key]
        assert len(sent.buffer) <= len(out), "gloo aborts the process here"
        out[: len(sent.buffer)].copy_(sent.buffer)
        with self._lock:
            sent.is_taken = True
            self._changed[source].notify_all()

    def await_taken(self, source: int, messages: Sequence[_Sent]) -> None:
        """Wait until the receivers have copied these messages. Raises CommError if one of them is closed."""
        ends = {source, *(sent.destination for sent in messages)}
        with self._lock:
            self._changed[source].wait_for(
                lambda: all(sent.is_taken for sent in messages) or self._closed & ends, self._timeout_s
            )
            for sent in messages:
                if not sent.is_taken:
                    raise CommError(f"rank {sent.destination} has not taken a message of rank {source}")

    def close(self, rank: int) -> None:
        with self._lock:
            self._closed.add(rank)
            for changed in self._changed.values():
                changed.notify_all()

    def left(self) -> int:
        return sum(len(box) for box in self._boxes.values())


class MemoryTransport:
    """One rank's end of the wires.

    Args:
        waits_for_sends: the result of `start` waits for its sends. Otherwise `complete_sends` waits.
    """

    tagged = True
    sums = None

    def __init__(self, wires: Wires, rank: int, *, waits_for_sends: bool = False) -> None:
        self._wires, self._rank, self._waits_for_sends = wires, rank, waits_for_sends
        self._outbox: list[_Sent] = []

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        sent = [self._wires.post(self._rank, peer, tag, buffer) for peer, buffer in sends]
        if not self._waits_for_sends:
            self._outbox = [message for message in (*self._outbox, *sent) if not message.is_taken]
            sent = []
        return _Taking(self._wires, self._rank, receives, tag, sent)

    def complete_sends(self) -> None:
        self._wires.await_taken(self._rank, self._outbox)
        self._outbox.clear()

    def close(self) -> None:
        """End all waits for this rank with an error, as the end of a process does."""
        self._wires.close(self._rank)


class _Taking:
    def __init__(self, wires: Wires, rank: int, receives: Calls, tag: int, sent: Sequence[_Sent]) -> None:
        self._wires, self._rank, self._receives, self._tag, self._sent = wires, rank, receives, tag, sent

    def wait(self) -> None:
        for peer, buffer in self._receives:
            self._wires.take(peer, self._rank, self._tag, buffer)
        self._wires.await_taken(self._rank, self._sent)
