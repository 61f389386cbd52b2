"""The control plane of all workers: sends steps, receives reports, and detects lost workers.

A `Launcher` starts the workers and decides where they run.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn, Protocol, Self, TypeVar

import msgspec
import zmq

from longspan import limits
from longspan.core.cluster import Cluster
from longspan.core.steps import BytesSent, Completion, Forward, Free, MoveKV, Reshard, Step
from longspan.errors import OutOfMemoryError, WorkerLostError
from longspan.runtime import messages
from longspan.runtime.child import how_ended, lack_of_memory, unless_forked
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.in_flight import InFlight

if TYPE_CHECKING:
    from longspan.runtime.host_tiers import DiskLink, HostTiers

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 3.0
_MIN_WAIT_S = 0.1
"""Minimum seconds to wait for reports before a rank counts as stalled. The controller itself may have been stopped."""

ReportT = TypeVar("ReportT", messages.Ready, messages.Measured)


class MonotonicClock:
    """The engine's clock: the monotonic clock of the host."""

    def now(self) -> float:
        return time.monotonic()


class WorkerHandle(Protocol):
    """A worker as its controller sees it."""

    pid: int

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until it ends, and return its exit code. Raises TimeoutError after `timeout_s`."""

    def kill(self) -> None:
        """Kill it, or close its transports, without waiting for its end."""

    def destroy(self) -> None:
        """Kill it and wait for its end, with a time limit."""


class Launcher(Protocol):
    """Starts the workers of one engine: one per rank of `cluster`, and more for larger clusters.

    The executor closes `channel`, to which workers connect, and then calls `clean_up`.
    """

    cluster: Cluster
    channel: Channel

    def start(self, rank: int) -> WorkerHandle:
        """Start a worker, which reports when it is ready."""

    def hint(self, rank: int) -> str: ...

    def clean_up(self) -> None: ...


class WorkerExecutor:
    """Runs steps on workers, the ranks of a `Cluster`.

    A rank with a step to run but no report for `step_timeout_s` is lost: it hangs, or waits for a rank that hangs.
    Commands and reports use zmq sockets, tensors the transports between the workers. Close it, or use it as a context
    manager. It also closes when it is garbage-collected or the interpreter exits.

    Attributes:
        wakeup: a zmq socket or file descriptor that also ends the wait of `poll` when it is readable.
        fallbacks: sentences of the workers that started first on parts of the model that our kernels do not compute.
        worker_times: by rank, the seconds per category up to the latest step, if the workers record them.
    """

    def __init__(self, launcher: Launcher, *, step_timeout_s: float, tiers: HostTiers | None = None) -> None:
        """Start one worker per rank and wait until all are ready.

        Raises:
            WorkerLostError: if a worker does not start.
        """
        cluster = launcher.cluster
        with ExitStack() as acquired:
            acquired.callback(launcher.clean_up)
            acquired.callback(launcher.channel.close)
            self._launcher, self._step_timeout_s, self._channel = launcher, step_timeout_s, launcher.channel
            self._in_flight = InFlight(cluster)
            self._workers: list[WorkerHandle] = []
            self._watchers: list[threading.Thread] = []
            self._disk_link = None if tiers is None else tiers.link(self._channel, cluster)
            self.wakeup: zmq.Socket[bytes] | int | None = None
            self.worker_times: list[dict[str, float]] = [{} for _ in range(cluster.num_ranks)]
            self._decoder = msgspec.msgpack.Decoder(messages.Report)
            self._num_oom_kills = limits.num_oom_kills()
            self._finalizer = weakref.finalize(
                self,
                unless_forked(_clean_up),
                self._workers,
                self._watchers,
                self._disk_link,
                launcher,
            )
            acquired.callback(self.close)
            for rank in range(cluster.num_ranks):
                self._start(rank)
            ready = self._await(messages.Ready)
            self.fallbacks = tuple(dict.fromkeys(text for report in ready for text in report.fallbacks))
            acquired.pop_all()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    def submit(self, step: Step) -> None:
        """Send a Forward to its ranks, a MoveKV to both ends or to a disk, and other steps to all ranks.

        A Reshard to a cluster with more ranks starts more workers.
        """
        if isinstance(step, Free):
            self._send(messages.RunFree(step), range(len(self._workers)))
            return
        if isinstance(step, Reshard):
            for rank in range(len(self._workers), step.cluster.num_ranks):
                self._add(rank)
            all_ranks = range(len(self._workers))
            self._in_flight.regroup(step, all_ranks, time.monotonic())
            self._send(messages.RunReshard(step.number, step.cluster), all_ranks)
            return
        if isinstance(step, MoveKV) and step.way in ("save", "load"):
            assert self._disk_link is not None, "there is a disk tier"
            self._disk_link.put(step)
            return
        self._in_flight.begin(step, time.monotonic())
        if isinstance(step, MoveKV):
            self._send(messages.RunMoves((step,)), self._in_flight.ranks([*step.sources, *step.targets]))
            return
        self._send(messages.RunForward(step), self._in_flight.ranks(step.instances))
        for target in sorted({target for move in step.streams for target in move.targets}):
            received = tuple(move for move in step.streams if target in move.targets)  # not the streams that it sends
            self._send(messages.RunMoves(received), self._in_flight.ranks((target,)))

    def run(self, step: Forward | Reshard) -> None:
        """Run one step before all steps of the engine. A Reshard only changes pools.

        Raises:
            WorkerLostError: if a worker dies or raises, for example from lack of memory.
        """
        self.submit(step)
        while not self.poll(None):
            pass

    def measure(self, step: Forward) -> tuple[messages.RankMemory, ...]:
        """Run the largest step, and return each rank's memory afterwards. Raises WorkerLostError as `run` does.

        Ranks report twice, and the second report counts. All ranks of a device have freed the step's memory then.
        """
        self.run(step)
        for _ in range(2):
            self._send(messages.Measure(), range(len(self._workers)))
            reports = self._await(messages.Measured)
        return tuple(report.memory for report in sorted(reports, key=lambda report: report.rank))

    def prepare(self, max_num_seqs: int, max_model_len: int, max_tokens: int) -> None:
        """Prepare steps of up to `max_num_seqs` requests and `max_tokens` tokens on all ranks, before any other step.

        A progress bar shows the recorded graphs of rank 0.

        Raises:
            WorkerLostError: if a worker dies or raises, for example from lack of memory.
        """
        self._send(messages.Prepare(max_num_seqs, max_model_len, max_tokens), range(len(self._workers)))
        from tqdm import tqdm  # noqa: PLC0415 - only for CUDA devices

        with tqdm(desc="CUDA graphs", unit="graph", dynamic_ncols=True, disable=None, delay=1e-3) as bar:

            def show(report: messages.Prepared) -> None:
                if report.rank == 0:
                    bar.total = report.num_graphs
                    bar.update(report.num_done - bar.n)

            self._await(messages.Ready, show)

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Wait for completions. A lost worker closes this executor."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            report = self._receive(self._patience_s(left_s), wakeup=self.wakeup)
            if report is None:
                self._lose_stalled()
                return []
            completion = self._take(report)
            if completion is not None:
                return [completion]

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Stop the workers, and kill them after a timeout. Can be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int) -> None:
        self._workers.append(self._launcher.start(rank))
        arguments = self._workers[rank], rank, self._channel.reporter()
        thread = threading.Thread(target=_watch, args=arguments, daemon=True)
        thread.start()
        self._watchers.append(thread)

    def _add(self, rank: int) -> None:
        """Start one more worker, which waits for a Reshard. If it does not start, the executor closes."""
        self.worker_times.append({})
        try:
            self._start(rank)
        except OSError as error:
            self._lose(rank, f"it does not start: {error}")

    def _await(self, kind: type[ReportT], show: Callable[[messages.Prepared], None] = lambda _: None) -> list[ReportT]:
        """Wait until every rank has sent such a report. Returns them in order of arrival."""
        reports: dict[int, ReportT] = {}
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(reports) < len(self._workers):
            report = self._receive(deadline - time.monotonic())
            if report is None:
                missing = min({*range(len(self._workers))} - {*reports})
                self._lose(missing, f"not ready after {_START_TIMEOUT_S:.0f} s")
            elif isinstance(report, kind):
                reports[report.rank] = report
            elif isinstance(report, messages.Prepared):
                show(report)
            else:
                self._take(report)
        return list(reports.values())

    def _patience_s(self, timeout_s: float | None) -> float | None:
        """Return the seconds to wait for a report before checking for stalled ranks."""
        since_s = self._in_flight.busy_since_s()
        if since_s is None:
            return timeout_s
        due_s = since_s + self._step_timeout_s - time.monotonic()
        return min(float("inf") if timeout_s is None else timeout_s, max(_MIN_WAIT_S, due_s))

    def _lose_stalled(self) -> None:
        stalled = self._in_flight.stalled(time.monotonic() - self._step_timeout_s)
        if stalled:
            ranks = f"rank{'s' * (len(stalled) > 1)} {', '.join(map(str, stalled))}"
            self._lose(stalled[0], f"no step was completed by {ranks} for {self._step_timeout_s:g} s (--step-timeout)")

    def _receive(
        self, timeout_s: float | None, wakeup: zmq.Socket[bytes] | int | None = None
    ) -> messages.Report | None:
        data = self._channel.receive(timeout_s, wakeup)
        return None if data is None else self._decoder.decode(data)

    def _take(self, report: messages.Report) -> Completion | None:
        match report:
            case messages.Done():
                self.worker_times[report.rank] = report.times
                return self._in_flight.take(report, time.monotonic())
            case messages.Moved() | messages.Regrouped():
                return self._in_flight.take(report, time.monotonic())
            case messages.Sent(rank, number):
                self._in_flight.sent(rank, number)
            case messages.Stored(number, num_bytes, failed):
                sent: BytesSent = {("disk_copy", "same_host"): num_bytes}
                return Completion(number=number, sampled=(), bytes_sent=sent, failed=failed)
            case messages.Failed(peer=True) | messages.Exited(code=1 | messages.DISCONNECTED):
                from longspan.runtime.executor.causes import cause_of  # noqa: PLC0415 - few workers are lost

                self._take(cause_of(report, self._receive))
            case messages.Failed(rank, reason, memory=memory):
                self._lose(rank, reason, OutOfMemoryError if memory else WorkerLostError)
            case messages.Exited(rank, code):
                if (lacked := lack_of_memory(code, self._num_oom_kills)) is not None:
                    self._lose(rank, f"{how_ended(code)}: {lacked}", OutOfMemoryError)
                self._lose(rank, how_ended(code))
        return None

    def _lose(self, rank: int, reason: str, kind: type[WorkerLostError] = WorkerLostError) -> NoReturn:
        for worker in self._workers:
            worker.kill()  # other ranks may hang in a transfer with the lost rank
        self.close()
        raise kind(rank, f"{reason} ({self._launcher.hint(rank)})")

    def _send(self, command: messages.Command, ranks: Sequence[int]) -> None:
        data = msgspec.msgpack.encode(command)
        for rank in ranks:
            self._channel.send(rank, data)


def _watch(worker: WorkerHandle, rank: int, reports: zmq.Socket[bytes]) -> None:
    """Report the end of a worker. Owns its socket, since a zmq socket belongs to one thread."""
    code = worker.wait()
    try:
        reports.send(msgspec.msgpack.encode(messages.Exited(rank=rank, code=code)))
    except zmq.ZMQError:
        return  # the executor is closing
    finally:
        reports.close(linger=0)


def _clean_up(
    workers: Sequence[WorkerHandle],
    watchers: Sequence[threading.Thread],
    disk_link: DiskLink | None,
    launcher: Launcher,
) -> None:
    """End all workers, and release their processes, threads, sockets and files, except logs."""
    stop = msgspec.msgpack.encode(messages.Stop())
    for rank in range(len(workers)):
        launcher.channel.send_now(rank, stop)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            worker.destroy()
    for watcher in watchers:  # zmq aborts the process if a socket is closed while another thread sends on it
        watcher.join(_STOP_TIMEOUT_S)
    if disk_link is not None:
        disk_link.close()
    launcher.channel.close()
    launcher.clean_up()
