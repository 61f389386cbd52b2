"""The verb `simulate`: reads options, runs an experiment, and prints and draws what it showed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.cli.bundles import bundled
from longspan.cli.estimate import HardwareOptions
from longspan.cli.scheduling import SHARING, SchedulingOptions
from longspan.core.options import key_values
from longspan.errors import ParameterError, named

if TYPE_CHECKING:
    from longspan.core.cluster import Cluster
    from longspan.sim.cluster import Scheduling
    from longspan.sim.experiment import Experiment
    from longspan.sim.result import Result
    from longspan.sim.run import Faults
    from longspan.sim.timeline import Timeline
    from longspan.workload.arrivals import Workload

_cluster = partial(typer.Option, rich_help_panel="Cluster")
_workload = partial(typer.Option, rich_help_panel="Requests")
_faults = partial(typer.Option, rich_help_panel="What goes wrong")
_results = partial(typer.Option, rich_help_panel="Results")


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """Which devices there are, and which instances on them."""

    hardware: Annotated[
        str | None,
        _cluster(metavar="NAME", help="A device such as a100-sxm-80g; an unknown name lists all. Or give --profile."),
    ] = None
    profile: Annotated[
        Path | None,
        _cluster(metavar="FILE", help="Instead: what longspan profile measured; instances are of that machine."),
    ] = None
    hosts: Annotated[int, _cluster(help="How many hosts there are.")] = 1
    gpus_per_host: Annotated[
        int | None, _cluster(help="Devices of each host.", show_default="what the instances need, or else 8")
    ] = None
    parallel: Annotated[
        str | None,
        _cluster(
            metavar="SPEC",
            help=r"\[N]\[xtpT]: N instances of T devices each; they take all devices.",
            show_default="one per device",
        ),
    ] = None
    prefill_parallel: Annotated[
        str | None,
        _cluster(metavar="SPEC", help="Instead of --parallel: the instances that prefill only, on the first devices."),
    ] = None
    decode_parallel: Annotated[
        str | None, _cluster(metavar="SPEC", help="With it: those that decode only; prompts' KV is sent to them.")
    ] = None
    transfer_backends: Annotated[
        int | None,
        _cluster(
            metavar="N",
            help="How many transfers a decode instance receives at once.",
            show_default="one per prefill instance",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClusterOptions(HardwareOptions, FleetOptions):
    """What the cluster is made of."""


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is asked for and when."""

    workload: Annotated[
        str,
        _workload(
            metavar="short|medium|long|FILE",
            help="Lengths as in Tetris's traces; or a trace (.csv, .jsonl, maybe .gz); or quantiles (.json).",
        ),
    ] = "short"
    rate: Annotated[
        float | None,
        _workload(help="Requests per second; a trace with times is stretched to it.", show_default="a trace's own"),
    ] = None
    burstiness: Annotated[
        float | None,
        _workload(help="Shape of the gamma distribution of gaps: below 1 in bursts, above steadier.", show_default="1"),
    ] = None
    num_requests: Annotated[
        int | None, _workload(help="Requests in all, each turn counted.", show_default="1000, or all of a trace")
    ] = None
    output_len: Annotated[
        int | None, _workload(help="Output tokens of every request.", show_default="as the workload has them")
    ] = None
    prefix_len: Annotated[int, _workload(help="Tokens, in addition, at the start that prompts share.")] = 0
    num_prefixes: Annotated[
        int | None, _workload(help="How many different such starts there are.", show_default="1")
    ] = None
    turns: Annotated[int, _workload(help="Requests of a conversation, which come one after the other.")] = 1
    think_time: Annotated[
        float | None, _workload(metavar="S", help="Seconds from an answer to the next turn.", show_default="10")
    ] = None
    seed: Annotated[int, _workload(help="Of times and lengths.")] = 0


