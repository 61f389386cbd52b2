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
from pathlib import Path

import msgspec

import longspan
from longspan.core.options import SchedulingArgs
from longspan.errors import WorkerLostError
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
"""The packages that determine the result of a simulation."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What all simulations of a plan have in common.

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
        """Return the candidate's instances on the fewest hosts that split no instance."""
        specs = [candidate.spec, *([] if candidate.decode is None else [candidate.decode])]
        roles = {"parallel": str(candidate.spec)}
        if candidate.decode is not None:
            roles = {"prefill_parallel": str(candidate.spec), "decode_parallel": str(candidate.decode)}
        if self.profiles:
            return ClusterSpec(profile=Path(dict(self.profiles)[candidate.spec.tp]), **roles)
        num_gpus = candidate.num_gpus
        hosts = math.ceil(num_gpus / self.gpus_per_host)
        while hosts < num_gpus and any(math.ceil(num_gpus / hosts) % spec.tp for spec in specs):
            hosts += 1
        return ClusterSpec(hardware=candidate.hardware, hosts=hosts, **vars(self.devices), **roles)


def run(setup: Setup, work: Work) -> Outcome:
    """Run a simulation. A problem of the candidate is part of the outcome."""
    rate = work.rate or base_rate(setup.workload)
    sample = sample_of(setup.workload, work.seed, work.num_requests, rate)
    try:
        result = _experiment(setup, work.candidate).run(sample)
    except ValueError as error:
        return Outcome(problem=str(error))
    return outcome_of(result, sample, setup.level, rate)


@lru_cache(maxsize=8)
def _experiment(setup: Setup, candidate: Candidate) -> Experiment:
    scheduling = SchedulingArgs(
        policy=candidate.policy,
        policy_options=dict(candidate.policy_options),
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        host_kv_gib=candidate.host_kv_gib,
    )
    return make_experiment(setup.model, setup.cluster(candidate), scheduling)


# ---------------------------------------------------------------- requests


def base_rate(spec: WorkloadSpec) -> float:
    """Return the requests per second of a workload. Infinite if all arrive at the start."""
    if spec.requests_per_s is not None:
        return spec.requests_per_s
    arrivals = whole(spec).arrivals
    last_s = max(arrival.due_s for arrival in arrivals if arrival.follows is None)
    return len(arrivals) / last_s if last_s else math.inf


@lru_cache(maxsize=2)
def whole(spec: WorkloadSpec) -> Workload:
    """Return all requests of a workload."""
    return make_workload(spec)


