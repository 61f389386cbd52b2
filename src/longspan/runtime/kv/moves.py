"""KV that moves between ranks of different steps: nobody's Forward waits for it, on either end."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.comm import Message, Pending, Transport, peer_errors, start_receives, start_sends
from longspan.core.steps import Forward, Link, MoveKV
from longspan.runtime.kv.block_messages import BlockMessages, BlockSlice, RankMove
from longspan.runtime.kv.pool import WINDOW_BYTES
from longspan.runtime.messages import Moved, Sent
from longspan.runtime.worker.step_comm import MoveComm


class MoveTransport:
    """A `Transport` whose sends take as long as they take: what `start` returns keeps their buffers and waits for them.

    `start` itself waits for nothing. Both are for threads that have nothing else to do.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, staged: bool, device: torch.device) -> None:
        self._group, self._staged, self._device = process_group, staged, device
        self.tagged = dist.get_backend(process_group) != "nccl"

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> Pending:
        """Starts all and waits for nothing."""
        with peer_errors():
            arrival = start_receives(receives, self._group, tag, staged=self._staged)
            leaving = list(start_sends(sends, self._group, tag, staged=self._staged))
        return _Beside(arrival, leaving, self._device)

    def complete_sends(self) -> None:
        """Waits for nothing: peers may be in other steps."""


class _Beside:
    def __init__(self, arrival: Pending, leaving: Sequence[tuple[dist.Work, Tensor]], device: torch.device) -> None:
        self._arrival, self._leaving, self._device = arrival, leaving, device

    def wait(self) -> None:
        """Waits until all is there, and all has left."""
        with beside(self._device):
            self._arrival.wait()
            with peer_errors():
                for work, _ in self._leaving:
                    work.wait()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """Marks the moment at which a CUDA device is done with what it has been given up to now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Lets a block wait for transfers on a CUDA device whose other work goes on. The block begins `after`."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


_CHUNK_BYTES = 8 * 2**20
"""The largest message, unless a single block is larger."""
_CLOSE_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One message of a move.

    Attributes:
        number: of the move.
        blocks: that are in the message.
        index: of the chunk among those of its layer.
        is_last: whether it is the last of them.
        ready: on a CUDA device, when the pool has the blocks.
    """

    number: int
    blocks: BlockSlice
    index: int
    is_last: bool
    ready: torch.cuda.Event | None


