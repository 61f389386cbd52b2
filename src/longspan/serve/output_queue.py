"""The queue of the engine core's outputs for one HTTP request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from longspan.serve import messages
from longspan.serve.errors import ServeError
from longspan.text.input_processor import EngineRequest

Output = tuple[int, messages.Delta]
"""The index of an engine request, and new tokens of one of its choices."""
_MAX_OUTPUTS = 64
"""Outputs that `get` returns at once. Making the chunks of more outputs would block the event loop longer."""


class OutputQueue:
    """Outputs of an HTTP request that were received and not taken. Closing it cancels the unfinished choices.

    `get` and `get_all` raise the error if an engine request cannot be finished.

    Attributes:
        accepted: done when the engine core has queued all engine requests, or has refused one, with the exception.
        finished: the choices that have finished, each with the index of its engine request.
        expected_ttft_s: the latest predicted first token of its engine requests. None without a prediction.
    """

    def __init__(self, engine_requests: Sequence[EngineRequest], cancel: Callable[[OutputQueue], None]) -> None:
        self.engine_requests = engine_requests
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished: list[tuple[int, messages.FinishedChoice]] = []
        self.expected_ttft_s: float | None = None
        self._progress: dict[int, tuple[int, int]] = {}  # by engine request: computed and all prompt tokens
        self._has_progress = False
        self._cancel = cancel
        self._unaccepted = set(range(len(engine_requests)))
        self._num_open = {index: request.params.n for index, request in enumerate(engine_requests)}
        self._taken: set[int] = set()  # engine requests whose outputs `get` has returned
        self._was_repeated = False
        self._outputs: deque[Output] = deque()
        self._error: ServeError | None = None
        self._changed = asyncio.Event()

    async def get(self) -> list[Output] | None:
        """Remove and return outputs, waiting for the first. Return an empty list if all were taken.

        Return None if there is progress of prompts instead, see `take_progress`.
        """
        while not self._outputs and self._error is None and self._num_open:
            if self._has_progress:
                return None
            await self._change()
        self._has_progress = False
        taken = [self._outputs.popleft() for _ in range(min(len(self._outputs), _MAX_OUTPUTS))]
        self._taken.update(index for index, _ in taken)
        if not taken and self._error is not None:
            raise self._error
        return taken

    async def get_all(self) -> list[Output]:
        """Wait for all outputs and return them. Until then none counts as taken."""
        while self._num_open and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error
        return list(self._outputs)

    def close(self) -> None:
        """Cancel the unfinished choices. Their KV is freed on every rank."""
        self._num_open.clear()
        self._outputs.clear()
        self._changed.set()
        self._cancel(self)

    def take_progress(self) -> tuple[int, int] | None:
        """Return the computed and all tokens of the prompts in progress, or None if that is no news."""
        has_progress, self._has_progress = self._has_progress, False
        if not has_progress:
            return None
        computed, totals = zip(*self._progress.values(), strict=True)
        return sum(computed), sum(totals)

    def report(self, index: int, num_computed: int, num_prompt: int) -> None:
        """Record the progress of a prompt."""
        self._progress[index] = num_computed, num_prompt
        self._has_progress = True
        self._changed.set()

    def accept(self, index: int, expected_ttft_s: float | None = None) -> None:
        """Record that the engine core has queued an engine request."""
        if expected_ttft_s is not None:
            self.expected_ttft_s = max(expected_ttft_s, self.expected_ttft_s or 0.0)
        self._unaccepted.discard(index)
        if not self._unaccepted and not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, index: int, delta: messages.Delta) -> bool:
        """Add a delta. Return True if it is the last delta of its engine request."""
        self._outputs.append((index, delta))
        if delta.finish_reason is not None and index in self._num_open:
            self._num_open[index] -= 1
            if not self._num_open[index]:
                del self._num_open[index]
        self._changed.set()
        return index not in self._num_open

    def fail(self, error: ServeError) -> None:
        """Let `get` and `get_all` raise `error` instead of waiting for more outputs."""
        self._error = error
        self._changed.set()
        if not self.accepted.done():
            end_with(self.accepted, error)

    def repeat(self) -> bool:
        """Discard the outputs of unfinished engine requests, to compute them again. Return False if that is impossible.

        It is possible once, and only if none of these outputs was taken, since recomputed outputs may differ.
        """
        if self._was_repeated or self._taken & self._num_open.keys():
            return False
        self._was_repeated = True
        self._outputs = deque(output for output in self._outputs if output[0] not in self._num_open)
        self.finished = [pair for pair in self.finished if pair[0] not in self._num_open]
        self._num_open = {index: self.engine_requests[index].params.n for index in self._num_open}
        return True

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def end_with(future: asyncio.Future[Any], error: Exception) -> None:
    """End a future with an error. asyncio does not log the error if the waiting task was cancelled."""
    future.set_exception(error)
    future.exception()
