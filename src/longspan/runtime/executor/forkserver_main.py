"""The process that workers are forked from, see `executor.forkserver`. It has one thread, so that forking is safe."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import NoReturn

import msgspec

from longspan.core.exports import uncollected
from longspan.runtime.executor.forkserver import Ended, KillWorker, ServerCommand, ServerReport, Started, StartWorker

_END_TIMEOUT_S = 2.0
_POLL_S = 0.02
_MODULES = (
    "longspan.runtime.worker_process",
    "longspan.model.whole_step",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "sympy",
)
"""Modules that workers need. PyTorch imports sympy when it builds a model on the meta device."""


class _Children:
    """Running workers, each with a pipe whose closing tells it that the server has exited."""

    def __init__(self) -> None:
        self._lifelines: dict[int, int] = {}

    def start(self, command: StartWorker) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            for lifeline in (*self._lifelines.values(), writing):
                os.close(lifeline)
            _become_worker(command, reading)
        os.close(reading)
        self._lifelines[pid] = writing
        _report(Started(pid))

    def kill(self, pid: int) -> None:
        if pid in self._lifelines:  # otherwise it has ended, and its id may be reused
            os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Close all lifelines, and kill workers that still run after a timeout."""
        for lifeline in self._lifelines.values():
            os.close(lifeline)
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while self._lifelines:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            if pid:
                del self._lifelines[pid]
            elif time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            else:
                for pid in self._lifelines:
                    os.kill(pid, signal.SIGKILL)
                return

    def reap(self) -> None:
        while self._lifelines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            os.close(self._lifelines.pop(pid))
            _report(Ended(pid, os.waitstatus_to_exitcode(status)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uncollected(), _ending_with_parent():
        for name in _MODULES:
            import_module(name)
    gc.freeze()  # so that collections in the workers do not copy shared pages
    waking, wake = socket.socketpair()
    for end in (waking, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(waking, selectors.EVENT_READ)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    children, received, decoder = _Children(), b"", _decoder()
    while True:
        for key, _ in selector.select():
            if key.fileobj is waking:
                waking.recv(4096)
                children.reap()
                continue
            data = os.read(sys.stdin.fileno(), 1 << 16)
            if not data:
                children.end()
                return
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                match decoder.decode(line):
                    case StartWorker() as command:
                        children.start(command)
                    case KillWorker(pid):
                        children.kill(pid)


@contextmanager
def _ending_with_parent() -> Iterator[None]:
    """Exit at once if the parent exits while the block imports. The watching thread ends with the block."""
    stop, stopping = os.pipe()
    pipes = select.poll()
    pipes.register(sys.stdin.fileno(), 0)  # poll always reports a closed other end
    pipes.register(stop, 0)

    def watch() -> None:
        if any(descriptor != stop for descriptor, _ in pipes.poll()):
            os._exit(1)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        os.close(stopping)
        watcher.join()
        os.close(stop)


def _become_worker(command: StartWorker, lifeline: int) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(command.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(log, fcntl.LOCK_SH)  # protects the log from clean-up while the worker writes
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        from longspan.runtime import worker_process  # noqa: PLC0415 - imported by the server, see `main`

        worker_process.main(command, lifeline)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _decoder() -> msgspec.json.Decoder[ServerCommand]:
    return msgspec.json.Decoder(ServerCommand, dec_hook=lambda kind, text: kind(text))  # paths


def _report(report: ServerReport) -> None:
    with suppress(BrokenPipeError):  # the controller has exited: closing its other pipe ends this process
        os.write(sys.stdout.fileno(), msgspec.json.encode(report) + b"\n")


if __name__ == "__main__":
    main()
    os._exit(0)  # nothing needs a flush, and a normal exit takes half a second to unload modules
