"""Tetris, Figures 8 to 13: request rates, TTFT and ablations, on simulated clusters.

    python benchmarks/papers/tetris.py --serving [--quick] [--num-requests N] [--jobs N] [--json FILE]
    python benchmarks/papers/tetris.py --auto [--num-requests N] [--jobs N]

`--json benchmarks/papers/tetris_serving.json` stores the results that claims and figures use, after each case. Cases in
the file are not simulated again, unless the code or the number of requests is another one.

The 8B model of Llama 3 runs on 4 hosts of 8 A100. It has 16 prefill instances of TP 1, 2 decode instances of TP 8, and
groups of up to 16. The 70B model runs on 8 hosts. It has 8 prefill and 8 decode instances of TP 4, and groups of up to
8. `loongserve` has all devices in one pool of TP 1, or TP 4. All use ring attention. The paper leaves these parameters
open:

- Answers have 512 tokens. At that length `loongserve` uses about half of its instances for decode, as the paper's P/D
  ratio of 1:1 implies. The ratio of its TBT to TP 8 is the paper's, so TBT is no independent check.
- "25x of the light-load latency" is 25 times the P99 of TTFT of `tetris` at light load, for all systems.
- Improvement rates are profiled with a different seed than in the measurement.
- Steps have up to 32,768 tokens per instance, so hardly any chunk is cut.

`--auto` finds the highest rates of the default policy with these roles, and on the same number of devices without
roles. Without roles, answers are decoded, too. The exit code is 1 if neither is within 2 % of `tetris` in some case.

If separate instances decode, answers do not change TTFT. They are then simulated only for the printed TBT.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from stored_runs import code_version
from tqdm import tqdm

from longspan.core.options import SchedulingArgs
from longspan.extras.timeline import Timeline
from longspan.sim.experiment import Experiment, near_light_load
from longspan.sim.run import Result, percentile
from longspan.sim.spec import ClusterSpec
from longspan.simulation import make_experiment
from longspan.workload.arrivals import Workload
from longspan.workload.requests import make_workload
from longspan.workload.spec import WorkloadSpec

WORKLOADS = ("short", "medium", "long")
_OUTPUT_LEN = 512
_SEED, _PROFILED_SEED = 0, 1
FIXED_RATES = (0.1, 0.3, 0.5, 0.7)
_LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 1.0)
"""Loads at which the options of `tetris` are compared, as shares of its highest rate."""
_PRECISION = 1.05
_MIN_REQUESTS = 200
_AS_GOOD = 0.98
QUANTILES = tuple(range(5, 100, 5))
"""Percentiles of TTFT that are stored (Fig. 9)."""
STORED = Path(__file__).with_name("tetris_serving.json")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A model and its cluster.

    Attributes:
        transfer_backends: backends of each decode instance. None: as many as prefill instances.
    """

    model: str
    hosts: int
    prefill: str
    decode: str
    unified: str
    largest: int
    fixed: tuple[int, ...]
    transfer_backends: int | None = None

    @property
    def sizes(self) -> str:
        """The group sizes, powers of two up to `largest`, as the option `sp_sizes`."""
        return ",".join(str(2**power) for power in range(self.largest.bit_length()))


