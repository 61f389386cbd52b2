"""Signals of the command line: SIGINT, SIGTERM and SIGHUP end it at any time with exit code 128 + number.

While an engine runs, the first signal raises SystemExit, which unwinds the verb and shuts the engine down. A first
signal during that shutdown does not interrupt it. At any other time, and at a second signal, the process ends at once:
its children are killed and its folders removed. No exception is raised into an import, which may convert it or crash.
An exception that is lost where C code calls Python is raised again.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from longspan.runtime.child import end_all

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_AGAIN_S = 0.05
"""Seconds until the exception is raised again, if no handler has begun."""


class _State:
    """The signal that ends this process, and whether it may unwind the verb or must not interrupt a shutdown."""

    def __init__(self) -> None:
        self.exception: SystemExit | None = None
        self.unwinds = self.finishes = False


_state = _State()


def catch() -> None:
    """Install the signal handlers.

    An ignored SIGINT is handled, since shells ignore it for background jobs. An ignored SIGHUP, as by nohup, is not.
    """
    _state.exception, _state.unwinds, _state.finishes = None, False, False
    for number in NUMBERS:
        if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _take)


def exit_code() -> int | None:
    """Return the exit code of the first signal. None if there was no signal."""
    return None if _state.exception is None else int(str(_state.exception.code))


@contextmanager
def finishing() -> Iterator[None]:
    """Let the first signal in the block only set the exit code, except inside `unwinding`."""
    _state.finishes = True
    try:
        yield
    finally:
        _state.finishes = False


@contextmanager
def unwinding() -> Iterator[None]:
    """Let the first signal raise SystemExit in the block."""
    before = signal.getsignal(signal.SIGALRM)
    signal.signal(signal.SIGALRM, lambda _, frame: _raise(frame))
    _state.unwinds = True
    try:
        yield
    finally:
        _state.unwinds = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _take(number: int, frame: FrameType | None) -> None:
    if _state.exception is not None or not (_state.unwinds or _state.finishes):
        _end(number)
    _state.exception = SystemExit(128 + number)
    if not _state.unwinds:
        return
    sys.unraisablehook = lambda _: None  # Python would print a lost exception
    _raise(frame)


def _end(number: int) -> NoReturn:
    """End the process and its children and remove their folders, without running interrupted code."""
    end_all()
    os._exit(128 + number)


def _raise(frame: FrameType | None) -> None:
    """Raise the exception, unless it is being handled or an import runs. Check again after `_AGAIN_S`."""
    if not _state.unwinds or _state.exception is None:
        return
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
    if not _is_handled(_state.exception) and not _imports(frame):
        raise _state.exception


def _is_handled(exception: BaseException) -> bool:
    """Return True if the interrupted code handles the exception, or an exception that it caused."""
    handled = sys.exception()
    while handled is not None and handled is not exception:
        handled = handled.__context__
    return handled is exception


def _imports(frame: FrameType | None) -> bool:
    """Return True if the interrupted code is part of an import."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
