"""Seconds of a worker per category. Categories are exclusive: a nested category pauses the outer one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from longspan.attn.comm import Calls, Pending, Sums, Transport

_CATEGORIES = ("attention", "linear", "other", "messages", "controller")
"""`attention` excludes its messages. `linear` is linear layers, or fused layers except attention. `messages` and
`controller` are waits.
"""
_WAITING = {"messages", "controller"}


class Stopwatch:
    """Sums seconds per category. Does nothing unless `enabled`, since reading the clock takes time.

    Waits are measured by wall clock. Computation on a CPU is measured by thread time, so that ranks on one core do not
    count each other's work. On CUDA devices, each change of category synchronizes the device. The shares are then
    correct, but the total is longer than without the stopwatch.
    """

    def __init__(self, *, enabled: bool, device: torch.device) -> None:
        self.enabled, self._is_cuda = enabled, device.type == "cuda"
        self._seconds = dict.fromkeys(_CATEGORIES, 0.0)
        self._current, self._since = "controller", self._now("controller")

    def switch(self, category: str) -> str:
        """Count time from now on as `category`. Return the previous category."""
        before = self._current
        if self.enabled and category != before:
            if self._is_cuda:
                torch.cuda.synchronize()
            self._seconds[before] += self._now(before) - self._since
            self._current, self._since = category, self._now(category)
        return before

    def _now(self, category: str) -> float:
        return time.perf_counter() if self._is_cuda or category in _WAITING else time.thread_time()

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        before = self.switch(category)
        try:
            yield
        finally:
            self.switch(before)

    def seconds(self) -> dict[str, float]:
        """Return seconds since the start, up to the latest change of category. Empty unless enabled."""
        return dict(self._seconds) if self.enabled else {}

    def watch_linear(self, module: nn.Module) -> None:
        if not self.enabled:
            return
        from longspan.model.fused import ReplacedForward  # noqa: PLC0415 - only with recorded times

        for layer in module.modules():
            if isinstance(layer, nn.Linear) or isinstance(vars(layer).get("forward"), ReplacedForward):
                layer.register_forward_pre_hook(self._enter_linear)
                layer.register_forward_hook(self._leave_linear)

    def _enter_linear(self, *_: object) -> None:
        self.switch("linear")

    def _leave_linear(self, *_: object) -> None:
        self.switch("other")


class TimedTransport:
    """A transport whose calls count as `messages`."""

    def __init__(self, inner: Transport, watch: Stopwatch) -> None:
        self._inner, self._watch, self.tagged = inner, watch, inner.tagged
        self.sums = None if inner.sums is None else self._timed(inner.sums)

    def start(self, sends: Calls, receives: Calls, tag: int) -> Pending:
        with self._watch.during("messages"):
            return _TimedPending(self._inner.start(sends, receives, tag), self._watch)

    def complete_sends(self) -> None:
        with self._watch.during("messages"):
            self._inner.complete_sends()

    def _timed(self, sums: Sums) -> Sums:
        def add(ranks: Sequence[int], tensor: Tensor) -> Tensor:
            with self._watch.during("messages"):
                return sums(ranks, tensor)

        return add


class _TimedPending:
    def __init__(self, inner: Pending, watch: Stopwatch) -> None:
        self._inner, self._watch = inner, watch

    def wait(self) -> None:
        with self._watch.during("messages"):
            self._inner.wait()
