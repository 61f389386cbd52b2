"""What `simulate` does with its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.cli.pairs import key_values
from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.simulate import ClusterOptions, FaultOptions, ResultOptions, WorkloadOptions
from longspan.cli.simulate_cluster import Cluster, cluster_of
from longspan.cli.simulate_workload import Workload, workload_of
from longspan.core.engine import EngineConfig
from longspan.policy import make_policy
from longspan.sim.faults import Faults
from longspan.sim.rates import MOST_TIMES_LIGHT, find_max_rate
from longspan.sim.report import check_report, html_report
from longspan.sim.result import Result, percentile, summary
from longspan.sim.run import Watch, simulate
from longspan.sim.timeline import Timeline
from longspan.sim.trace import chrome_trace

_FAR_APART_S = 1e6


def run_simulation(
    model: str,
    cluster_options: ClusterOptions,
    scheduling: SchedulingOptions,
    workload_options: WorkloadOptions,
    fault_options: FaultOptions,
    results: ResultOptions,
) -> int:
    """Runs it, prints and writes what it showed, and returns the exit code.

    Raises:
        ValueError: for a value that is not possible, or files that cannot be read or written.
    """
    _check_files(results)
    faults = _faults(fault_options)
    cluster = cluster_of(model, cluster_options, scheduling)
    workload = workload_of(workload_options)
    scene = _Scene(cluster=cluster, scheduling=scheduling, faults=faults, shares=workload.shares)
    timeline = Timeline() if results.report or results.trace else None
    result = scene.run(workload, timeline, title="requests")
    numbers: dict[str, float | int | None] = summary(result)
    if results.find_max_rate:
        numbers |= _rates(scene, workload, start=workload_options.rate or 1.0)
    settings = _settings(model, cluster_options, scheduling, workload_options, cluster)
    if timeline is not None:
        _write_pictures(results, result, timeline, settings)
    if results.as_json:
        typer.echo(json.dumps(numbers, allow_nan=False))
    else:
        Console().print(_table(numbers))
    if result.refused:
        place, reason = next(iter(sorted(result.refused.items())))
        typer.echo(f"longspan: {len(result.refused)} requests were refused, the first, {place}: {reason}", err=True)
    return 0


@dataclass(frozen=True, kw_only=True)
class _Scene:
    """All of a simulation but its requests."""

    cluster: Cluster
    scheduling: SchedulingOptions
    faults: Faults
    shares: bool

    def run(self, workload: Workload, timeline: Timeline | None, *, title: str) -> Result:
        """With a progress bar on stderr, if that is a terminal."""
        policy = make_policy(
            self.scheduling.policy,
            num_instances=self.cluster.num_instances,
            options=self.scheduling.policy_options(),
            facts=self.cluster.facts,
        )
        capacity = policy.capacity_tokens(num_blocks=self.cluster.num_blocks, block_size=self.scheduling.block_size)
        with _bar(len(workload.arrivals), title) as finished:
            watch = replace(timeline.watch if timeline else Watch(), finished=finished)
            return simulate(
                workload.arrivals, self._config(capacity), policy, self.cluster.cost, faults=self.faults, watch=watch
            )

    def _config(self, capacity: int) -> EngineConfig:
        options = self.scheduling
        return EngineConfig(
            num_instances=self.cluster.num_instances,
            num_blocks=self.cluster.num_blocks,
            block_size=options.block_size,
            max_model_len=options.max_model_len or capacity,
            limits=options.limits(),
            prefix_caching=options.enable_prefix_caching and self.shares,  # else nothing would be found
            max_steps_in_flight=2 if options.async_scheduling else 1,
        )


def _rates(scene: _Scene, workload: Workload, *, start: float) -> dict[str, float | None]:
    """The highest rate whose P99 of TTFT stays below so many times that of requests which never meet."""
    light = percentile(scene.run(workload.one_by_one(_FAR_APART_S), None, title="light load").ttfts_s, 99)
    if light is None:
        raise ValueError("--find-max-rate: no request was served")

    def keeps_up(rate: float) -> bool:
        found = percentile(scene.run(workload.at_rate(rate), None, title=f"rate {rate:.3g}").ttfts_s, 99)
        return found is not None and found < MOST_TIMES_LIGHT * light

    return {"max_rate": find_max_rate(keeps_up, start=start), "light_ttft_p99_s": light}


def _faults(options: FaultOptions) -> Faults:
    given = key_values("--slow", options.slow or ())
    try:
        slow = {int(instance): float(factor) for instance, factor in given.items()}
    except ValueError:
        raise ValueError(
            f"--slow is INSTANCE=FACTOR, such as 3=1.5, but {' '.join(options.slow or ())} given"
        ) from None
    return Faults(slow=slow, lost_at_s=tuple(options.lose_worker_at or ()), restart_s=options.restart_time)


def _check_files(results: ResultOptions) -> None:
    """Whether they can be written, before the run."""
    for flag, path in (("--report", results.report), ("--trace", results.trace)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag}: the folder {str(path.parent)!r} is not there")
    if results.report is not None:
        check_report()


def _settings(
    model: str,
    cluster: ClusterOptions,
    scheduling: SchedulingOptions,
    workload: WorkloadOptions,
    found: Cluster,
) -> dict[str, object]:
    """What the run was, for its page."""
    return {
        "model": model,
        "cluster": found.words,
        "policy": " ".join(
            [scheduling.policy, *(f"{key}={value}" for key, value in scheduling.policy_options().items())]
        ),
        "hosts": cluster.hosts,
        "instances": found.num_instances,
        "workload": Path(workload.workload).name,
        "rate": workload.rate,
        "seed": workload.seed,
    }


def _write_pictures(results: ResultOptions, result: Result, timeline: Timeline, settings: dict[str, object]) -> None:
    if results.report is not None:
        _write("--report", results.report, html_report(result, timeline, settings))
    if results.trace is not None:
        _write("--trace", results.trace, chrome_trace(result, timeline))
        if not timeline.complete:
            typer.echo(f"longspan: --trace holds the first {len(timeline.blocks):,} blocks only", err=True)


def _write(flag: str, path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{flag} {str(path)!r} cannot be written: {error.strerror}") from None


@contextmanager
def _bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    with tqdm(total=total, desc=title, unit="request", dynamic_ncols=True, leave=False, disable=None) as bar:
        yield lambda num_done: bar.update(num_done - bar.n)


def _table(numbers: dict[str, float | int | None]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in numbers.items():
        table.add_row(name, "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}")
    return table
