"""Worker processes, forked from one that has imported everything: a worker then starts in a blink, not in seconds.

The first worker of a controller starts the server, a process with one thread that imports PyTorch and transformers.
It stays for the next engine and ends with its controller, however that ends; its workers end with it. Both ties
are pipes that close when their owner is gone. This module is light: only the server imports `runtime.worker`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from longspan.runtime.child import start_child, unless_forked
from longspan.runtime.messages import WorkerConfig

_LOST = -9
"""Exit code of workers whose server was lost: they end at once, but nobody learns how."""
_START_TIMEOUT_S = 300.0
"""The server has imported everything and forked."""
_END_TIMEOUT_S = 5.0
"""The server has done what ends a worker, or itself."""
_SPIN_COUNT = "20000"
"""The number of times that a thread of GNU's OpenMP asks whether it can go on before it sleeps.

They take some 1 ms; the default takes 15 times as long. A decode step has a hundred such waits, each for Python between
two kernels: at 2,000 it took a quarter longer, since threads slept. But the thread that is waited for may have lost its
core to another process.
"""


class StartWorker(msgspec.Struct, frozen=True, tag="start"):
    """Fork the worker `rank`, which uses the folder `run_dir` and writes to the file `log`; answered by `Started`."""

    config: WorkerConfig
    rank: int
    run_dir: str
    log: Path


class KillWorker(msgspec.Struct, frozen=True, tag="kill"):
    """Kill a worker unless it has ended."""

    pid: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The process id of the worker that was asked for."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker has ended; negative codes are signals."""

    pid: int
    code: int


ServerCommand = StartWorker | KillWorker
ServerReport = Started | Ended


class WorkerProcess:
    """A worker as its controller sees it."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._ended = threading.Event()

    def wait(self, timeout_s: float | None = None) -> int:
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"worker process {self.pid} still runs after {timeout_s} s")
        assert self.returncode is not None, "set before the event"
        return self.returncode

    def kill(self) -> None:
        self._server.send(KillWorker(self.pid))

    def destroy(self) -> None:
        """Ends it by force and waits, with a time limit: a server that does not kill it is ended, too."""
        self.kill()
        try:
            self.wait(_END_TIMEOUT_S)
        except TimeoutError:
            self._server.destroy()

    def end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class _ForkServer:
    """The controller's side of the server process."""

    def __init__(self) -> None:
        self._process = start_child(
            "longspan.runtime.executor.forkserver_main",
            stdout=subprocess.PIPE,
            env={
                **({} if "OMP_WAIT_POLICY" in os.environ else {"GOMP_SPINCOUNT": _SPIN_COUNT}),
                **os.environ,
                "OMP_NUM_THREADS": "1",  # workers set their own number; threads would not survive a fork
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for devices must not initialise CUDA before the fork
            },
        )
        assert self._process.stdin is not None, "a child has a pipe"
        self._pipe = self._process.stdin
        self._workers: dict[int, WorkerProcess] = {}
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._started = threading.Semaphore(0)
        self._latest: WorkerProcess | None = None
        self._decoder = msgspec.json.Decoder(ServerReport)
        threading.Thread(target=self._listen, daemon=True).start()
        weakref.finalize(self, unless_forked(self.close))  # at exit, after the finalizers of engines, which are younger

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def start(self, command: StartWorker) -> WorkerProcess:
        """Starts a worker, which finds its controller in its `run_dir`; raises OSError when the server cannot."""
        with self._starting:
            self.send(command)
            if not self._started.acquire(timeout=_START_TIMEOUT_S):
                self.destroy()
                raise OSError(f"the process that forks workers does nothing for {_START_TIMEOUT_S:g} s")
            if self._latest is None:
                raise OSError(f"the process that forks workers ended with code {self._process.wait()}")
            return self._latest

    def forget(self) -> None:
        """Closes a forked child's copies of the pipes, so that the server ends with its owner while the child lives."""
        null = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(null, pipe.fileno(), inheritable=False)  # the file object closes its number later
        os.close(null)

    def send(self, command: ServerCommand) -> None:
        """Sends a command; a server that is gone is ignored, since its workers are gone, too."""
        with self._lock:
            try:
                self._pipe.write(msgspec.json.encode(command, enc_hook=os.fspath) + b"\n")
                self._pipe.flush()
            except (BrokenPipeError, ValueError):
                return

    def close(self) -> None:
        """Ends the server and with it its workers. Without workers it need not finish its imports."""
        with self._lock, suppress(BrokenPipeError):  # a fork server that has ended reads no message
            self._pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S if self._workers else 0.0)
        except subprocess.TimeoutExpired:
            self.destroy()

    def destroy(self) -> None:
        """Ends a server that hangs, and all its workers, by force."""
        workers = list(self._workers)
        with _watched(workers) as wait:
            for pid in workers:  # they are the server's to reap, so these numbers are still theirs
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None, "asked for a pipe"
        with self._process.stdout as reports:
            for line in reports:
                match self._decoder.decode(line):
                    case Started(pid):
                        self._latest = self._workers[pid] = WorkerProcess(self, pid)
                        self._started.release()
                    case Ended(pid, code):
                        self._workers.pop(pid).end(code)
        with self._lock, suppress(BrokenPipeError):
            self._pipe.close()
        self._latest = None
        self._started.release()
        for worker in self._workers.values():
            worker.end(_LOST)


@contextmanager
def _watched(pids: Sequence[int]) -> Iterator[Callable[[], None]]:
    """Gives a function that waits, though not for ever, until processes which need not be ours have ended.

    Where the system cannot tell, it does not wait.
    """
    ends: list[int] = []
    try:
        for pid in pids if hasattr(os, "pidfd_open") else ():
            with suppress(ProcessLookupError):
                ends.append(os.pidfd_open(pid))
        yield lambda: _await_all(ends)
    finally:
        for end in ends:
            os.close(end)


def _await_all(ends: Sequence[int]) -> None:
    deadline = time.monotonic() + _END_TIMEOUT_S
    for end in ends:
        waiting = select.poll()  # select() fails in a process with more than 1,023 open files
        waiting.register(end, select.POLLIN)
        waiting.poll(max(0.0, deadline - time.monotonic()) * 1000)


_server: _ForkServer | None = None
_server_lock = threading.Lock()


def start_server() -> _ForkServer:
    """Starts the server unless it runs already; does not wait while it is still importing."""
    global _server  # noqa: PLW0603 - one per process is its point
    with _server_lock:
        if _server is None or not _server.alive:
            _server = _ForkServer()
        return _server


def _forget_server() -> None:
    """Lets a forked child have a server of its own. Another thread may have held the lock when it forked."""
    global _server, _server_lock  # noqa: PLW0603 - see above
    _server_lock = threading.Lock()
    if _server is not None:
        _server.forget()
        _server = None


os.register_at_fork(after_in_child=_forget_server)
