"""KV blocks that move: inside a Forward layer by layer (`StepMoves`), or concurrently with it (`Moves`)."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from longspan.attn.comm import Group, Message, Pending, Transport
from longspan.core.steps import Forward, Link, MoveKV
from longspan.runtime.block_messages import BlockMessages, BlockSlice, RankMove
from longspan.runtime.messages import Moved, Sent

if TYPE_CHECKING:
    from longspan.runtime.host_pool import HostPool
    from longspan.runtime.move_channels import MoveChannel

# ---------------------------------------------------------------- moves that no Forward waits for


_Event = tuple[BlockSlice, Message] | int | Moved | Exception
"""The threads report what has come, a move of which a last message has left, one that a lane has made, or an error."""


class Moves:
    """One rank's end of the MoveKVs that are steps of their own, and of those that stream out of a Forward.

    A channel per other rank and direction reads the pool, sends and receives, with a bounded number of bytes under way.
    What has come is written to the pool by `take_arrived` only, that is by the thread that computes, between its steps.
    Moves to and from the pool of the `host` go by a `SwapLane`.

    Attributes:
        wakeup: a file descriptor that can be read when there may be something to take.
    """

    def __init__(self, messages: BlockMessages, transport: Transport, host: HostPool | None = None) -> None:
        self._messages, self._transport = messages, transport
        self._sending: dict[int, MoveChannel] = defaultdict(lambda: self._channel(sends=True))
        self._receiving: dict[int, MoveChannel] = defaultdict(lambda: self._channel(sends=False))
        self._missing: Counter[int] = Counter()  # layers of moves to this rank, a rank of their source each
        self._leaving: Counter[int] = Counter()  # the final messages of moves from this rank, a peer each; a swap
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.wakeup, self._wake = os.pipe()
        for end in (self.wakeup, self._wake):
            os.set_blocking(end, False)
        self._waking = threading.Lock()  # nobody writes to a descriptor that is closed, and may be another's by now
        self._swaps = None
        if host is not None:
            from longspan.runtime.move_channels import SwapLane  # noqa: PLC0415 - an engine with a host tier alone

            self._swaps = SwapLane(host, messages, self._notify)

    def _channel(self, *, sends: bool) -> MoveChannel:
        from longspan.runtime.move_channels import MoveChannel  # noqa: PLC0415 - KV that moves between ranks alone

        begin, end = (self._begin_send, self._left) if sends else (self._begin_receive, self._came)
        return MoveChannel(self._messages.device, begin, end, self._notify)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._missing and not self._leaving

    def close(self) -> None:
        """Ends all threads; the transport is closed already, so that they wait for no peer."""
        lanes = () if self._swaps is None else (self._swaps,)
        for channel in (*self._sending.values(), *self._receiving.values(), *lanes):
            channel.close()
        with self._waking:
            for end in (self.wakeup, self._wake):
                os.close(end)
            self._wake = -1

    def expect(self, moves: Sequence[MoveKV]) -> None:
        """Receives moves to this rank, layer by layer, in the order in which they are sent; begins to swap."""
        for swap in moves:
            if swap.way != "across":
                assert self._swaps is not None, "moves to and from a host need its pool"
                self._leaving[swap.number] += 1
                self._swaps.put(swap)
        taken = [self._messages.of_rank(move) for move in moves if move.way == "across"]
        for layer in self._messages.layers:
            for move in taken:
                for blocks in self._messages.coming(move, layer):
                    self._missing[move.number] += 1
                    for chunk in blocks.cut():
                        self._receiving[chunk.peer].put(chunk)

    def send(self, moves: Sequence[MoveKV]) -> Iterator[Moved]:
        """Sends what this rank has of moves, and reports each that it has something of."""
        parts = [self._messages.of_rank(move) for move in moves if move.way == "across"]
        sent = {move.number: Counter[tuple[str, Link]]() for move in moves}
        for layer in self._messages.layers:
            for part in parts:
                self.send_layer(part, layer, sent[part.number])
        for part in parts:
            if part.to:
                yield Moved(rank=self._messages.rank, number=part.number, bytes_sent=dict(sent[part.number]))

    def send_layer(self, move: RankMove, layer: int, sent: Counter[tuple[str, Link]]) -> None:
        """Sends what this rank has of one layer, and counts it in `sent`. Nobody writes it before it has come."""
        layers = self._messages.layers
        if layer == layers[0] and move.to:
            self._leaving[move.number] += 1  # until all of its messages are counted
        for blocks in self._messages.leaving(move, layer):
            self._leaving[move.number] += blocks.is_final
            sent["kv_transfer", self._group(blocks).link(blocks.peer)] += blocks.num_bytes
            for chunk in blocks.cut(self._messages.mark()):
                self._sending[chunk.peer].put(chunk)
        if layer == layers[-1] and move.to:
            self._notify(move.number)

    def take_arrived(self) -> list[Moved | Sent]:
        """Writes what has come to the pool; reports the moves of which it was the last, and those that have left.

        Raises:
            CommError: when a peer is gone.
            Exception: whatever else a channel has failed with.
        """
        with suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        rank = self._messages.rank
        done: list[Moved | Sent] = []
        while not self._events.empty():
            match self._events.get():
                case Exception() as error:
                    raise error
                case Moved() as swapped:
                    _is_last(self._leaving, swapped.number)
                    done.append(swapped)
                case int(number):
                    if _is_last(self._leaving, number):
                        done.append(Sent(rank=rank, number=number))
                case blocks, message:
                    self._messages.store(blocks, message)
                    self._receiving[blocks.peer].free(blocks)
                    if blocks.is_last and _is_last(self._missing, blocks.number):
                        done.append(Moved(rank=rank, number=blocks.number, bytes_sent={}))
        return done

    def _begin_send(self, blocks: BlockSlice) -> tuple[Message, Pending]:
        message = self._messages.filled(blocks)
        return message, self._group(blocks).start(sends={blocks.peer: message}, receives={}, hop=0)

    def _begin_receive(self, blocks: BlockSlice) -> tuple[Message, Pending]:
        message = self._messages.room(blocks)
        return message, self._group(blocks).start(sends={}, receives={blocks.peer: message}, hop=0)

    def _group(self, blocks: BlockSlice) -> Group:
        """Connects all ranks for a message, whose bytes `send_layer` has counted."""
        return self._messages.group(
            self._transport, "kv_transfer", blocks.number, blocks.layer, blocks.chunk, Counter()
        )

    def _came(self, blocks: BlockSlice, message: Message) -> None:
        self._notify((blocks, message))

    def _left(self, blocks: BlockSlice, _: Message) -> None:
        self._sending[blocks.peer].free(blocks)
        if blocks.is_last and blocks.is_final:
            self._notify(blocks.number)

    def _notify(self, event: _Event) -> None:
        self._events.put(event)
        with self._waking, suppress(BlockingIOError):  # it is full of wake-ups already
            if self._wake >= 0:
                os.write(self._wake, b"\0")


def _is_last(counts: Counter[int], number: int) -> bool:
    counts[number] -= 1
    if counts[number]:
        return False
    del counts[number]
    return True


# ---------------------------------------------------------------- moves that keep pace with a Forward


class StepMoves:
    """One rank's end of the `rebalances` and `streams` of a Forward, which counts what it sends in `sent`.

    Args:
        rebalances: carries the former; their peers receive in the same step.
        moves: carries the latter.
    """

    def __init__(
        self,
        forward: Forward,
        messages: BlockMessages,
        *,
        rebalances: Transport,
        moves: Moves,
        sent: Counter[tuple[str, Link]],
    ) -> None:
        self._messages, self._transport, self._moves, self._sent = messages, rebalances, moves, sent
        starts = {part.request_id: part.start for part in forward.parts}
        for move in forward.rebalances:
            if move.is_local:
                messages.copy_own(move, starts[move.request_id])
        self._rebalances = [messages.of_rank(move) for move in forward.rebalances if not move.is_local]
        self._streams = [messages.of_rank(move) for move in forward.streams]
        self._num_complete = self._num_streamed = messages.layers[0]
        self._coming: list[tuple[Pending, list[tuple[BlockSlice, Message]]]] = []
        self._start(messages.layers[0])

    @property
    def any_left(self) -> bool:
        """Whether any KV moves layer by layer."""
        return bool(self._rebalances or self._streams)

    def complete(self, layer: int) -> None:
        """Waits until a layer's rebalanced KV is in the pool, and then starts that of the next layer."""
        while self._num_complete <= layer:
            for pending, rooms in self._coming:
                pending.wait()
                for blocks, room in rooms:
                    self._messages.store(blocks, room)
            self._num_complete += 1
            self._start(self._num_complete)

    def stream(self, layer: int) -> None:
        """Sends the streams of all layers up to this one, whose new KV is in the pool."""
        while self._num_streamed <= layer:
            for move in self._streams:
                self._moves.send_layer(move, self._num_streamed, self._sent)
            self._num_streamed += 1

    def _start(self, layer: int) -> None:
        self._coming = []
        for move in self._rebalances if layer in self._messages.layers else ():
            group = self._messages.group(self._transport, "kv_balance", move.number, layer, 0, self._sent)
            sends = {blocks.peer: self._messages.filled(blocks) for blocks in self._messages.leaving(move, layer)}
            rooms = [(blocks, self._messages.room(blocks)) for blocks in self._messages.coming(move, layer)]
            receives = {blocks.peer: room for blocks, room in rooms}
            self._coming.append((group.start(sends=sends, receives=receives, hop=0), rooms))
