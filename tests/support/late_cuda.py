"""Replaces `torch.cuda` on a CPU: copies of a side stream run as late as a device may run them, or at once.

Streams have clocks. A copy takes `copy_s`, and a test advances the clock of the computation. An event waits for the
clock at which it was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LateStream:
    def __init__(self) -> None:
        self.clock_s, self.copies = 0.0, list[Callable[[], object]]()

    def wait_event(self, event: LateEvent) -> None:
        event.run()
        self.clock_s = max(self.clock_s, event.clock_s)


class LateEvent:
    def __init__(self) -> None:
        self.clock_s, self.stream, self.num_copies = 0.0, LateStream(), 0

    def record(self, stream: LateStream) -> None:
        self.clock_s, self.stream, self.num_copies = stream.clock_s, stream, len(stream.copies)

    def run(self) -> None:
        """Run the copies before this event that have not run yet."""
        for number in range(self.num_copies):
            self.stream.copies[number]()
            self.stream.copies[number] = _do_nothing


class LateCuda:
    """The functions of `torch.cuda` for streams and events of one device."""

    Event = LateEvent

    def __init__(self, *, is_early: bool, copy_s: float = 0.0) -> None:
        self.computation, self.copying = LateStream(), LateStream()
        self.copy_s, self.num_copies, self._is_early = copy_s, 0, is_early

    def Stream(self, _: torch.device) -> LateStream:  # noqa: N802 - as in PyTorch
        return self.copying

    def current_stream(self, _: torch.device) -> LateStream:
        return self.computation

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        """Put the copies of a block on a stream."""
        with _Captured(self, stream):
            yield

    def add(self, stream: LateStream, copy: Callable[[], object]) -> None:
        """Append a copy to a stream."""
        stream.clock_s += self.copy_s
        self.num_copies += 1
        if self._is_early:
            copy()
        else:
            stream.copies.append(copy)


class _Captured(TorchDispatchMode):
    def __init__(self, cuda: LateCuda, stream: LateStream) -> None:
        super().__init__()
        self._cuda, self._stream = cuda, stream

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        target, source, is_async = args
        assert is_async and target.is_contiguous() and source.is_contiguous(), "else the host takes part in the copy"
        self._cuda.add(self._stream, lambda: target.copy_(source))
        return target


def _do_nothing() -> None:
    pass