@lru_cache(maxsize=16)
def sample_of(spec: WorkloadSpec, seed: int, num: int, rate: float) -> Workload:
    """Return `num` requests at a rate: drawn by the seed, or a part of the trace that depends on the seed."""
    num = max(spec.turns, num // spec.turns * spec.turns)
    if is_drawn(spec):
        offline = math.isinf(rate)
        drawn = replace(
            spec, seed=spec.seed + seed, num_requests=num, rate=None if offline else rate, offline=offline
        )
        return make_workload(drawn)
    return window(whole(spec), seed, num, rate)


# ---------------------------------------------------------------- processes


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs simulations, and stores each outcome in a file from which it is read again.

    Attributes:
        num_processes: with 1, simulations run in this process.
        finished: gets the number of requests of each simulation when it has ended.
    """

    setup: Setup
    num_processes: int
    finished: Callable[[int], object]
    store: Path | None

    def __call__(self, work: Sequence[Work]) -> dict[Work, Outcome]:
        """Run simulations in any order, the longest first."""
        stored = _stored(self.store)
        outcomes = {one: stored[one] for one in work if one in stored}
        for one in outcomes:
            self.finished(one.num_requests)
        missing = sorted(dict.fromkeys(one for one in work if one not in outcomes), key=lambda one: -one.num_requests)
        ran = self._in_children(missing) if self.num_processes > 1 and len(missing) > 1 else self._here(missing)
        for one, outcome in ran:
            outcomes[one] = outcome
            _append(self.store, one, outcome)
            self.finished(one.num_requests)
        return outcomes

    def _here(self, work: Sequence[Work]) -> Iterator[tuple[Work, Outcome]]:
        return ((one, run(self.setup, one)) for one in work)

    def _in_children(self, work: Sequence[Work]) -> Iterator[tuple[Work, Outcome]]:
        pending: queue.SimpleQueue[Work] = queue.SimpleQueue()
        for one in work:
            pending.put(one)
        ended: queue.SimpleQueue[tuple[Work, Outcome] | WorkerLostError] = queue.SimpleQueue()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        children = [
            start_child(_MODULE, stdout=subprocess.PIPE, env=environment)
            for _ in range(min(self.num_processes, len(work)))
        ]
        try:
            for rank, child in enumerate(children):
                threading.Thread(target=_serve, args=(self.setup, rank, child, pending, ended), daemon=True).start()
            for _ in work:
                result = ended.get()
                if isinstance(result, WorkerLostError):
                    raise result
                yield result
        finally:
            for child in children:
                child.kill()
                child.wait()


def _serve(
    setup: Setup,
    rank: int,
    child: subprocess.Popen[bytes],
    pending: queue.SimpleQueue[Work],
    ended: queue.SimpleQueue[tuple[Work, Outcome] | WorkerLostError],
) -> None:
    """Give pending work to a child until there is none, or the child ends."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(msgspec.json.encode(setup) + b"\n")
        while True:
            try:
                work = pending.get_nowait()
            except queue.Empty:
                return
            child.stdin.write(msgspec.json.encode(work) + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                raise BrokenPipeError
            ended.put((work, msgspec.json.decode(line, type=Outcome)))
    except (OSError, ValueError):
        ended.put(WorkerLostError(rank, how_ended(child.wait())))


def _work() -> None:
    """Run simulations from standard input until it closes."""
    setup = msgspec.json.decode(sys.stdin.buffer.readline(), type=Setup)
    for line in sys.stdin.buffer:
        outcome = run(setup, msgspec.json.decode(line, type=Work))
        sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
        sys.stdout.buffer.flush()


# ---------------------------------------------------------------- stored outcomes


class _Line(msgspec.Struct):
    work: Work
    outcome: Outcome


def store_of(setup: Setup) -> Path:
    """Return the file of outcomes. Its name depends on all inputs of simulations, and on the code that runs them."""
    from longspan.simulation import read_architecture  # noqa: PLC0415

    inputs = hashlib.sha256(longspan.__version__.encode())
    root = Path(__file__).parent
    for package in _PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.suffix in {".py", ".toml"}:
                inputs.update(file.read_bytes())
    inputs.update(msgspec.json.encode(setup))
    inputs.update(repr(read_architecture(setup.model, dtype=setup.devices.dtype)).encode())
    for path in (setup.workload.workload, *(path for _, path in setup.profiles)):
        if Path(path).is_file():
            inputs.update(Path(path).read_bytes())
    return cache_root() / "plans" / f"{inputs.hexdigest()[:16]}.jsonl"


def _stored(path: Path | None) -> dict[Work, Outcome]:
    """Read all outcomes. A line that a killed process has not completed is left out."""
    outcomes: dict[Work, Outcome] = {}
    if path is None:
        return outcomes
    with suppress(FileNotFoundError):
        for text in path.read_bytes().splitlines():
            with suppress(msgspec.DecodeError):
                line = msgspec.json.decode(text, type=_Line)
                outcomes[line.work] = line.outcome
    return outcomes


def _append(path: Path | None, work: Work, outcome: Outcome) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(_Line(work=work, outcome=outcome)) + b"\n")
    except OSError as error:
        raise ValueError(f"the cache {unwritten(path, error)}: set LONGSPAN_CACHE to another folder") from None


if __name__ == "__main__":
    _work()
