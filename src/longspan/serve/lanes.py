"""Threads for what takes long, in lanes: what is slow in one lane holds up nobody in another."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from longspan.serve.answer import QueueFullError

ResultT = TypeVar("ResultT")


class Lane:
    """Does work in the order in which it comes, at most `num_threads` pieces at once.

    Work whose caller has given up waiting before it began is dropped, with all that it refers to. A thread lives as
    long as there is something to do, so there is nothing to close.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int | None = None) -> None:
        self._name, self._most_threads, self._max_waiting = name, num_threads, max_waiting
        self._num_threads = 0
        self._waiting: dict[Future[Any], Callable[[], object]] = {}  # in order
        self._lock = threading.Lock()

    async def run(self, function: Callable[..., ResultT], *arguments: object) -> ResultT:
        """The function's result.

        Raises:
            QueueFullError: when `max_waiting` others have not begun yet.
        """
        return await asyncio.wrap_future(self._add(partial(function, *arguments)))

    def _add(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        future: Future[ResultT] = Future()
        with self._lock:
            if self._max_waiting is not None and len(self._waiting) >= self._max_waiting:
                raise QueueFullError(f"{len(self._waiting)} {self._name} are waiting already")
            if self._num_threads < self._most_threads:
                _Thread(target=self._serve, name=self._name, daemon=True).start()
                self._num_threads += 1
            self._waiting[future] = work
        future.add_done_callback(self._drop)
        return future

    def _drop(self, future: Future[Any]) -> None:
        """It was cancelled, or else it is not there any more."""
        with self._lock:
            self._waiting.pop(future, None)

    def _serve(self) -> None:
        while self._do_next():
            pass

    def _do_next(self) -> bool:
        """Whether there was anything to do; nothing of it is kept."""
        with self._lock:
            future = next(iter(self._waiting), None)
            if future is None:
                self._num_threads -= 1
                return False
            work = self._waiting.pop(future)
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is awaited
                future.set_exception(error)
            else:
                future.set_result(result)
        return True


class _Thread(threading.Thread):
    """One of a lane's."""


def end_process_if_busy(code: int) -> None:
    """Ends the process with this exit code if a lane is still at work, else returns.

    Such work cannot be interrupted, and the interpreter would either wait for it, or go down under native code that
    comes back to it then. What is to be done at exit is done first.
    """
    if any(isinstance(thread, _Thread) for thread in threading.enumerate()):
        atexit._run_exitfuncs()  # noqa: SLF001 - as multiprocessing does where it ends by os._exit
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
