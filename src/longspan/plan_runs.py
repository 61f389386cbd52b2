"""The simulations of a plan: in this process or in several, with results that a later run of the same plan reads.

`python -m longspan.plan_runs` is such a process. Its first line of input is a `Setup`, and each further line a `Work`.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import msgspec

from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.core.options import SchedulingArgs
from longspan.errors import ParameterError, WorkerLostError
from longspan.file_errors import unwritten
from longspan.model.files import cache_root
from longspan.planner.candidates import Candidate
from longspan.planner.samples import Outcome, Work, outcome_of, window
from longspan.runtime.child import how_ended, start_child
from longspan.sim.experiment import Experiment
from longspan.sim.spec import ClusterSpec, HardwareSpec, ServiceLevel
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Workload
from longspan.workload.requests import is_drawn, make_workload
from longspan.workload.spec import WorkloadSpec

_log = logging.getLogger("longspan")
_MODULE = "longspan.plan_runs"
_PACKAGES = ("core", "cost", "planner", "policy", "sim", "workload")
_MODULES = ("csa_file.py", "plan_runs.py", "simulation.py", "model/files.py")
"""The packages and modules that determine the result of a simulation."""
_BATCHES_PER_PROCESS = 4
"""Batches of each process, from which on all seeds of a candidate are one batch."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Settings that all simulations of a plan have in common.

    Attributes:
        profiles: files of profiles by tp, in place of data sheets.
    """

    model: str
    devices: HardwareSpec
    gpus_per_host: int
    profiles: tuple[tuple[int, str], ...]
    workload: WorkloadSpec
    level: ServiceLevel

    def cluster(self, candidate: Candidate) -> ClusterSpec:
        """Return the candidate's instances on this kind of hosts. Raise ParameterError without a profile for its tp."""
        devices, profiles = vars(self.devices), dict(self.profiles)
        cluster: ClusterSpec = PackedSpec(hardware=candidate.hardware, max_per_host=self.gpus_per_host, **devices)
        if profiles:
            if (tp := candidate.spec.tp) not in profiles:
                problem = f"for tp {tp} is missing, there are profiles for tp {', '.join(map(str, profiles))}: add it"
                raise ParameterError("profile", problem, tp)
            cluster = ClusterSpec(profile=Path(profiles[tp]), **devices)
        if candidate.decode is None:
            return replace(cluster, parallel=str(candidate.spec))
        return replace(cluster, prefill_parallel=str(candidate.spec), decode_parallel=str(candidate.decode))


@dataclass(frozen=True, kw_only=True)
class PackedSpec(ClusterSpec):
    """A cluster whose hosts have at most `max_per_host` devices. An instance that fits on a host is not split."""

    max_per_host: int

    def clusters(self, policy: str) -> tuple[Cluster, ...]:
        clusters = super().clusters(policy)
        places = tuple(_packed(max(clusters, key=lambda cluster: cluster.tp(0)), self.max_per_host))
        return tuple(replace(cluster, locations=places) for cluster in clusters)


