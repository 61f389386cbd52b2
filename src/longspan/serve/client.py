"""The API server's client of the engine core: starts it, watches it, and exchanges messages without blocking."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from longspan import limits
from longspan.core.options import PolicySettings
from longspan.errors import ParameterError
from longspan.runtime.child import lack_of_memory
from longspan.serve import messages
from longspan.serve.core_process import CoreProcess, open_core
from longspan.serve.errors import EngineLostError, QueueFullError, RequestFailedError, ServeError
from longspan.serve.output_queue import OutputQueue, end_with
from longspan.text.input_processor import EngineRequest

if TYPE_CHECKING:
    from longspan.serve.request_recorder import RequestRecorder

_log = logging.getLogger("longspan")
_MAX_STARTS = 3
"""Number of engine cores in a row that may end without a token before the client stops starting new ones."""
_QUIT_TIMEOUT_S = 10.0
_LAST_REPORTS_S = 0.2
"""Seconds in which the last reports of an engine core that has ended may arrive."""
_Reply = PolicySettings | str | messages.Timeline
_RESTART_TIMEOUT_S = 900.0
"""Longest silence, in seconds, of an engine core that starts new workers."""


class EngineClient:
    """Keeps one engine core running. It starts a new one when the process ends by itself.

    Attributes:
        state: `serving` while requests are computed. `down` if no engine core could be kept alive.
        started, stats, policy, parallel: the latest values that an engine core has reported.
        on_step: called with the outputs of each step, from which metrics are counted.
        on_loss: called when an engine core that has served is lost.
        on_length: called with the new maximum request length, in tokens.
        down: set when the state becomes `down`.
    """

    def __init__(self, setup: messages.EngineSetup, recorder: RequestRecorder | None = None) -> None:
        self.state: Literal["starting", "serving", "restarting", "down"] = "starting"
        self.started: messages.Started | None = None
        self.stats: messages.Stats | None = None
        self.policy: PolicySettings
        self.parallel: str
        self.on_step: Callable[[messages.StepOutputs], None] = lambda _: None
        self.on_loss: Callable[[], None] = lambda: None
        self.on_length: Callable[[int], None] = lambda _: None
        self.down = asyncio.Event()
        self._first: asyncio.Future[messages.Started] = asyncio.get_running_loop().create_future()
        self._setup, self._recorder, self._numbers = setup, recorder, itertools.count()
        self._waiting: dict[int, tuple[OutputQueue, int]] = {}
        self._changes = _Changes()
        self._replies = _Replies()
        self._core: CoreProcess | None = None
        self._connected = False
        self._supervisor: asyncio.Task[None] | None = None
        self._num_starts, self._closing, self._end_reason = 0, False, ""

    async def start(self) -> messages.Started:
        """Start the engine core and wait until it can serve.

        Raises:
            ValueError: the setup is wrong.
            EngineLostError: the engine core does not start for another reason.
        """
        self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._first)  # the caller may be cancelled

    async def submit(self, engine_requests: Sequence[EngineRequest]) -> OutputQueue:
        """Queue all engine requests of an HTTP request, or none.

        Raises:
            QueueFullError: the queue has no capacity for them.
            EngineLostError: there is no engine.
        """
        if self.state == "down" or self._closing:
            raise EngineLostError("the engine is down")
        serving = self.state == "serving"
        # An engine core bounds the requests that it has accepted.
        waiting = [q.engine_requests[i] for q, i in self._waiting.values() if not serving or not q.accepted.done()]
        queue_limits = _queue_limits(self._setup, self.started, self.stats if serving else None)
        _check_capacity(waiting, engine_requests, *queue_limits)
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
        """Change options of the policy, also for later engine cores. Return its new settings. See `command`."""
        reply = await self.command(lambda number: messages.SetPolicy(number, options))
        assert isinstance(reply, PolicySettings)
        return reply

    async def reshard(self, parallel: str) -> str:
        """Change the parallel spec while requests go on, also for later engine cores. Return the spec in force.

        Only one change at a time is accepted, see `command`.
        """
        reply = await self.command(lambda number: messages.SetParallel(number, parallel))
        assert isinstance(reply, str)
        return reply

    async def command(self, command: Callable[[int], messages.Command]) -> _Reply:
        """Send a command and wait for the engine core's reply.

        Raises:
            ValueError: the engine core refuses it. Nothing has changed.
            EngineLostError: the engine is not running, or is lost before it replies.
        """
        if self._closing or not self._connected:
            raise EngineLostError(f"the engine is {self.state}")
        self._send(command(number := next(self._numbers)))
        return await self._replies.wait(number)

    async def close(self, at_once: asyncio.Event | None = None) -> None:
        """End the engine core and its workers, by force when `at_once` is set. Unfinished requests fail."""
        self._closing = True
        self.fail_all("the server is shutting down")
        if self.state == "serving" and self._core is not None:  # in other states it reads no commands: it is killed
            self._send(messages.Quit())
            waits = [asyncio.create_task(self._core.ended())]
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
        """End all requests with an error."""
        for queue in self._queues():
            self._fail(queue, EngineLostError(reason))

    def _queues(self) -> set[OutputQueue]:
        return {queue for queue, _ in self._waiting.values()}

    def _fail(self, queue: OutputQueue, error: ServeError) -> None:
        """End a request with an error, before or after it was accepted."""
        self._cancel(queue)
        queue.fail(error)

    def _cancel(self, queue: OutputQueue) -> None:
        for number in [number for number, (other, _) in self._waiting.items() if other is queue]:
            del self._waiting[number]
            self._send(messages.Cancel(number))

    def _send(self, command: messages.Command) -> None:
        """Send a command to the connected engine core. `_replay` repeats unfinished requests for a later one."""
        if self._core is not None and self._connected:
            self._core.send(command)

    async def _supervise(self) -> None:
        """Start engine cores, each after the end of the previous one."""
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
        """Run one engine core and return why it ended."""
        try:
            async with open_core(self._setup, self._recorder) as self._core:
                return await self._until_lost(self._core)
        except OSError as error:
            return f"the engine core cannot be started ({error})"
        finally:
            was_connected, self._core, self._connected = self._connected, None, False
            self.state = "restarting"
            lost = f"the engine core was lost{self._end_reason}"
            self._replies.fail_all(lost)
            if was_connected:
                for queue in self._queues():  # requests that can be repeated wait for the next engine core
                    if self._closing or not queue.repeat():
                        self._fail(queue, EngineLostError(lost))
                self.stats = None
                self.on_loss()

    async def _until_lost(self, core: CoreProcess) -> str:
        """Handle the reports of an engine core until it ends or sends none. Return the reason."""
        num_oom_kills = limits.num_oom_kills()
        listener, ended = asyncio.create_task(self._listen(core)), asyncio.create_task(core.ended())
        try:
            await asyncio.wait({listener, ended}, return_when=asyncio.FIRST_COMPLETED)
            self.state = "restarting"
            if not listener.done():
                await asyncio.wait({listener}, timeout=_LAST_REPORTS_S)
            if listener.done():
                return f"the engine core has sent nothing for {listener.result():g} s (--engine-timeout)"
            lacked = lack_of_memory(code := await ended, num_oom_kills)
            return f"the engine core ended with code {code}" + ("" if lacked is None else f": {lacked}")
        finally:
            abandon(listener)
            abandon(ended)

    async def _listen(self, core: CoreProcess) -> float:
        """Handle reports until a started engine core sends none for too long. Return that time in seconds."""
        timeout_s = 0.0  # no timeout until the engine core has started
        while not timeout_s or not await core.is_silent(timeout_s):
            self._handle(await core.receive())
            if self._connected:
                timeout_s = self._setup.engine_timeout_s if self.state == "serving" else _RESTART_TIMEOUT_S
        return timeout_s

    def _handle(self, report: messages.Report) -> None:
        match report:
            case messages.StepOutputs():
                self._handle_step(report)
            case messages.Accepted(number, expected_s) if number in self._waiting:
                queue, index = self._waiting[number]
                queue.accept(index, expected_s)
            case messages.Failed():
                self._handle_failure(report)
            case messages.PolicySet(settings, number):
                self._handle_settings(settings, number)
            case messages.ParallelSet(parallel, policy, number):
                self.parallel, self.policy = parallel, policy
                if number is not None:
                    self._changes.parallel = parallel
                self._handle_reply(number, parallel)
            case messages.Timeline(number, is_on) if number is not None:
                self._changes.is_recorded = is_on
                self._handle_reply(number, report)
            case messages.RequestLength(max_model_len):
                self.on_length(max_model_len)
            case messages.Started() | messages.NotStarted():
                self._handle_start(report)
            case messages.Ended(reason):
                self._end_reason = f": {reason}"
            case messages.Restarting() | messages.Restarted():
                self._handle_restart(report)

    def _handle_restart(self, report: messages.Restarting | messages.Restarted) -> None:
        if isinstance(report, messages.Restarting):
            follows = "new workers are being started" if report.is_replaced else "the other instances continue"
            _log.error("%s; %s", report.reason, follows)
            self.state = "restarting"
        else:
            self.state = "restarting" if self._changes.are_replayed else "serving"

    def _handle_start(self, report: messages.Started | messages.NotStarted) -> None:
        if isinstance(report, messages.Started):
            self.started, self.stats, self._connected, self._end_reason = report, report.stats, True, ""
            self.policy, self.parallel = report.policy, report.parallel
            self._replay(report)
            if not self._first.done():
                self._first.set_result(report)
        elif not self._first.done():
            error = ValueError(report.reason) if report.is_mistake else EngineLostError(report.reason)
            if report.parameter is not None:
                error = ParameterError(report.parameter, report.reason)
            end_with(self._first, error)

    def _handle_step(self, outputs: messages.StepOutputs) -> None:
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
        for number, num_computed, num_prompt in outputs.progress:
            if number in self._waiting:
                queue, index = self._waiting[number]
                queue.report(index, num_computed, num_prompt)
        if outputs.stats is not None:
            self.stats = outputs.stats

    def _handle_failure(self, failed: messages.Failed) -> None:
        if failed.id is None:
            _log.warning("the new engine core refused a change that was made before the restart: %s", failed.reason)
            self._handle_reply(None, "")
        elif failed.id in self._waiting:
            reason, queue = failed.reason, self._waiting[failed.id][0]
            error = QueueFullError(reason) if failed.is_full else RequestFailedError(reason, failed.param, failed.code)
            self._fail(queue, error)
        else:
            self._replies.take(failed.id, ValueError(failed.reason))

    def _handle_settings(self, settings: PolicySettings, number: int | None) -> None:
        self.policy = settings
        if number is not None:
            self._changes.add(settings)
        self._handle_reply(number, settings)

    def _handle_reply(self, number: int | None, value: _Reply) -> None:
        if number is None and self._changes.are_replayed:  # the engine core serves once it has replied to the changes
            self._changes.are_replayed, self.state = False, "serving"
        elif number is not None:
            self._replies.take(number, value)

    def _replay(self, started: messages.Started) -> None:
        """Send changes and all waiting requests to a new engine core. Accepted requests stay accepted."""
        for command in self._changes.replay():
            self._send(command)
        if not self._changes.are_replayed:
            self.state = "serving"
            self.on_length(started.max_model_len)
        for number, (queue, index) in self._waiting.items():
            engine_request, is_accepted = queue.engine_requests[index], queue.accepted.done()
            self._send(messages.Add(id=number, engine_request=engine_request, is_accepted=is_accepted))


def _queue_limits(
    setup: messages.EngineSetup, started: messages.Started | None, stats: messages.Stats | None
) -> tuple[int, int]:
    """Return how many requests, and how many prompt tokens, may wait or run by the latest stats."""
    max_reqs, max_tokens = setup.max_num_queued_reqs, setup.max_num_queued_tokens
    if started is None or stats is None:
        return max_reqs, max_tokens
    num_slots = len(stats.used_blocks) * started.max_num_seqs
    return max_reqs + num_slots, max_tokens + stats.num_kv_blocks * started.cache_config.block_size


def _check_capacity(
    waiting: Sequence[EngineRequest], added: Sequence[EngineRequest], max_reqs: int, max_tokens: int
) -> None:
    """Raise QueueFullError if more requests or tokens would wait than may. A single request may have any length."""
    num_reqs, num_tokens = len(waiting) + len(added), sum(len(request.token_ids) for request in (*waiting, *added))
    if num_reqs > max_reqs:
        problem = f"{num_reqs} requests would wait for the engine, of at most {max_reqs}"
        raise QueueFullError(f"{problem} (--max-num-queued-reqs)")
    if waiting and num_tokens > max_tokens:
        problem = f"prompts of {num_tokens} tokens would wait for the engine, of at most {max_tokens}"
        raise QueueFullError(f"{problem} (--max-num-queued-tokens)")


class _Replies:
    """The replies of the engine core to commands that are waited for, by the number of the command."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[_Reply]] = {}

    async def wait(self, number: int) -> _Reply:
        """Return the reply. Raise an error that `take` or `fail_all` gets instead."""
        reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._futures[number] = reply
        try:
            return await reply
        finally:
            del self._futures[number]

    def take(self, number: int, reply: _Reply | Exception) -> None:
        """End the wait for a reply, if there is one."""
        future = self._futures.get(number)
        if future is None or future.done():
            return
        if isinstance(reply, Exception):
            end_with(future, reply)
        else:
            future.set_result(reply)

    def fail_all(self, reason: str) -> None:
        """End all waits with an EngineLostError, because the engine core was lost."""
        for number in list(self._futures):
            self.take(number, EngineLostError(reason))


