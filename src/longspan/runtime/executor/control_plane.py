"""One control plane for all workers: sends them steps, takes their reports, and notices who is lost.

Who starts the workers, and where they run, is a `Launcher`'s business.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn, Protocol, Self, TypeVar

import msgspec
import zmq

from longspan import limits
from longspan.core.cluster import Cluster
from longspan.core.steps import BytesSent, Completion, Forward, Free, Link, MoveKV, Reshard, Sampled, Scored, Step
from longspan.errors import OutOfMemoryError, WorkerLostError
from longspan.runtime import messages
from longspan.runtime.child import how_ended, lack_of_memory, unless_forked

if TYPE_CHECKING:
    from longspan.runtime.disk_pool import DiskLane, DiskPool

_MAX_POLL_S = 2e6  # ZeroMQ counts milliseconds in 32 bits
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 3.0
_BLAME_TIMEOUT_S = 3.0
"""Wait this long for the rank that caused it when another one only noticed a lost peer, or ended by an exception."""
_LEAST_WAIT_S = 0.1
"""Wait this long for reports that may be there already: this process may have been stopped, not its workers."""

ReportT = TypeVar("ReportT", messages.Ready, messages.Measured)


class MonotonicClock:
    """Reads the host's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()


class WorkerHandle(Protocol):
    """A worker as its controller sees it."""

    pid: int

    def wait(self, timeout_s: float | None = None) -> int:
        """Returns its exit code once it has ended; raises TimeoutError after `timeout_s`."""

    def kill(self) -> None:
        """Ends it by force, or what it waits for, without waiting."""

    def destroy(self) -> None:
        """Ends it by force and waits for that, with a time limit."""


class Launcher(Protocol):
    """Starts the workers of one engine: one per rank of `cluster`, and others that come later.

    Attributes:
        context: the workers and their controller talk by its sockets, at addresses that begin with `endpoint`.
    """

    cluster: Cluster
    context: zmq.Context[zmq.Socket[bytes]]
    endpoint: str

    def start(self, rank: int) -> WorkerHandle:
        """Starts a worker, which reports when it is ready."""

    def hint(self, rank: int) -> str: ...

    def clean_up(self) -> None: ...


