"""The API server's client of the engine core: starts it, watches it, and talks to it without blocking."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from longspan import limits
from longspan.core.options import PolicySettings
from longspan.errors import ParameterError
from longspan.runtime.child import lack_of_memory, make_run_dir, start_child
from longspan.serve import messages
from longspan.serve.errors import EngineLostError, QueueFullError, RequestFailedError, ServeError
from longspan.serve.output_queue import OutputQueue, end_with
from longspan.text.input_processor import EngineRequest

_log = logging.getLogger("longspan")
_ENGINE_MODULE = "longspan.serve.engine_core"
_MAX_STARTS = 3
"""The number of engine cores that may end one after the other without a token."""
_QUIT_TIMEOUT_S = 10.0
_LAST_WORDS_S = 0.2
"""The last messages of an engine core that has ended may be on their way for so long."""
_RESTART_TIMEOUT_S = 900.0
"""An engine core that starts new workers may say nothing for so long."""


class EngineClient:
    """Keeps one engine core at a time; a new one is started when it ends by itself.

    Attributes:
        state: `serving` when requests are computed; `down` when no engine core could be kept alive.
        started, stats, policy, parallel: the latest that an engine core has said of them.
        on_step: called with all that metrics are made of.
        on_loss: called when an engine core that has served is lost.
        on_length: called with the length of the longest request from now on, in tokens.
        down: set when the state is so.
    """

    def __init__(self, setup: messages.EngineSetup) -> None:
        self.state: Literal["starting", "serving", "restarting", "down"] = "starting"
        self.started: messages.Started | None = None
        self.stats: messages.Stats | None = None
        self.policy: PolicySettings
        self.parallel: str
        self.on_step: Callable[[messages.StepOutputs], None] = lambda _: None
        self.on_loss: Callable[[], None] = lambda: None
        self.on_length: Callable[[int], None] = lambda _: None
        self.down = asyncio.Event()
        self._setup = setup
        self._first: asyncio.Future[messages.Started] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count()
        self._waiting: dict[int, tuple[OutputQueue, int]] = {}
        self._changes = _Changes()
        self._answers: dict[int, asyncio.Future[PolicySettings | str]] = {}  # of commands, by their number
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._connected = False
        self._supervisor: asyncio.Task[None] | None = None
        self._num_starts, self._closing, self._end_reason = 0, False, ""
        self._reports: msgspec.msgpack.Decoder[messages.Report] = msgspec.msgpack.Decoder(messages.Report)

    async def start(self) -> messages.Started:
        """Starts the engine core and waits until it can serve.

        Raises:
            ValueError: when the setup is wrong.
            EngineLostError: when it does not start for another reason.
        """
        self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._first)  # whoever starts it may give up waiting

    async def submit(self, engine_requests: Sequence[EngineRequest]) -> OutputQueue:
        """Queues all engine requests of an HTTP request, or none.

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
                self._send(messages.Add(id=number, engine_request=engine_request))
            await queue.accepted
        except BaseException:
            queue.close()
            raise
        return queue

    async def update_policy(self, options: dict[str, str | None]) -> PolicySettings:
        """Changes options of the policy, also for engine cores to come; returns its settings then.

        Raises:
            ValueError: when the engine refuses one; nothing has changed then.
            EngineLostError: when there is no engine, or none any more.
        """
        answer = await self._answer(lambda number: messages.SetPolicy(number, options))
        assert isinstance(answer, PolicySettings)
        return answer

    async def reshard(self, parallel: str) -> str:
        """Takes another parallel spec while requests go on, also for engine cores to come; returns that in force then.

        Raises:
            ValueError: when the engine refuses it, or another change is under way; nothing has changed then.
            EngineLostError: when there is no engine, or none any more.
        """
        answer = await self._answer(lambda number: messages.SetParallel(number, parallel))
        assert isinstance(answer, str)
        return answer

    async def _answer(self, command: Callable[[int], messages.Command]) -> PolicySettings | str:
        """Sends a command and waits for what the engine core answers."""
        if self._closing or not self._connected:
            raise EngineLostError(f"the engine is {self.state}")
        number = next(self._numbers)
        answer: asyncio.Future[PolicySettings | str] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        self._send(command(number))
        try:
            return await answer
        finally:
            del self._answers[number]

    async def close(self, at_once: asyncio.Event | None = None) -> None:
        """Ends the engine core and its workers, by force when `at_once` is set; all that is unfinished fails."""
        self._closing = True
        self.fail_all("the server is shutting down")
        if self.state == "serving" and self._process is not None:  # else it would not listen: it is killed
            self._send(messages.Quit())
            waits = [asyncio.create_task(_ended(self._process))]
            if at_once is not None:
                waits.append(asyncio.create_task(at_once.wait()))
            await asyncio.wait(waits, timeout=_QUIT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                abandon(wait)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    def fail_all(self, reason: str) -> None:
        """Ends all requests with an error."""
        for queue in self._queues():
            self._fail(queue, EngineLostError(reason))

    def _check_room(self, engine_requests: Sequence[EngineRequest]) -> None:
        """Bounds what an engine core that starts, hangs or is busy has not taken yet; it bounds its own queue.

        Raises:
            QueueFullError: when there is no room.
        """
        serving = self.state == "serving"
        waiting = [
            queue.engine_requests[index]
            for queue, index in self._waiting.values()
            if not serving or not queue.accepted.done()
        ]
        num_reqs = len(waiting) + len(engine_requests)
        num_tokens = sum(len(one.token_ids) for one in (*waiting, *engine_requests))
        room, room_tokens = _room(self._setup, self.started if serving else None, self.stats)
        if num_reqs > room:
            words = f"{num_reqs} requests would wait for the engine, of at most {room}"
            raise QueueFullError(f"{words} (--max-num-queued-reqs)")
        if waiting and num_tokens > room_tokens:
            words = f"prompts of {num_tokens} tokens would wait for the engine, of at most {room_tokens}"
            raise QueueFullError(f"{words} (--max-num-queued-tokens)")

    def _queues(self) -> set[OutputQueue]:
        return {queue for queue, _ in self._waiting.values()}

    def _fail(self, queue: OutputQueue, error: ServeError) -> None:
        """Ends a request with an error, before or after it was accepted."""
        self._cancel(queue)
        queue.fail(error)

    def _cancel(self, queue: OutputQueue) -> None:
        for number in [number for number, (other, _) in self._waiting.items() if other is queue]:
            del self._waiting[number]
            self._send(messages.Cancel(number))

    def _send(self, command: messages.Command) -> None:
        """Puts a command into the socket's own queue, which has no bound; a process that starts gets it later."""
        if self._socket is not None and self._connected:
            # The asyncio socket's own method: after a plain one, a message that comes meanwhile would wake nobody.
            sent = asyncio.ensure_future(self._socket.send(msgspec.msgpack.encode(command), zmq.NOBLOCK))
            error = sent.exception()
            if error is not None and not isinstance(error, zmq.Again):  # Again: it has just ended, and the next is told
                raise error

    async def _supervise(self) -> None:
        """Starts engine cores, one after the end of the other."""
        reason = "the engine was stopped"
        try:
            while not self._closing and self._num_starts < _MAX_STARTS:
                self._num_starts += 1
                reason = await self._run_core()
                if self.started is None:
                    break
                if not self._closing:
                    _log.error("%s; starting another engine core", reason)
        finally:
            self.state = "down"
            self.down.set()
            self.fail_all("the engine is down")
            if not self._first.done():
                end_with(self._first, EngineLostError(reason))

    async def _run_core(self) -> str:
        """Runs one engine core and returns why it ended."""
        folder = make_run_dir()
        context = zmq.asyncio.Context()
        try:
            socket = context.socket(zmq.PAIR)
            socket.sndhwm = socket.rcvhwm = 0
            socket.bind(messages.address(folder))
            self._process = process = start_child(_ENGINE_MODULE, folder)
            assert process.stdin is not None, "a child has a pipe"
            try:
                with contextlib.suppress(BrokenPipeError):  # it has ended already
                    process.stdin.write(msgspec.json.encode(self._setup) + b"\n")
                    process.stdin.flush()
                self._socket = socket
                return await self._until_lost(process, socket)
            finally:
                process.kill()  # its workers end with it
                await asyncio.create_task(_ended(process))
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        except OSError as error:
            return f"the engine core cannot be started ({error})"
        finally:
            was_connected, self._socket, self._connected = self._connected, None, False
            self.state = "restarting"
            context.destroy(linger=0)
            shutil.rmtree(folder, ignore_errors=True)
            lost = f"the engine core was lost{self._end_reason}"
            for answer in self._answers.values():
                if not answer.done():
                    end_with(answer, EngineLostError(lost))
            if was_connected:
                for queue in self._queues():  # what can be repeated waits for the next one
                    if self._closing or not queue.repeat():
                        self._fail(queue, EngineLostError(lost))
                self.stats = None
                self.on_loss()

    async def _until_lost(self, process: subprocess.Popen[bytes], socket: zmq.asyncio.Socket) -> str:
        """Takes all that an engine core says until it ends or falls silent; returns which of the two."""
        num_oom_kills = limits.num_oom_kills()
        listener, ended = asyncio.create_task(self._listen(socket)), asyncio.create_task(_ended(process))
        try:
            await asyncio.wait({listener, ended}, return_when=asyncio.FIRST_COMPLETED)
            self.state = "restarting"
            if not listener.done():
                await asyncio.wait({listener}, timeout=_LAST_WORDS_S)
            if listener.done():
                return f"the engine core has said nothing for {listener.result():g} s (--engine-timeout)"
            lacked = lack_of_memory(code := await ended, num_oom_kills)
            return f"the engine core ended with code {code}" + ("" if lacked is None else f": {lacked}")
        finally:
            abandon(listener)
            abandon(ended)

    async def _listen(self, socket: zmq.asyncio.Socket) -> float:
        """Takes reports until an engine core that has started says nothing for too long; returns how many seconds."""
        limit_s = 0.0  # until it has started, which takes as long as it takes
        # If this process was stopped, time was up before anything could come: the second wait is for that.
        while not limit_s or await socket.poll(int(limit_s * 750)) or await socket.poll(int(limit_s * 250)):
            self._take(self._reports.decode(await socket.recv()))
            if self._connected:
                limit_s = self._setup.engine_timeout_s if self.state == "serving" else _RESTART_TIMEOUT_S
        return limit_s

    def _take(self, report: messages.Report) -> None:
        match report:
            case messages.StepOutputs():
                self._take_step(report)
            case messages.Accepted(number) if number in self._waiting:
                queue, index = self._waiting[number]
                queue.accept(index)
            case messages.Failed():
                self._take_failure(report)
            case messages.PolicySet(settings, number):
                self._take_settings(settings, number)
            case messages.ParallelSet(parallel, policy, number):
                self.parallel, self.policy = parallel, policy
                if number is not None:
                    self._changes.parallel = parallel
                self._take_answer(number, parallel)
            case messages.RequestLength(max_model_len):
                self.on_length(max_model_len)
            case messages.Started() | messages.NotStarted():
                self._take_start(report)
            case messages.Ended(reason):
                self._end_reason = f": {reason}"
            case messages.Restarting(reason, is_replaced):
                _log.error("%s; %s", reason, "new workers are being started" if is_replaced else "the others go on")
                self.state = "restarting"
            case messages.Restarted():
                self.state = "restarting" if self._changes.are_replayed else "serving"

    def _take_start(self, report: messages.Started | messages.NotStarted) -> None:
        if isinstance(report, messages.Started):
            self.started, self._connected, self._end_reason = report, True, ""
            self.policy, self.parallel = report.policy, report.parallel
            self._replay(report)
            if not self._first.done():
                self._first.set_result(report)
        elif not self._first.done():
            error = ValueError(report.reason) if report.is_mistake else EngineLostError(report.reason)
            if report.parameter is not None:
                error = ParameterError(report.parameter, report.reason)
            end_with(self._first, error)

    def _take_step(self, outputs: messages.StepOutputs) -> None:
        self.on_step(outputs)
        if outputs.deltas:
            self._num_starts = 1
        for choice in outputs.finished:
            if choice.id in self._waiting:
                queue, index = self._waiting[choice.id]
                queue.finished.append((index, choice))
        for delta in outputs.deltas:
            if delta.id in self._waiting:
                queue, index = self._waiting[delta.id]
                if queue.put(index, delta):
                    del self._waiting[delta.id]
        if outputs.stats is not None:
            self.stats = outputs.stats

    def _take_failure(self, failed: messages.Failed) -> None:
        if failed.id is None:
            _log.warning("the new engine core refused a change that was made before the restart: %s", failed.reason)
            self._take_answer(None, "")
        elif failed.id in self._waiting:
            reason, queue = failed.reason, self._waiting[failed.id][0]
            error = QueueFullError(reason) if failed.is_full else RequestFailedError(reason, failed.param, failed.code)
            self._fail(queue, error)
        elif failed.id in self._answers and not self._answers[failed.id].done():
            end_with(self._answers[failed.id], ValueError(failed.reason))

    def _take_settings(self, settings: PolicySettings, number: int | None) -> None:
        self.policy = settings
        if number is not None:
            self._changes.add(settings)
        self._take_answer(number, settings)

    def _take_answer(self, number: int | None, value: PolicySettings | str) -> None:
        if number is None and self._changes.are_replayed:  # it serves once it has answered the changes
            self._changes.are_replayed, self.state = False, "serving"
        elif number in self._answers and not self._answers[number].done():
            self._answers[number].set_result(value)

    def _replay(self, started: messages.Started) -> None:
        """Sends what waits to a new engine core; what was accepted once stays accepted."""
        if (command := self._changes.replay()) is not None:
            self._send(command)
        else:
            self.state = "serving"
            self.on_length(started.max_model_len)
        for number, (queue, index) in self._waiting.items():
            engine_request, is_accepted = queue.engine_requests[index], queue.accepted.done()
            self._send(messages.Add(id=number, engine_request=engine_request, is_accepted=is_accepted))


def _room(
    setup: messages.EngineSetup, started: messages.Started | None, stats: messages.Stats | None
) -> tuple[int, int]:
    """Return how many requests and tokens of prompts may wait or run, by the latest of what an engine core reports."""
    room, room_tokens = setup.max_num_queued_reqs, setup.max_num_queued_tokens
    if started is None:
        return room, room_tokens
    num_instances, num_kv_blocks = started.num_instances, started.num_kv_blocks
    if stats is not None:
        num_instances, num_kv_blocks = len(stats.used_blocks), stats.num_kv_blocks
    return room + num_instances * started.max_num_seqs, room_tokens + num_kv_blocks * started.block_size


class _Changes:
    """The changes of policy and fleet since the start, which each new engine core has to make.

    Attributes:
        parallel: the parallel spec. None if it is that of the start.
        are_replayed: a new engine core has not answered them yet.
    """

    def __init__(self) -> None:
        self.parallel: str | None = None
        self.are_replayed = False
        self._options: dict[str, str | None] = {}

    def add(self, settings: PolicySettings) -> None:
        """Add changed options. A re-shard may choose a policy with other options: earlier changes stay."""
        self._options |= {name: settings.given.get(name) for name in settings.changeable}

    def replay(self) -> messages.Command | None:
        """Return the command that makes them. None if there are no changes."""
        self.are_replayed = self.parallel is not None or bool(self._options)
        if self.parallel is not None:
            return messages.SetParallel(None, self.parallel, self._options)
        return messages.SetPolicy(None, self._options) if self._options else None


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancels a task whose result is not needed any more. An exception that it ends with is not logged."""
    task.cancel()
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())


async def _ended(process: subprocess.Popen[bytes]) -> int:
    """Waits in a thread of its own until a process has ended; returns its exit code."""
    return await run_sync(process.wait, abandon_on_cancel=True, limiter=CapacityLimiter(1))