class _Changes:
    """Changes of policy, fleet and recording since the start, which are replayed to each new engine core.

    Attributes:
        parallel: the parallel spec. None if it has not changed.
        is_recorded: whether requests and steps are recorded, by the latest reply about that. None without one.
        are_replayed: True while a new engine core has not replied to them yet.
    """

    def __init__(self) -> None:
        self.parallel: str | None = None
        self.is_recorded: bool | None = None
        self.are_replayed = False
        self._options: dict[str, str | None] = {}

    def add(self, settings: PolicySettings) -> None:
        """Add changed options. Earlier changes stay, since a re-shard may choose a policy with other options."""
        self._options |= {name: settings.given.get(name) for name in settings.changeable}

    def replay(self) -> Iterator[messages.Command]:
        """Yield the commands that repeat the changes. The engine core replies to a change of policy or fleet."""
        self.are_replayed = self.parallel is not None or bool(self._options)
        if self.is_recorded is not None:
            yield messages.SetRecording(None, self.is_recorded)
        if self.parallel is not None:
            yield messages.SetParallel(None, self.parallel, self._options)
        elif self._options:
            yield messages.SetPolicy(None, self._options)


def abandon(task: asyncio.Future[Any]) -> None:
    """Cancel a task whose result is not needed. Its exception is not logged."""
    task.cancel()
    task.add_done_callback(lambda done: None if done.cancelled() else done.exception())
