"""Worker processes, forked from a server process that has imported everything, so that a worker starts quickly.

The first worker of a controller starts the server, a process with one thread that imports PyTorch and transformers.
The server stays for later engines. It exits when its controller exits in any way, and its workers exit with it. Both
notice by pipes that close with their owner. This module is light: only the server imports `runtime.worker`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from longspan.runtime.child import start_child, unless_forked
from longspan.runtime.contact import Contact
from longspan.runtime.messages import WorkerConfig

_LOST = -9
"""Exit code of workers whose server was lost. They exit at once, with an unknown code."""
_START_TIMEOUT_S = 300.0
"""Seconds for the server to import everything and fork."""
_END_TIMEOUT_S = 5.0
"""Seconds for the server to end a worker, or itself."""
_SPIN_COUNT = "20000"
"""Number of polls of a GNU OpenMP thread before it sleeps.

20,000 polls take about 1 ms. The default takes 15 times as long. A decode step has about a hundred such waits, each for
Python code between two kernels. At 2,000 polls a decode step took 25 % longer, since threads slept. Higher values waste
time if the awaited thread has lost its core to another process.
"""


_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATOR_NAMES = {_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF"}
"""Environment variables with the options of PyTorch's allocator. The first one hides the second."""
CUDA_QUEUES = 32
"""Hardware queues of a CUDA device, the maximum. CUDA's default is 8.

Streams share them, and a call that waits for a peer blocks the calls behind it in its queue.
"""


class StartWorker(msgspec.Struct, frozen=True, tag="start"):
    """Fork the worker `rank`, whose output goes to the file `log`. The answer is `Started`.

    Attributes:
        run_dir: the private folder of the engine on this host, where its ranks meet. The launcher creates it, or the
            ranks if they are placed on several hosts. Workers remove it when the process that started them exits.
    """

    config: WorkerConfig
    rank: int
    contact: Contact
    run_dir: str
    log: Path


class KillWorker(msgspec.Struct, frozen=True, tag="kill"):
    """Kill a worker unless it has ended."""

    pid: int


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The process id of the worker that a `StartWorker` has started."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A worker process has ended. Negative codes are signals."""

    pid: int
    code: int


ServerCommand = StartWorker | KillWorker
ServerReport = Started | Ended


class WorkerProcess:
    """The controller's handle of a worker process."""

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
        """Kill it and wait, with a time limit. A server that does not kill it is killed, too."""
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
                **_defaults(os.environ),
                **os.environ,
                "OMP_NUM_THREADS": "1",  # workers set their own number: threads do not survive a fork
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # counting devices must not initialise CUDA before the fork
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
        weakref.finalize(self, unless_forked(self.close))  # runs after the finalizers of engines, which are newer

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return self._process.poll() is None

    def start(self, command: StartWorker) -> WorkerProcess:
        """Start a worker. Raises OSError if that fails."""
        with self._starting:
            self.send(command)
            if not self._started.acquire(timeout=_START_TIMEOUT_S):
                self.destroy()
                raise OSError(f"the process that forks workers did not answer for {_START_TIMEOUT_S:g} s")
            if self._latest is None:
                raise OSError(f"the process that forks workers ended with code {self._process.wait()}")
            return self._latest

    def forget(self) -> None:
        """Close a forked child's copies of the pipes, so that the server exits with its owner, not with the child."""
        null = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(null, pipe.fileno(), inheritable=False)  # the file object closes its number later
        os.close(null)

    def send(self, command: ServerCommand) -> None:
        """Send a command. Ignores a server that has exited, since its workers have exited, too."""
        with self._lock:
            try:
                self._pipe.write(msgspec.json.encode(command, enc_hook=os.fspath) + b"\n")
                self._pipe.flush()
            except (BrokenPipeError, ValueError):
                return

    def close(self) -> None:
        """End the server and its workers. Without workers, it is killed even while it imports."""
        with self._lock, suppress(BrokenPipeError):  # the server may have exited
            self._pipe.close()
        try:
            self._process.wait(_END_TIMEOUT_S if self._workers else 0.0)
        except subprocess.TimeoutExpired:
            self.destroy()

    def destroy(self) -> None:
        """Kill the server and all its workers."""
        workers = list(self._workers)
        with _watched(workers) as wait:
            for pid in workers:  # only the server reaps them, so their ids are not reused yet
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.kill()
            self._process.wait()
            wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None, "the child has a pipe"
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
    """Yield a function that waits, with a timeout, until processes have ended. They need not be our children.

    Without `pidfd_open`, the function does not wait.
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


def _defaults(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that libraries of workers read when they start. The caller's own variables override them."""
    # NCCL must not register buffers of CUDA graphs: it reads wrong addresses in the segments of the allocator below.
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": str(CUDA_QUEUES), "NCCL_GRAPH_REGISTER": "0"}
    if "OMP_WAIT_POLICY" not in environment:
        defaults["GOMP_SPINCOUNT"] = _SPIN_COUNT
    if _ALLOCATOR_NAMES.isdisjoint(environment):  # leaves no gaps between tensors of changing sizes
        defaults[_ALLOCATOR] = "expandable_segments:True"
    return defaults


_server: _ForkServer | None = None
_server_lock = threading.Lock()


def start_server() -> _ForkServer:
    """Start the server unless it runs already. Does not wait for its imports."""
    global _server  # noqa: PLW0603 - one per process is its point
    with _server_lock:
        if _server is None or not _server.alive:
            _server = _ForkServer()
        return _server


def _forget_server() -> None:
    """Give a forked child its own server. Also replaces the lock, which another thread may have held at the fork."""
    global _server, _server_lock  # noqa: PLW0603 - see above
    _server_lock = threading.Lock()
    if _server is not None:
        _server.forget()
        _server = None


os.register_at_fork(after_in_child=_forget_server)
