"""KV that moves between ranks of different steps: nobody's Forward waits for it, on either end."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from longspan.attn.comm import CommError, Pending
from longspan.core.steps import Link, MoveKV
from longspan.runtime.block_messages import BlockMessage, BlockMessages, RankMove
from longspan.runtime.messages import Moved
from longspan.runtime.move_transport import MoveTransport
from longspan.runtime.step_comm import MoveComm


@dataclass(frozen=True, kw_only=True)
class _Coming:
    number: int
    room: BlockMessage
    pending: Pending


class Moves:
    """One rank's end of the MoveKVs that are steps of their own, and of those that stream out of a Forward.

    Sends are started and left alone. Receives are waited for in a thread per call of `expect`; the pool is written by
    `take_arrived` only, that is by the thread that computes, between its steps.

    Attributes:
        wakeup: a file descriptor that can be read when there may be something to take.
    """

    def __init__(self, messages: BlockMessages, transport: MoveTransport, *, rank: int, hosts: Sequence[int]) -> None:
        self._messages, self._transport, self._rank = messages, transport, rank
        num_layers = messages.num_layers
        self._comm = MoveComm(transport, "kv_transfer", rank=rank, hosts=hosts, num_layers=num_layers)
        self._missing: Counter[int] = Counter()
        self._arrived: queue.SimpleQueue[_Coming | CommError] = queue.SimpleQueue()
        self.wakeup, self._wake = os.pipe()
        for end in (self.wakeup, self._wake):
            os.set_blocking(end, False)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._missing and self._transport.is_idle

    def expect(self, moves: Sequence[MoveKV]) -> None:
        """Posts the receives of moves to this rank, if any, in the order in which they are sent: layer by layer."""
        taken, coming = [self._messages.part(move) for move in moves], list[_Coming]()
        for layer in range(self._messages.num_layers):
            for move in taken:
                for room in move.incoming(layer):
                    group = self._comm.group(move.number, layer, Counter())
                    pending = group.start(sends={}, receives={room.peer: room.message}, hop=0)
                    coming.append(_Coming(number=move.number, room=room, pending=pending))
        self._missing.update(one.number for one in coming)
        if coming:
            threading.Thread(target=self._wait, args=(coming,), daemon=True).start()

    def send(self, moves: Sequence[MoveKV]) -> Iterator[Moved]:
        """Starts to send what this rank has of moves, and reports each that it has something of."""
        for move in moves:
            part, sent = self._messages.part(move), Counter[tuple[str, Link]]()
            for layer in range(self._messages.num_layers):
                self.send_layer(part, layer, sent)
            if part.leaving:
                yield Moved(rank=self._rank, number=move.number, bytes_sent=dict(sent))

    def send_layer(self, move: RankMove, layer: int, sent: Counter[tuple[str, Link]]) -> None:
        """Starts to send what this rank has of one layer, and counts it in `sent`."""
        self._comm.group(move.number, layer, sent).start(sends=move.outgoing(layer), receives={}, hop=0)

    def take_arrived(self) -> list[Moved]:
        """Writes what has come to the pool; reports the moves of which it was the last.

        Raises:
            CommError: when a peer is gone.
        """
        with suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        done = []
        while not self._arrived.empty():
            arrived = self._arrived.get()
            if isinstance(arrived, CommError):
                raise arrived
            self._messages.store(arrived.room)
            self._missing[arrived.number] -= 1
            if not self._missing[arrived.number]:
                del self._missing[arrived.number]
                done.append(Moved(rank=self._rank, number=arrived.number, bytes_sent={}))
        return done

    def _wait(self, coming: Sequence[_Coming]) -> None:
        for one in coming:
            try:
                one.pending.wait()
            except CommError as error:
                self._tell(error)
                return
            self._tell(one)

    def _tell(self, arrived: _Coming | CommError) -> None:
        self._arrived.put(arrived)
        with suppress(BlockingIOError):  # it is full of wake-ups already
            os.write(self._wake, b"\0")
