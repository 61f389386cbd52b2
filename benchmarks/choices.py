"""Compare the default policy with every fixed choice, simulated: workloads x clusters x loads.

    python benchmarks/choices.py --traces FOLDER --profile FILE [--json FILE] [--plots FILE] [--jobs 2]
    python benchmarks/choices.py --workloads "prompts of 1M" "chats and 512K" "code completion" "RAG in bursts"
    python benchmarks/choices.py --quick

The first takes an hour, and resumes after the points in its `--json` file. The second runs the cells of long prompts
and tails. The third takes half a minute. `--profile` names a file of `longspan profile` for a small model. Its
instances are one more cluster, with workloads of their own. Cells without their trace or profile are skipped.

A load is a fraction of the highest rate: the offline throughput of `chunked` or of groups of 4 (2 as profiled),
whichever is higher. Goodput is the fraction of requests that meet two limits. Their TTFT is at most 5 times that of an
idle cluster (by `context`, which shares every long prompt, or `chunked`). Their mean TBT is at most 3 times that of an
idle cluster (by `chunked`, or by `context` for prompts beyond one instance).

The exit code is 1 if `auto` fails in any cell, compared with the best other policy by goodput. Goodput must be at least
0.98 of it. TTFT P99 and TBT P99 may be 1.25 times as long, and E2E P50 1.1 times. On the mixture of chats and
documents goodput must be 1.1 times as high, or 1.
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

POLICIES = (
    *("auto", "chunked", "context", "tetris", "fixed-sp 2", "fixed-sp 4", "fixed-sp 8", "loongserve"),
    *("decode-first", "prefill-first"),
)
_LOADS = (0.2, 0.5, 0.8, 0.95)
_A100 = ClusterSpec(hardware="a100-sxm-80g", gpus_per_host=8)
_CLUSTERS = {
    "1x8 A100, 8B": ("llama-3-8b", replace(_A100, hosts=1)),
    "2x8 A100, 8B": ("llama-3-8b", replace(_A100, hosts=2)),
    "1x4 A100, 8B": ("llama-3-8b", replace(_A100, hosts=1, gpus_per_host=4)),
    "3x4 A100, 8B": ("llama-3-8b", replace(_A100, hosts=3, gpus_per_host=4)),
    "1x8 A10, 8B": ("llama-3-8b", ClusterSpec(hardware="a10", hosts=1, gpus_per_host=8, parallel="4xtp2")),
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
_SMALL = ("up to 6K", "up to 6K, in bursts")
_SHORT_INPUT, _SHORT_OUTPUT = {"0": 100, "1": 6000}, {"0": 8, "1": 64}
_DRAWN = {
    "up to 6K": (_SHORT_INPUT, _SHORT_OUTPUT, 1.0),
    "up to 6K, in bursts": (_SHORT_INPUT, _SHORT_OUTPUT, 0.1),
    "prompts of 1M": ({"0": 1_000_000, "1": 1_000_000}, {"0": 20, "0.5": 150, "1": 400}, 1.0),
    "code completion": ({"0": 300, "0.5": 2000, "1": 7500}, {"0": 4, "0.5": 16, "1": 64}, 1.0),
    "RAG in bursts": ({"0": 2000, "0.5": 12_000, "1": 64_000}, {"0": 20, "0.5": 150, "1": 600}, 1 / 16),
}
"""Quantiles of prompt and answer tokens, and burstiness (`arrival_times`): 1/16 is a coefficient of variation of 4."""
_MIXED = {"chats and documents": (131_072, 20), "chats and 512K": (524_288, 50)}
"""Tokens of each document, and the number of requests per document."""
_ONLY_ON = {
    "prompts of 1M": ("8x8 A100, 8B",),
    "chats and 512K": ("1x8 A100, 8B", "8x8 A100, 8B"),
    "code completion": ("1x8 A10, 8B",),
    "RAG in bursts": ("1x4 A100, 8B", "3x4 A100, 8B"),
}
_TAIL_CLUSTERS = ("1x4 A100, 8B", "3x4 A100, 8B", "1x8 A10, 8B")
"""Clusters that only the workloads above use."""
_IN_PHASES = ("decode-first", "prefill-first")
_ALONE = ("chunked", *_IN_PHASES)
"""Policies without groups."""
_WORKLOADS = (*_TRACES, *_NAMED, *_MIXED, *_DRAWN)
_SHAREGPT = Path(__file__).parent / "papers" / "sharegpt_quantiles.json"
_ANSWER = 200
_TTFT_FACTOR, _TBT_FACTOR = 5.0, 3.0
_GOOD, _BETTER = 0.98, 1.10
_SEED, _GAP_S = 1, 1000.0


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A policy in a cell. Times are seconds, and goodput is a fraction of all requests."""

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
    """The input files of cells."""

    traces: Path | None = None
    profile: Path | None = None