SETUPS = (
    Setup(model="llama-3-8b", hosts=4, prefill="16", decode="2xtp8", unified="32", largest=16, fixed=(8, 16)),
    Setup(model="llama-3-70b", hosts=8, prefill="8xtp4", decode="8xtp4", unified="16xtp4", largest=8, fixed=(8,)),
)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One system at one rate.

    Attributes:
        ttft_quantiles_s: TTFT at the `QUANTILES`.
    """

    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    throughput_tokens_per_s: float
    computing: float
    ttft_quantiles_s: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class Study:
    """The results of one setup and workload.

    Attributes:
        num_requests: of each run.
        code: `code_version` of the simulation.
        max_rates: by system.
        at_limit: by system, at the highest rate of the best baseline.
        curves: P50 and P99 of TTFT by system and rate, at shares of the highest rate of `tetris`.
        fixed_rates: TTFT with an improvement rate over that with the table, by load, then rate: P50 and P99.
        single_chunk: by load: TTFT without chunks over that with chunks (P50 and P99), and the share of time in which
            prefill instances compute, without and with chunks.
    """

    model: str
    workload: str
    num_requests: int
    light_s: float
    table: str
    code: str = ""
    max_rates: dict[str, float] = field(default_factory=dict)
    at_limit: dict[str, Point] = field(default_factory=dict)
    curves: dict[str, dict[float, tuple[float, float]]] = field(default_factory=dict)
    fixed_rates: dict[float, dict[float, tuple[float, float]]] = field(default_factory=dict)
    single_chunk: dict[float, tuple[float, float, float, float]] = field(default_factory=dict)

    @property
    def best_baseline(self) -> str:
        """The system with the highest rate, except for `tetris`."""
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
            transfer_backends=None if unified else setup.transfer_backends,
        )
        scheduling = SchedulingArgs(policy=policy, policy_options=options, max_num_batched_tokens=32_768)
        return make_experiment(setup.model, cluster, scheduling)

    def profile(self) -> tuple[float, str]:
        """Profile the improvement rates of `tetris`, and return its TTFT at light load and the table of rates."""
        tetris = self.experiments["tetris"]
        at_low_rates = tetris.with_options({"improvement_rate": "0.05"})
        light_s = percentile(at_low_rates.at_light_load(self.requests(output_len=1)).ttfts_s, 99)
        assert light_s is not None
        roughly = _max_rate(tetris.with_options({"improvement_rate": "0.5"}), self.answers("tetris"), light_s)
        profiled = self.requests(seed=_PROFILED_SEED, output_len=1, num=self._num_requests // 4)
        table, _ = tetris.improvement_rates(profiled, roughly)
        self.experiments["tetris"] = tetris.with_options({"improvement_rates": str(table)})
        return light_s, str(table)

    def auto(self) -> dict[str, Experiment]:
        """Return `tetris` and the default policy: with the same roles, and on the same devices without roles."""
        options = {"exchange": "ring_kv"}
        return {
            "tetris": self.experiments["tetris"],
            "auto with roles": self._experiment("auto", options),
            "auto": self._experiment("auto", options, unified=True),
        }

    def requests(self, *, seed: int = _SEED, output_len: int = _OUTPUT_LEN, num: int | None = None) -> Workload:
        """Return requests that arrive at one per second."""
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
        """Return requests for measuring TTFT. Answers have one token if separate instances decode."""
        return self.requests(output_len=_OUTPUT_LEN if system in {"loongserve", "auto"} else 1)


def study(setup: Setup, workload: str, num_requests: int, loads: tuple[float, ...]) -> Study:
    """Run all simulations of one setup and workload."""
    systems = Systems(setup, workload, num_requests)
    light_s, table = systems.profile()
    results = Study(
        model=setup.model,
        workload=workload,
        num_requests=num_requests,
        light_s=light_s,
        table=table,
        code=code_version(__file__),
    )
    for name, experiment in systems.experiments.items():
        results.max_rates[name] = _max_rate(experiment, systems.answers(name), light_s)
    limit = results.max_rates[results.best_baseline]
    for name, experiment in systems.experiments.items():
        results.at_limit[name] = _point(experiment, systems.requests().at_rate(limit))
    for load in loads:
        _ablations(results, systems.experiments["tetris"], systems.answers("tetris"), load)
        rate = load * results.max_rates["tetris"]
        for name, experiment in systems.experiments.items():
            point = _point(experiment, systems.answers(name).at_rate(rate))
            results.curves.setdefault(name, {})[rate] = (point.ttft_p50_s, point.ttft_p99_s)
    return results


def auto_rates(setup: Setup, workload: str, num_requests: int) -> dict[str, float]:
    """Return the highest rates of the default policy, and of `tetris`."""
    systems = Systems(setup, workload, num_requests)
    light_s, _ = systems.profile()
    return {name: _max_rate(experiment, systems.answers(name), light_s) for name, experiment in systems.auto().items()}


def run_auto(args: argparse.Namespace) -> bool:
    """Print the highest rates. Return True if `auto` is within 2 % of `tetris` in all cases."""
    cases = list(product([setup for setup in SETUPS if setup.model in args.models], args.workloads))
    names = ("tetris", "auto with roles", "auto")
    table, passed = Table("highest rate, requests/s", *names), True
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = [pool.submit(auto_rates, *case, args.num_requests or 1000) for case in cases]
        for (setup, workload), future in zip(cases, tqdm(futures, desc="cases", disable=None), strict=True):
            rates = future.result()
            table.add_row(f"{setup.model}, {workload}", *(f"{rates[name]:.2f}" for name in names))
            passed &= max(rates["auto"], rates["auto with roles"]) >= _AS_GOOD * rates["tetris"]
    Console(width=120).print(table)
    return passed


def _ablations(results: Study, experiment: Experiment, requests: Workload, load: float) -> None:
    at_rate = requests.at_rate(load * results.max_rates["tetris"])
    dynamic, single = _point(experiment, at_rate), _point(experiment.with_options({"chunking": "false"}), at_rate)
    results.single_chunk[load] = (*_times(single, dynamic), single.computing, dynamic.computing)
    named = experiment.scheduling.all_policy_options().items()
    options = {name: value for name, value in named if name != "improvement_rates"}
    fixed = replace(experiment, scheduling=replace(experiment.scheduling, policy_options=options))
    results.fixed_rates[load] = {
        rate: _times(_point(fixed.with_options({"improvement_rate": str(rate)}), at_rate), dynamic)
        for rate in FIXED_RATES
    }


def _times(point: Point, base: Point) -> tuple[float, float]:
    return point.ttft_p50_s / base.ttft_p50_s, point.ttft_p99_s / base.ttft_p99_s


def _point(experiment: Experiment, requests: Workload) -> Point:
    timeline = Timeline()
    result = experiment.run(requests, timeline.observers(experiment.cost))
    numbers = result.summary()
    decodes = any(arrival.output_len > 1 for arrival in requests.arrivals)
    return Point(
        ttft_p50_s=float(numbers["ttft_p50_s"] or 0),
        ttft_p99_s=float(numbers["ttft_p99_s"] or 0),
        ttft_mean_s=float(np.mean(result.ttfts_s)),
        tbt_p50_s=numbers["tbt_p50_s"] if decodes else None,
        tbt_p99_s=numbers["tbt_p99_s"] if decodes else None,
        throughput_tokens_per_s=float(numbers["throughput_tokens_per_s"] or 0),
        computing=_computing(experiment, result, timeline),
        ttft_quantiles_s=np.percentile(result.ttfts_s, QUANTILES).tolist(),
    )


def _computing(experiment: Experiment, result: Result, timeline: Timeline) -> float:
    """Return the share of time in which prefill instances compute prompts, until the last request's first token."""
    busy_s = sum(block.end_s - block.start_s for block in timeline.blocks if block.index is not None)
    last_s = max(request.arrival_s + request.ttft_s for request in result.served)
    return busy_s / (last_s * len(experiment.cluster.prefill))