@dataclass(frozen=True, kw_only=True)
class FaultOptions:
    """Instances that are slow, workers that are lost."""

    slow: Annotated[
        list[str] | None,
        _faults(metavar="INSTANCE=FACTOR", help="This instance, from 0, takes so many times as long; repeatable."),
    ] = None
    lose_worker_at: Annotated[
        list[float] | None,
        _faults(
            metavar="S",
            help="After so many seconds a worker is lost; all start anew, as a real engine's do; repeatable.",
        ),
    ] = None
    restart_time: Annotated[
        float | None, _faults(metavar="S", help="Seconds that workers take to start anew.", show_default="10")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """What is told."""

    as_json: Annotated[bool, _results("--json", help="Print one JSON object and no table.")] = False
    find_max_rate: Annotated[
        bool,
        _results(
            "--find-max-rate",
            help="Also find the requests per second up to which P99 TTFT stays below 25 times that of light load.",
        ),
    ] = False
    profile_improvement_rates: Annotated[
        bool,
        _results(
            "--profile-improvement-rates",
            help="Only find what -o improvement_rates= of tetris should say, for up to --rate requests per second.",
        ),
    ] = False
    report: Annotated[
        Path | None, _results(metavar="FILE.html", help="A page with pictures; needs longspan\\[report].")
    ] = None
    trace: Annotated[Path | None, _results(metavar="FILE.json", help="A trace for Perfetto or Chrome.")] = None


Options = ClusterOptions | SchedulingOptions | WorkloadOptions | FaultOptions
_RESTART_S = 10.0
_IN_OTHER_WORDS = ("hardware", "transfer_backends", "policy", "policy_option", *SHARING)
"""Options that the page tells with what was found."""
_CLUSTER, _WORKLOAD = ClusterOptions(), WorkloadOptions()
_SCHEDULING = SchedulingOptions(max_num_batched_tokens=8192)
"""Devices that have data sheets take so many tokens at once; CPUs, for which the other verbs are set, take fewer."""
_FAULTS, _RESULTS = FaultOptions(), ResultOptions()


@bundled()
def simulate(
    model: Annotated[str, typer.Argument(help="A name such as llama-3-8b, a folder with a config.json, or a hub id.")],
    *,
    cluster: ClusterOptions = _CLUSTER,
    scheduling: SchedulingOptions = _SCHEDULING,
    workload: WorkloadOptions = _WORKLOAD,
    faults: FaultOptions = _FAULTS,
    results: ResultOptions = _RESULTS,
) -> int:
    """Serves a workload on a cluster that is not there, by the policies that serve, and tells times and rates.

    Steps take what longspan estimate computes, or what the profile of a machine says. Times are seconds of a virtual
    clock; the same options give the same numbers. docs/simulator.md says what each means.
    """
    _check_results(results, workload)
    try:
        return _run(model, cluster, scheduling, workload, faults, results)
    except ParameterError as error:
        raise ValueError(named(f"--{error.parameter.replace('_', '-')}", error.problem)) from error


def _run(
    model: str,
    cluster: ClusterOptions,
    scheduling: SchedulingOptions,
    workload: WorkloadOptions,
    faults: FaultOptions,
    results: ResultOptions,
) -> int:
    from longspan.sim.cluster import ClusterSpec  # noqa: PLC0415 - other verbs need neither numpy nor the engine
    from longspan.sim.timeline import Timeline  # noqa: PLC0415
    from longspan.simulation import make_experiment  # noqa: PLC0415
    from longspan.workload.spec import WorkloadSpec, make_workload  # noqa: PLC0415

    experiment = make_experiment(model, ClusterSpec(**vars(cluster)), _bounds(scheduling), _faults_of(faults))
    experiment = replace(experiment, progress=_bar)
    requests = make_workload(WorkloadSpec(**vars(workload)))
    if results.profile_improvement_rates:
        assert workload.rate is not None, "it was checked"
        _print_improvement_rates(experiment, requests, workload.rate, as_json=results.as_json)
        return 0
    if (hint := experiment.hint()) is not None:
        typer.echo(f"longspan: {hint}", err=True)
    timeline = Timeline() if results.report or results.trace else None
    result = experiment.run(requests, timeline)
    numbers: dict[str, float | int | None] = result.summary()
    if results.find_max_rate:
        numbers |= _rates(experiment, requests, start=workload.rate or 1.0)
    if timeline is not None:
        settings = _settings(model, experiment, (cluster, scheduling, workload, faults))
        _write_pictures(results, result, timeline, settings, experiment.cluster.cluster)
    if results.as_json:
        typer.echo(json.dumps(numbers, allow_nan=False))
    else:
        Console().print(_table(numbers))
    if result.refused:
        index, reason = next(iter(sorted(result.refused.items())))
        typer.echo(f"longspan: {len(result.refused)} requests were refused, the first, {index}: {reason}", err=True)
    return 0


def _bounds(options: SchedulingOptions) -> Scheduling:
    from longspan.sim.cluster import Scheduling  # noqa: PLC0415

    names = {field.name for field in fields(Scheduling)}
    given: dict[str, Any] = {name: value for name, value in vars(options).items() if name in names}
    return Scheduling(**given, policy_options=options.policy_options())


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many are done, if that is a terminal."""
    with tqdm(total=total, desc=title, unit="request", dynamic_ncols=True, leave=False, disable=None) as bar:
        yield lambda num_done: bar.update(num_done - bar.n)


def _print_improvement_rates(experiment: Experiment, workload: Workload, highest: float, *, as_json: bool) -> None:
    table, means_s = experiment.improvement_rates(workload, highest)
    if as_json:
        ttfts = {f"{rate:g}": {f"{tried:g}": s for tried, s in found.items()} for rate, found in means_s.items()}
        typer.echo(json.dumps({"improvement_rates": str(table), "ttft_mean_s": ttfts}, allow_nan=False))
    else:
        typer.echo(f"improvement_rates={table}")


def _rates(experiment: Experiment, workload: Workload, *, start: float) -> dict[str, float | None]:
    """Finds the numbers that `--find-max-rate` adds."""
    from longspan.sim.experiment import MOST_TIMES_LIGHT  # noqa: PLC0415

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


def _faults_of(options: FaultOptions) -> Faults:
    from longspan.sim.run import Faults  # noqa: PLC0415

    try:
        given = key_values(options.slow or ())
        slow = {int(instance): float(factor) for instance, factor in given.items()}
    except ValueError:
        raise ValueError(
            f"--slow is INSTANCE=FACTOR, such as 3=1.5, but {' '.join(options.slow or ())} given"
        ) from None
    if options.restart_time is not None and not options.lose_worker_at:
        raise ValueError(f"--restart-time {options.restart_time:g} is of lost workers: give --lose-worker-at")
    restart_s = _RESTART_S if options.restart_time is None else options.restart_time
    return Faults(slow=slow, lost_at_s=tuple(options.lose_worker_at or ()), restart_s=restart_s)


def _check_results(results: ResultOptions, workload: WorkloadOptions) -> None:
    """Refuses, before the run, what cannot be found or written after it."""
    others = {"--find-max-rate": results.find_max_rate, "--report": results.report, "--trace": results.trace}
    for flag, value in others.items():
        if value and results.profile_improvement_rates:
            raise ValueError(f"{flag} is of a single run, and --profile-improvement-rates makes many: leave one out")
    if results.profile_improvement_rates and workload.rate is None:
        raise ValueError("--profile-improvement-rates goes up to --rate: give the highest rate that is expected")
    if results.find_max_rate and workload.rate == math.inf:
        raise ValueError(
            "--rate inf has all requests come at once, but --find-max-rate varies the time between them: give a number"
        )
    for flag, path in (("--report", results.report), ("--trace", results.trace)):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{flag}: the folder {str(path.parent)!r} is not there")
    if results.report is not None:
        from longspan.sim.report import check_report  # noqa: PLC0415

        check_report()


def _settings(model: str, experiment: Experiment, bundles: Sequence[Options]) -> dict[str, object]:
    """Says what the run was, for its page: what was found, then all options by their names, but those not given."""
    cluster, policy = experiment.cluster.cluster, [experiment.scheduling.policy]
    policy += (f"{key}={value}" for key, value in experiment.scheduling.policy_options.items())
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
    """Shortens an option's value for people: of a file its name."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return Path(value).name if isinstance(value, str | Path) else value


def _write_pictures(
    results: ResultOptions, result: Result, timeline: Timeline, settings: dict[str, object], cluster: Cluster
) -> None:
    from longspan.sim.report import html_report  # noqa: PLC0415
    from longspan.sim.timeline import chrome_trace  # noqa: PLC0415

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
