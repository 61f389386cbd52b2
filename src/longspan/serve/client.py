"""The HTTP face's side of the engine process: starts it, watches it, and talks to it without blocking."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from longspan.jobs import Job
from longspan.runtime.local import make_run_dir
from longspan.serve.messages import (
    Accepted,
    Add,
    Cancel,
    Command,
    Ended,
    EngineSetup,
    Failed,
    NotStarted,
    QueueFull,
    Quit,
    Report,
    Restarted,
    Restarting,
    Started,
    Stats,
    Turn,
    address,
)
from longspan.serve.updates import Update

State = Literal["starting", "serving", "restarting", "down"]
_log = logging.getLogger("longspan")
_MOST_STARTS = 3
"""So many engine processes may end, one after the other, without a token."""
_QUIT_TIMEOUT_S = 10.0


class QueueFullError(Exception):
    """The queue has no room for a request; it can be sent again later."""


class EngineLostError(Exception):
    """The engine cannot answer a request, through no fault of the request's sender."""


class Answer:
    """What comes for the jobs of one HTTP request: iterate over the updates; close it to cancel what has not come.

    Attributes:
        ended: what is told of each choice when it has ended, before its last update.
    """

    def __init__(self, jobs: Sequence[Job], cancel: Callable[[Answer], None]) -> None:
        self.jobs = jobs
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: list[Ended] = []
        self.has_updates = self.was_replayed = False
        self._cancel = cancel
        self._updates: asyncio.Queue[tuple[int, Update] | EngineLostError] = asyncio.Queue()
        self._num_unaccepted = self._num_unfinished = len(jobs)

    def accept(self) -> None:
        """One more job is queued."""
        self._num_unaccepted -= 1
        if not self._num_unaccepted and not self.accepted.done():
            self.accepted.set_result(None)

    def put(self, index: int, update: Update) -> None:
        """There is news of a job."""
        self.has_updates = True
        self._updates.put_nowait((index, update))

    def fail(self, error: QueueFullError | EngineLostError) -> None:
        """Nothing more will come."""
        if not self.accepted.done():
            self.accepted.set_exception(error)
            self.accepted.exception()  # seen: whoever submitted may have left
        elif isinstance(error, EngineLostError):
            self._updates.put_nowait(error)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """Job indices and updates; raises EngineLostError when the rest cannot come."""
        while self._num_unfinished:
            item = await self._updates.get()
            if isinstance(item, EngineLostError):
                self._num_unfinished = 0
                raise item
            self._num_unfinished -= item[1].finished
            yield item

    def close(self) -> None:
        """Cancels what is not finished; its KV is freed on every rank."""
        self._num_unfinished = 0
        self._cancel(self)


