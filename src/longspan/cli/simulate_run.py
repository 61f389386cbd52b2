"""What `simulate` does with its options."""

from __future__ import annotations

import json
import math
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from longspan.cli.pairs import key_values
from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.simulate import ClusterOptions, FaultOptions, ResultOptions, WorkloadOptions
from longspan.cli.simulate_cluster import Cluster
from longspan.cli.simulate_rates import print_improvement_rates, tell_of_a_constant_rate
from longspan.cli.simulate_scene import Scene
from longspan.cli.simulate_workload import Workload, workload_of
from longspan.sim.faults import Faults
from longspan.sim.rates import MOST_TIMES_LIGHT
from longspan.sim.report import check_report, html_report
from longspan.sim.result import Result, summary
from longspan.sim.timeline import Timeline
from longspan.sim.trace import chrome_trace


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
    if results.find_max_rate and workload_options.rate == math.inf:
        raise ValueError(
            "--rate inf has all requests come at once, but --find-max-rate varies the time between them: give a number"
        )
    scene = Scene.of(model, cluster_options, scheduling, _faults(fault_options))
    workload = workload_of(workload_options)
    if results.profile_improvement_rates:
        return print_improvement_rates(scene, workload, workload_options.rate, as_json=results.as_json)
    tell_of_a_constant_rate(scene)
    timeline = Timeline() if results.report or results.trace else None
    result = scene.run(workload, timeline, title="requests")
    numbers: dict[str, float | int | None] = summary(result)
    if results.find_max_rate:
        numbers |= _rates(scene, workload, start=workload_options.rate or 1.0)
    settings = _settings(model, cluster_options, scheduling, workload_options, scene.cluster)
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


def _rates(scene: Scene, workload: Workload, *, start: float) -> dict[str, float | None]:
    """What `--find-max-rate` adds."""
    light_s = scene.light_ttft_p99_s(workload)
    if light_s is None:
        raise ValueError("--find-max-rate: no request was served")
    found = scene.max_rate(workload, light_s, start=start)
    if found is None:
        typer.echo(
            f"longspan: max_rate is null: when all {len(workload.arrivals)} requests come at once, P99 TTFT is still "
            f"below {MOST_TIMES_LIGHT} times the {light_s:.3g} s of light load: give a larger --num-requests",
            err=True,
        )
    return {"max_rate": found, "light_ttft_p99_s": light_s}


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


def _table(numbers: dict[str, float | int | None]) -> Table:
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in numbers.items():
        table.add_row(name, "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.4g}")
    return table
