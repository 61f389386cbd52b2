"""The thread that drives an engine for callers in any thread.

Callers submit commands, which run between two steps, so that requests of all callers share steps. The first command
starts the thread. Without work the thread rests and does not use the engine.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from longspan.errors import WorkerLostError
from longspan.outputs import RequestOutput
from longspan.running_requests import RunningRequests
from longspan.service import Service
from longspan.text.output_processor import RequestState, Snapshot

_STOP_TIMEOUT_S = 10.0
"""Longest wait for the end of the thread, in seconds. The thread ends between two steps, after milliseconds."""
_log = logging.getLogger("longspan")

ResultT = TypeVar("ResultT")


class ShutDownError(RuntimeError):
    """The engine was shut down, possibly during the call."""


@dataclass(frozen=True, slots=True)
class Update:
    """The new output of a request, or its end."""

    state: RequestState
    snapshot: tuple[Snapshot, ...]

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return all(choice.finish_reason is not None for choice in self.snapshot)

    def output(self) -> RequestOutput:
        return self.state.output(self.snapshot)


@dataclass(kw_only=True, eq=False)
class Call:
    """The requests that one caller waits for.

    Attributes:
        put: receives updates, or the error that ends the call. It runs in the driving thread and must not block.
        each_token: whether each token makes an update, or only the end of a request.
        aborted: whether further requests of this call end as soon as they start.
    """

    put: Callable[[Update | BaseException], object]
    each_token: bool
    aborted: bool = False


@dataclass(frozen=True, eq=False)
class _Submitted:
    """A request of a call."""

    state: RequestState
    call: Call

    def deliver(self, error: Exception | None = None) -> None:
        self.call.put(error or Update(self.state, self.state.snapshot()))


@dataclass(frozen=True)
class _Command:
    """A function to run between two steps. `fail` receives the error if the engine is down."""

    run: Callable[[], object]
    fail: Callable[[BaseException], object] = lambda _: None


class Driver:
    """Drives the engine of a service, which it owns: `close` closes both.

    Methods may be called from any thread. `abort` and `leave` use no lock, for signal handlers and finalizers.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._running: RunningRequests[_Submitted] = RunningRequests(service.engine)
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()  # guards the next two
        self._thread: threading.Thread | None = None
        self._rests = True
        self._end: BaseException | None = None  # the error that ended the engine
        self._closes_at_end = False
        self._process = os.getpid()
        self._wakeup_out, self._wakeup_in = socket.socketpair()  # a byte ends the wait for workers
        self._wakeup_out.setblocking(False)
        self._wakeup_in.setblocking(False)

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has neither this object's thread nor its connections."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, from which process {os.getpid()} was forked: "
                "make an engine after the fork, or start the child by spawn"
            )

    def check(self) -> None:
        """Raise RuntimeError in a forked child, or the error of the engine if it is down."""
        self.check_process()
        if self._end is not None:
            raise _copied(self._end, "; this engine is down, make a new one")

    def start(self, call: Call, states: Sequence[RequestState]) -> None:
        """Start requests of a call. If the engine refuses a request, the call ends with the error."""
        self._submit(_Command(partial(self._start, call, states), call.put))

    def abort(self, call: Call | None = None) -> None:
        """End the requests of a call, or of all calls, and deliver their outputs so far."""
        if call is not None:
            call.aborted = True
        self._post(_Command(partial(self._abort, call)))

    def leave(self, call: Call) -> None:
        """Abort the requests of a call whose caller has stopped waiting."""
        self._post(_Command(partial(self._abort, call, delivers=False)))

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function between two steps and return its result.

        If no request runs, steps of ended requests complete before, and changes of clusters before and after.
        """
        future = Future[ResultT]()

        def call() -> None:
            self._settle()
            try:
                result = function()
            except WorkerLostError:
                raise
            except Exception as error:  # noqa: BLE001 - an error of the caller
                future.set_exception(error)
            else:
                self._settle()
                future.set_result(result)

        self._submit(_Command(call, future.set_exception))
        return future.result()

    def settle(self) -> None:
        """Wait until the driving thread rests, so that the caller may use the engine. Return at once if calls run."""
        if self._rests or self._end is not None or self.run(lambda: bool(self._running.choices)):
            return
        with self._changed:
            self._changed.wait_for(lambda: self._rests or self._running.choices)

    def close(self) -> None:
        """End the thread, end all calls with an error, and close the service."""
        with self._changed:
            self._end = self._end or ShutDownError("this engine was shut down: make a new one")
            self._wake()
            is_own = self._thread is threading.current_thread()  # the garbage collector runs finalizers in any thread
            if is_own or not self._changed.wait_for(lambda: self._thread is None, _STOP_TIMEOUT_S):
                self._closes_at_end = True  # a command still uses the engine, whose sockets belong to its thread
                return
        self._refuse()
        self._close()

    def _close(self) -> None:
        self._service.close()
        self._wakeup_out.close()
        self._wakeup_in.close()

    # ------------------------------------------------------------ commands

    def _submit(self, command: _Command) -> None:
        self.check()
        if threading.current_thread() is self._thread:
            raise RuntimeError("the thread of the engine cannot wait for itself: call this from another thread")
        self._commands.append(command)
        with self._changed:
            if self._thread is None:
                threading.Thread(target=self._drive, name="longspan engine", daemon=True).start()
            self._wake()
            self._rests = False
        if self._end is not None:  # the thread may have ended before it saw the command
            self._refuse()

    def _post(self, command: _Command) -> None:
        """Add a command without a lock. A resting thread has no requests, so the command need not wake it."""
        if os.getpid() == self._process and self._end is None:
            self._commands.append(command)
            self._interrupt()

    def _wake(self) -> None:
        """Make the thread check for commands, whether it rests or waits for workers."""
        if self._rests:
            self._changed.notify_all()
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        with suppress(OSError):  # the socket is full or closed
            self._wakeup_out.send(b"\0")

    def _clear_wakeup(self) -> None:
        with suppress(BlockingIOError):  # there is no byte
            self._wakeup_in.recv(4096)

    def _refuse(self) -> None:
        while self._commands:
            with suppress(IndexError):  # another thread has removed the command
                self._commands.popleft().fail(self._error())

    def _error(self) -> BaseException:
        assert self._end is not None, "the engine is down"
        return _copied(self._end)

    # ------------------------------------------------------------ the driving thread

    def _drive(self) -> None:
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
        try:
            self._service.executor.wakeup = self._wakeup_in.fileno()
            while self._end is None:
                self._run_commands()
                if self._engine.has_unfinished:
                    self._step()
                else:
                    self._engine.check_when_idle()
                    self._rest()
        except BaseException as error:  # noqa: BLE001 - callers would wait for ever
            if not isinstance(error, WorkerLostError):
                _log.exception("the engine failed")
            self._end = self._end or error.with_traceback(None)  # the traceback refers to this object
        self._fail_all()
        with self._changed:
            self._thread, self._rests = None, True
            self._changed.notify_all()
            closes = self._closes_at_end
        if closes:
            self._close()

    def _rest(self) -> None:
        """Wait for a command or the end."""
        assert not self._running.choices, "requests are unfinished"
        with self._changed:
            if self._commands:
                return
            self._service.executor.wakeup, self._rests = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._commands or self._end is not None)
            self._service.executor.wakeup, self._rests = self._wakeup_in.fileno(), False

    def _run_commands(self) -> None:
        if self._commands:
            self._clear_wakeup()
        while self._commands and self._end is None:
            command = self._commands.popleft()
            try:
                command.run()
            except BaseException:
                self._commands.appendleft(command)  # `_refuse` ends it with the error
                raise

    def _step(self) -> None:
        touched = self._running.step()
        if not touched:  # the wait may have ended by `_interrupt`
            self._clear_wakeup()
        for submitted, error in touched.items():
            if error is not None:
                self._running.abort(submitted)
                submitted.deliver(error)
            elif submitted.call.each_token and not submitted.state.finished:
                submitted.deliver()
        for submitted in self._running.finished():
            self._running.forget(submitted)
            submitted.deliver()

    def _settle(self) -> None:
        """Complete steps of ended requests if no request runs, so that the next requests find their KV."""
        while not self._running.choices and self._end is None and self._engine.has_unfinished:
            self._step()

    def _start(self, call: Call, states: Sequence[RequestState]) -> None:
        self._settle()
        started = []
        try:
            for state in states:
                started.append(_Submitted(state, call))
                self._running.start(started[-1])
        except Exception as error:  # noqa: BLE001 - an error of the caller
            for submitted in started:
                self._running.abort(submitted)
            call.put(error)
        if call.aborted:
            self._abort(call)
        with self._changed:
            self._changed.notify_all()

    def _abort(self, call: Call | None, *, delivers: bool = True) -> None:
        for submitted in self._running.owners():
            if call is None or submitted.call is call:
                submitted.call.aborted = True
                error = self._running.abort(submitted)
                if delivers:
                    submitted.deliver(error)

    def _fail_all(self) -> None:
        for call in {submitted.call: None for submitted in self._running.owners()}:
            call.put(self._error())
        self._running.choices.clear()
        self._refuse()


def _copied(end: BaseException, remedy: str = "") -> BaseException:
    """Return a copy of an error for another caller, because exceptions are not shared between threads."""
    if isinstance(end, WorkerLostError):
        return type(end)(end.rank, f"{end.reason}{remedy}")
    if isinstance(end, ShutDownError):
        return ShutDownError(*end.args)
    error = RuntimeError("the engine failed, see the log: make a new one")
    error.__cause__ = end
    return error
