"""Threads that copy KV blocks: to or from one other rank (`MoveChannel`), or a rank's host (`SwapLane`)."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from longspan.attn.comm import Message, Pending
from longspan.core.steps import BytesSent, MoveKV
from longspan.runtime.block_messages import BlockMessages, BlockSlice
from longspan.runtime.messages import Moved
from longspan.runtime.pool import WINDOW_BYTES

if TYPE_CHECKING:
    from longspan.runtime.host_pool import HostPool

_CLOSE_TIMEOUT_S = 2.0


class SideStream:
    """A CUDA stream for transfers, concurrent with the device's other work. No-op on CPUs.

    Threads share it, since a device has few hardware queues.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def __call__(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Run a block on the stream once `after` has completed. At its end, wait for its transfers."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):  # also selects the device: threads start on device 0
            if after is not None:
                self._stream.wait_event(after)
            yield
            done = torch.cuda.Event()
            done.record()
        done.synchronize()


class MoveChannel:
    """Sends block slices to one other rank, or receives them from it, first in, first out. Only its threads wait.

    Both ends get the same slices in the same order. The oldest slice in flight here is therefore the oldest at the
    peer, or was not submitted there yet. No deadlock can occur.

    Args:
        starting, ending: the streams of `begin` and of the waits for transfers. No transfer waits for the latter.
        begin: allocates a message and starts to send or receive it.
        end: called when the transfer is complete. The memory counts as used until `free`.
        fail: called with any error, such as a lost peer or a lack of memory. The channel then stops.
    """

    def __init__(
        self,
        starting: SideStream,
        ending: SideStream,
        begin: Callable[[BlockSlice], tuple[Message, Pending]],
        end: Callable[[BlockSlice, Message], None],
        fail: Callable[[Exception], None],
    ) -> None:
        self._starting, self._ending, self._begin, self._end, self._fail = starting, ending, begin, end, fail
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
        while (blocks := self._submitted.get()) is not None:
            self._reserve(blocks.num_bytes)
            with self._starting(after=blocks.ready):
                message, pending = self._begin(blocks)
            self._in_flight.put((blocks, message, pending))

    def _reserve(self, num_bytes: int) -> None:
        """Wait until `num_bytes` fit the window, or no message is in flight."""
        with self._freed:
            self._freed.wait_for(lambda: not self._num_bytes or self._num_bytes + num_bytes <= WINDOW_BYTES)
            self._num_bytes += num_bytes

    def _end_all(self) -> None:
        while (transfer := self._in_flight.get()) is not None:
            blocks, message, pending = transfer
            with self._ending():
                pending.wait()
            self._end(blocks, message)
            del blocks, message, pending, transfer  # the wait for the next transfer must not keep their memory


class SwapLane:
    """Copies blocks between a rank's pool and the pool of its host on one thread, first in, first out.

    A CUDA device copies them itself, since the host pool is page-locked: one copy per block, layer and field.

    Args:
        done: called with the report of each move, or with the error that ends the lane.
    """

    def __init__(self, host: HostPool, messages: BlockMessages, done: Callable[[Moved | Exception], None]) -> None:
        self._host, self._messages, self._done = host, messages, done
        self._submitted: queue.SimpleQueue[tuple[MoveKV, int, torch.cuda.Event | None] | None] = queue.SimpleQueue()
        self._num_bytes = Counter[int]()  # by move
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, move: MoveKV, layer: int, ready: torch.cuda.Event | None) -> None:
        """Queue one layer of a move. Its copies start after all earlier ones, once `ready` has completed."""
        self._submitted.put((move, layer, ready))

    def close(self) -> None:
        """End the thread after its current layer."""
        self._closing = True
        self._submitted.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            side_stream = SideStream(self._messages.device)
            while (submitted := self._submitted.get()) is not None:
                move, layer, ready = submitted
                if self._closing:
                    return
                with side_stream(after=ready):
                    for target, source in self._host.copies(move, layer):
                        target.copy_(source, non_blocking=True)
                        self._num_bytes[move.number] += target.nbytes
                if layer == self._messages.layers[-1]:
                    sent: BytesSent = {("host_copy", "same_host"): self._num_bytes.pop(move.number, 0)}
                    self._done(Moved(rank=self._messages.rank, number=move.number, bytes_sent=sent))
        except Exception as error:  # noqa: BLE001 - the computing thread raises it
            self._done(error)
