"""Tetris, Figures 8 to 13: request rates, TTFT and ablations, on simulated clusters, beside the paper's claims.

    python benchmarks/papers/tetris.py --serving [--quick] [--num-requests N] [--jobs N] [--json FILE]

Llama 3 8B on 4 hosts of 8 A100 (16 prefill instances of TP 1, 2 decode instances of TP 8, groups of up to 16), and
70B on 8 hosts (8 and 8 instances of TP 4, groups of up to 8). `loongserve` has all devices in one pool of TP 1, or TP
4. All use ring attention. The paper leaves open, and here is chosen:

- answers have 512 tokens. At that length `loongserve` takes about half of its instances for decode, which is what the
  paper's P/D ratio of 1:1 gives, and its TBT stands to TP 8 as in the paper; so TBT is no independent check.
- "25x of the light-load latency" is 25 times the P99 of TTFT of `tetris` at light load, for all systems.
- Improvement rates are profiled with another seed than the one they are measured with.
- Steps have up to 32,768 tokens per instance, so that hardly any chunk is cut.

Answers do not change TTFT where others decode, so that only what is printed of TBT is simulated with them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.core.options import SchedulingArgs
from longspan.sim.experiment import Experiment, near_light_load
from longspan.sim.run import Result
from longspan.sim.spec import ClusterSpec
from longspan.sim.timeline import Timeline
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Workload
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

_WORKLOADS = ("short", "medium", "long")
_OUTPUT_LEN = 512
_SEED, _PROFILED_SEED = 0, 1
_FIXED_RATES = (0.1, 0.3, 0.5, 0.7)
_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
"""Parts of the highest rate of `tetris` at which its options are compared."""
_PRECISION = 1.05
_FEWEST = 200


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and its cluster."""

    model: str
    hosts: int
    prefill: str
    decode: str
    unified: str
    largest: int
    fixed: tuple[int, ...]

    @property
    def sizes(self) -> str:
        """Returns the improvement rate of groups."""
        return ",".join(str(2**power) for power in range(self.largest.bit_length()))


