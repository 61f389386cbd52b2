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
from longspan.runtime.messages import Moved, Sent
from longspan.runtime.move_transport import beside, mark
from longspan.runtime.move_ways import Piece, Way
from longspan.runtime.step_comm import MoveComm

_News = tuple[Way, Piece, Message] | int | Exception
"""From the threads of the ways: what has come, the number of a move of which a last message has left, or an error."""


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
        self._leaving: Counter[int] = Counter()  # messages of the last layer of moves from this rank, a peer each
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
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
                    self._way(self._receiving, blocks, self._receive, self._came).put(move.number, blocks, None)

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
        is_last = layer + 1 == self._messages.num_layers
        for blocks in move.leaving(layer):
            self._leaving[move.number] += is_last
            self._comm.count(blocks.peer, blocks.num_bytes, sent)
            ready = mark(self._messages.device)
            self._way(self._sending, blocks, self._send, self._left).put(move.number, blocks, ready)
        if is_last and move.is_source:  # of which this rank may have nothing to send
            self._leaving[move.number] += 1
            self._tell(move.number)

    def take_arrived(self) -> list[Moved | Sent]:
        """Writes what has come to the pool; reports the moves of which it was the last, and those that have left.

        Raises:
            CommError: when a peer is gone.
            Exception: whatever else a way has failed with.
        """
        with suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        done: list[Moved | Sent] = []
        while not self._news.empty():
            news = self._news.get()
            if isinstance(news, Exception):
                raise news
            if isinstance(news, int):
                self._leaving[news] -= 1
                if not self._leaving[news]:
                    del self._leaving[news]
                    done.append(Sent(rank=self._rank, number=news))
                continue
            way, piece, message = news
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
            way = ways[blocks.peer] = Way(begin, end, self._tell)
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

    def _came(self, way: Way, piece: Piece, message: Message) -> None:
        self._tell((way, piece, message))

    def _left(self, way: Way, piece: Piece, _: Message) -> None:
        way.left(piece)
        if piece.is_last and piece.blocks.layer + 1 == self._messages.num_layers:
            self._tell(piece.number)

    def _tell(self, news: _News) -> None:
        self._news.put(news)
        with suppress(BlockingIOError):  # it is full of wake-ups already
            os.write(self._wake, b"\0")
