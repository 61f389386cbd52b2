"""Compares the default policy with every fixed choice, simulated: workloads x clusters x loads.

    python benchmarks/choices.py --traces FOLDER [--json FILE] [--jobs 2]     # hours; goes on where FILE ends
    python benchmarks/choices.py --quick                                      # minutes: one cluster, short workloads

A load is a part of the highest rate: that at which the best of all policies serves the workload when all of it is there
at the start. Goodput is the part of the requests whose first token takes at most 5 times as long as alone on the
cluster (by `context`, which shares every long prompt), and whose mean time between tokens is at most 3 times as long as
alone (by `chunked`). Exit code 1 if in any cell goodput of `auto` is below 0.98 of the best other policy's, or its TTFT
P99, TBT P99 or E2E P50 are above 1.1 times that policy's; on the mixture goodput is to be 1.1 times as high, or all of
it. Cells with a trace are left out where `--traces` has no such file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.core.options import SchedulingArgs
from longspan.sim.experiment import Experiment
from longspan.sim.run import Result, percentile
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Workload, prompt_of
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

_POLICIES = ("auto", "chunked", "context", "tetris", "fixed-sp 2", "fixed-sp 4", "fixed-sp 8", "loongserve")
_LOADS = (0.2, 0.5, 0.8, 0.95)
_A100 = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=8)
_CLUSTERS = {
    "1x8 A100, 8B": ("llama-3-8b", replace(_A100, hosts=1)),
    "2x8 A100, 8B": ("llama-3-8b", replace(_A100, hosts=2)),
    "8x8 A100, 8B": ("llama-3-8b", replace(_A100, hosts=8)),
    "4x8 H100, 70B": (
        "llama-3-70b",
        ClusterSpec(hardware="h100-sxm-80g", hosts=4, gpus_per_host=8, parallel="8xtp4"),
    ),
}
_TRACES = {
    "mooncake_conversation": "mooncake_conversation.jsonl.gz",
    "splitwise_conv": "splitwise_conv.csv.gz",
    "arxiv, answers of 200": "arxiv_summarization_lengths.csv.gz",
}
_NAMED, _MIXTURE = ("short", "medium", "long"), "chats and documents"
_SHAREGPT = Path(__file__).parent / "papers" / "sharegpt_quantiles.json"
_DOCUMENT, _EVERY, _ANSWER = 131_072, 20, 200
_TTFT_FACTOR, _TBT_FACTOR = 5.0, 3.0
_GOOD, _SLOWER, _BETTER = 0.98, 1.10, 1.10
_SEED, _GAP_S = 1, 1000.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in a cell; times are seconds, and goodput is a part of all requests."""

    cluster: str
    workload: str
    load: float
    policy: str
    rate: float
    goodput: float
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    e2e_p50: float

    @property
    def cell(self) -> tuple[str, str, float]:
        return self.cluster, self.workload, self.load