def _packed(cluster: Cluster, max_per_host: int) -> Iterator[Location]:
    """Yield the locations of all ranks in order. A larger instance than a host splits by stages, then by shards."""
    sizes: list[int] = []
    for instance in cluster.instances:
        num_ranks, tp = len(cluster.ranks(instance)), cluster.tp(instance)
        sizes += [num_ranks] if num_ranks <= max_per_host else [tp] * (num_ranks // tp)
    sizes += [1] * cluster.num_spare
    host = used = rank = 0
    for size in sizes:
        if used and used + size > max_per_host:
            host, used = host + 1, 0
        for _ in range(size):
            if used == max_per_host:
                host, used = host + 1, 0
            yield Location(host=host, device=rank)
            used, rank = used + 1, rank + 1


def run(setup: Setup, work: Work) -> Outcome:
    """Run a simulation. A problem of the candidate is part of the outcome."""
    rate = work.rate or base_rate(setup.workload)
    sample = sample_of(setup.workload, work.seed, work.num_requests, rate)
    try:
        result = experiment_of(setup, work.candidate).run(sample)
    except ValueError as error:
        return Outcome(problem=str(error))
    return outcome_of(result, sample, setup.level, rate)


def experiment_of(setup: Setup, candidate: Candidate, num_gpu_blocks_override: int | None = None) -> Experiment:
    """Return the experiment of a candidate, built again after a file changes. Raise ValueError if it cannot run."""
    return _experiment(setup, candidate, num_gpu_blocks_override, _contents(setup, candidate.hardware))


@lru_cache(maxsize=8)
def _experiment(
    setup: Setup, candidate: Candidate, num_gpu_blocks_override: int | None, _files: tuple[bytes, ...]
) -> Experiment:
    others: dict[str, Any] = {"num_gpu_blocks_override": num_gpu_blocks_override, **dict(candidate.scheduling)}
    scheduling = SchedulingArgs(
        policy=candidate.policy,
        policy_options=dict(candidate.policy_options),
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        host_kv_gib=candidate.host_kv_gib,
        **others,
    )
    return make_experiment(setup.model, setup.cluster(candidate), scheduling)


# ---------------------------------------------------------------- requests


def base_rate(spec: WorkloadSpec) -> float:
    """Return the requests per second of a workload. Infinite if all arrive at the start."""
    if spec.is_closed_loop:
        return math.inf
    if spec.requests_per_s is not None:
        return spec.requests_per_s
    arrivals = whole(spec).arrivals
    last_s = max(arrival.due_s for arrival in arrivals if arrival.follows is None)
    return len(arrivals) / last_s if last_s else math.inf


def whole(spec: WorkloadSpec) -> Workload:
    """Return all requests of a trace, read again after it changes. `num_requests` is the length of its samples."""
    return _whole(spec, _version(spec))


@lru_cache(maxsize=2)
def _whole(spec: WorkloadSpec, _version: tuple[int, ...]) -> Workload:
    return make_workload(replace(spec, num_requests=None))


def _version(spec: WorkloadSpec) -> tuple[int, ...]:
    path = Path(spec.workload)
    if not path.is_file():
        return ()
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


def sample_of(spec: WorkloadSpec, seed: int, num: int, rate: float) -> Workload:
    """Return `num` requests at a rate: drawn by the seed, or a part of the trace that depends on the seed."""
    return _sample(spec, seed, num, rate, _version(spec))


@lru_cache(maxsize=16)
def _sample(spec: WorkloadSpec, seed: int, num: int, rate: float, _version: tuple[int, ...]) -> Workload:
    num = max(spec.turns, num // spec.turns * spec.turns)
    if is_drawn(spec):
        drawn = replace(spec, seed=spec.seed + seed, num_requests=num)
        if not spec.is_closed_loop:
            offline = math.isinf(rate)
            drawn = replace(drawn, rate=None if offline else rate, offline=offline)
        return make_workload(drawn)
    return window(whole(spec), seed, num, rate)


# ---------------------------------------------------------------- processes

Batch = tuple[Work, ...]
Ended = tuple[Batch, tuple[Outcome, ...]]


class Runner:
    """Runs simulations, in this process or in several, and stores each outcome in a file from which it is read again.

    Args:
        num_processes: with 1, simulations run in this process.
        progress: gets the numbers of finished simulations, and of all simulations that are known so far.
        store: None stores nothing.
    """

    def __init__(
        self, setup: Setup, num_processes: int, progress: Callable[[int, int], object], store: Path | None
    ) -> None:
        self._setup, self._num_processes, self._progress, self._store = setup, num_processes, progress, store
        self._num_ended = 0
        self.num_requests = 0
        """Requests of all simulations, including stored ones."""
        self._counted: set[Work] = set()
        self._known = _stored(store)
        self._children: list[subprocess.Popen[bytes]] = []
        self._pending: queue.SimpleQueue[Batch | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[Ended | WorkerLostError] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            self._pending.put(None)
            child.kill()
            child.wait()

    def __call__(self, work: Sequence[Work]) -> dict[Work, Outcome]:
        """Run simulations in any order."""
        outcomes = {one: self._known[one] for one in work if one in self._known}
        missing = list(dict.fromkeys(one for one in work if one not in outcomes))
        self.num_requests += sum(one.num_requests for one in {*work} - self._counted)
        self._counted.update(work)
        self._num_ended = len(self._counted) - len(missing)
        self._progress(self._num_ended, len(self._counted))
        for batch, ended in self._in_children(missing) if self._num_processes > 1 else self._here(missing):
            for one, outcome in zip(batch, ended, strict=True):
                outcomes[one] = self._known[one] = outcome
                self._store = _append(self._store, one, outcome)
                self._num_ended += 1
                self._progress(self._num_ended, len(self._counted))
        return outcomes

    def _here(self, work: Sequence[Work]) -> Iterator[Ended]:
        return (((one,), (run(self._setup, one),)) for one in work)

    def _in_children(self, work: Sequence[Work]) -> Iterator[Ended]:
        """Give batches to the children. Many candidates are batches each, so that a child builds a cluster once."""
        keys = [one.candidate for one in work]
        is_many = len(set(keys)) >= _BATCHES_PER_PROCESS * self._num_processes
        batches = [tuple(group) for _, group in groupby(work, attrgetter("candidate"))] if is_many else zip(work)
        num = 0
        for num, batch in enumerate(batches, start=1):  # noqa: B007 - counted
            self._pending.put(tuple(batch))
        while len(self._children) < min(self._num_processes, num):
            rank = len(self._children)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            child = start_child(_MODULE, stdout=subprocess.PIPE, env=environment)
            self._children.append(child)
            threading.Thread(target=self._serve, args=(rank, child), daemon=True).start()
        for _ in range(num):
            result = self._ended.get()
            if isinstance(result, WorkerLostError):
                raise result
            yield result

    def _serve(self, rank: int, child: subprocess.Popen[bytes]) -> None:
        """Give pending batches to a child until it ends."""
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode(self._setup) + b"\n")
            while (batch := self._pending.get()) is not None:
                child.stdin.write(msgspec.json.encode(batch) + b"\n")
                child.stdin.flush()
                self._ended.put((batch, msgspec.json.decode(child.stdout.readline(), type=tuple[Outcome, ...])))
        except (OSError, ValueError):  # a closed pipe
            self._ended.put(WorkerLostError(rank, how_ended(child.wait())))


def _work() -> None:
    """Run batches of simulations from standard input. Exit when it closes, also during a simulation."""
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=(lines,), daemon=True).start()
    setup = msgspec.json.decode(lines.get(), type=Setup)
    while True:
        outcomes = [run(setup, work) for work in msgspec.json.decode(lines.get(), type=Batch)]
        sys.stdout.buffer.write(msgspec.json.encode(outcomes) + b"\n")
        sys.stdout.buffer.flush()


def _read_into(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)  # the parent has ended


# ---------------------------------------------------------------- stored outcomes


class _Line(msgspec.Struct):
    work: Work
    outcome: Outcome


def store_of(setup: Setup, hardware: Sequence[str] = ()) -> Path:
    """Return the file of outcomes. Its name depends on all inputs of simulations, and on the code that runs them."""
    inputs = hashlib.sha256()
    root = Path(__file__).parent
    files = [file for package in _PACKAGES for file in sorted((root / package).rglob("*"))]
    for file in (*files, *(root / module for module in _MODULES)):
        if file.suffix in {".py", ".toml"}:
            inputs.update(file.read_bytes())
    inputs.update(msgspec.json.encode(setup))
    for content in _contents(setup, *hardware, setup.workload.workload):
        inputs.update(content)
    return cache_root() / "plans" / f"{inputs.hexdigest()[:16]}.jsonl"


def _contents(setup: Setup, *further: str) -> tuple[bytes, ...]:
    """Return the contents of the files of the model, of profiles, and of further paths. Other names are of catalogs."""
    paths = (setup.model, f"{setup.model}/config.json", *(path for _, path in setup.profiles), *further)
    files = [Path(path).expanduser() for path in paths]
    return tuple(file.read_bytes() for file in files if file.is_file())


def _stored(path: Path | None) -> dict[Work, Outcome]:
    """Read all outcomes, and end a line that a killed process has not completed.

    Raises:
        ValueError: the file cannot be read or written.
    """
    outcomes: dict[Work, Outcome] = {}
    if path is None:
        return outcomes
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+") as file:
            file.seek(0)
            data = file.read()
            file.write(b"" if data[-1:] in (b"", b"\n") else b"\n")
    except OSError as error:
        raise ValueError(f"the cache {unwritten(path, error)}: set LONGSPAN_CACHE to another folder") from None
    for text in data.splitlines():
        with suppress(msgspec.DecodeError):
            line = msgspec.json.decode(text, type=_Line)
            outcomes[line.work] = line.outcome
    return outcomes


def _append(path: Path | None, work: Work, outcome: Outcome) -> Path | None:
    """Store an outcome. Return None instead of the file if that fails, since a plan needs no store."""
    if path is None:
        return None
    try:
        with path.open("ab") as file:
            file.write(msgspec.json.encode(_Line(work=work, outcome=outcome)) + b"\n")
    except OSError as error:
        _log.warning("further simulations are not stored: %s", unwritten(path, error))
        return None
    return path


if __name__ == "__main__":
    _work()