def main() -> int:
    """Run the cells that are not in the file yet, and print all cells."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one cluster, two workloads, two loads")
    parser.add_argument("--traces", type=Path, help="folder of traces; without it their cells are left out")
    parser.add_argument("--profile", type=Path, help="of a machine; without it its cells are left out")
    parser.add_argument("--clusters", nargs="+", choices=(*_CLUSTERS, MEASURED), default=(*_CLUSTERS, MEASURED))
    parser.add_argument("--workloads", nargs="+", choices=_WORKLOADS)
    parser.add_argument("--loads", type=float, nargs="+", default=_LOADS)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--num-requests", type=int, default=400)
    parser.add_argument("--json", type=Path, help="where points are kept, and taken from")
    parser.add_argument("--plots", type=Path, help="an HTML page with all metrics over loads; needs plotly")
    parser.add_argument("--jobs", type=int, default=2)
    asked = parser.parse_args()
    files = Files(asked.traces, asked.profile)
    workloads = asked.workloads or _WORKLOADS
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
    name, _, sp = policy.partition(" ")
    if cluster == MEASURED or workload in _SMALL:
        if cluster != MEASURED or workload not in _SMALL or files.profile is None:
            return False
        return _num_measured(files.profile) % int(sp or 1) == 0
    if cluster in _TAIL_CLUSTERS or workload in _ONLY_ON:
        if cluster not in _ONLY_ON.get(workload, ()):
            return False
        number = _CLUSTERS[cluster][1].hosts * 4 if cluster in _TAIL_CLUSTERS else 8
        too_long = workload == "prompts of 1M" and (name in _ALONE or sp == "2")
        return number % int(sp or 1) == 0 and not too_long
    return (workload not in _TRACES or files.traces is not None) and name not in _IN_PHASES


def _num_measured(profile: Path) -> int:
    """Return the largest number of instances that were measured together."""
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
    """Return the highest rate, and the TTFT and mean TBT of each request on an idle cluster."""
    requests = _requests(workload, number, files)
    offline = requests.one_by_one(0.0)
    groups = "fixed-sp 2" if cluster == MEASURED else "fixed-sp 4"
    names = [one for one in ("chunked", groups) if is_possible(cluster, workload, one, files)]
    runs = [_experiment(cluster, policy, files).run(offline) for policy in names]
    highest = max(len(run.served) / run.makespan_s for run in runs)
    alone = requests.one_by_one(_GAP_S)
    first = replace(alone, arrivals=[replace(one, output_len=1) for one in alone.arrivals])
    quickest: Result = _experiment(cluster, "context", files).run(first)
    ttft_s, tbt_s = {one.index: one.ttft_s for one in quickest.served}, dict[int, float]()
    if "chunked" in names:
        for one in _experiment(cluster, "chunked", files).run(alone).served:
            ttft_s[one.index], tbt_s[one.index] = min(ttft_s[one.index], one.ttft_s), one.mean_tbt_s
    if len(tbt_s) < number:  # prompts beyond one instance
        rest = replace(alone, arrivals=[one for index, one in enumerate(alone.arrivals) if index not in tbt_s])
        indices = [index for index in range(number) if index not in tbt_s]
        shared: Result = _experiment(cluster, "context", files).run(rest)
        tbt_s |= {indices[one.index]: one.mean_tbt_s for one in shared.served}
    return highest, ttft_s, tbt_s


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
    if workload in _DRAWN:
        rng = np.random.default_rng(_SEED)
        *points, burstiness = _DRAWN[workload]
        lengths = zip(("input_len", "output_len"), points, strict=True)
        inputs, outputs = (draw_lengths(quantiles(name, one), number, rng) for name, one in lengths)
        times = arrival_times(number, rate=1.0, burstiness=burstiness, rng=rng)
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
    document, every = _MIXED[workload]
    arrivals = [
        replace(one, prompt=prompt_of(index, document), output_len=_ANSWER) if index % every == every // 2 else one
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
    """Draw a row per cluster and workload, a column per metric, and a line per policy, over loads."""
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
_BOUNDS = {"ttft_p99": 1.25, "tbt_p99": 1.25, "e2e_p50": 1.1}


def _failed(ours: Point, best: Point) -> Iterator[str]:
    wanted = min(1.0, _BETTER * best.goodput) if ours.workload == _MIXTURE else _GOOD * best.goodput
    if ours.goodput < wanted:
        yield "goodput"
    for name, bound in _BOUNDS.items():
        if getattr(ours, name) > bound * getattr(best, name):
            yield name


if __name__ == "__main__":
    sys.exit(main())