def _max_rate(experiment: Experiment, requests: Workload, light_s: float) -> float:
    rate = experiment.max_rate(requests, near_light_load(light_s), start=2.0, precision=_PRECISION)
    if rate is None:
        raise SystemExit(f"{experiment.scheduling.policy} serves all requests at once: give a larger --num-requests")
    return rate


def run(args: argparse.Namespace) -> list[Study]:
    """Run all cases, and print each when it is done."""
    setups = [setup for setup in SETUPS if setup.model in args.models]
    loads: tuple[float, ...] = _LOADS
    cases, number = list(product(setups, args.workloads)), 1000
    if args.quick:
        cases, loads, number = cases[:1], (0.5, 0.9), 400
    if args.num_requests is not None:
        number = args.num_requests
    json_path: Path | None = args.json
    if number < _MIN_REQUESTS:
        raise SystemExit(f"--num-requests must be at least {_MIN_REQUESTS}, or no rate is too high, but {number} given")
    done = {(study.model, study.workload): study for study in stored_studies(json_path)}
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = {
            (setup.model, workload): pool.submit(study, setup, workload, number, loads)
            for setup, workload in cases
            if not _is_current(done.get((setup.model, workload)), number)
        }
        for key, future in tqdm(futures.items(), desc="cases", disable=None):
            done[key] = future.result()
            _print(done[key])
            if json_path is not None:
                _store(json_path, list(done.values()))
    return [done[setup.model, workload] for setup, workload in cases]


def _is_current(study: Study | None, num_requests: int) -> bool:
    return study is not None and (study.code, study.num_requests) == (code_version(__file__), num_requests)


def _store(path: Path, studies: Sequence[Study]) -> None:
    """Write the results of studies, next to the stored ones of workloads that have no study."""
    before = stored(path) if path.is_file() else {}
    now = {model: _joined(before.get(model), found) for model, found in figures(studies).items()}
    path.write_bytes(msgspec.json.format(msgspec.json.encode({**before, **now}), indent=1) + b"\n")


def _joined(before: Figures | None, now: Figures) -> Figures:
    """Return the numbers of all workloads, the new ones where there are both."""
    if before is None:
        return now
    by_workload = {
        item.name: {**getattr(before, item.name), **getattr(now, item.name)}
        for item in fields(Figures)
        if item.name != "num_requests"
    }
    return Figures(num_requests=min(before.num_requests, now.num_requests), **by_workload)


