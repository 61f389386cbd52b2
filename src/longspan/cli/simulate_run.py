"""What `simulate` does with its options."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from longspan.cli.pairs import key_values
from longspan.cli.scheduling import SHARING, SchedulingOptions
from longspan.cli.simulate import ClusterOptions, FaultOptions, ResultOptions, WorkloadOptions
from longspan.cli.simulate_rates import print_improvement_rates, tell_of_a_constant_rate
from longspan.cli.simulate_scene import Experiment
from longspan.core.cluster import Cluster
from longspan.sim.report import check_report, html_report
from longspan.sim.result import MOST_TIMES_LIGHT, Result, summary
from longspan.sim.run import Faults
from longspan.sim.timeline import Timeline, chrome_trace
from longspan.workload.spec import Workload, make_workload

_RESTART_S = 10.0
_IN_OTHER_WORDS = ("hardware", "transfer_backends", "policy", "policy_option", *SHARING)
"""Options that the page tells with what was found."""

Options = ClusterOptions | SchedulingOptions | WorkloadOptions | FaultOptions


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
    _check_results(results)
    if results.find_max_rate and workload_options.rate == math.inf:
        raise ValueError(
            "--rate inf has all requests come at once, but --find-max-rate varies the time between them: give a number"
        )
    experiment = Experiment.of(model, cluster_options, scheduling, _faults(fault_options))
    workload = make_workload(workload_options)
    if results.profile_improvement_rates:
        return print_improvement_rates(experiment, workload, workload_options.rate, as_json=results.as_json)
    tell_of_a_constant_rate(experiment)
    timeline = Timeline() if results.report or results.trace else None
    result = experiment.run(workload, timeline, title="requests")
    numbers: dict[str, float | int | None] = summary(result)
    if results.find_max_rate:
        numbers |= _rates(experiment, workload, start=workload_options.rate or 1.0)
    if timeline is not None:
        options = (cluster_options, scheduling, workload_options, fault_options)
        _write_pictures(results, result, timeline, _settings(model, experiment, options), experiment.cluster.cluster)
    if results.as_json:
        typer.echo(json.dumps(numbers, allow_nan=False))
    else:
        Console().print(_table(numbers))
    if result.refused:
        place, reason = next(iter(sorted(result.refused.items())))
        typer.echo(f"longspan: {len(result.refused)} requests were refused, the first, {place}: {reason}", err=True)
    return 0


def _rates(experiment: Experiment, workload: Workload, *, start: float) -> dict[str, float | None]:
    """What `--find-max-rate` adds."""
    light_s = experiment.light_ttft_p99_s(workload)
    if light_s is None:
        raise ValueError("--find-max-rate: no request was served")
    found = experiment.max_rate(workload, light_s, start=start)
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
    if options.restart_time is not None and not options.lose_worker_at:
        raise ValueError(f"--restart-time {options.restart_time:g} is of lost workers: give --lose-worker-at")
    restart_s = _RESTART_S if options.restart_time is None else options.restart_time
    return Faults(slow=slow, lost_at_s=tuple(options.lose_worker_at or ()), restart_s=restart_s)


def _check_results(results: ResultOptions) -> None:
    """Whether all that is asked for will be there, and can be written, before the run."""
    others = {"--find-max-rate": results.find_max_rate, "--report": results.report, "--trace": results.trace}
    for flag, value in others.items():
        if value and results.profile_improvement_rates:
            raise ValueError(f"{flag} is of a single run, and --profile-improvement-rates makes many: leave one out")
    for flag, path in (("--report", results.report), ("--trace", results.trace)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag}: the folder {str(path.parent)!r} is not there")
    if results.report is not None:
        check_report()


def _settings(model: str, experiment: Experiment, bundles: Sequence[Options]) -> dict[str, object]:
    """What the run was, for its page: what was found, then all options by their names, but those not given."""
    cluster, policy = experiment.cluster.cluster, [experiment.scheduling.policy]
    policy += (f"{key}={value}" for key, value in experiment.policy_options.items())
    instances, blocks = str(cluster.num_instances), f"{cluster.num_blocks(0):,}"
    if cluster.has_roles:
        prefill, decode = len(cluster.prefill), len(cluster.decode)
        instances = f"{prefill} prefill, {decode} decode, {cluster.backends} transfers at once to each"
        blocks += f", {cluster.num_blocks(-1):,} to decode"
    found = {"model": model, "cluster": experiment.cluster.words, "instances": instances, "KV blocks": blocks}
    given = {field.name: getattr(bundle, field.name) for bundle in bundles for field in fields(bundle)}
    return {**found, "policy": " ".join(policy)} | {
        name.replace("_", "-"): _words(value)
        for name, value in given.items()
        if name not in _IN_OTHER_WORDS and value not in (None, [])
    }


def _words(value: object) -> object:
    """An option's value, for people; of a file its name."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return Path(value).name if isinstance(value, str | Path) else value


def _write_pictures(
    results: ResultOptions, result: Result, timeline: Timeline, settings: dict[str, object], cluster: Cluster
) -> None:
    if results.report is not None:
        _write("--report", results.report, html_report(result, timeline, settings, cluster=cluster))
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
