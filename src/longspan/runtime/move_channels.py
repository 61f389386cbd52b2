"""Threads that copy KV blocks: to or from one other rank (`MoveChannel`), or a rank's host (`SwapLane`)."""

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
"""Pinned memory for staging blocks between a CUDA device and its host."""


class _SideStream:
    """A CUDA stream for the transfers of one thread, concurrent with the device's other work. No-op on CPUs.

    Create it in the thread that uses it: the constructor selects the device, since threads start on device 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            torch.cuda.set_device(device)
            self._stream = torch.cuda.Stream(device)

    @contextmanager
    def __call__(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run a block on the stream once `after` has completed. At its end, wait for its transfers."""
        if self._stream is None:
            yield
            return
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class MoveChannel:
    """Sends block slices to one other rank, or receives them from it, first in, first out. Only its threads wait.

    Both ends get the same slices in the same order. The oldest slice in flight here is therefore the oldest at the
    peer, or was not submitted there yet. No deadlock can occur.

    Args:
        begin: allocates a message and starts to send or receive it.
        end: called when the transfer is complete. The memory counts as used until `free`.
        fail: called with any error, such as a lost peer or a lack of memory. The channel then stops.
    """

    def __init__(
        self,
        device: torch.device,
        begin: Callable[[BlockSlice], tuple[Message, Pending]],
        end: Callable[[BlockSlice, Message], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._device, self._begin, self._end, self._fail = device, begin, end, fail
        self._submitted: queue.SimpleQueue[BlockSlice | None] = queue.SimpleQueue()
        self._in_flight: queue.SimpleQueue[tuple[BlockSlice, Message, Pending] | None] = queue.SimpleQueue()
        self._freed = threading.Condition()
        self._num_bytes = 0
        self._threads = [
            threading.Thread(target=self._run, args=(work,), daemon=True) for work in (self._begin_all, self._end_all)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, blocks: BlockSlice) -> None:
        self._submitted.put(blocks)

    def free(self, blocks: BlockSlice) -> None:
        """Release the memory of a message."""
        with self._freed:
            self._num_bytes -= blocks.num_bytes
            self._freed.notify()

    def close(self) -> None:
        """End its threads. Close the transport before, so that they wait for no peer."""
        with self._freed:
            self._num_bytes = 0
            self._freed.notify()
        self._submitted.put(None)
        self._in_flight.put(None)
        for thread in self._threads:
            thread.join(_CLOSE_TIMEOUT_S)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the computing thread raises it
            self._fail(error)

    def _begin_all(self) -> None:
        side_stream = _SideStream(self._device)
        while (blocks := self._submitted.get()) is not None:
            self._reserve(blocks.num_bytes)
            with side_stream(after=blocks.ready):
                message, pending = self._begin(blocks)
            self._in_flight.put((blocks, message, pending))

    def _reserve(self, num_bytes: int) -> None:
        """Wait until `num_bytes` fit the window, or no message is in flight."""
        with self._freed:
            self._freed.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= WINDOW_BYTES)
            self._num_bytes += num_bytes

    def _end_all(self) -> None:
        side_stream = _SideStream(self._device)
        while (transfer := self._in_flight.get()) is not None:
            blocks, message, pending = transfer
            with side_stream():
                pending.wait()
            self._end(blocks, message)
            del blocks, message, pending, transfer  # the wait for the next transfer must not keep their memory


class SwapLane:
    """Copies blocks between a rank's pool and the pool of its host on one thread, first in, first out.

    Args:
        done: called with the report of each move, or with the error that ends the lane.
    """

    def __init__(self, host: HostPool, messages: BlockMessages, done: Callable[[Moved | Exception], None]) -> None:
        self._host, self._messages, self._done = host, messages, done
        self._device = messages.device
        self._submitted: queue.SimpleQueue[tuple[MoveKV, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, move: MoveKV) -> None:
        """Queue a move. It starts after all earlier moves and all work submitted to the device so far."""
        self._submitted.put((move, self._messages.mark()))

    def close(self) -> None:
        """End the thread after its current layer."""
        self._closing = True
        self._submitted.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            side_stream = _SideStream(self._device)
            while (submitted := self._submitted.get()) is not None:
                move, ready = submitted
                num_bytes = 0
                for layer in self._messages.layers:
                    if self._closing:
                        return
                    copies = list(self._host.copies(move, layer))
                    num_bytes += sum(target.nbytes for target, _ in copies)
                    self._copy(copies, ready, side_stream)
                sent: BytesSent = {("host_copy", "same_host"): num_bytes}
                self._done(Moved(rank=self._messages.rank, number=move.number, bytes_sent=sent))
        except Exception as error:  # noqa: BLE001 - the computing thread raises it
            self._done(error)

    def _copy(
        self, copies: Sequence[tuple[Tensor, Tensor]], ready: torch.cuda.Event | None, side_stream: _SideStream
    ) -> None:
        """Copy (target, source) pairs. Copies to or from a CUDA device are staged in pinned memory.

        All tensors have one dtype. Their sizes may differ.
        """
        if self._device.type == "cpu":
            for target, source in copies:
                target.copy_(source)
            return
        batch_size = max(1, _STAGED_BYTES // max(target.nbytes for target, _ in copies)) if copies else 1
        for first in range(0, len(copies), batch_size):
            batch = copies[first : first + batch_size]
            sizes = [target.numel() for target, _ in batch]
            pinned = torch.empty(sum(sizes), dtype=batch[0][0].dtype, pin_memory=True).split(sizes)
            staged = [buffer.view(target.shape) for buffer, (target, _) in zip(pinned, batch, strict=True)]
            with side_stream(after=ready):
                for buffer, (_, source) in zip(staged, batch, strict=True):
                    buffer.copy_(source, non_blocking=True)
            with side_stream(after=ready):
                for buffer, (target, _) in zip(staged, batch, strict=True):
                    target.copy_(buffer, non_blocking=True)
