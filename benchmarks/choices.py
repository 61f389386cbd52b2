"""Compares the default policy with every fixed choice, simulated: workloads x clusters x loads.

    python benchmarks/choices.py --traces FOLDER --profile FILE [--json FILE] [--plots FILE] [--jobs 2]
    python benchmarks/choices.py --quick

The first takes an hour and goes on where its `--json` file ends; the second half a minute. `--profile` is a file that
`longspan profile` has written, of a small model: its machine's instances are one more cluster, with workloads of their
own. Cells whose trace or profile is not given are left out.

A load is a part of the highest rate: that at which `chunked` or groups of 4 (of 2 as profiled), whichever is quicker,
serve the workload when all of it is there at the start. Goodput is the part of the requests whose first token takes at
most 5 times as long as alone on the cluster (by `context`, which shares every long prompt), and whose mean time between
tokens is at most 3 times as long as alone (by `chunked`). Exit code 1 if in any cell goodput of `auto` is below 0.98 of
the best other policy's, or its TTFT P99, TBT P99 or E2E P50 are above 1.1 times that policy's; on the mixture goodput
is to be 1.1 times as high, or all of it.
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
from typing import NamedTuple

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.core.options import SchedulingArgs
from longspan.cost.profile import Profile
from longspan.sim.experiment import Experiment
from longspan.sim.run import Result, percentile
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Arrival, Workload, arrival_times, prompt_of
from longspan.workload.requests import draw_lengths, make_workload, quantiles
from longspan.workload.spec import WorkloadSpec

POLICIES = ("auto", "chunked", "context", "tetris", "fixed-sp 2", "fixed-sp 4", "fixed-sp 8", "loongserve")
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
MEASURED = "as profiled"
_SMALL = {"up to 6K": 1.0, "up to 6K, in bursts": 0.1}
"""Burstiness, see `arrival_times`."""
_INPUT_LEN, _OUTPUT_LEN = quantiles("input_len", {"0": 100, "1": 6000}), quantiles("output_len", {"0": 8, "1": 64})
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
    num_requests: int
    goodput: float
    ttft_p50: float
    ttft_p99: float
    tbt_p50: float
    tbt_p99: float
    e2e_p50: float

    @property
    def cell(self) -> tuple[str, str, float]:
        return self.cluster, self.workload, self.load


class Files(NamedTuple):
    """Files that cells are made from."""

    traces: Path | None = None
    profile: Path | None = None


def main() -> int:
    """Runs the cells that are not in the file yet, and prints all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cluster, two workloads, two loads")
    parser.add_argument("--traces", type=Path, help="folder of traces; without it their cells are left out")
    parser.add_argument("--profile", type=Path, help="of a machine; without it its cells are left out")
    parser.add_argument("--clusters", nargs="+", choices=(*_CLUSTERS, MEASURED), default=(*_CLUSTERS, MEASURED))
    parser.add_argument("--workloads", nargs="+", choices=(*_TRACES, *_NAMED, _MIXTURE, *_SMALL))
    parser.add_argument("--loads", type=float, nargs="+", default=_LOADS)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--json", type=Path, help="where points are kept, and taken from")
    parser.add_argument("--plots", type=Path, help="an HTML page with all metrics over loads; needs plotly")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    files = Files(asked.traces, asked.profile)
    workloads = asked.workloads or [*_TRACES, *_NAMED, _MIXTURE, *_SMALL]
    clusters, loads, number = asked.clusters, asked.loads, asked.num_requests
    if asked.quick:
        clusters, loads, number, workloads = ["1x8 A100, 8B"], (0.5, 0.8), 120, ["short", _MIXTURE]
    found: list[Point] = []
    if asked.json is not None and asked.json.is_file():
        found = msgspec.json.decode(asked.json.read_bytes(), type=list[Point])
    kept, found = found, [one for one in found if one.num_requests == number]
    others = [one for one in kept if one.num_requests != number]
    known = {(*one.cell, one.policy) for one in found}
    with ProcessPoolExecutor(max_workers=asked.jobs) as pool:
        jobs = [
            pool.submit(_measure, cluster, workload, policy, todo, number, files)
            for cluster, workload, policy in product(clusters, workloads, asked.policies)
            if is_possible(cluster, workload, policy, files)
            and (todo := [load for load in loads if (cluster, workload, load, policy) not in known])
        ]
        for job in tqdm(jobs, desc="policies", disable=None):
            found += job.result()
            if asked.json is not None:
                asked.json.write_bytes(msgspec.json.format(msgspec.json.encode([*others, *found]), indent=1) + b"\n")
    if asked.plots is not None:
        plot(found, asked.plots)
    return report(found)


def is_possible(cluster: str, workload: str, policy: str, files: Files) -> bool:
    if cluster == MEASURED or workload in _SMALL:
        if cluster != MEASURED or workload not in _SMALL or files.profile is None:
            return False
        _, _, sp = policy.partition(" ")
        return _num_measured(files.profile) % int(sp or 1) == 0
    return workload not in _TRACES or files.traces is not None


def _num_measured(profile: Path) -> int:
    """Returns the largest number of instances that were measured together."""
    return max(one.members for one in Profile.from_json(profile.read_text(encoding="utf-8")).prefills)


# ---------------------------------------------------------------- runs


def _measure(
    cluster: str, workload: str, policy: str, loads: Sequence[float], number: int, files: Files
) -> list[Point]:
    requests = _requests(workload, number, files)
    highest, ttft_s, tbt_s = _references(cluster, workload, number, files)
    found = []
    for load in loads:
        result = _experiment(cluster, policy, files).run(requests.at_rate(load * highest))
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
                num_requests=number,
                goodput=good / len(requests.arrivals),
                **times,
            )
        )
    return found


