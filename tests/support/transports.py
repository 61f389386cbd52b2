"""Faults for any transport, and members of a group as threads of one process."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from longspan.attn.comm import CommError, Pending, Transport
from longspan.attn.memory import MemoryTransport, Wires

Sends = Sequence[tuple[int, Tensor]]
Result = TypeVar("Result")


class DiedError(Exception):
    """Raised by a member whose transport ends by a planned fault."""


class FaultyTransport:
    """Delays every send by a random time, so that messages overtake each other, drops some, or dies.

    `die` is called instead of the `die_at`-th start (from 0) and is to raise, or to end the process. The send number
    `drop_at` never arrives. A lane of its own hands the sends to `inner` as they fall due.
    """

    def __init__(
        self,
        inner: Transport,
        *,
        seed: int = 0,
        max_delay_s: float = 0.0,
        drop_at: int | None = None,
        die_at: int | None = None,
        die: Callable[[], None] | None = None,
    ) -> None:
        self.tagged, self.sums = inner.tagged, inner.sums
        self._inner, self._random, self._max_delay_s = inner, random.Random(seed), max_delay_s
        self._drop_at, self._die_at, self._die = drop_at, die_at, die or _die
        self._num_starts = self._num_sends = 0
        self._due: list[tuple[float, int, int, int, Tensor]] = []
        self._changed = threading.Condition()
        self._error: CommError | None = None
        self._closed = False
        threading.Thread(target=self._lane, daemon=True).start()

    def start(self, sends: Sends, receives: Sends, tag: int) -> Pending:
        if self._num_starts == self._die_at:
            self._die()
        self._num_starts += 1
        pending = self._inner.start([], receives, tag)
        with self._changed:
            if self._error:
                raise self._error
            for peer, buffer in sends:
                if self._num_sends != self._drop_at:
                    due = time.monotonic() + self._random.uniform(0, self._max_delay_s)
                    heapq.heappush(self._due, (due, self._num_sends, peer, tag, buffer))
                self._num_sends += 1
            self._changed.notify_all()
        return pending

    def complete_sends(self) -> None:
        """Wait until the lane is empty, and raise its error."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due or self._error)
            if self._error:
                raise self._error

    def close(self) -> None:
        """End the lane. Its messages are lost."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _lane(self) -> None:
        with self._changed:
            while not self._closed:  # the end of a peer does not stop messages to other peers
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                _, _, peer, tag, buffer = heapq.heappop(self._due)
                try:
                    self._inner.start([(peer, buffer)], [], tag)
                except CommError as error:
                    self._error = error
                self._changed.notify_all()


def _die() -> None:
    raise DiedError


def run_members(
    num_members: int,
    work: Callable[[int, Transport], Result],
    *,
    wires: Wires | None = None,
    faults: Callable[[int, Transport], FaultyTransport] | None = None,
    limit_s: float = 30.0,
) -> list[Result | Exception]:
    """Run `work(rank, transport)` on a thread per member. Return the result or the error of each, by rank.

    A member that raises closes its transport, as a worker process does by ending. Fails when one hangs.
    """
    wires = wires or Wires(timeout_s=20.0)
    results: list[Result | Exception] = [TimeoutError("the member hangs")] * num_members

    def member(rank: int) -> None:
        transport = MemoryTransport(wires, rank)
        faulty = faults(rank, transport) if faults else None
        try:
            results[rank] = work(rank, faulty or transport)
            if faulty:
                faulty.complete_sends()
        except Exception as error:  # noqa: BLE001 - the caller looks at it
            results[rank] = error
            transport.close()
        finally:
            if faulty:
                faulty.close()

    threads = [threading.Thread(target=member, args=(rank,), daemon=True) for rank in range(num_members)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"members hang: {results}"
    return results