SETUPS = (
    Setup(model="llama-3-8b", hosts=4, prefill="16", decode="2xtp8", unified="32", largest=16, fixed=(8, 16)),
    Setup(model="llama-3-70b", hosts=8, prefill="8xtp4", decode="8xtp4", unified="16xtp4", largest=8, fixed=(8,)),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One system at one rate."""

    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    throughput_tokens_per_s: float
    computing: float


@dataclass(kw_only=True)
class Study:
    """An outcome is what became of one setup and workload.

    Attributes:
        max_rates: by system.
        at_limit: by system, at the highest rate of the best baseline.
        fixed_rates: TTFT with an improvement rate over that with the table, by load, then rate: P50 and P99.
        single_chunk: by load, TTFT without chunks over that with them: P50 and P99; and which part of the time prefill
            instances compute then, without and with.
    """

    model: str
    workload: str
    light_s: float
    table: str
    max_rates: dict[str, float] = field(default_factory=dict)
    at_limit: dict[str, Point] = field(default_factory=dict)
    fixed_rates: dict[float, dict[float, tuple[float, float]]] = field(default_factory=dict)
    single_chunk: dict[float, tuple[float, float, float, float]] = field(default_factory=dict)

    @property
    def best_baseline(self) -> str:
        """Returns the setup with the highest rate."""
        return max((name for name in self.max_rates if name != "tetris"), key=self.max_rates.__getitem__)


class Systems:
    """The systems on one setup, with requests of one workload."""

    def __init__(self, setup: Setup, workload: str, num_requests: int) -> None:
        self.setup = setup
        self._workload, self._num_requests = workload, num_requests
        shared = {"exchange": "ring_kv"}
        sizes = {**shared, "sp_sizes": setup.sizes}
        self.experiments = {
            "tetris": self._experiment("tetris", sizes),
            "loongserve": self._experiment("loongserve", sizes, unified=True),
            "loongserve-disagg": self._experiment("loongserve-disagg", sizes),
        }
        for sp in setup.fixed:
            self.experiments[f"fixed-sp {sp}"] = self._experiment("fixed-sp", {**shared, "sp": str(sp)})

    def _experiment(self, policy: str, options: Mapping[str, str], *, unified: bool = False) -> Experiment:
        setup = self.setup
        cluster = ClusterSpec(
            hardware="a100-sxm-80g",
            hosts=setup.hosts,
            gpus_per_host=8,
            parallel=setup.unified if unified else None,
            prefill_parallel=None if unified else setup.prefill,
            decode_parallel=None if unified else setup.decode,
        )
        scheduling = SchedulingArgs(policy=policy, policy_options=options, max_num_batched_tokens=32_768)
        return make_experiment(setup.model, cluster, scheduling)

    def requests(self, *, seed: int = _SEED, output_len: int = _OUTPUT_LEN, num: int | None = None) -> Workload:
        """Sends requests at one per second."""
        return make_workload(
            WorkloadSpec(
                workload=self._workload,
                rate=1.0,
                num_requests=self._num_requests if num is None else num,
                output_len=output_len,
                seed=seed,
            )
        )

    def answers(self, system: str) -> Workload:
        """Requests whose answers are as long as they must be for TTFT."""
        return self.requests(output_len=_OUTPUT_LEN if system == "loongserve" else 1)


def study(setup: Setup, workload: str, num_requests: int, loads: tuple[float, ...]) -> Study:
    """Runs all of one setup and workload."""
    systems = Systems(setup, workload, num_requests)
    tetris = systems.experiments["tetris"]
    light_s = tetris.with_options({"improvement_rate": "0.05"}).light_ttft_p99_s(systems.requests(output_len=1))
    assert light_s is not None
    roughly = _max_rate(tetris.with_options({"improvement_rate": "0.5"}), systems.answers("tetris"), light_s)
    profiled = systems.requests(seed=_PROFILED_SEED, output_len=1, num=num_requests // 4)
    table, _ = tetris.improvement_rates(profiled, roughly)
    systems.experiments["tetris"] = tetris = tetris.with_options({"improvement_rates": str(table)})
    found = Study(model=setup.model, workload=workload, light_s=light_s, table=str(table))
    for name, experiment in systems.experiments.items():
        found.max_rates[name] = _max_rate(experiment, systems.answers(name), light_s)
    limit = found.max_rates[found.best_baseline]
    for name, experiment in systems.experiments.items():
        found.at_limit[name] = _point(experiment, systems.requests().at_rate(limit))
    for load in loads:
        _ablations(found, systems.experiments["tetris"], systems.answers("tetris"), load)
    return found


def _ablations(found: Study, experiment: Experiment, requests: Workload, load: float) -> None:
    at_rate = requests.at_rate(load * found.max_rates["tetris"])
    dynamic, single = _point(experiment, at_rate), _point(experiment.with_options({"chunking": "false"}), at_rate)
    found.single_chunk[load] = (*_times(single, dynamic), single.computing, dynamic.computing)
    named = experiment.scheduling.all_policy_options().items()
    options = {name: value for name, value in named if name != "improvement_rates"}
    fixed = replace(experiment, scheduling=replace(experiment.scheduling, policy_options=options))
    found.fixed_rates[load] = {
        rate: _times(_point(fixed.with_options({"improvement_rate": str(rate)}), at_rate), dynamic)
        for rate in _FIXED_RATES
    }


def _times(one: Point, other: Point) -> tuple[float, float]:
    return one.ttft_p50_s / other.ttft_p50_s, one.ttft_p99_s / other.ttft_p99_s


def _point(experiment: Experiment, requests: Workload) -> Point:
    timeline = Timeline()
    result = experiment.run(requests, timeline)
    numbers = result.summary()
    decodes = any(one.output_len > 1 for one in requests.arrivals)
    return Point(
        ttft_p50_s=float(numbers["ttft_p50_s"] or 0),
        ttft_p99_s=float(numbers["ttft_p99_s"] or 0),
        ttft_mean_s=float(np.mean(result.ttfts_s)),
        tbt_p50_s=numbers["tbt_p50_s"] if decodes else None,
        tbt_p99_s=numbers["tbt_p99_s"] if decodes else None,
        throughput_tokens_per_s=float(numbers["throughput_tokens_per_s"] or 0),
        computing=_computing(experiment, result, timeline),
    )


def _computing(experiment: Experiment, result: Result, timeline: Timeline) -> float:
    """Returns which part of the time until the last first token instances compute prompts, of those that prefill."""
    busy_s = sum(block.end_s - block.start_s for block in timeline.blocks if block.index is not None)
    last_s = max(one.arrival_s + one.ttft_s for one in result.served)
    return busy_s / (last_s * len(experiment.cluster.prefill))


def _max_rate(experiment: Experiment, requests: Workload, light_s: float) -> float:
    found = experiment.max_rate(requests, near_light_load(light_s), start=2.0, precision=_PRECISION)
    if found is None:
        raise SystemExit(f"{experiment.scheduling.policy} serves all requests at once: give a larger --num-requests")
    return found


def run(given: argparse.Namespace) -> bool:
    """Runs and prints everything, each case when it is done; returns whether `tetris` has the highest rate in each."""
    setups = [setup for setup in SETUPS if setup.model in given.models]
    loads: tuple[float, ...] = _LOADS
    cases, number = list(product(setups, given.workloads)), 1000
    if given.quick:
        cases, loads, number = cases[:1], (0.5, 0.9), 400
    if given.num_requests is not None:
        number = given.num_requests
    json_path: Path | None = given.json
    if number < _FEWEST:
        raise SystemExit(f"--num-requests must be at least {_FEWEST}, or no rate is too high, but {number} given")
    studies = []
    with ProcessPoolExecutor(max_workers=given.jobs) as pool:
        waiting = [pool.submit(study, setup, workload, number, loads) for setup, workload in cases]
        for one in tqdm(waiting, desc="cases", disable=None):
            studies.append(one.result())
            _print(studies[-1])
            if json_path is not None:
                found = json.dumps([asdict(done) for done in studies], indent=1)
                json_path.write_text(found + "\n", encoding="utf-8")
    _verdicts(studies)
    return all(one.max_rates["tetris"] >= one.max_rates[one.best_baseline] for one in studies)


def _print(one: Study) -> None:
    title = f"{one.model}, {one.workload}: light-load P99 {one.light_s:.2f} s, improvement rates {one.table}"
    rates = Table("", "max rate", "TTFT P50", "P99", "TBT P50", "P99", "tokens/s", title=title)
    for name, highest in one.max_rates.items():
        point = one.at_limit[name]
        rates.add_row(
            name,
            f"{highest:.2f}",
            f"{point.ttft_p50_s:.2f}",
            f"{point.ttft_p99_s:.2f}",
            f"{1e3 * (point.tbt_p50_s or 0):.1f} ms",
            f"{1e3 * (point.tbt_p99_s or 0):.1f} ms",
            f"{point.throughput_tokens_per_s:,.0f}",
        )
    console = Console(width=120)
    console.print(rates)
    print(
        f"TTFT, TBT and throughput are at {one.max_rates[one.best_baseline]:.2f}/s, the limit of {one.best_baseline}."
    )
    loads = Table(
        "load", *(f"rate {rate}" for rate in _FIXED_RATES), "single chunk", "computing", title="TTFT P50, P99"
    )
    for load, by_rate in one.fixed_rates.items():
        p50, p99, single, chunked = one.single_chunk[load]
        cells = [f"{mid:.2f}x {tail:.2f}x" for mid, tail in by_rate.values()]
        loads.add_row(f"{load:.0%}", *cells, f"{p50:.2f}x {p99:.2f}x", f"{single:.1%} {chunked:.1%}")
    console.print(loads)
    print(
        "Over the profiled table, and over chunks. Computing: prefill instances' part of the time, single and chunks.",
        end="\n\n",
        flush=True,
    )


def _verdicts(studies: Iterable[Study]) -> None:
    """Prints a line for each claim of the paper that these are about."""
    studies = list(studies)
    claims = Table("claim", "paper", "ours", "", title="The paper's claims")

    def claim(name: str, paper: tuple[float, float], ours: list[float], form: str) -> None:
        if not ours:
            return
        reached = "within the paper's range"
        if min(ours) > paper[1]:
            reached = "MORE than the paper"
        elif max(ours) < paper[0]:
            reached = "NOT reached"
        elif min(ours) < paper[0] or max(ours) > paper[1]:
            reached = "partly"
        shown = f"{form.format(min(ours))} to {form.format(max(ours))}"
        claims.add_row(name, f"{form.format(paper[0])} to {form.format(paper[1])}", shown, reached)

    best = [one.at_limit[one.best_baseline] for one in studies]
    gains = [one.max_rates["tetris"] / one.max_rates[one.best_baseline] - 1 for one in studies]
    claim("max rate over the best baseline", (0.20, 0.45), gains, "{:+.0%}")
    disagg = [one.max_rates["tetris"] / _best_disaggregated(one) - 1 for one in studies]
    claim("the same, best of disaggregated baselines", (0.20, 0.45), disagg, "{:+.0%}")
    tetris = [one.at_limit["tetris"] for one in studies]
    p50 = [base.ttft_p50_s / ours.ttft_p50_s for base, ours in zip(best, tetris, strict=True)]
    p99 = [base.ttft_p99_s / ours.ttft_p99_s for base, ours in zip(best, tetris, strict=True)]
    claim("P50 TTFT of the best baseline at its limit, over ours", (1.64, 4.17), p50, "{:.2f}x")
    claim("P99 TTFT of the best baseline at its limit, over ours", (1.52, 4.35), p99, "{:.2f}x")
    chunks = [max(max(found[:2]) for found in one.single_chunk.values()) for one in studies]
    claim("single-chunk TTFT at worst, over chunks", (2.33, 4.77), chunks, "{:.2f}x")
    small = [one for one in studies if one.model == "llama-3-8b"]
    pairs = [(one.at_limit["loongserve"].tbt_p50_s, one.at_limit["tetris"].tbt_p50_s) for one in small]
    tbt = [slow / quick - 1 for slow, quick in pairs if slow and quick]
    claim("P50 TBT of loongserve over ours (8B)", (0.55, 0.67), tbt, "{:+.0%}")
    Console(width=120).print(claims)
    for one in studies:
        single = max(one.single_chunk.values(), key=lambda found: max(found[:2]))
        print(
            f"{one.model}, {one.workload}: tetris {one.max_rates['tetris']:.2f}/s, {one.best_baseline} "
            f"{one.max_rates[one.best_baseline]:.2f}/s; without chunks TTFT is {max(single[:2]):.2f} times at worst: "
            f"prefill instances compute {single[2]:.1%} of the time then: chunks have {1 - single[2]:.1%} to win"
        )


def _best_disaggregated(one: Study) -> float:
    return max(rate for name, rate in one.max_rates.items() if name not in ("tetris", "loongserve"))


def options(parser: argparse.ArgumentParser) -> None:
    """Prints the tables of `--serving`."""
    models = [setup.model for setup in SETUPS]
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--workloads", nargs="+", default=_WORKLOADS, choices=_WORKLOADS)
    parser.add_argument("--quick", action="store_true", help="the first of these cases, 400 requests")
    parser.add_argument("--num-requests", type=int, help="of each run; 1000 unless --quick")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
