"""KV that moves with the layers of one Forward: to its members before they compute, and out of it when they have."""

from __future__ import annotations

from collections import Counter

from longspan.attn.comm import Message, Pending
from longspan.core.steps import Forward, Link
from longspan.runtime.block_messages import BlockMessages, BlockSlice
from longspan.runtime.moves import Moves
from longspan.runtime.step_comm import MoveComm


class StepMoves:
    """One rank's end of the `balances` and `streams` of a Forward, which counts what it sends in `sent`."""

    def __init__(
        self,
        forward: Forward,
        messages: BlockMessages,
        *,
        balance: MoveComm,
        moves: Moves,
        sent: Counter[tuple[str, Link]],
    ) -> None:
        self._messages, self._comm, self._moves, self._sent = messages, balance, moves, sent
        self._balances = [messages.part(move) for move in forward.balances]
        self._streams = [messages.part(move) for move in forward.streams]
        self._num_settled = self._num_streamed = 0
        self._coming: list[tuple[Pending, list[tuple[BlockSlice, Message]]]] = []
        self._start(0)

    def settle(self, layer: int) -> None:
        """Waits until a layer's balances are in the pool, and then sets those of the next layer going."""
        while self._num_settled <= layer:
            for pending, rooms in self._coming:
                pending.wait()
                for blocks, room in rooms:
                    self._messages.store(blocks, room)
            self._num_settled += 1
            self._start(self._num_settled)

    def stream(self, layer: int) -> None:
        """Sends the streams of all layers up to this one, whose new KV is in the pool."""
        while self._num_streamed <= layer:
            for move in self._streams:
                self._moves.send_layer(move, self._num_streamed, self._sent)
            self._num_streamed += 1

    def _start(self, layer: int) -> None:
        """Sends and receives of a layer's balances."""
        self._coming = []
        for move in self._balances if layer < self._messages.num_layers else ():
            group = self._comm.group(move.number, layer, self._sent)
            sends = {blocks.peer: self._messages.filled(blocks) for blocks in move.leaving(layer)}
            rooms = [(blocks, self._messages.room(blocks)) for blocks in move.coming(layer)]
            receives = {blocks.peer: room for blocks, room in rooms}
            self._coming.append((group.start(sends=sends, receives=receives, hop=0), rooms))
