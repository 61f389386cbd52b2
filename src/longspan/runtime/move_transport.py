"""Messages whose two ends do not wait for each other: threads do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.comm import Pending, peer_errors, start_receives, start_sends


class MoveTransport:
    """A `Transport` whose sends take as long as they take: what `start` returns keeps their buffers and waits for them.

    `start` itself waits for nothing. Both are for threads that have nothing else to do.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, *, staged: bool, device: torch.device) -> None:
        self._group, self._staged, self._device = process_group, staged, device
        self.tagged = dist.get_backend(process_group) != "nccl"

    def start(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], tag: int) -> Pending:
        """See `Transport`."""
        with peer_errors():
            arrival = start_receives(receives, self._group, tag, staged=self._staged)
            leaving = list(start_sends(sends, self._group, tag, staged=self._staged))
        return _Beside(arrival, leaving, self._device)

    def flush(self) -> None:
        """Does not wait: peers may be in other steps."""


class _Beside:
    def __init__(self, arrival: Pending, leaving: Sequence[tuple[dist.Work, Tensor]], device: torch.device) -> None:
        self._arrival, self._leaving, self._device = arrival, leaving, device

    def wait(self) -> None:
        """Until all is there, and all has left."""
        with beside(self._device):
            self._arrival.wait()
            with peer_errors():
                for work, _ in self._leaving:
                    work.wait()


def mark(device: torch.device) -> torch.cuda.Event | None:
    """The moment at which a CUDA device is done with what it has been given up to now."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@contextmanager
def beside(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """A block that waits for transfers does so on a CUDA device, too, whose other work goes on. It begins `after`."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
