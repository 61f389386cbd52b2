"""A rank of `slow_link.py`: a worker that can record the times of its work, its waits, and its messages."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from host_ranks import run_rank

from longspan.attn.comm import Calls, Pending
from longspan.runtime import rank as rank_module
from longspan.runtime import worker as worker_module
from longspan.runtime.timing import Stopwatch, TimedTransport

_MAX_SLICES = 400_000


class Slice(msgspec.Struct, frozen=True):
    """A period of work, or of a transfer, from its start to the end of the receiver's wait."""

    name: str
    kind: str
    start_s: float
    stop_s: float


_slices: deque[Slice] = deque(maxlen=_MAX_SLICES)


class _Watch(Stopwatch):
    """Also records each period of a category."""

    _since_s = 0.0

    def switch(self, category: str) -> str:
        before, now_s = super().switch(category), time.monotonic()
        if before != category:
            _slices.append(Slice(before, "work", self._since_s, now_s))
            self._since_s = now_s
        return before


class _Transport(TimedTransport):
    """Also records each call, from its start to the end of the wait for it."""

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        return _Pending(super().start(sends, receives, tag), sum(buffer.nbytes for _, buffer in receives))


class _Pending:
    def __init__(self, inner: Pending, num_bytes: int) -> None:
        self._inner, self._num_bytes, self._start_s = inner, num_bytes, time.monotonic()

    def wait(self) -> None:
        self._inner.wait()
        _slices.append(Slice(f"{self._num_bytes / 1e6:.2f} MB", "transfer", self._start_s, time.monotonic()))


def main() -> None:
    """Run a rank. Record its times if LONGSPAN_TRACE is set."""
    trace = os.environ.get("LONGSPAN_TRACE")
    if trace:
        rank_module.Stopwatch = _Watch  # type: ignore[attr-defined]  # users cannot choose these classes
        worker_module.TimedTransport = _Transport  # type: ignore[attr-defined]
    command = run_rank()
    if trace:
        Path(f"{trace}.rank{command.rank}").write_bytes(msgspec.json.encode(list(_slices)))


if __name__ == "__main__":
    main()
