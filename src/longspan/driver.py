"""The thread that drives an engine for callers in any thread.

Callers submit commands, which run between two steps, so that requests of all callers share steps. The first command
starts the thread. While nothing is to be done the thread rests, and does not touch the engine.
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
"""Longest wait for the end of the thread, in seconds. It ends between two steps, after milliseconds."""
_log = logging.getLogger("longspan")

ResultT = TypeVar("ResultT")


class ShutDownError(RuntimeError):
    """The engine was shut down, maybe while the call was under way."""


@dataclass(frozen=True, slots=True)
class Update:
    """The output of a request has grown or ended."""

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
        put: takes an update, or the error that ends the call. It runs in the driving thread and must not wait.
        each_token: whether updates come with each token, or only with the end of a request.
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
    """A function to run between two steps. `fail` takes the error if the engine is down."""

    run: Callable[[], object]
    fail: Callable[[BaseException], object] = lambda _: None


class Driver:
    """Drives the engine of a service, which it owns: `close` closes both.

    Methods may be called from any thread. Only `abort` and `leave` take no lock, for signal handlers and finalizers.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._engine = service, service.engine
        self._running: RunningRequests[_Submitted] = RunningRequests(service.engine)
        self._commands: deque[_Command] = deque()
        self._changed = threading.Condition()  # guards the next two
        self._thread: threading.Thread | None = None
        self._rests = True
        self._end: BaseException | None = None  # of the engine, which takes no more calls
        self._closes_at_end = False
        self._process = os.getpid()
        self._bell, self._ear = socket.socketpair()  # a byte ends the wait for workers
        self._bell.setblocking(False)
        self._ear.setblocking(False)

    def check_process(self) -> None:
        """Raise RuntimeError in a forked child, which has neither this object's thread nor its connections."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this engine belongs to process {self._process}, which process {os.getpid()} was forked from: "
                "make an engine after the fork, or start the child by spawn"
            )

    def check(self) -> None:
        """Raise RuntimeError in a forked child, and the error that later calls get when the engine is down."""
        self.check_process()
        if self._end is not None:
            raise _again(self._end, "; this engine is down, make a new one")

    def start(self, call: Call, states: Sequence[RequestState]) -> None:
        """Start requests of a call. What the engine refuses ends the call with the error."""
        self._submit(_Command(partial(self._start, call, states), call.put))

    def abort(self, call: Call | None = None) -> None:
        """End the requests of a call, or of all calls under way; their outputs so far are delivered."""
        if call is not None:
            call.aborted = True
        self._post(_Command(partial(self._abort, call)))

    def leave(self, call: Call) -> None:
        """Abort the requests of a call whose caller has stopped waiting."""
        self._post(_Command(partial(self._abort, call, delivers=False)))

    def run(self, function: Callable[[], ResultT]) -> ResultT:
        """Call a function between two steps and return its result.

        If no request is under way, steps of ended requests complete first, and changes of clusters before and after.
        """
        future = Future[ResultT]()

        def call() -> None:
            self._settle()
            try:
                result = function()
            except WorkerLostError:
                raise
            except Exception as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)
            else:
                self._settle()
                future.set_result(result)

        self._submit(_Command(call, future.set_exception))
        return future.result()

    def settle(self) -> None:
        """Wait until the engine is at rest, so that this thread may use it; return at once if calls are under way."""
        if self._rests or self._end is not None or self.run(lambda: bool(self._running.choices)):
            return
        with self._changed:
            self._changed.wait_for(lambda: self._rests or self._running.choices)

    def close(self) -> None:
        """End the thread, fails all calls under way, and close the service."""
        with self._changed:
            self._end = self._end or ShutDownError("this engine was shut down: make a new one")
            self._wake()
            is_own = self._thread is threading.current_thread()  # a collector runs finalizers anywhere
            if is_own or not self._changed.wait_for(lambda: self._thread is None, _STOP_TIMEOUT_S):
                self._closes_at_end = True  # a command still uses the engine, whose sockets belong to that thread
                return
        self._refuse()
        self._close()

    def _close(self) -> None:
        self._service.close()
        self._bell.close()
        self._ear.close()

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
        if self._end is not None:  # set meanwhile, so the thread may not have seen the command
            self._refuse()

    def _post(self, command: _Command) -> None:
        """Leave a command for the thread. If that rests, no request is under way that it could be for."""
        if os.getpid() == self._process and self._end is None:
            self._commands.append(command)
            self._ring()

    def _wake(self) -> None:
        """Let the thread look for commands, whether it rests or wait for workers."""
        if self._rests:
            self._changed.notify_all()
        else:
            self._ring()

    def _ring(self) -> None:
        with suppress(OSError):  # it rings already, or is closed
            self._bell.send(b"\0")

    def _silence(self) -> None:
        with suppress(BlockingIOError):  # it does not ring
            self._ear.recv(4096)

    def _refuse(self) -> None:
        while self._commands:
            with suppress(IndexError):  # another thread does the same
                self._commands.popleft().fail(self._error())

    def _error(self) -> BaseException:
        assert self._end is not None, "the engine is down"
        return _again(self._end)

    # ------------------------------------------------------------ the driving thread

    def _drive(self) -> None:
        with self._changed:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
        try:
            self._service.executor.wakeup = self._ear.fileno()
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
            self._end = self._end or error.with_traceback(None)  # which refers to this object
        self._fail_all()
        with self._changed:
            self._thread, self._rests = None, True
            self._changed.notify_all()
            closes = self._closes_at_end
        if closes:
            self._close()

    def _rest(self) -> None:
        """Wait for a command or the end."""
        assert not self._running.choices, "a call under way has requests"
        with self._changed:
            if self._commands:
                return
            self._service.executor.wakeup, self._rests = None, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._commands or self._end is not None)
            self._service.executor.wakeup, self._rests = self._ear.fileno(), False

    def _run_commands(self) -> None:
        if self._commands:
            self._silence()
        while self._commands and self._end is None:
            command = self._commands.popleft()
            try:
                command.run()
            except BaseException:
                self._commands.appendleft(command)  # which fails with the others
                raise

    def _step(self) -> None:
        touched = self._running.step()
        if not touched:  # maybe the wait ended since the bell rings
            self._silence()
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
        """Complete steps of ended requests if no others run, so that the next ones find their KV."""
        while not self._running.choices and self._end is None and self._engine.has_unfinished:
            self._step()

    def _start(self, call: Call, states: Sequence[RequestState]) -> None:
        self._settle()
        begun = []
        try:
            for state in states:
                begun.append(_Submitted(state, call))
                self._running.start(begun[-1])
        except Exception as error:  # noqa: BLE001 - it is the caller's
            for submitted in begun:
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


def _again(end: BaseException, advice: str = "") -> BaseException:
    """Make the error anew for another caller: exceptions are not shared between threads."""
    if isinstance(end, WorkerLostError):
        return type(end)(end.rank, f"{end.reason}{advice}")
    if isinstance(end, ShutDownError):
        return ShutDownError(*end.args)
    error = RuntimeError("the engine failed, see the log: make a new one")
    error.__cause__ = end
    return error