class WorkerExecutor:
    """Runs steps on workers, the ranks of a `Cluster`.

    A rank that has a step to run and reports none for `step_timeout_s` is lost: it hangs, or waits for one that does.
    Commands and reports go over zmq sockets, tensors over the transports between the workers. Close it, or use it as a
    context manager; it also closes when it is collected or the interpreter exits.

    Attributes:
        wakeup: a zmq socket or a file descriptor that also ends the wait of `poll`, when there is something to read.
        worker_times: by rank, the seconds spent per category up to the latest step, if the workers record them.
    """

    def __init__(
        self, launcher: Launcher, *, step_timeout_s: float, disks: Mapping[int, DiskPool] = MappingProxyType({})
    ) -> None:
        """Starts one worker per rank and waits until all are ready.

        Raises:
            WorkerLostError: when a worker does not start.
        """
        cluster = launcher.cluster
        with ExitStack() as acquired:
            acquired.callback(launcher.clean_up)
            acquired.callback(launcher.context.destroy, linger=0)
            self._launcher, self._step_timeout_s = launcher, step_timeout_s
            self._context = launcher.context
            self._context.sndhwm = self._context.rcvhwm = 0  # without bound: the engine bounds the steps in flight
            self._commands: list[zmq.Socket[bytes]] = []
            self._in_flight = InFlight(cluster)
            self._workers: list[WorkerHandle] = []
            self._reports = self._context.socket(zmq.PULL)
            self._watchers: list[threading.Thread] = []
            stored = self._context.socket(zmq.PUSH)
            self._disk_lane = _disk_lane(disks, stored) if disks else None
            self.wakeup: zmq.Socket[bytes] | int | None = None
            self.worker_times: list[dict[str, float]] = [{} for _ in range(cluster.num_ranks)]
            self._decoder = msgspec.msgpack.Decoder(messages.Report)
            self._num_oom_kills = limits.num_oom_kills()
            self._finalizer = weakref.finalize(
                self,
                unless_forked(_clean_up),
                self._workers,
                self._watchers,
                self._commands,
                self._reports,
                self._disk_lane,
                launcher,
            )
            acquired.callback(self.close)
            self._reports.bind(messages.report_address(launcher.endpoint))
            stored.connect(messages.report_address(launcher.endpoint))
            for rank in range(cluster.num_ranks):
                self._start(rank)
            self._await(messages.Ready)
            acquired.pop_all()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    def submit(self, step: Step) -> None:
        """Sends a Forward to the ranks that take part, a MoveKV to both ends or to the disk, others to all.

        For a Reshard to a cluster with more ranks further workers start.
        """
        everyone = range(len(self._commands))
        if isinstance(step, Free):
            self._send(messages.RunFree(step), everyone)
            return
        if isinstance(step, Reshard):
            for rank in range(len(everyone), step.cluster.num_ranks):
                self._add(rank)
            everyone = range(len(self._commands))
            self._in_flight.regroup(step, everyone, time.monotonic())
            self._send(messages.RunReshard(step.number, step.cluster), everyone)
            return
        if isinstance(step, MoveKV) and step.way in ("save", "load"):
            assert self._disk_lane is not None, "there is a disk tier"
            self._disk_lane.put(step)
            return
        self._in_flight.begin(step, time.monotonic())
        if isinstance(step, MoveKV):
            self._send(messages.RunMoves((step,)), self._in_flight.ranks([*step.sources, *step.targets]))
            return
        self._send(messages.RunForward(step), self._in_flight.ranks(step.instances))
        for target in sorted({target for move in step.streams for target in move.targets}):
            coming = tuple(move for move in step.streams if target in move.targets)  # it may send others in this step
            self._send(messages.RunMoves(coming), self._in_flight.ranks((target,)))

    def measure(self, step: Forward) -> tuple[messages.RankMemory, ...]:
        """Runs the largest step, and returns what memory each rank found then.

        They are asked twice, since those that share a device must all have freed what the step left behind.

        Raises:
            WorkerLostError: when a worker dies or raises, maybe for want of memory.
        """
        self.submit(step)
        while not self.poll(None):
            pass
        found: dict[int, messages.RankMemory] = {}
        for _ in range(2):
            self._send(messages.Measure(), range(len(self._commands)))
            found = {one.rank: one.memory for one in self._await(messages.Measured)}
        return tuple(found[rank] for rank in sorted(found))

    def change_pools(self, cluster: Cluster) -> None:
        """Gives every rank its place in a cluster that differs in its pools only, before any other step.

        Raises:
            WorkerLostError: when a worker dies or raises, maybe for want of memory.
        """
        self.submit(Reshard(number=0, cluster=cluster))
        while not self.poll(None):
            pass

    def poll(self, timeout_s: float | None) -> list[Completion]:
        """Waits for completions; a lost worker closes this executor."""
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
        """Stops the workers, by force if need be; can be called again."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, rank: int) -> None:
        endpoint = self._launcher.endpoint
        socket = self._context.socket(zmq.PUSH)
        socket.connect(messages.command_address(endpoint, rank))
        self._commands.append(socket)
        watcher = self._context.socket(zmq.PUSH)
        watcher.connect(messages.report_address(endpoint))
        self._workers.append(self._launcher.start(rank))  # not before: a worker that has no socket cannot be stopped
        thread = threading.Thread(target=_watch, args=(self._workers[rank], rank, watcher), daemon=True)
        thread.start()
        self._watchers.append(thread)

    def _add(self, rank: int) -> None:
        """Starts a further worker, which waits for its place; the executor closes if it does not start."""
        self.worker_times.append({})
        try:
            self._start(rank)
        except OSError as error:
            self._lose(rank, f"it does not start: {error}")

    def _await(self, kind: type[ReportT]) -> list[ReportT]:
        """Waits until every rank has sent such a report; they are in the order in which they came."""
        found: dict[int, ReportT] = {}
        deadline = time.monotonic() + _START_TIMEOUT_S
        while len(found) < len(self._workers):
            report = self._receive(deadline - time.monotonic())
            if report is None:
                missing = min({*range(len(self._workers))} - {*found})
                self._lose(missing, f"not ready after {_START_TIMEOUT_S:.0f} s")
            elif isinstance(report, kind):
                found[report.rank] = report
            else:
                self._take(report)
        return list(found.values())

    def _patience_s(self, timeout_s: float | None) -> float | None:
        """Returns how long to wait for a report before looking for ranks that hang."""
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

    def _receive(
        self, timeout_s: float | None, wakeup: zmq.Socket[bytes] | int | None = None
    ) -> messages.Report | None:
        poller = zmq.Poller()
        poller.register(self._reports, zmq.POLLIN)
        if wakeup is not None:
            poller.register(wakeup, zmq.POLLIN)
        ready = dict(poller.poll(None if timeout_s is None else int(min(max(0.0, timeout_s), _MAX_POLL_S) * 1000)))
        return self._decoder.decode(self._reports.recv()) if self._reports in ready else None

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
            case messages.Failed(rank, reason, peer=True):
                self._blame(rank, reason)
            case messages.Failed(rank, reason, memory=True):
                self._lose(rank, reason, OutOfMemoryError)
            case messages.Failed(rank, reason):
                self._lose(rank, reason)
            case messages.Exited(rank, 1):  # it has said why, but what comes from two sockets comes in any order
                self._blame(rank, how_ended(1))
            case messages.Exited(rank, code):
                self._lose_ended(rank, code)
        return None

    def _blame(self, rank: int, reason: str) -> NoReturn:
        """Waits shortly, when a rank lost a peer or ended by an exception, for the report of who is to blame."""
        deadline = time.monotonic() + _BLAME_TIMEOUT_S
        while (report := self._receive(deadline - time.monotonic())) is not None:
            if isinstance(report, messages.Failed):
                if not report.peer:
                    self._take(report)
                if report.rank == rank:
                    reason = report.reason
            if isinstance(report, messages.Exited) and report.rank != rank and report.code != 1:
                self._lose_ended(report.rank, report.code)
        self._lose(rank, reason)

    def _lose_ended(self, rank: int, code: int) -> NoReturn:
        if (lacked := lack_of_memory(code, self._num_oom_kills)) is not None:
            self._lose(rank, f"{how_ended(code)}: {lacked}", OutOfMemoryError)
        self._lose(rank, how_ended(code))

    def _lose(self, rank: int, reason: str, kind: type[WorkerLostError] = WorkerLostError) -> NoReturn:
        for worker in self._workers:
            worker.kill()  # the others may hang in a transfer with the one that is lost
        self.close()
        raise kind(rank, f"{reason} ({self._launcher.hint(rank)})")

    def _send(self, command: messages.Command, ranks: Sequence[int]) -> None:
        data = msgspec.msgpack.encode(command)
        for rank in ranks:
            _tell(self._commands[rank], data)


_StepReport = messages.Done | messages.Moved | messages.Regrouped


@dataclass
class _StepInFlight:
    """A Forward, a MoveKV or a Reshard that some rank has not reported done yet.

    Attributes:
        awaited: ranks that have not reported its end.
        carries: the moves that are sent with it: the streams of a Forward, a MoveKV by itself.
        unsent: of a MoveKV, ranks that have not started to send their share.
        leaving: of a MoveKV, ranks whose share has not left, as far as they said.
    """

    awaited: set[int]
    carries: Sequence[int] = ()
    unsent: set[int] = field(default_factory=set)
    leaving: set[int] = field(default_factory=set)
    reports: list[_StepReport] = field(default_factory=list)


class InFlight:
    """Tracks the steps in flight and makes completions of reports. Times are seconds of any clock.

    A rank works as long as a step wants something of it that does not wait for another step: who receives a MoveKV
    works on it from when all have started to send it, or at once when it comes from the host.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._steps: dict[int, _StepInFlight] = {}
        self._due: dict[int, set[int]] = {}  # by rank: the steps that want something of it now
        self._since_s: dict[int, float] = {}  # by rank that works: when it reported, or got a step while it had none

    def ranks(self, instances: Iterable[int]) -> list[int]:
        return [rank for instance in instances for rank in self._cluster.ranks(instance)]

    def begin(self, step: Forward | MoveKV, now_s: float) -> None:
        instances = (step.sources or step.targets) if isinstance(step, MoveKV) else step.instances
        carried = (step,) if isinstance(step, MoveKV) else step.streams
        workers = self.ranks(instances)
        for move in carried:
            assert move.way == "in" or not {*move.targets} & {*move.sources}, "KV moves to others than who sends it"
            sources = self.ranks(move.sources)
            self._steps[move.number] = _StepInFlight(
                awaited={*self.ranks(move.targets)}, unsent={*sources}, leaving={*sources}
            )
        own = self._steps.setdefault(step.number, _StepInFlight(awaited=set()))
        own.awaited.update(workers)
        own.carries = [move.number for move in carried]
        self._work(workers, step.number, now_s)

    def regroup(self, step: Reshard, ranks: Iterable[int], now_s: float) -> None:
        """Begins a step of all ranks, after which steps are those of another cluster."""
        assert not self._steps, "ranks regroup when nothing else is in flight"
        self._cluster = step.cluster
        self._steps[step.number] = _StepInFlight(awaited={*ranks})
        self._work(ranks, step.number, now_s)

    def take(self, report: _StepReport, now_s: float) -> Completion | None:
        """Returns the completion of a step once its last rank has reported."""
        rank, number = report.rank, report.number
        step = self._steps[number]
        step.awaited.remove(rank)
        step.reports.append(report)
        self._rest(rank, number, now_s)
        for carried in step.carries:
            move = self._steps.get(carried)  # which may be done before a Forward is
            if move is not None and rank in move.unsent:
                move.unsent.remove(rank)
                if not move.unsent:
                    self._work(move.awaited, carried, now_s)
        if step.awaited:
            return None
        del self._steps[number]
        return _completion(number, step.reports)

    def sent(self, rank: int, number: int) -> None:
        """Records that a rank's share of a move has left it; the move may be done already."""
        if number in self._steps:
            self._steps[number].leaving.discard(rank)

    def first_due_s(self) -> float | None:
        """Returns since when a rank has worked longest without a report; None when none works."""
        return min(self._since_s.values(), default=None)

    def stalled(self, late_s: float) -> list[int]:
        """Lists ranks that work and have not reported since `late_s`, then those whose KV has not left for one of them.

        Nothing says which end holds up a move of which a part has not left: it leaves when both ends take part.
        """
        late = {rank for rank, since_s in self._since_s.items() if since_s <= late_s}
        steps = [self._steps[number] for rank in late for number in self._due[rank]]
        sources = {rank for step in steps if not step.unsent for rank in step.leaving} - late
        return [*sorted(late), *sorted(rank for rank in sources if rank not in self._since_s)]

    def _work(self, ranks: Iterable[int], number: int, now_s: float) -> None:
        for rank in ranks:
            self._due.setdefault(rank, set()).add(number)
            self._since_s.setdefault(rank, now_s)

    def _rest(self, rank: int, number: int, now_s: float) -> None:
        due = self._due.get(rank, set())
        due.discard(number)
        if due:
            self._since_s[rank] = now_s
        else:
            self._since_s.pop(rank, None)


