"""KV blocks that move: between ranks inside a Forward layer by layer (`StepMoves`), or beside it (`Moves`); between a
rank and its host (`SwapLane`).
"""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message, Pending, Transport
from longspan.core.steps import BytesSent, Forward, Link, MoveKV
from longspan.runtime.block_messages import BlockMessages, BlockSlice, RankMove
from longspan.runtime.messages import Moved, Sent
from longspan.runtime.pool import WINDOW_BYTES

if TYPE_CHECKING:
    from longspan.runtime.host_pool import HostPool

_CLOSE_TIMEOUT_S = 2.0
_STAGED_BYTES = 32 * 2**20
"""Pinned memory through which blocks go between a CUDA device and its host."""


# ---------------------------------------------------------------- moves that no Forward waits for


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """Marks the moment at which a CUDA device is done with what it has been given up to now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


class _Beside:
    """Lets a thread wait for transfers on a CUDA device whose other work goes on.

    The thread that makes it has one stream for all of them, and is on that device: a thread begins on the first one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)

    @contextmanager
    def __call__(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Begins the block `after`, and waits for its transfers at its end."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class MoveChannel:
    """Carries what moves to, or from, one other rank, first in, first out. Threads of its own do all that waits.

    Both ends are given the same in the same order. So what is oldest under way here is oldest there, or is not known
    there yet, and nobody waits in a circle.

    Args:
        begin: makes a message, and starts to send or receive it.
        end: the message has left, or is there. Its memory counts until it is given to `free`.
        fail: a peer is gone, or there is no memory, or any other error. Nothing more is done here.
    """

    def __init__(
        self,
        device: torch.device,
        begin: Callable[[BlockSlice], tuple[Message, Pending]],
        end: Callable[[BlockSlice, Message], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._device, self._begin, self._end, self._fail = device, begin, end, fail
        self._given: queue.SimpleQueue[BlockSlice | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[tuple[BlockSlice, Message, Pending] | None] = queue.SimpleQueue()
        self._room = threading.Condition()
        self._num_bytes = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True) for work in (self._begin_all, self._end_all)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, blocks: BlockSlice) -> None:
        self._given.put(blocks)

    def free(self, blocks: BlockSlice) -> None:
        """Frees the memory of a message."""
        with self._room:
            self._num_bytes -= blocks.num_bytes
            self._room.notify()

    def close(self) -> None:
        """Ends its threads, which wait for nothing any more since their transport is closed."""
        with self._room:
            self._num_bytes = 0
            self._room.notify()
        self._given.put(None)
        self._under_way.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever it is, who computes must hear of it
            self._fail(error)

    def _begin_all(self) -> None:
        beside = _Beside(self._device)
        while (blocks := self._given.get()) is not None:
            self._reserve(blocks.num_bytes)
            with beside(after=blocks.ready):
                message, pending = self._begin(blocks)
            self._under_way.put((blocks, message, pending))

    def _reserve(self, num_bytes: int) -> None:
        """Waits until there is memory for `num_bytes`, or nothing is under way."""
        with self._room:
            self._room.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= WINDOW_BYTES)
            self._num_bytes += num_bytes

    def _end_all(self) -> None:
        beside = _Beside(self._device)
        while (under_way := self._under_way.get()) is not None:
            blocks, message, pending = under_way
            with beside():
                pending.wait()
            self._end(blocks, message)
            del blocks, message, pending, under_way  # what waits for the next one must not keep its memory


class SwapLane:
    """Copies blocks between a rank's pool and that of its host, first in, first out, on a thread of its own.

    Args:
        done: is given the report of each move, or the error that ends the lane.
    """

    def __init__(self, host: HostPool, messages: BlockMessages, done: Callable[[Moved | Exception], None]) -> None:
        self._host, self._layers, self._rank, self._done = host, messages.layers, messages.rank, done
        self._device = messages.device
        self._given: queue.SimpleQueue[tuple[MoveKV, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, move: MoveKV) -> None:
        """Begins a move after those before it; what the device has been given up to now comes first, too."""
        self._given.put((move, _mark(self._device)))

    def close(self) -> None:
        """Ends its thread, behind the layer that it is in."""
        self._closing = True
        self._given.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            beside = _Beside(self._device)
            while (given := self._given.get()) is not None:
                move, ready = given
                num_bytes = 0
                for layer in self._layers:
                    if self._closing:
                        return
                    copies = list(self._host.copies(move, layer))
                    num_bytes += sum(target.nbytes for target, _ in copies)
                    self._copy(copies, ready, beside)
                sent: BytesSent = {("host_copy", "same_host"): num_bytes}
                self._done(Moved(rank=self._rank, number=move.number, bytes_sent=sent))
        except Exception as error:  # noqa: BLE001 - whatever it is, who computes must hear of it
            self._done(error)

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None, beside: _Beside) -> None:
        """Copies from the second to the first of each pair; to or from a CUDA device through pinned memory."""
        if self._device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return
        most = max(1, _STAGED_BYTES // copies[0][0].nbytes) if copies else 1
        for first in range(0, len(copies), most):
            now = copies[first : first + most]
            staged = torch.empty(len(now), *now[0][0].shape, dtype=now[0][0].dtype, pin_memory=True)
            with beside(after=ready):
                for room, (_, source) in zip(staged, now, strict=True):
                    room.copy_(source, non_blocking=True)
            with beside(after=ready):
                for room, (target, _) in zip(staged, now, strict=True):
                    target.copy_(room, non_blocking=True)


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
        device, fail = messages.device, self._notify
        self._sending = defaultdict[int, MoveChannel](lambda: MoveChannel(device, self._begin_send, self._left, fail))
        self._receiving = defaultdict[int, MoveChannel](
            lambda: MoveChannel(device, self._begin_receive, self._came, fail)
        )
        self._missing: Counter[int] = Counter()  # layers of moves to this rank, a rank of their source each
        self._leaving: Counter[int] = Counter()  # the final messages of moves from this rank, a peer each; a swap
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self.wakeup, self._wake = os.pipe()
        for end in (self.wakeup, self._wake):
            os.set_blocking(end, False)
        self._waking = threading.Lock()  # nobody writes to a descriptor that is closed, and may be another's by now
        self._swaps = None if host is None else SwapLane(host, messages, self._notify)

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
            for chunk in blocks.cut(_mark(self._messages.device)):
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