class EngineClient:
    """One engine process at a time; a new one is started when it ends by itself.

    Attributes:
        state: `serving` when requests are computed; `down` when no engine process could be kept alive.
        started: what the first engine process said of the model.
        stats: the latest.
        on_ended, on_stats, on_tokens: called with what metrics are made of.
        down: set when the state is.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.state: State = "starting"
        self.started: Started | None = None
        self.stats: Stats | None = None
        self.on_ended: Callable[[Ended], None] = lambda _: None
        self.on_stats: Callable[[Stats], None] = lambda _: None
        self.on_tokens: Callable[[int], None] = lambda _: None
        self.down = asyncio.Event()
        self._setup = setup
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[Answer, int]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._connected = False
        self._keeper: asyncio.Task[None] | None = None
        self._num_starts = 0
        self._closing = False
        self._reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)

    async def start(self) -> Started:
        """Starts the engine process and waits until it can serve.

        Raises:
            ValueError: when the setup is wrong.
            EngineLostError: when it does not start for another reason.
        """
        first: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(first))
        return await first

    @property
    def num_unfinished(self) -> int:
        """Jobs whose answers somebody waits for."""
        return len(self._waiting)

    async def submit(self, jobs: Sequence[Job]) -> Answer:
        """Queues all jobs of a request, or none.

        Raises:
            QueueFullError: when they have no place in the queue.
            EngineLostError: when there is no engine.
        """
        if self.state == "down" or self._closing:
            raise EngineLostError("the engine is down")
        answer = Answer(jobs, self._cancel)
        for index, job in enumerate(jobs):
            number = next(self._numbers)
            self._waiting[number] = answer, index
            self._send(Add.of(number, job))
        try:
            await answer.accepted
        except BaseException:
            answer.close()
            raise
        return answer

    async def close(self) -> None:
        """Ends the engine process and its workers; all that is unfinished fails."""
        self._closing = True
        self.fail_all("the server is shutting down")
        self._send(Quit())
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _QUIT_TIMEOUT_S)
            if self._process.returncode is None:
                self._process.kill()
        if self._keeper is not None:
            await self._keeper
        self.state = "down"

    def _cancel(self, answer: Answer) -> None:
        for number in self._numbers_of(answer):
            del self._waiting[number]
            self._send(Cancel(number))

    def _numbers_of(self, answer: Answer) -> list[int]:
        return [number for number, (other, _) in self._waiting.items() if other is answer]

    def _send(self, command: Command) -> None:
        """Into the socket's own queue, which has no bound and does not wait. A process that starts is told later."""
        if self._socket is not None and self._connected:
            zmq.Socket.send(self._socket, msgspec.msgpack.encode(command), zmq.NOBLOCK)

    async def _keep(self, first: asyncio.Future[Started]) -> None:
        """Starts engine processes, one after the end of the other."""
        while not self._closing and self._num_starts < _MOST_STARTS:
            self._num_starts += 1
            reason = await self._live(first)
            if first.done() and first.exception() is not None:
                break
            if not first.done():
                first.set_exception(EngineLostError(reason))
                break
            if not self._closing:
                _log.error("%s; starting another engine process", reason)
        self.state = "down"
        self.down.set()
        self.fail_all("the engine is down")

    async def _live(self, first: asyncio.Future[Started]) -> str:
        """The life of one engine process; why it ended."""
        folder = make_run_dir()
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.PAIR)
            socket.sndhwm = socket.rcvhwm = 0
            socket.bind(address(folder))
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "longspan.serve.engine_main", folder),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # signals to the terminal's group are ours to handle
            )
            assert process.stdin is not None, "asked for a pipe"
            process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
            self._socket, self._connected = socket, False
            listener = asyncio.create_task(self._listen(socket, first))
            code = await process.wait()
            with contextlib.suppress(TimeoutError):  # its last words may be on their way
                await asyncio.wait_for(asyncio.shield(listener), 0.2)
            listener.cancel()
            process.stdin.close()
            return f"the engine process ended with code {code}"
        finally:
            self._socket = None
            self.state = "restarting"
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)

    def _replay(self) -> None:
        """A new engine process knows nothing: what has said nothing yet is sent again, once; the rest fails."""
        for answer in {answer for answer, _ in self._waiting.values()}:
            if answer.has_updates or answer.was_replayed:
                self._fail(answer, EngineLostError("the engine process was lost"))
            answer.was_replayed = True
        for number, (answer, index) in self._waiting.items():
            self._send(Add.of(number, answer.jobs[index]))

    async def _listen(self, socket: zmq.asyncio.Socket, first: asyncio.Future[Started]) -> None:
        while True:
            self._take(self._reports.decode(await socket.recv()), first)

    def _take(self, report: Report, first: asyncio.Future[Started]) -> None:
        match report:
            case Turn():
                self._take_turn(report)
            case Accepted(number) if number in self._waiting:
                self._waiting[number][0].accept()
            case QueueFull(number, reason) if number in self._waiting:
                self._fail(self._waiting[number][0], QueueFullError(reason))
            case Failed(number, reason) if number in self._waiting:
                self._fail(self._waiting[number][0], EngineLostError(reason))
            case Started():
                self.started, self.state, self._connected = report, "serving", True
                self._replay()
                if not first.done():
                    first.set_result(report)
            case NotStarted():
                error = ValueError(report.reason) if report.is_mistake else EngineLostError(report.reason)
                if not first.done():
                    first.set_exception(error)
            case Restarting(reason):
                _log.error("%s; new workers are being started", reason)
                self.state = "restarting"
            case Restarted():
                self.state = "serving"

    def _take_turn(self, turn: Turn) -> None:
        if turn.updates:
            self._num_starts = 1
        for ended in turn.ended:
            self.on_ended(ended)
            if ended.id in self._waiting:
                self._waiting[ended.id][0].ended.append(ended)
        for number, update in turn.updates:
            self.on_tokens(sum(len(choice.token_ids) for choice in update.choices))
            if number in self._waiting:
                answer, index = self._waiting[number]
                answer.put(index, update)
                if update.finished:
                    del self._waiting[number]
        if turn.stats is not None:
            self.stats = turn.stats
            self.on_stats(turn.stats)

    def fail_all(self, reason: str) -> None:
        """Ends all requests with an error."""
        for answer in {answer for answer, _ in self._waiting.values()}:
            self._fail(answer, EngineLostError(reason))

    def _fail(self, answer: Answer, error: QueueFullError | EngineLostError) -> None:
        """Ends a request with an error, before or after it was accepted."""
        self._cancel(answer)
        answer.fail(error)
