"""Threads that carry KV blocks: to or from one other rank (`MoveChannel`), or a rank's host (`SwapLane`)."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.comm import Message, Pending
from longspan.core.steps import BytesSent, MoveKV
from longspan.runtime.block_messages import BlockMessages, BlockSlice
from longspan.runtime.messages import Moved
from longspan.runtime.pool import WINDOW_BYTES

if TYPE_CHECKING:
    from longspan.runtime.host_pool import HostPool

_CLOSE_TIMEOUT_S = 2.0
_STAGED_BYTES = 32 * 2**20
"""Pinned memory through which blocks go between a CUDA device and its host."""


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
        self._host, self._messages, self._done = host, messages, done
        self._device = messages.device
        self._given: queue.SimpleQueue[tuple[MoveKV, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, move: MoveKV) -> None:
        """Begins a move after those before it; what the device has been given up to now comes first, too."""
        self._given.put((move, self._messages.mark()))

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
                for layer in self._messages.layers:
                    if self._closing:
                        return
                    copies = list(self._host.copies(move, layer))
                    num_bytes += sum(target.nbytes for target, _ in copies)
                    self._copy(copies, ready, beside)
                sent: BytesSent = {("host_copy", "same_host"): num_bytes}
                self._done(Moved(rank=self._messages.rank, number=move.number, bytes_sent=sent))
        except Exception as error:  # noqa: BLE001 - whatever it is, who computes must hear of it
            self._done(error)

    def _copy(self, copies: Sequence[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None, beside: _Beside) -> None:
        """Copies from the second to the first of each pair; to or from a CUDA device through pinned memory.

        All have one type; their sizes may differ.
        """
        if self._device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return
        most = max(1, _STAGED_BYTES // max(target.nbytes for target, _ in copies)) if copies else 1
        for first in range(0, len(copies), most):
            now = copies[first : first + most]
            sizes = [target.numel() for target, _ in now]
            pinned = torch.empty(sum(sizes), dtype=now[0][0].dtype, pin_memory=True).split(sizes)
            staged = [room.view(target.shape) for room, (target, _) in zip(pinned, now, strict=True)]
            with beside(after=ready):
                for room, (_, source) in zip(staged, now, strict=True):
                    room.copy_(source, non_blocking=True)
            with beside(after=ready):
                for room, (target, _) in zip(staged, now, strict=True):
                    target.copy_(room, non_blocking=True)
