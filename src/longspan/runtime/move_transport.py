"""Messages whose two ends do not wait for each other: threads do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.comm import CommError, Pending, peer_errors, start_receives, start_sends


class MoveTransport:
    """A `Transport` whose sends take as long as they take: a thread keeps their buffers and waits for them.

    `start` waits for nothing. What it returns is to be waited for in a thread, too.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, staged: bool, device: torch.device) -> None:
        self._group, self._staged, self._device = process_group, staged, device
        self.tagged = dist.get_backend(process_group) != "nccl"
        self._sends: queue.SimpleQueue[tuple[dist.Work, Tensor]] = queue.SimpleQueue()
        self._num_started = self._num_left = 0
        self._error: CommError | None = None
        threading.Thread(target=self._wait_for_sends, daemon=True).start()

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> Pending:
        """See `Transport`."""
        if self._error is not None:
            raise self._error
        with peer_errors():
            arrival = start_receives(receives, self._group, tag, staged=self._staged)
            for leaving in start_sends(sends, self._group, tag, staged=self._staged):
                self._num_started += 1
                self._sends.put(leaving)
        return _Beside(arrival, self._device)

    def flush(self) -> None:
        """Does not wait: peers may be in other steps."""

    @property
    def is_idle(self) -> bool:
        """Whether all sends have left."""
        return self._num_started == self._num_left

    def _wait_for_sends(self) -> None:
        while True:
            work, _ = self._sends.get()
            try:
                with _beside(self._device), peer_errors():
                    work.wait()
            except CommError as error:
                self._error = error
                return
            self._num_left += 1


class _Beside:
    def __init__(self, inner: Pending, device: torch.device) -> None:
        self._inner, self._device = inner, device

    def wait(self) -> None:
        with _beside(self._device):
            self._inner.wait()


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """A block that waits for transfers does so on a CUDA device, too, whose other work goes on."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