def _print(case: Study) -> None:
    title = f"{case.model}, {case.workload}: light-load P99 {case.light_s:.2f} s, improvement rates {case.table}"
    rates = Table("", "max rate", "TTFT P50", "P99", "TBT P50", "P99", "tokens/s", title=title)
    for name, highest in case.max_rates.items():
        point = case.at_limit[name]
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
    baseline = case.best_baseline
    print(f"TTFT, TBT and throughput are at {case.max_rates[baseline]:.2f}/s, the limit of {baseline}.")
    loads = Table("load", *(f"rate {rate}" for rate in FIXED_RATES), "single chunk", "computing", title="TTFT P50, P99")
    for load, by_rate in case.fixed_rates.items():
        p50, p99, single, chunked = case.single_chunk[load]
        cells = [f"{mid:.2f}x {tail:.2f}x" for mid, tail in by_rate.values()]
        loads.add_row(f"{load:.0%}", *cells, f"{p50:.2f}x {p99:.2f}x", f"{single:.1%} {chunked:.1%}")
    console.print(loads)
    print(
        "Over the profiled table, and over chunks. Computing: prefill instances' part of the time, single and chunks.",
        end="\n\n",
        flush=True,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The numbers of one model that claims need. Most are by workload. Numbers that were not stored are empty.

    Attributes:
        max_rates: by workload and system.
        ttft_p50, ttft_p99: of the best baseline at its highest rate, over the values of `tetris` at the same rate.
        tbt_p50, tbt_p99: the same of `loongserve`.
        throughput: of `tetris` over that of the best baseline, at the same rate.
        fixed_rate: the least TTFT with any fixed improvement rate over that with the table, P50 and P99, all loads.
        low_load, high_load: P50 of TTFT over that with the table, by workload and improvement rate.
        single_p50, single_p99: TTFT without chunks over that with them, at the worst load.
        studies: the results, by workload.
    """

    num_requests: int
    max_rates: dict[str, dict[str, float]]
    ttft_p50: dict[str, float]
    ttft_p99: dict[str, float]
    throughput: dict[str, float]
    fixed_rate: dict[str, float]
    single_p50: dict[str, float]
    single_p99: dict[str, float]
    studies: dict[str, Study] = field(default_factory=dict)
    tbt_p50: dict[str, float] = field(default_factory=dict)
    tbt_p99: dict[str, float] = field(default_factory=dict)
    low_load: dict[str, dict[str, float]] = field(default_factory=dict)
    high_load: dict[str, dict[str, float]] = field(default_factory=dict)


def stored(path: Path = STORED) -> dict[str, Figures]:
    """Read the stored figures by model."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Figures])


def stored_studies(path: Path | None = STORED) -> list[Study]:
    """Read the stored results of all cases."""
    if path is None or not path.is_file():
        return []
    return [study for figures in stored(path).values() for study in figures.studies.values()]


def figures(studies: Sequence[Study]) -> dict[str, Figures]:
    """Return the numbers of the studies that claims need, by model."""
    models = dict.fromkeys(study.model for study in studies)
    return {model: _figures({study.workload: study for study in studies if study.model == model}) for model in models}


def _figures(studies: Mapping[str, Study]) -> Figures:
    def over(key: str, system: str | None = None) -> dict[str, float]:
        return {
            name: getattr(study.at_limit[system or study.best_baseline], key) / getattr(study.at_limit["tetris"], key)
            for name, study in studies.items()
        }

    def at_load(find: Callable[[Iterable[float]], float]) -> dict[str, dict[str, float]]:
        return {
            name: {str(rate): pair[0] for rate, pair in study.fixed_rates[find(study.fixed_rates)].items()}
            for name, study in studies.items()
        }

    def worst(place: int) -> dict[str, float]:
        return {name: max(ratios[place] for ratios in study.single_chunk.values()) for name, study in studies.items()}

    return Figures(
        studies=dict(studies),
        num_requests=min(study.num_requests for study in studies.values()),
        max_rates={name: study.max_rates for name, study in studies.items()},
        ttft_p50=over("ttft_p50_s"),
        ttft_p99=over("ttft_p99_s"),
        tbt_p50=over("tbt_p50_s", "loongserve"),
        tbt_p99=over("tbt_p99_s", "loongserve"),
        throughput={name: 1 / ratio for name, ratio in over("throughput_tokens_per_s").items()},
        fixed_rate={
            name: min(ratio for by_rate in study.fixed_rates.values() for pair in by_rate.values() for ratio in pair)
            for name, study in studies.items()
        },
        low_load=at_load(min),
        high_load=at_load(max),
        single_p50=worst(0),
        single_p99=worst(1),
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `--serving` and `--auto`."""
    models = [setup.model for setup in SETUPS]
    parser.add_argument("--models", nargs="+", default=models, choices=models)
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--quick", action="store_true", help="the first of these cases, 400 requests")
    parser.add_argument("--num-requests", type=int, help="of each run; 1000 unless --quick")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", type=Path, help="write the figures that claims need to this file")
