"""One way between two ranks, for KV that moves: messages in their order, and a bound on those that are under way."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from longspan.attn.comm import Message, Pending
from longspan.runtime.block_messages import BlockSlice

PIECE_BYTES = 8 * 2**20
"""The largest message, unless a single block is larger."""
WINDOW_BYTES = 64 * 2**20
"""Messages that are under way from one rank to another at once, and so the memory for them at each end."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One message of a move.

    Attributes:
        number: of the move.
        blocks: that are in the message.
        index: of the piece among those of its layer.
        is_last: whether it is the last of them.
        ready: on a CUDA device, when the pool has the blocks.
    """

    number: int
    blocks: BlockSlice
    index: int
    is_last: bool
    ready: torch.cuda.Event | None


class Way:
    """What moves to, or from, one other rank, first in, first out. Threads of its own do all that waits.

    Both ends are given the same in the same order. So what is oldest under way here is oldest there, or is not known
    there yet, and nobody waits in a circle.

    Args:
        begin: makes the message of a piece, and starts to send or receive it.
        end: the message has left, or is there. Its memory counts until it is `left`.
        fail: a peer is gone, or there is no memory, or any other error. Nothing more is done here.
    """

    def __init__(
        self,
        begin: Callable[[Piece], tuple[Message, Pending]],
        end: Callable[[Way, Piece, Message], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._begin, self._end, self._fail = begin, end, fail
        self._given: queue.SimpleQueue[tuple[int, BlockSlice, torch.cuda.Event | None]] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[tuple[Piece, Message, Pending]] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._num_bytes = self._num_given = self._num_left = 0
        for work in (self._begin_all, self._end_all):
            threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def put(self, number: int, blocks: BlockSlice, ready: torch.cuda.Event | None) -> None:
        """Blocks of one layer of a move."""
        self._num_given += 1
        self._given.put((number, blocks, ready))

    @property
    def is_idle(self) -> bool:
        """Whether all that was put has left."""
        return self._num_given == self._num_left

    def left(self, piece: Piece) -> None:
        """Nobody needs the message of a piece any more."""
        with self._room:
            self._num_bytes -= piece.blocks.num_bytes
            self._num_left += piece.is_last
            self._room.notify()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, who computes must hear of it
            self._fail(error)

    def _begin_all(self) -> None:
        while True:
            number, blocks, ready = self._given.get()
            pieces = blocks.cut(PIECE_BYTES)
            for index, part in enumerate(pieces):
                piece = Piece(number=number, blocks=part, index=index, is_last=index + 1 == len(pieces), ready=ready)
                self._enter(part.num_bytes)
                message, pending = self._begin(piece)
                self._under_way.put((piece, message, pending))

    def _enter(self, num_bytes: int) -> None:
        """Waits until there is room for so many bytes, or nothing is under way."""
        with self._room:
            self._room.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= WINDOW_BYTES)
            self._num_bytes += num_bytes

    def _end_all(self) -> None:
        while True:
            piece, message, pending = self._under_way.get()
            pending.wait()
            self._end(self, piece, message)
            del piece, message, pending  # what waits for the next one must not keep its memory