class MoveChannel:
    """Carries what moves to, or from, one other rank, first in, first out. Threads of its own do all that waits.

    Both ends are given the same in the same order. So what is oldest under way here is oldest there, or is not known
    there yet, and nobody waits in a circle.

    Args:
        begin: makes the message of a chunk, and starts to send or receive it.
        end: the message has left, or is there. Its memory counts until it is `left`.
        fail: a peer is gone, or there is no memory, or any other error. Nothing more is done here.
    """

    def __init__(
        self,
        begin: Callable[[Chunk], tuple[Message, Pending]],
        end: Callable[[MoveChannel, Chunk, Message], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._begin, self._end, self._fail = begin, end, fail
        self._given: queue.SimpleQueue[tuple[int, BlockSlice, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[tuple[Chunk, Message, Pending] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._num_bytes = self._num_given = self._num_left = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True) for work in (self._begin_all, self._end_all)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, number: int, blocks: BlockSlice, ready: torch.cuda.Event | None) -> None:
        """Queues blocks of one layer of a move."""
        self._num_given += 1
        self._given.put((number, blocks, ready))

    @property
    def is_idle(self) -> bool:
        """Tells whether all that was put has left."""
        return self._num_given == self._num_left

    def left(self, chunk: Chunk) -> None:
        """Frees the memory of a message that nobody needs any more."""
        with self._room:
            self._num_bytes -= chunk.blocks.num_bytes
            self._num_left += chunk.is_last
            self._room.notify()

    def close(self) -> None:
        """Ends its threads, which wait for nothing any more since their transport is closed."""
        with self._room:
            self._num_bytes = 0
            self._room.notify()
        for work in (self._given, self._under_way):
            work.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, who computes must hear of it
            self._fail(error)

    def _begin_all(self) -> None:
        while (given := self._given.get()) is not None:
            number, blocks, ready = given
            chunks = blocks.cut(_CHUNK_BYTES)
            for index, part in enumerate(chunks):
                chunk = Chunk(number=number, blocks=part, index=index, is_last=index + 1 == len(chunks), ready=ready)
                self._enter(part.num_bytes)
                message, pending = self._begin(chunk)
                self._under_way.put((chunk, message, pending))

    def _enter(self, num_bytes: int) -> None:
        """Waits until there is room for so many bytes, or nothing is under way."""
        with self._room:
            self._room.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= WINDOW_BYTES)
            self._num_bytes += num_bytes

    def _end_all(self) -> None:
        while (under_way := self._under_way.get()) is not None:
            chunk, message, pending = under_way
            pending.wait()
            self._end(self, chunk, message)
            del chunk, message, pending, under_way  # what waits for the next one must not keep its memory


_Event = tuple[MoveChannel, Chunk, Message] | int | Exception
"""From the threads of the channels: what has come, a move of which a last message has left, or an error."""


class Moves:
    """One rank's end of the MoveKVs that are steps of their own, and of those that stream out of a Forward.

    A channel per other rank and direction reads the pool, sends and receives, with a bounded number of bytes under way.
    The pool is written by `take_arrived` only, that is by the thread that computes, between its steps.

    Attributes:
        wakeup: a file descriptor that can be read when there may be something to take.
    """

    def __init__(self, messages: BlockMessages, transport: Transport, *, rank: int, hosts: Sequence[int]) -> None:
        self._messages, self._rank = messages, rank
        num_layers = messages.num_layers
        self._comm = MoveComm(transport, "kv_transfer", rank=rank, hosts=hosts, num_layers=num_layers)
        self._sending: dict[int, MoveChannel] = {}
        self._receiving: dict[int, MoveChannel] = {}
        self._missing: Counter[int] = Counter()  # layers of moves to this rank, a rank of their source each
        self._leaving: Counter[int] = Counter()  # messages of the last layer of moves from this rank, a peer each
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.wakeup, self._wake = os.pipe()
        for end in (self.wakeup, self._wake):
            os.set_blocking(end, False)
        self._waking = threading.Lock()  # nobody writes to a descriptor that is closed, and may be another's by now

    @property
    def is_idle(self) -> bool:
        """Tells whether nothing is under way."""
        return not self._missing and all(channel.is_idle for channel in self._sending.values())

    def close(self) -> None:
        """Ends all threads; the transport is closed already, so that they wait for no peer."""
        for channel in (*self._sending.values(), *self._receiving.values()):
            channel.close()
        with self._waking:
            for end in (self.wakeup, self._wake):
                os.close(end)
            self._wake = -1

    def expect(self, moves: Sequence[MoveKV]) -> None:
        """Receives moves to this rank, if any, in the order in which they are sent: layer by layer."""
        taken = [self._messages.part(move) for move in moves]
        for layer in range(self._messages.num_layers):
            for move in taken:
                for blocks in move.coming(layer):
                    self._missing[move.number] += 1
                    self._channel(self._receiving, blocks, self._receive, self._came).put(move.number, blocks, None)

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
            self._channel(self._sending, blocks, self._send, self._left).put(move.number, blocks, ready)
        if is_last and move.is_source:  # of which this rank may have nothing to send
            self._leaving[move.number] += 1
            self._notify(move.number)

    def take_arrived(self) -> list[Moved | Sent]:
        """Writes what has come to the pool; reports the moves of which it was the last, and those that have left.

        Raises:
            CommError: when a peer is gone.
            Exception: whatever else a channel has failed with.
        """
        with suppress(BlockingIOError):
            os.read(self.wakeup, 4096)
        done: list[Moved | Sent] = []
        while not self._events.empty():
            event = self._events.get()
            if isinstance(event, Exception):
                raise event
            if isinstance(event, int):
                self._leaving[event] -= 1
                if not self._leaving[event]:
                    del self._leaving[event]
                    done.append(Sent(rank=self._rank, number=event))
                continue
            channel, chunk, message = event
            self._messages.store(chunk.blocks, message)
            channel.left(chunk)
            self._missing[chunk.number] -= chunk.is_last
            if not self._missing[chunk.number]:
                del self._missing[chunk.number]
                done.append(Moved(rank=self._rank, number=chunk.number, bytes_sent={}))
        return done

    def _channel(
        self,
        channels: dict[int, MoveChannel],
        blocks: BlockSlice,
        begin: Callable[[Chunk], tuple[Message, Pending]],
        end: Callable[[MoveChannel, Chunk, Message], None],
    ) -> MoveChannel:
        channel = channels.get(blocks.peer)
        if channel is None:
            channel = channels[blocks.peer] = MoveChannel(begin, end, self._notify)
        return channel

    def _send(self, chunk: Chunk) -> tuple[Message, Pending]:
        with beside(self._messages.device, after=chunk.ready):
            message = self._messages.filled(chunk.blocks)
            group = self._comm.group(chunk.number, chunk.blocks.layer, Counter(), chunk.index)
            return message, group.start(sends={chunk.blocks.peer: message}, receives={}, hop=0)

    def _receive(self, chunk: Chunk) -> tuple[Message, Pending]:
        with beside(self._messages.device):
            message = self._messages.room(chunk.blocks)
            group = self._comm.group(chunk.number, chunk.blocks.layer, Counter(), chunk.index)
            return message, group.start(sends={}, receives={chunk.blocks.peer: message}, hop=0)

    def _came(self, channel: MoveChannel, chunk: Chunk, message: Message) -> None:
        self._notify((channel, chunk, message))

    def _left(self, channel: MoveChannel, chunk: Chunk, _: Message) -> None:
        channel.left(chunk)
        if chunk.is_last and chunk.blocks.layer + 1 == self._messages.num_layers:
            self._notify(chunk.number)

    def _notify(self, event: _Event) -> None:
        self._events.put(event)
        with self._waking, suppress(BlockingIOError):  # it is full of wake-ups already
            if self._wake >= 0:
                os.write(self._wake, b"\0")


class StepMoves:
    """One rank's end of the `rebalances` and `streams` of a Forward, which counts what it sends in `sent`."""

    def __init__(
        self,
        forward: Forward,
        messages: BlockMessages,
        *,
        rebalances: MoveComm,
        moves: Moves,
        sent: Counter[tuple[str, Link]],
    ) -> None:
        self._messages, self._comm, self._moves, self._sent = messages, rebalances, moves, sent
        self._rebalances = [messages.part(move) for move in forward.rebalances]
        self._streams = [messages.part(move) for move in forward.streams]
        self._num_complete = self._num_streamed = 0
        self._coming: list[tuple[Pending, list[tuple[BlockSlice, Message]]]] = []
        self._start(0)

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
        """Starts the sends and receives of a layer's rebalancing."""
        self._coming = []
        for move in self._rebalances if layer < self._messages.num_layers else ():
            group = self._comm.group(move.number, layer, self._sent)
            sends = {blocks.peer: self._messages.filled(blocks) for blocks in move.leaving(layer)}
            rooms = [(blocks, self._messages.room(blocks)) for blocks in move.coming(layer)]
            receives = {blocks.peer: room for blocks, room in rooms}
            self._coming.append((group.start(sends=sends, receives=receives, hop=0), rooms))