def _completion(number: int, reports: Iterable[_StepReport]) -> Completion:
    sampled: list[Sampled] = []
    scored: list[Scored] = []
    non_finite: set[int] = set()
    sent: Counter[tuple[str, Link]] = Counter()
    for report in reports:
        sent.update(report.bytes_sent)
        if isinstance(report, messages.Done):
            sampled += report.sampled
            scored += report.scored
            non_finite.update(report.non_finite)
    return Completion(
        number=number,
        sampled=tuple(sampled),
        bytes_sent=sent,
        scored=tuple(scored),
        non_finite=tuple(sorted(non_finite)),
    )


def _watch(worker: WorkerHandle, rank: int, reports: zmq.Socket[bytes]) -> None:
    """Reports the end of a worker. Owns its socket: zmq sockets belong to one thread."""
    code = worker.wait()
    try:
        reports.send(msgspec.msgpack.encode(messages.Exited(rank=rank, code=code)))
    except zmq.ZMQError:
        return  # the executor is closing; nobody listens any more
    finally:
        reports.close(linger=0)


def _tell(worker: zmq.Socket[bytes], command: bytes) -> None:
    """Sends without waiting: nobody would ever read what is for a thread that has ended."""
    with suppress(zmq.Again):
        worker.send(command, zmq.NOBLOCK)


