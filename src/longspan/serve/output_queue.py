"""What comes for one HTTP request: the engine's client puts it in, whoever answers the request takes it out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from longspan.serve.messages import Ended, Update
from longspan.text.input_processor import EngineRequest

News = tuple[int, Update]
"""The index of a job, and what is new of it."""
_MOST_NEWS = 64
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


class Answer:
    """Takes `news` as it comes, or the `whole`; close it to cancel what has not come.

    Attributes:
        accepted: done when all jobs are queued; its exception says why they are not.
        ended: the choices that have ended, each with the index of its job.
    """

    def __init__(self, engine_requests: Sequence[EngineRequest], cancel: Callable[[Answer], None]) -> None:
        self.engine_requests = engine_requests
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: list[tuple[int, Ended]] = []
        self._cancel = cancel
        self._unaccepted, self._unfinished = set(range(len(engine_requests))), set(range(len(engine_requests)))
        self._told: set[int] = set()  # jobs of which somebody has taken news
        self._was_repeated = False
        self._news: deque[News] = deque()
        self._error: QueueFullError | EngineLostError | None = None
        self._changed = asyncio.Event()

    async def news(self) -> list[News]:
        """What has come and was not taken yet; waits if there is nothing; empty when all has been taken.

        Raises:
            EngineLostError, QueueFullError: when the rest cannot come.
        """
        while not self._news and self._error is None and self._unfinished:
            await self._change()
        taken = [self._news.popleft() for _ in range(min(len(self._news), _MOST_NEWS))]
        self._told.update(index for index, _ in taken)
        if not taken and self._error is not None:
            raise self._error
        return taken

    async def whole(self) -> list[News]:
        """Everything, when it is complete; until then, nothing counts as told.

        Raises:
            EngineLostError, QueueFullError: when it cannot be completed.
        """
        while self._unfinished and self._error is None:
            await self._change()
        if self._error is not None:
            raise self._error
        return list(self._news)

    def close(self) -> None:
        """Cancels what is not finished; its KV is freed on every rank."""
        self._unfinished.clear()
        self._news.clear()
        self._changed.set()
        self._cancel(self)

    def accept(self, index: int) -> None:
        """A job is queued."""
        self._unaccepted.discard(index)
        if not self._unaccepted and not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, index: int, update: Update) -> None:
        """There is news of a job."""
        self._news.append((index, update))
        if update.finished:
            self._unfinished.discard(index)
        self._changed.set()

    def end(self, index: int, ended: Ended) -> None:
        """A choice of a job has ended; its last news is about to come."""
        self.ended.append((index, ended))

    def fail(self, error: QueueFullError | EngineLostError) -> None:
        """Nothing more will come."""
        self._error = error
        self._changed.set()
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen: whoever submitted may have left

    def repeat(self) -> bool:
        """Whether what is not finished can be computed from its beginning, which it is then about to be.

        It can be once, and not when something of it has been told already: the second time, it may differ.
        """
        if self._was_repeated or self._told & self._unfinished:
            return False
        self._was_repeated = True
        self._news = deque(news for news in self._news if news[0] not in self._unfinished)
        self.ended = [end for end in self.ended if end[0] not in self._unfinished]
        return True

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
