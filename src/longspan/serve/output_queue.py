"""Outputs of one HTTP request: the engine client puts deltas in, whoever answers the request takes them out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from longspan.serve.messages import Delta, FinishedChoice
from longspan.text.input_processor import EngineRequest

Output = tuple[int, Delta]
"""The index of an engine request, and new tokens of one of its choices."""
_MOST_OUTPUTS = 64
"""So many are handed out at once: making their chunks is not to hold up the event loop."""


class QueueFullError(Exception):
    """The queue has no room for a request; it can be sent again later."""


class EngineLostError(Exception):
    """The engine cannot answer a request, through no fault of the request's sender."""


class RequestFailedError(EngineLostError):
    """The engine goes on, but this request cannot, and would not the next time either.

    Attributes:
        param: the field of the request that is the cause; None when its sender is not to blame.
        status: of the HTTP answer.
    """

    def __init__(self, reason: str, param: str | None = None) -> None:
        super().__init__(reason)
        self.param, self.status = param, 500 if param is None else 400


class OutputQueue:
    """Holds what came for an HTTP request and was not taken; close it to cancel what has not come.

    Attributes:
        accepted: done when the engine core has queued all engine requests; its exception says why it has not.
        finished: the choices that have finished, each with the index of its engine request.
    """

    def __init__(self, engine_requests: Sequence[EngineRequest], cancel: Callable[[OutputQueue], None]) -> None:
        self.engine_requests = engine_requests
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.finished: list[tuple[int, FinishedChoice]] = []
        self._cancel = cancel
        self._unaccepted = set(range(len(engine_requests)))
        self._num_open = {index: request.params.n for index, request in enumerate(engine_requests)}
        self._taken: set[int] = set()  # engine requests of which somebody has taken outputs
        self._was_repeated = False
        self._outputs: deque[Output] = deque()
        self._error: QueueFullError | EngineLostError | None = None
        self._changed = asyncio.Event()

    async def get(self) -> list[Output]:
        """Take what has come; wait if there is nothing; return nothing when all has been taken.

        Raises:
            EngineLostError, QueueFullError: when the rest cannot come.
        """
        while not self._outputs and self._error is None and self._num_open:
            await self._change()
        taken = [self._outputs.popleft() for _ in range(min(len(self._outputs), _MOST_OUTPUTS))]
        self._taken.update(index for index, _ in taken)
        if not taken and self._error is not None:
            raise self._error
        return taken

    async def get_all(self) -> list[Output]:
        """Wait until everything has come, and return it; until then nothing counts as taken.

        Raises:
            EngineLostError, QueueFullError: when it cannot be completed.
        """
        while self._num_open and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error
        return list(self._outputs)

    def close(self) -> None:
        """Cancel what is not finished; its KV is freed on every rank."""
        self._num_open.clear()
        self._outputs.clear()
        self._changed.set()
        self._cancel(self)

    def accept(self, index: int) -> None:
        """Note that the engine core has queued an engine request."""
        self._unaccepted.discard(index)
        if not self._unaccepted and not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, index: int, delta: Delta) -> bool:
        """Add a delta; return whether it is the last one of its engine request."""
        self._outputs.append((index, delta))
        if delta.finish_reason is not None and index in self._num_open:
            self._num_open[index] -= 1
            if not self._num_open[index]:
                del self._num_open[index]
        self._changed.set()
        return index not in self._num_open

    def finish(self, index: int, choice: FinishedChoice) -> None:
        """Note that a choice has finished; its last delta is about to come."""
        self.finished.append((index, choice))

    def fail(self, error: QueueFullError | EngineLostError) -> None:
        """Raise `error` to whoever takes the rest: nothing more will come."""
        self._error = error
        self._changed.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen: whoever submitted may have left

    def repeat(self) -> bool:
        """Forget what is not finished, if it can be computed from its beginning, and return whether it can.

        It can be once, and not when something of it has been taken already: the second time, it may differ.
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
