"""LocalExecutor: one worker process per rank on this host."""

from __future__ import annotations

import fcntl
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

import msgspec
import zmq

from longspan.core.cluster import Fleet
from longspan.core.steps import Completion, Free, MoveKV, Step
from longspan.errors import WorkerLostError
from longspan.model.cache import cache_root
from longspan.model.files import ModelFiles
from longspan.runtime.executor.forkserver import WorkerProcess, start_worker
from longspan.runtime.executor.in_flight import InFlight
from longspan.runtime.messages import (
    Command,
    Done,
    Exited,
    Failed,
    Moved,
    Ready,
    Report,
    RunForward,
    RunFree,
    RunMoves,
    Sent,
    Stop,
    WorkerConfig,
    command_address,
    report_address,
)

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 3.0
_MAX_PARENT = 70
_BLAME_TIMEOUT_S = 3.0
"""How long to wait for the rank that caused it when another one only noticed a lost peer."""
_LEAST_WAIT_S = 0.1
"""For reports that may be there already: it may have been this process that was stopped for long, not its workers."""


class MonotonicClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        """Seconds since an arbitrary moment."""
        return time.monotonic()


class LocalExecutor:
    """Implements `Executor` on worker processes, the ranks of a `Fleet`.

    `poll` returns early, with nothing, when there is something to read on the socket `interrupt`.
    A rank that has a step to run and reports none for `step_timeout_s` is lost: it hangs, or waits for one that does.
    `worker_times` has, by rank, the seconds spent per category up to the latest step, if the workers record them.
    Commands and reports go over zmq sockets in a private folder, tensors over torch.distributed between the workers.
    Close it, or use it as a context manager; it also closes when it is collected or the interpreter exits.
    """

    def __init__(self, configs: Sequence[WorkerConfig], *, log_dir: Path, step_timeout_s: float) -> None:
        """Starts one worker per configuration and waits until all are ready.

        The configurations' `run_dir` is made by `make_run_dir` and removed by `close`.

        Raises:
            WorkerLostError: when a worker does not start.
        """
        run_dir = configs[0].run_dir
        self._log_dir, self._step_timeout_s = log_dir, step_timeout_s
        self._context = zmq.Context()
        self._context.sndhwm = self._context.rcvhwm = 0  # queues without bound: the engine bounds the steps in flight
        self._commands: list[zmq.Socket[bytes]] = []
        self._in_flight = InFlight(configs[0].fleet)
        self._processes: list[WorkerProcess] = []
        self._reports = self._context.socket(zmq.PULL)
        self._finalizer = weakref.finalize(
            self, _clean_up, self._processes, self._commands, self._reports, self._context, Path(run_dir)
        )
        self._reports.bind(report_address(run_dir))
        self.interrupt: zmq.Socket[bytes] | None = None
        self.worker_times: list[dict[str, float]] = [{} for _ in configs]
        self._decoder = msgspec.msgpack.Decoder(Report)
        log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for config in configs:
                self._start(config)
            self._wait_until_ready(len(configs))
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank."""
        return tuple(process.pid for process in self._processes)

    def submit(self, step: Step) -> None:
        """Sends a Forward to the ranks that take part, a MoveKV to both ends, a Free to all."""
        if isinstance(step, Free):
            self._send(RunFree(step), range(len(self._commands)))
            return
        self._in_flight.begin(step, time.monotonic())
        if isinstance(step, MoveKV):
            self._send(RunMoves((step,)), self._in_flight.ranks([*step.sources, *step.targets]))
            return
        self._send(RunForward(step), self._in_flight.ranks(step.instances))
        if step.streams:
            targets = sorted({target for move in step.streams for target in move.targets})
            self._send(RunMoves(step.streams), self._in_flight.ranks(targets))

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """See `Executor`; a lost worker closes this executor."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            report = self._receive(self._patience_s(left_s), interrupt=self.interrupt)
            if report is None:
                self._lose_stalled()
                return []
            completion = self._take(report)
            if completion is not None:
                return [completion]

    def close(self) -> None:
        """Stops the workers, by force if they do not stop, and removes the run folder. May be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, config: WorkerConfig) -> None:
        process = start_worker(config, self._log_dir / f"rank{config.rank}.log")
        self._processes.append(process)
        socket = self._context.socket(zmq.PUSH)
        socket.connect(command_address(config.run_dir, config.rank))
        self._commands.append(socket)
        watcher = self._context.socket(zmq.PUSH)
        watcher.connect(report_address(config.run_dir))
        threading.Thread(target=_watch, args=(process, config.rank, watcher), daemon=True).start()

    def _wait_until_ready(self, num_ranks: int) -> None:
        ready: set[int] = set()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(ready) < num_ranks:
            report = self._receive(deadline - time.monotonic())
            if report is None:
                missing = min(set(range(num_ranks)) - ready)
                self._lose(missing, f"not ready after {_START_TIMEOUT_S:.0f} s")
            elif isinstance(report, Ready):
                ready.add(report.rank)
            else:
                self._take(report)

    def _patience_s(self, timeout_s: float | None) -> float | None:
        """How long to wait for a report before it is time to look for ranks that hang."""
        since_s = self._in_flight.first_due_s()
        if since_s is None:
            return timeout_s
        due_s = since_s + self._step_timeout_s - time.monotonic()
        return min(float("inf") if timeout_s is None else timeout_s, max(_LEAST_WAIT_S, due_s))

    def _lose_stalled(self) -> None:
        stalled = self._in_flight.stalled(time.monotonic() - self._step_timeout_s)
        if stalled:
            ranks = f"rank{'s' * (len(stalled) > 1)} {', '.join(map(str, stalled))}"
            self._lose(stalled[0], f"no step was completed by {ranks} for {self._step_timeout_s:g} s (--step-timeout)")

    def _receive(self, timeout_s: float | None, interrupt: zmq.Socket[bytes] | None = None) -> Report | None:
        poller = zmq.Poller()
        for socket in (self._reports, interrupt):
            if socket is not None:
                poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout_s is None else int(max(0.0, timeout_s) * 1000)))
        return self._decoder.decode(self._reports.recv()) if self._reports in ready else None

    def _take(self, report: Report) -> Completion | None:
        match report:
            case Done():
                self.worker_times[report.rank] = report.times
                return self._in_flight.take(report, time.monotonic())
            case Moved():
                return self._in_flight.take(report, time.monotonic())
            case Sent(rank, number):
                self._in_flight.sent(rank, number)
            case Failed(rank, reason, peer=True):
                self._blame(rank, reason)
            case Failed(rank, reason):
                self._lose(rank, reason)
            case Exited(rank, code):
                self._lose(rank, _describe(code))
        return None

    def _blame(self, rank: int, reason: str) -> NoReturn:
        """A rank lost a peer: waits shortly for the word of the one that was lost."""
        deadline = time.monotonic() + _BLAME_TIMEOUT_S
        while (report := self._receive(deadline - time.monotonic())) is not None:
            if isinstance(report, Failed) and not report.peer:
                self._lose(report.rank, report.reason)
            if isinstance(report, Exited) and report.rank != rank and report.code != 1:
                self._lose(report.rank, _describe(report.code))
        self._lose(rank, reason)

    def _lose(self, rank: int, reason: str) -> NoReturn:
        for process in self._processes:
            process.kill()  # the others may hang in a transfer with the one that is lost
        self.close()
        raise WorkerLostError(rank, f"{reason} (log: {self._log_dir / f'rank{rank}.log'})")

    def _send(self, command: Command, ranks: Sequence[int]) -> None:
        data = msgspec.msgpack.encode(command)
        for rank in ranks:
            self._commands[rank].send(data)


def make_run_dir() -> str:
    """A private folder for sockets, whose paths may have some 100 characters: not below a long TMPDIR."""
    parent = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="longspan-", dir=parent if len(parent) < _MAX_PARENT else "/tmp")  # noqa: S108 - private


def _watch(process: WorkerProcess, rank: int, reports: zmq.Socket[bytes]) -> None:
    """Reports the end of a worker process. Owns its socket: zmq sockets belong to one thread."""
    code = process.wait()
    try:
        reports.send(msgspec.msgpack.encode(Exited(rank=rank, code=code)))
    except zmq.ZMQError:
        return  # the executor is closing; nobody listens any more
    finally:
        reports.close(linger=0)


def _describe(code: int) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with code {code}"


def _clean_up(
    processes: Sequence[WorkerProcess],
    commands: Sequence[zmq.Socket[bytes]],
    reports: zmq.Socket[bytes],
    context: zmq.Context[zmq.Socket[bytes]],
    run_dir: Path,
) -> None:
    """Ends all workers; nothing is left of them: no process, no socket, no file but the logs.

    It is given all sockets of this thread: a context waits for ever for one that is garbage, but not closed yet.
    """
    stop = msgspec.msgpack.encode(Stop())
    for socket in commands:
        socket.send(stop)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            process.destroy()
    reports.close(linger=0)
    context.destroy(linger=0)
    shutil.rmtree(run_dir, ignore_errors=True)


_NUM_LOGS_KEPT = 20


def start_workers(
    files: ModelFiles,
    fleet: Fleet,
    device: str,
    threads: int,
    num_blocks: Sequence[int],
    block_size: int,
    *,
    hosts: tuple[int, ...],
    attention_kernel: Path | None,
    record_times: bool,
    step_timeout_s: float,
) -> LocalExecutor:
    """One worker per rank of `fleet`, ready for steps, with the `num_blocks` of its instance.

    What `hosts` says of each rank decides how bytes are counted.

    Raises:
        WorkerLostError: when a worker does not start.
    """
    run_dir = make_run_dir()
    configs = [
        WorkerConfig(
            rank=rank,
            fleet=fleet,
            run_dir=run_dir,
            model_name=files.name,
            config_dir=str(files.config_dir),
            weights=str(files.weights),
            tokenizer_dir=None if files.tokenizer_dir is None else str(files.tokenizer_dir),
            dtype=files.dtype,
            trust_remote_code=files.trust_remote_code,
            device=device,
            num_threads=threads,
            num_blocks=num_blocks[fleet.place(rank)[0]],
            block_size=block_size,
            hosts=hosts,
            attention_kernel=None if attention_kernel is None else str(attention_kernel),
            record_times=record_times,
        )
        for rank in range(fleet.num_ranks)
    ]
    return LocalExecutor(configs, log_dir=_log_dir(run_dir), step_timeout_s=step_timeout_s)


def _log_dir(run_dir: str) -> Path:
    """A folder for the logs of this engine's workers; of those that nobody writes to only the latest are kept."""
    logs = cache_root() / "logs"
    if logs.is_dir():
        times = {}
        for folder in logs.iterdir():
            with suppress(FileNotFoundError):  # another engine may be doing the same
                times[folder] = folder.stat().st_mtime
        for folder in sorted(times, key=lambda folder: times[folder], reverse=True)[_NUM_LOGS_KEPT:]:
            if not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)
    return logs / Path(run_dir).name


def _in_use(folder: Path) -> bool:
    """Whether a worker still writes to a log, which it has locked."""
    for path in folder.glob("*.log"):
        try:
            with path.open("rb") as log:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # another engine has removed it, or there are no locks here
            continue
    return False