def main() -> int:
    """Runs the cells that are not in the file yet, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cluster, two workloads, two loads")
    parser.add_argument("--traces", type=Path, help="folder of traces; without it their cells are left out")
    parser.add_argument("--clusters", nargs="+", choices=tuple(_CLUSTERS), default=tuple(_CLUSTERS))
    parser.add_argument("--workloads", nargs="+", choices=(*_TRACES, *_NAMED, _MIXTURE))
    parser.add_argument("--loads", type=float, nargs="+", default=_LOADS)
    parser.add_argument("--policies", nargs="+", choices=_POLICIES, default=_POLICIES)
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    workloads = asked.workloads or [*(_TRACES if asked.traces else ()), *_NAMED, _MIXTURE]
    clusters, loads, number = asked.clusters, asked.loads, asked.num_requests
    if asked.quick:
        clusters, loads, number, workloads = ["1x8 A100, 8B"], (0.5, 0.8), 120, ["short", _MIXTURE]
    found: list[Point] = []
    if asked.json is not None and asked.json.is_file():
        found = msgspec.json.decode(asked.json.read_bytes(), type=list[Point])
    known = {(*one.cell, one.policy) for one in found}
    with ProcessPoolExecutor(max_workers=asked.jobs) as pool:
        jobs = [
            pool.submit(_measure, cluster, workload, policy, todo, number, asked.traces)
            for cluster, workload, policy in product(clusters, workloads, asked.policies)
            if (todo := [load for load in loads if (cluster, workload, load, policy) not in known])
        ]
        for job in tqdm(jobs, desc="policies", disable=None):
            found += job.result()
            if asked.json is not None:
                asked.json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    return _report(found)


# ---------------------------------------------------------------- runs


def _measure(
    cluster: str, workload: str, policy: str, loads: Sequence[float], number: int, traces: Path | None
) -> list[Point]:
    requests = _requests(workload, number, traces)
    highest, ttft_s, tbt_s = _references(cluster, workload, number, traces)
    found = []
    for load in loads:
        result = _experiment(cluster, policy).run(requests.at_rate(load * highest))
        good = sum(
            one.ttft_s <= _TTFT_FACTOR * ttft_s[one.index] and one.mean_tbt_s <= _TBT_FACTOR * tbt_s[one.index]
            for one in result.served
        )
        tbts, e2es = result.tbts_s, np.array([one.e2e_s for one in result.served])
        times = {
            f"{name}_p{percent}": percentile(values, percent) or 0.0
            for name, values, percents in (
                ("ttft", result.ttfts_s, (50, 99)),
                ("tbt", tbts, (50, 99)),
                ("e2e", e2es, (50,)),
            )
            for percent in percents
        }
        found.append(
            Point(
                cluster=cluster,
                workload=workload,
                load=load,
                policy=policy,
                rate=load * highest,
                goodput=good / len(requests.arrivals),
                **times,
            )
        )
    return found


@lru_cache(maxsize=8)
def _references(
    cluster: str, workload: str, number: int, traces: Path | None
) -> tuple[float, Mapping[int, float], Mapping[int, float]]:
    """Returns the highest rate, and for each request the seconds of its first token, and between tokens, alone."""
    requests = _requests(workload, number, traces)
    offline = requests.one_by_one(0.0)
    highest = max(number / _experiment(cluster, policy).run(offline).makespan_s for policy in ("chunked", "fixed-sp 4"))
    alone = requests.one_by_one(_GAP_S)
    first = replace(alone, arrivals=[replace(one, output_len=1) for one in alone.arrivals])
    quickest: Result = _experiment(cluster, "context").run(first)
    steady: Result = _experiment(cluster, "chunked").run(alone)
    ttft_s = {one.index: one.ttft_s for one in quickest.served}
    for one in steady.served:
        ttft_s[one.index] = min(ttft_s[one.index], one.ttft_s)
    return highest, ttft_s, {one.index: one.mean_tbt_s for one in steady.served}


@lru_cache(maxsize=16)
def _experiment(cluster: str, policy: str) -> Experiment:
    model, spec = _CLUSTERS[cluster]
    name, _, sp = policy.partition(" ")
    return make_experiment(model, spec, SchedulingArgs(policy=name, policy_options={"sp": sp} if sp else {}))


@lru_cache(maxsize=4)
def _requests(workload: str, number: int, traces: Path | None) -> Workload:
    if workload in _TRACES:
        assert traces is not None, "its cells are left out"
        answer = _ANSWER if workload.startswith("arxiv") else None
        spec = WorkloadSpec(
            workload=str(traces / _TRACES[workload]), rate=1.0, num_requests=number, output_len=answer, seed=_SEED
        )
        return make_workload(spec)
    if workload in _NAMED:
        return make_workload(WorkloadSpec(workload=workload, rate=1.0, num_requests=number, seed=_SEED))
    chats = make_workload(WorkloadSpec(workload=str(_SHAREGPT), rate=1.0, num_requests=number, seed=_SEED))
    arrivals = [
        replace(one, prompt=prompt_of(index, _DOCUMENT), output_len=_ANSWER) if index % _EVERY == _EVERY // 2 else one
        for index, one in enumerate(chats.arrivals)
    ]
    return replace(chats, arrivals=arrivals)


# ---------------------------------------------------------------- report


def _report(found: Sequence[Point]) -> int:
    failures = []
    table = Table(title="auto, over the best other policy of the cell by goodput", title_justify="left")
    for name in ("cluster", "workload", "load", "best other", "goodput", "of it", *_TIMES, "fails"):
        table.add_column(name, justify="left" if name in {"cluster", "workload", "best other"} else "right")
    for cell in dict.fromkeys(one.cell for one in found):
        points = {one.policy: one for one in found if one.cell == cell}
        if "auto" not in points or len(points) < 2:
            continue
        ours = points.pop("auto")
        best = max(points.values(), key=lambda one: (one.goodput, -one.e2e_p50))
        failed = list(_failed(ours, best))
        failures += failed
        ratios = [getattr(ours, name) / getattr(best, name) for name in _TIMES]
        of_it = ours.goodput / best.goodput if best.goodput else 1.0
        numbers = (f"{ours.goodput:.3f}", f"{of_it:.2f}", *(f"{ratio:.2f}" for ratio in ratios))
        table.add_row(cell[0], cell[1], f"{cell[2]:g}", best.policy, *numbers, ", ".join(failed))
    Console(width=180).print(table)
    print(f"{len(failures)} requirements failed")
    return 1 if failures else 0


_TIMES = ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "e2e_p50")
_BOUNDED = ("ttft_p99", "tbt_p99", "e2e_p50")


def _failed(ours: Point, best: Point) -> Iterator[str]:
    wanted = min(1.0, _BETTER * best.goodput) if ours.workload == _MIXTURE else _GOOD * best.goodput
    if ours.goodput < wanted:
        yield "goodput"
    for name in _BOUNDED:
        if getattr(ours, name) > _SLOWER * getattr(best, name):
            yield name


if __name__ == "__main__":
    sys.exit(main())
