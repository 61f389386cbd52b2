"""KV that moves between ranks of different steps: nobody's Forward waits for it, on either end."""

from __future__ import annotations

import os
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from longspan.attn.comm import Message, Pending, Transport
from longspan.core.steps import Link, MoveKV
from longspan.runtime.block_messages import BlockMessages, BlockSlice, RankMove
from longspan.runtime.messages import Moved
from longspan.runtime.move_transport import beside, mark
from longspan.runtime.move_ways import Piece, Way
from longspan.runtime.step_comm import MoveComm


class Moves:
    """One rank's end of the MoveKVs that are steps of their own, and of those that stream out of a Forward.

    A way per other rank and direction reads the pool, sends and receives, with a bounded number of bytes under way.
    The pool is written by `take_arrived` only, that is by the thread that computes, between its steps.

    Attributes:
        wakeup: a file descriptor that can be read when there may be something to take.
    """

    def __init__(self, messages: BlockMessages, transport: Transport, *, rank: int, hosts: Sequence[int]) -> None:
        self._messages, self._rank = messages, rank
        num_layers = messages.num_layers
        self._comm = MoveComm(transport, "kv_transfer", rank=rank, hosts=hosts, num_layers=num_layers)
        self._sending: dict[int, Way] = {}
        self._receiving: dict[int, Way] = {}
        self._missing: Counter[int] = Counter()  # layers of moves to this rank, a rank of their source each
        self._arrived: queue.SimpleQueue[tuple[Way, Piece, Message] | Exception] = queue.SimpleQueue()
        self.wakeup, self._wake = os.pipe()
        for end in (self.wakeup, self._wake):
            os.set_blocking(end, False)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._missing and all(way.is_idle for way in self._sending.values())

    def expect(self, moves: Sequence[MoveKV]) -> None:
        """Receives moves to this rank, if any, in the order in which they are sent: layer by layer."""
        taken = [self._messages.part(move) for move in moves]
        for layer in range(self._messages.num_layers):
            for move in taken:
                for blocks in move.coming(layer):
                    self._missing[move.number] += 1
                    self._way(self._receiving, blocks, self._receive, self._tell).put(move.number, blocks, None)

    def send(self, moves: Sequence[MoveKV]) -> Iterator[Moved]:
        """Sends what this rank has of moves, and reports each that it has something of."""
        parts = [self._messages.part(move) for move in moves]
        sent = {move.number: Counter[tuple[str, Link]]() for move in moves}
        for layer in range(self._messages.num_layers):
            for part in parts:
                self.send_layer(part, layer, sent[part.number])
        for part in parts:
            if part.is_source:
                yield Moved(rank=self._rank, number=part.number, bytes_sent=dict(sent[part.number]))

    def send_layer(self, move: RankMove, layer: int, sent: Counter[tuple[str, Link]]) -> None:
        """Sends what this rank has of one layer, and counts it in `sent`. Nobody writes it before it has come."""
        for blocks in move.leaving(layer):
            self._comm.count(blocks.peer, blocks.num_bytes, sent)
            ready = mark(self._messages.device)
            self._way(self._sending, blocks, self._send, _left).put(move.number, blocks, ready)

    def take_arrived(self) -> list[Moved]:
        """Writes what has come to the pool; reports the moves of which it was the last.

        Raises:
            CommError: when a peer is gone.
            Exception: whatever else a way has failed with.
        """
        with suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        done = []
        while not self._arrived.empty():
            arrived = self._arrived.get()
            if isinstance(arrived, Exception):
                raise arrived
            way, piece, message = arrived
            self._messages.store(piece.blocks, message)
            way.left(piece)
            self._missing[piece.number] -= piece.is_last
            if not self._missing[piece.number]:
                del self._missing[piece.number]
                done.append(Moved(rank=self._rank, number=piece.number, bytes_sent={}))
        return done

    def _way(
        self,
        ways: dict[int, Way],
        blocks: BlockSlice,
        begin: Callable[[Piece], tuple[Message, Pending]],
        end: Callable[[Way, Piece, Message], None],
    ) -> Way:
        way = ways.get(blocks.peer)
        if way is None:
            way = ways[blocks.peer] = Way(begin, end, self._fail)
        return way

    def _send(self, piece: Piece) -> tuple[Message, Pending]:
        with beside(self._messages.device, after=piece.ready):
            message = self._messages.filled(piece.blocks)
            group = self._comm.group(piece.number, piece.blocks.layer, Counter(), piece.index)
            return message, group.start(sends={piece.blocks.peer: message}, receives={}, hop=0)

    def _receive(self, piece: Piece) -> tuple[Message, Pending]:
        with beside(self._messages.device):
            message = self._messages.room(piece.blocks)
            group = self._comm.group(piece.number, piece.blocks.layer, Counter(), piece.index)
            return message, group.start(sends={}, receives={piece.blocks.peer: message}, hop=0)

    def _tell(self, way: Way, piece: Piece, message: Message) -> None:
        self._arrived.put((way, piece, message))
        self._wake_up()

    def _fail(self, error: Exception) -> None:
        self._arrived.put(error)
        self._wake_up()

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # it is full of wake-ups already
            os.write(self._wake, b"\0")


def _left(way: Way, piece: Piece, _: Message) -> None:
    way.left(piece)