def _disk_lane(disks: Mapping[int, DiskPool], stored: zmq.Socket[bytes]) -> DiskLane:
    """Start the thread that moves blocks to and from disks."""
    from longspan.runtime.disk_pool import DiskLane  # noqa: PLC0415 - an engine with a disk tier alone

    return DiskLane(disks, lambda report: stored.send(msgspec.msgpack.encode(report)))


def _clean_up(
    workers: Sequence[WorkerHandle],
    watchers: Sequence[threading.Thread],
    commands: Sequence[zmq.Socket[bytes]],
    reports: zmq.Socket[bytes],
    disk_lane: DiskLane | None,
    launcher: Launcher,
) -> None:
    """Ends all workers; nothing is left of them: no process, no thread, no socket, no file but the logs.

    It is given all sockets of this thread: a context waits for ever for one that is garbage, but not closed yet.
    """
    stop = msgspec.msgpack.encode(messages.Stop())
    for socket in commands:
        _tell(socket, stop)
    deadline = time.monotonic() + _STOP_TIMEOUT_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            worker.destroy()
    for watcher in watchers:  # zmq aborts the process when a socket is closed that another thread is sending on
        watcher.join(_STOP_TIMEOUT_S)
    if disk_lane is not None:
        disk_lane.close()
    reports.close(linger=0)
    launcher.context.destroy(linger=0)
    launcher.clean_up()
