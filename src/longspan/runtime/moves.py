"""KV transfers: layer by layer inside a Forward (`StepMoves`), or concurrently with it (`Moves`)."""

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
    from longspan.runtime.move_channels import MoveChannel, SideStream

# ---------------------------------------------------------------- moves concurrent with Forwards


_Event = tuple[BlockSlice, Message] | int | Moved | Exception
"""A thread's report: a received slice, the number of a move whose final message was sent, a swap, or an error."""


class Moves:
    """One rank's end of MoveKV steps, and of the moves that a Forward streams.

    A channel per peer and direction reads the pool, sends and receives, with a bounded number of bytes in flight.
    Only `take_arrived` writes received blocks to the pool. The computing thread calls it between its steps.
    A `SwapLane` executes the moves to and from the pool of the `host`.

    Attributes:
        wakeup: a file descriptor that becomes readable when `take_arrived` may have work.
    """

    def __init__(self, messages: BlockMessages, transport: Transport, host: HostPool | None = None) -> None:
        self._messages, self._transport = messages, transport
        self._streams: list[SideStream] | None = None
        self._sending: dict[int, MoveChannel] = defaultdict(lambda: self._channel(sends=True))
        self._receiving: dict[int, MoveChannel] = defaultdict(lambda: self._channel(sends=False))
        self._missing: Counter[int] = Counter()  # by move: slices to receive, one per layer and peer
        self._sends: Counter[int] = Counter()  # by move: final messages in flight, one per peer, or one swap
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.wakeup, self._wake = os.pipe()
        for end in (self.wakeup, self._wake):
            os.set_blocking(end, False)
        self._waking = threading.Lock()  # a closed descriptor, whose number may be reused, must not be written
        self._swaps = None
        if host is not None:
            from longspan.runtime.move_channels import SwapLane  # noqa: PLC0415 - only with a host tier

            self._swaps = SwapLane(host, messages, self._notify)

    def _channel(self, *, sends: bool) -> MoveChannel:
        from longspan.runtime.move_channels import MoveChannel, SideStream  # noqa: PLC0415 - only for moves between ranks

        if self._streams is None:
            self._streams = [SideStream(self._messages.device) for _ in ("pack", "receive", "end")]
        pack, receive, ending = self._streams
        if sends:
            return MoveChannel(pack, ending, self._begin_send, self._end_send, self._notify)
        return MoveChannel(receive, ending, self._begin_receive, self._end_receive, self._notify)

    @property
    def is_idle(self) -> bool:
        """Whether no move is in flight."""
        return not self._missing and not self._sends

    def close(self) -> None:
        """End all threads. Close the transport before, so that they wait for no peer."""
        lanes = () if self._swaps is None else (self._swaps,)
        for channel in (*self._sending.values(), *self._receiving.values(), *lanes):
            channel.close()
        with self._waking:
            for end in (self.wakeup, self._wake):
                os.close(end)
            self._wake = -1

    def expect(self, moves: Sequence[MoveKV]) -> None:
        """Start to receive moves to this rank, layer by layer, in sending order. Start copies from and to hosts."""
        for swap in moves:
            for layer in self._messages.layers if swap.way != "across" else ():
                self.swap_layer([swap], layer)
        rank_moves = [self._messages.of_rank(move) for move in moves if move.way == "across"]
        for layer in self._messages.layers:
            for move in rank_moves:
                for blocks in self._messages.slices_to_receive(move, layer):
                    self._missing[move.number] += 1
                    for chunk in blocks.cut():
                        self._receiving[chunk.peer].put(chunk)

    def send(self, moves: Sequence[MoveKV]) -> Iterator[Moved]:
        """Start to send this rank's blocks of the moves. Yields a report for each move with such blocks."""
        rank_moves = [self._messages.of_rank(move) for move in moves if move.way == "across"]
        sent = {move.number: Counter[tuple[str, Link]]() for move in moves}
        for layer in self._messages.layers:
            for move in rank_moves:
                self.send_layer(move, layer, sent[move.number])
        for move in rank_moves:
            if move.sent_to:
                yield Moved(rank=self._messages.rank, number=move.number, bytes_sent=dict(sent[move.number]))

    def send_layer(self, move: RankMove, layer: int, sent: Counter[tuple[str, Link]]) -> None:
        """Start to send this rank's blocks of one layer, and count their bytes in `sent`.

        No step writes to these blocks before the move is complete.
        """
        layers = self._messages.layers
        if layer == layers[0] and move.sent_to:
            self._sends[move.number] += 1  # until all of its messages are counted
        for blocks in self._messages.slices_to_send(move, layer):
            self._sends[move.number] += blocks.is_final
            sent["kv_transfer", self._group(blocks).link(blocks.peer)] += blocks.num_bytes
            for chunk in blocks.cut(self._messages.mark()):
                self._sending[chunk.peer].put(chunk)
        if layer == layers[-1] and move.sent_to:
            self._notify(move.number)

    def swap_layer(self, swaps: Sequence[MoveKV], layer: int) -> None:
        """Start to copy a layer from or to the host, after all work submitted to the device so far."""
        ready = self._messages.mark() if swaps else None
        for swap in swaps:
            assert self._swaps is not None, "moves to and from a host need its pool"
            self._sends[swap.number] += layer == self._messages.layers[0]
            self._swaps.put(swap, layer, ready)

    def of_step(self, forward: Forward, rebalances: Transport, sent: Counter[tuple[str, Link]]) -> StepMoves:
        """Begin the moves of a Forward, see `StepMoves`."""
        return StepMoves(forward, self._messages, rebalances=rebalances, moves=self, sent=sent)

    def take_arrived(self) -> list[Moved | Sent]:
        """Write received blocks to the pool. Return reports of completed receives, sends and swaps.

        Raises:
            CommError: if a peer was lost.
            Exception: any other error of a channel.
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
                    _is_last(self._sends, swapped.number)
                    done.append(swapped)
                case int(number):
                    if _is_last(self._sends, number):
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
        message = self._messages.allocate(blocks)
        return message, self._group(blocks).start(sends={}, receives={blocks.peer: message}, hop=0)

    def _group(self, blocks: BlockSlice) -> Group:
        """Return the group of all ranks for a message. `send_layer` counts its bytes."""
        return self._messages.group(
            self._transport, "kv_transfer", blocks.number, blocks.layer, blocks.chunk, Counter()
        )

    def _end_receive(self, blocks: BlockSlice, message: Message) -> None:
        self._notify((blocks, message))

    def _end_send(self, blocks: BlockSlice, _: Message) -> None:
        self._sending[blocks.peer].free(blocks)
        if blocks.is_last and blocks.is_final:
            self._notify(blocks.number)

    def _notify(self, event: _Event) -> None:
        self._events.put(event)
        with self._waking, suppress(BlockingIOError):  # a full pipe already wakes the reader
            if self._wake >= 0:
                os.write(self._wake, b"\0")


def _is_last(counts: Counter[int], number: int) -> bool:
    counts[number] -= 1
    if counts[number]:
        return False
    del counts[number]
    return True


# ---------------------------------------------------------------- moves inside a Forward


class StepMoves:
    """One rank's end of the `rebalances` and `streams` of a Forward. Counts bytes sent to instances in `sent`.

    Args:
        rebalances: the transport of the rebalances. Their peers receive in the same step.
        moves: sends the streams.
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
        self._rebalances = [messages.of_rank(move) for move in forward.rebalances if not move.is_local]
        self._streams = [messages.of_rank(move) for move in forward.streams if move.way == "across"]
        self._swaps = [swap for swap in forward.streams if swap.way == "out" and messages.instance in swap.sources]
        self._num_complete = self._num_streamed = messages.layers[0]
        self._receiving: list[tuple[Pending, list[tuple[BlockSlice, Message]]]] = []
        self._start(messages.layers[0])

    def complete(self, layer: int) -> None:
        """Wait until a layer's rebalanced KV is in the pool, then start the transfers of the next layer."""
        while self._num_complete <= layer:
            for pending, received in self._receiving:
                pending.wait()
                for blocks, message in received:
                    self._messages.store(blocks, message)
            self._num_complete += 1
            self._start(self._num_complete)

    def stream(self, layer: int) -> None:
        """Send the streams of all layers up to this one, whose new KV is in the pool."""
        while self._num_streamed <= layer:
            for move in self._streams:
                self._moves.send_layer(move, self._num_streamed, self._sent)
            self._moves.swap_layer(self._swaps, self._num_streamed)
            self._num_streamed += 1

    def _start(self, layer: int) -> None:
        self._receiving = []
        for move in self._rebalances if layer in self._messages.layers else ():
            group = self._messages.group(self._transport, "kv_balance", move.number, layer, 0, self._sent)
            outgoing = self._messages.slices_to_send(move, layer)
            sends = {blocks.peer: self._messages.filled(blocks) for blocks in outgoing}
            incoming = self._messages.slices_to_receive(move, layer)
            received = [(blocks, self._messages.allocate(blocks)) for blocks in incoming]
            receives = {blocks.peer: message for blocks, message in received}
            self._receiving.append((group.start(sends=sends, receives=receives, hop=0), received))