@lru_cache(maxsize=8)
def _references(
    cluster: str, workload: str, number: int, files: Files
) -> tuple[float, Mapping[int, float], Mapping[int, float]]:
    """Returns the highest rate, and for each request the seconds of its first token, and between tokens, alone."""
    requests = _requests(workload, number, files)
    offline = requests.one_by_one(0.0)
    groups = "fixed-sp 2" if cluster == MEASURED else "fixed-sp 4"
    names = ["chunked", *([groups] if is_possible(cluster, workload, groups, files) else [])]
    highest = max(number / _experiment(cluster, policy, files).run(offline).makespan_s for policy in names)
    alone = requests.one_by_one(_GAP_S)
    first = replace(alone, arrivals=[replace(one, output_len=1) for one in alone.arrivals])
    quickest: Result = _experiment(cluster, "context", files).run(first)
    steady: Result = _experiment(cluster, "chunked", files).run(alone)
    ttft_s = {one.index: one.ttft_s for one in quickest.served}
    for one in steady.served:
        ttft_s[one.index] = min(ttft_s[one.index], one.ttft_s)
    return highest, ttft_s, {one.index: one.mean_tbt_s for one in steady.served}


@lru_cache(maxsize=16)
def _experiment(cluster: str, policy: str, files: Files) -> Experiment:
    if cluster == MEASURED:
        assert files.profile is not None, "its cells are left out"
        profile = Profile.from_json(files.profile.read_text(encoding="utf-8"))
        number = _num_measured(files.profile)
        model, spec = profile.profile_key.model, ClusterSpec(profile=files.profile, parallel=str(number))
    else:
        model, spec = _CLUSTERS[cluster]
    name, _, sp = policy.partition(" ")
    return make_experiment(model, spec, SchedulingArgs(policy=name, policy_options={"sp": sp} if sp else {}))


@lru_cache(maxsize=4)
def _requests(workload: str, number: int, files: Files) -> Workload:
    if workload in _SMALL:
        rng = np.random.default_rng(_SEED)
        inputs, outputs = (draw_lengths(lengths, number, rng) for lengths in (_INPUT_LEN, _OUTPUT_LEN))
        times = arrival_times(number, rate=1.0, burstiness=_SMALL[workload], rng=rng)
        each = enumerate(zip(times, inputs, outputs, strict=True))
        arrivals = [Arrival(due_s=s, prompt=prompt_of(index, new), output_len=out) for index, (s, new, out) in each]
        return Workload(arrivals=arrivals, shares=False)
    if workload in _TRACES:
        assert files.traces is not None, "its cells are left out"
        answer = _ANSWER if workload.startswith("arxiv") else None
        spec = WorkloadSpec(
            workload=str(files.traces / _TRACES[workload]), rate=1.0, num_requests=number, output_len=answer, seed=_SEED
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


def report(found: Sequence[Point]) -> int:
    failures, regrets = [], Table(title="auto, over the best of all others by each metric alone", title_justify="left")
    for name in ("cluster", "workload", "load", "goodput", *_TIMES):
        regrets.add_column(name, justify="left" if name in {"cluster", "workload"} else "right")
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
        ratios = [_over(getattr(ours, name), getattr(best, name)) for name in _TIMES]
        least = [_over(getattr(ours, name), min(getattr(one, name) for one in points.values())) for name in _TIMES]
        more = f"{ours.goodput - best.goodput:+.3f}"
        regrets.add_row(cell[0], cell[1], f"{cell[2]:g}", more, *map("{:.2f}".format, least))
        of_it = _over(ours.goodput, best.goodput)
        numbers = (f"{ours.goodput:.3f}", f"{of_it:.2f}", *(f"{ratio:.2f}" for ratio in ratios))
        table.add_row(cell[0], cell[1], f"{cell[2]:g}", best.policy, *numbers, ", ".join(failed))
    console = Console(width=180)
    console.print(table)
    console.print(regrets)
    print(f"{len(failures)} requirements failed")
    return 1 if failures else 0


def _over(ours: float, other: float) -> float:
    return ours / other if other else 1.0


def plot(found: Sequence[Point], file: Path) -> None:
    """Draws a row for each cluster and workload, a column for each metric, and a line for each policy, over loads."""
    import plotly.graph_objects as go  # noqa: PLC0415  # optional
    from plotly.colors import qualitative  # noqa: PLC0415
    from plotly.subplots import make_subplots  # noqa: PLC0415

    rows = list(dict.fromkeys(one.cell[:2] for one in found))
    columns = ("goodput", *_TIMES)
    page = make_subplots(
        rows=len(rows), cols=len(columns), column_titles=list(columns), row_titles=[", ".join(row) for row in rows]
    )
    policies = list(dict.fromkeys(one.policy for one in found))
    for row, column, (place, policy) in product(range(len(rows)), range(len(columns)), enumerate(policies)):
        points = sorted((one for one in found if one.cell[:2] == rows[row] and one.policy == policy), key=_load)
        line = {"color": qualitative.Dark24[place], "width": 3 if policy == "auto" else 1}
        values = [getattr(one, columns[column]) for one in points]
        drawn = go.Scatter(x=list(map(_load, points)), y=values, name=policy, legendgroup=policy, line=line)
        drawn.showlegend = not row and not column
        page.add_trace(drawn, row=row + 1, col=column + 1)
    page.update_xaxes(range=[0, 1])
    page.update_yaxes(rangemode="tozero")
    page.update_layout(height=230 * len(rows), width=1500, template="plotly_white")
    page.write_html(file)


def _load(point: Point) -> float:
    return point.load


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
