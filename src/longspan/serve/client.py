"""The API server's client of the engine core: starts it, watches it, and talks to it without blocking."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from longspan.policy.spec import PolicySettings, option_text
from longspan.runtime.executor.processes import make_run_dir
from longspan.serve.messages import (
    Accepted,
    Add,
    Cancel,
    Command,
    EngineSetup,
    Failed,
    NotStarted,
    PolicyRefused,
    PolicySet,
    QueueFull,
    Quit,
    Report,
    Restarted,
    Restarting,
    SetPolicy,
    Started,
    Stats,
    StepOutputs,
    address,
)
from longspan.serve.output_queue import EngineLostError, OutputQueue, QueueFullError, RequestFailedError
from longspan.text.input_processor import EngineRequest

State = Literal["starting", "serving", "restarting", "down"]
_log = logging.getLogger("longspan")
_ENGINE_MODULE = "longspan.serve.engine_core"
_MOST_STARTS = 3
"""So many engine cores may end, one after the other, without a token."""
_QUIT_TIMEOUT_S = 10.0
_LAST_WORDS_S = 0.2
"""The last messages of an engine core that has ended may be on their way for so long."""
_RESTART_TIMEOUT_S = 900.0
"""An engine core that starts new workers may say nothing for so long."""
_NUM_TICKS = 8
"""Silence is measured in so many parts: one is long if this process was stopped, but not all are."""


class PolicyRefusedError(ValueError):
    """The engine core did not change an option; the message says why."""


class PolicyState:
    """The engine's policy as the API server knows it, whatever becomes of engine cores.

    Attributes:
        settings: those in force; None until an engine core has told them.
    """

    def __init__(self) -> None:
        self.settings: PolicySettings | None = None
        self._asked: dict[int, asyncio.Future[PolicySettings]] = {}
        self._changes: dict[str, str] = {}

    @property
    def changes(self) -> dict[str, str]:
        """Return the options that a new engine core is to be sent, to be set as the last one was."""
        return dict(self._changes)

    def ask(self, number: int) -> asyncio.Future[PolicySettings]:
        """Return a future for the answer to the change that was sent under this number.

        The future raises PolicyRefusedError, or EngineLostError when there is no engine any more.
        """
        self._asked[number] = future = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        return future

    def take(self, report: PolicySet | PolicyRefused) -> None:
        """Take the answer to a change, or the settings of an engine core that starts."""
        future = None if report.id is None else self._asked.get(report.id)
        if isinstance(report, PolicySet):
            self.settings = report.settings
            if report.id is not None:
                self._changes = {
                    name: option_text(report.settings.options[name]) for name in report.settings.changeable
                }
        if future is None or future.done():
            return
        if isinstance(report, PolicySet):
            future.set_result(report.settings)
        else:
            future.set_exception(PolicyRefusedError(report.reason))

    def lose(self, reason: str) -> None:
        """Fail all changes that wait for an engine core that is gone."""
        for future in list(self._asked.values()):
            if not future.done():
                future.set_exception(EngineLostError(reason))


class EngineClient:
    """Keeps one engine core at a time; a new one is started when it ends by itself.

    Attributes:
        state: `serving` when requests are computed; `down` when no engine core could be kept alive.
        started: what the first engine core said of the model.
        stats: the latest.
        policy: what decides, and how it is set.
        on_step: called with all that metrics are made of.
        on_loss: called when an engine core that has served is lost.
        down: set when the state is.
    """

    def __init__(self, setup: EngineSetup) -> None:
        self.state: State = "starting"
        self.started: Started | None = None
        self.stats: Stats | None = None
        self.policy = PolicyState()
        self.on_step: Callable[[StepOutputs], None] = lambda _: None
        self.on_loss: Callable[[], None] = lambda: None
        self.down = asyncio.Event()
        self._setup = setup
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[OutputQueue, int]] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._connected = self._was_heard = False
        self._keeper: asyncio.Task[None] | None = None
        self._num_starts = 0
        self._closing = False
        self._reports: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)

    async def start(self) -> Started:
        """Start the engine core and wait until it can serve.

        Raises:
            ValueError: when the setup is wrong.
            EngineLostError: when it does not start for another reason.
        """
        first: asyncio.Future[Started] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(first))
        return await asyncio.shield(first)  # whoever starts it may give up waiting

    @property
    def num_unfinished(self) -> int:
        """Count the engine requests that are not finished."""
        return len(self._waiting)

    async def submit(self, engine_requests: Sequence[EngineRequest]) -> OutputQueue:
        """Queue all engine requests of an HTTP request, or none.

        Raises:
            QueueFullError: when they have no place in the queue.
            EngineLostError: when there is no engine.
        """
        if self.state == "down" or self._closing:
            raise EngineLostError("the engine is down")
        self._check_room(engine_requests)
        queue = OutputQueue(engine_requests, self._cancel)
        try:
            for index, engine_request in enumerate(engine_requests):
                number = next(self._numbers)
                self._waiting[number] = queue, index
                self._send(Add.of(number, engine_request))
            await queue.accepted
        except BaseException:
            queue.close()
            raise
        return queue

    async def update_policy(self, options: dict[str, str]) -> PolicySettings:
        """Change options of the policy, also for engine cores to come; return its settings then.

        Raises:
            PolicyRefusedError: when the engine refuses one; nothing has changed then.
            EngineLostError: when there is no engine, or none any more.
        """
        if self._closing or not self._connected:
            raise EngineLostError(f"the engine is {self.state}")
        return await self._set_policy(options)

    def _set_policy(self, options: dict[str, str]) -> asyncio.Future[PolicySettings]:
        number = next(self._numbers)
        answer = self.policy.ask(number)
        self._send(SetPolicy(number, options))
        return answer

    async def close(self, at_once: asyncio.Event | None = None) -> None:
        """End the engine core and its workers, by force when `at_once` is set; all that is unfinished fails."""
        self._closing = True
        self.fail_all("the server is shutting down")
        if self.state == "serving" and self._process is not None:  # else it would not listen: it is killed
            self._send(Quit())
            waits = [asyncio.create_task(self._process.wait())]
            if at_once is not None:
                waits.append(asyncio.create_task(at_once.wait()))
            await asyncio.wait(waits, timeout=_QUIT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper

    def _check_room(self, engine_requests: Sequence[EngineRequest]) -> None:
        """Bound what an engine core that starts, hangs or is busy has not taken yet; it bounds its own queue.

        Raises:
            QueueFullError: when there is no room.
        """
        serving = self.state == "serving"
        waiting = [
            queue.engine_requests[index]
            for queue, index in self._waiting.values()
            if not serving or not queue.accepted.done()
        ]
        # An engine that serves may run some at once.
        room_engine_requests, room_tokens = self._room() if serving else (0, 0)
        max_engine_requests, most_tokens = self._setup.max_num_queued_reqs, self._setup.max_num_queued_tokens
        num_engine_requests, num_tokens = (
            len(waiting) + len(engine_requests),
            sum(len(engine_request.token_ids) for engine_request in (*waiting, *engine_requests)),
        )
        if max_engine_requests is not None and num_engine_requests > max_engine_requests + room_engine_requests:
            words = f"{num_engine_requests} requests would wait for the engine"
            raise QueueFullError(
                f"{words}, of at most {max_engine_requests + room_engine_requests} (--max-num-queued-reqs)"
            )
        if most_tokens is not None and waiting and num_tokens > most_tokens + room_tokens:
            words = f"prompts of {num_tokens} tokens would wait for the engine"
            raise QueueFullError(f"{words}, of at most {most_tokens + room_tokens} (--max-num-queued-tokens)")

    def _room(self) -> tuple[int, int]:
        """Return how many requests and tokens an engine holds beside its queue."""
        assert self.started is not None, "it serves"
        started = self.started
        return started.num_instances * started.max_num_seqs, started.num_kv_blocks * started.block_size

    def _cancel(self, queue: OutputQueue) -> None:
        for number in [number for number, (other, _) in self._waiting.items() if other is queue]:
            del self._waiting[number]
            self._send(Cancel(number))

    def _send(self, command: Command) -> None:
        """Put a command into the socket's own queue, which has no bound; a process that starts gets it later."""
        if self._socket is not None and self._connected:
            # The asyncio socket's own method: after a plain one, a message that comes meanwhile would wake nobody.
            sent = asyncio.ensure_future(self._socket.send(msgspec.msgpack.encode(command), zmq.NOBLOCK))
            error = sent.exception()
            if error is not None and not isinstance(error, zmq.Again):  # Again: it has just ended, and the next is told
                raise error

    async def _keep(self, first: asyncio.Future[Started]) -> None:
        """Start engine cores, one after the end of the other."""
        reason = "the engine was stopped"
        try:
            while not self._closing and self._num_starts < _MOST_STARTS:
                self._num_starts += 1
                reason = await self._live(first)
                if not first.done() or first.exception() is not None:
                    break
                if not self._closing:
                    _log.error("%s; starting another engine process", reason)
        finally:
            self.state = "down"
            self.down.set()
            self.fail_all("the engine is down")
            if not first.done():
                first.set_exception(EngineLostError(reason))
                first.exception()  # seen: whoever started it may have left

    async def _live(self, first: asyncio.Future[Started]) -> str:
        """Run one engine core and return why it ended."""
        folder = make_run_dir()
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.PAIR)
            socket.sndhwm = socket.rcvhwm = 0
            socket.bind(address(folder))
            self._process = process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", _ENGINE_MODULE, folder),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # signals to the terminal's group are ours to handle
            )
            try:
                assert process.stdin is not None, "asked for a pipe"
                process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
                self._socket, self._connected = socket, False
                return await self._hear(process, socket, first)
            finally:
                await _end(process)
        except OSError as error:
            return f"the engine process cannot be started ({error})"
        finally:
            was_connected, self._socket, self._connected = self._connected, None, False
            self.state = "restarting"
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            self.policy.lose("the engine process was lost")
            if was_connected:
                self._lose_outputs()
                self.stats = None
                self.on_loss()

    async def _hear(
        self, process: asyncio.subprocess.Process, socket: zmq.asyncio.Socket, first: asyncio.Future[Started]
    ) -> str:
        """Take all that an engine core says until it ends or falls silent; return which of the two."""
        listener, ended = asyncio.create_task(self._listen(socket, first)), asyncio.create_task(process.wait())
        silent = asyncio.create_task(self._silence())
        try:
            await asyncio.wait({listener, ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            self.state = "restarting"
            if not listener.done():
                await asyncio.wait({listener}, timeout=_LAST_WORDS_S)
            if listener.done():
                listener.result()  # it ends by an error only
            if silent.done():
                return f"the engine process has said nothing for {silent.result():g} s (--engine-timeout)"
            return f"the engine process ended with code {await ended}"
        finally:
            for task in (listener, ended, silent):
                task.cancel()

    async def _silence(self) -> float:
        """Wait until an engine core that has started says nothing for too long; return for how many seconds."""
        silent_s, limit_s = 0.0, self._setup.engine_timeout_s
        while silent_s < (limit_s if self.state == "serving" else _RESTART_TIMEOUT_S):
            self._was_heard = False
            await asyncio.sleep(limit_s / _NUM_TICKS)
            silent_s = 0.0 if self._was_heard or not self._connected else silent_s + limit_s / _NUM_TICKS
        return silent_s

    def _lose_outputs(self) -> None:
        """Let what can be repeated wait for the next engine core; the rest fails."""
        for queue in self._queues():
            if self._closing or not queue.repeat():
                self._fail(queue, EngineLostError("the engine process was lost"))

    def _replay(self) -> None:
        """Send what waits to a new engine core; what was accepted once stays accepted."""
        if changes := self.policy.changes:
            self._set_policy(changes).add_done_callback(_warn_of_refusal)
        for number, (queue, index) in self._waiting.items():
            self._send(Add.of(number, queue.engine_requests[index], is_accepted=queue.accepted.done()))

    def _queues(self) -> set[OutputQueue]:
        return {queue for queue, _ in self._waiting.values()}

    async def _listen(self, socket: zmq.asyncio.Socket, first: asyncio.Future[Started]) -> None:
        while True:
            self._take(self._reports.decode(await socket.recv()), first)

    def _take(self, report: Report, first: asyncio.Future[Started]) -> None:
        self._was_heard = True
        match report:
            case StepOutputs():
                self._take_step(report)
            case Accepted(number) if number in self._waiting:
                queue, index = self._waiting[number]
                queue.accept(index)
            case QueueFull(number, reason) if number in self._waiting:
                self._fail(self._waiting[number][0], QueueFullError(reason))
            case Failed(number, reason, param) if number in self._waiting:
                self._fail(self._waiting[number][0], RequestFailedError(reason, param))
            case PolicySet() | PolicyRefused():
                self.policy.take(report)
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

    def _take_step(self, outputs: StepOutputs) -> None:
        self.on_step(outputs)
        if outputs.deltas:
            self._num_starts = 1
        for choice in outputs.finished:
            if choice.id in self._waiting:
                queue, index = self._waiting[choice.id]
                queue.finish(index, choice)
        for delta in outputs.deltas:
            if delta.id in self._waiting:
                queue, index = self._waiting[delta.id]
                if queue.put(index, delta):
                    del self._waiting[delta.id]
        if outputs.stats is not None:
            self.stats = outputs.stats

    def fail_all(self, reason: str) -> None:
        """End all requests with an error."""
        for queue in self._queues():
            self._fail(queue, EngineLostError(reason))

    def _fail(self, queue: OutputQueue, error: QueueFullError | EngineLostError) -> None:
        """End a request with an error, before or after it was accepted."""
        self._cancel(queue)
        queue.fail(error)


def _warn_of_refusal(answer: asyncio.Future[PolicySettings]) -> None:
    """Log that a new engine core refuses what was changed before: nobody waits for that now."""
    if isinstance(error := answer.exception(), PolicyRefusedError):
        _log.warning("the policy is set as it was at the start: the engine refused what was changed since: %s", error)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill an engine core unless it has ended; its workers end with it."""
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
    if process.stdin is not None:
        process.stdin.close()
