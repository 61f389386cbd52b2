"""The verb `simulate`: reads options, runs experiments, and prints and draws their results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.cli.options import NameArgument, verb
from longspan.cli.outputs import check_writable, note, write_result
from longspan.core.options import Option, options_of
from longspan.core.quantities import quantity
from longspan.errors import ParameterError
from longspan.sim.spec import ClusterSpec, ComparedScheduling, Faults, ServiceLevel
from longspan.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from longspan.extras.timeline import Record
    from longspan.sim.experiment import Experiment
    from longspan.sim.run import Result
    from longspan.workload.arrivals import Workload

FlatNumbers = dict[str, float | int | None]
Numbers = dict[str, float | int | dict[str, float] | dict[str, FlatNumbers] | None]
_NUMBERS_OF_CLASS = ("slo_attainment", "goodput_requests_per_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
_results = partial(Option, group="Results")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """Options of the results that are computed and written."""

    as_json: Annotated[bool, _results("Print one JSON object and no table.", name="json")] = False
    find_max_rate: Annotated[
        bool,
        _results(
            "Also find the maximum requests per second at which 90 % meet --slo-ttft and --slo-tbt. Without these "
            "bounds, P99 TTFT must be below 25 times its value at light load."
        ),
    ] = False
    profile_improvement_rates: Annotated[
        bool,
        _results("Only find the value for -o improvement_rates= of tetris, for up to --rate requests per second."),
    ] = False
    replay: Annotated[
        Path | None,
        Option(
            "Instead: the requests of a run that --trace recorded, which is shown alongside.",
            group="Requests",
            metavar="FILE.json",
        ),
    ] = None
    report: Annotated[Path | None, _results("A page with pictures. Needs longspan[report].", metavar="FILE.html")] = (
        None
    )
    trace: Annotated[Path | None, _results("A trace for Perfetto or Chrome.", metavar="FILE.json")] = None


_DERIVED_ON_PAGE = ("hardware", "transfer_backends", "policy", "policy_options", "exchange", "layout", "fractions")
"""Options that the page shows as part of resolved values."""


@verb
def simulate(
    model: NameArgument,
    *,
    cluster: ClusterSpec = ClusterSpec(),
    scheduling: ComparedScheduling = ComparedScheduling(),
    workload: WorkloadSpec = WorkloadSpec(),
    faults: Faults = Faults(),
    results: ResultOptions = ResultOptions(),
    level: ServiceLevel = ServiceLevel(),
) -> int:
    """Serve a workload on a simulated cluster, with the policies of the engine, and report times and rates.

    The resolved cluster is printed above the table: devices, links, instances and their KV. The duration of a step is
    the prediction of longspan estimate, or of the profile of a machine. Times are seconds of a virtual clock, so the
    same options give the same numbers. docs/simulator.md explains each number.
    """
    from longspan.simulation import each_policy, make_experiment  # noqa: PLC0415 - other verbs need no engine
    from longspan.workload.requests import make_workload  # noqa: PLC0415

    recorded = None if results.replay is None else _recorded(results.replay, workload)
    if results.replay is not None:
        workload = replace(workload, workload=str(results.replay))
    _check_results(results, workload, level)
    if faults.restart_s is not None and not faults.lost_at_s:
        raise ParameterError("restart_s", f"{faults.restart_s:g} needs a lost worker: give --lose-worker-at")
    chosen = each_policy(scheduling)
    if results.profile_improvement_rates and len(chosen) > 1:
        raise ParameterError("policy", f"must be tetris, which has improvement rates, but {scheduling.policy} given")
    experiments = [replace(make_experiment(model, cluster, policy, faults), progress=_bar) for policy in chosen]
    requests = make_workload(workload)
    _warn(experiments)
    if results.profile_improvement_rates:
        assert workload.rate is not None, "it was checked"
        _print_improvement_rates(experiments[0], requests, workload.rate, as_json=results.as_json)
        return 0
    _print_policies(experiments)
    if results.find_max_rate and len(experiments) > 1 and not level.is_given:
        note("each max_rate is relative to the policy's own light load: give --slo-ttft or --slo-tbt to compare")
    records = [] if recorded is None else [recorded]
    numbers_of: dict[str, Numbers] = {record.policy: _numbers(record.result, level) for record in records}
    for experiment in experiments:
        name = experiment.scheduling.policy if len(experiments) > 1 else experiment.policy().name
        record, numbers_of[name] = _run(experiment, requests, workload, level, results, name)
        records.append(record)
        _print_refused(record.result, f"{name}: " if len(experiments) > 1 else "")
    if results.report or results.trace:
        given = (cluster, experiments[0].scheduling, workload, faults, level)
        settings = _settings(model, experiments, given)
        _write_pictures(results, records, [*map(_flat, numbers_of.values())], settings, cluster, level)
    _print(experiments, numbers_of, as_json=results.as_json)
    return 0 if all(record.result.served for record in records) else 1


def _recorded(path: Path, workload: WorkloadSpec) -> Record:
    """Read the recording of a run, which is named after its policy.

    Raises:
        ParameterError: it cannot be read, or other options describe requests.
    """
    from longspan.extras.trace import read_record  # noqa: PLC0415 - few simulations replay a run

    for name, (option, _) in options_of(WorkloadSpec).items():
        if getattr(workload, name) != getattr(WorkloadSpec(), name):
            raise ParameterError("replay", f"{path} has its own requests: leave out --{option.flag(name)}", path)
    try:
        record = read_record(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ParameterError("replay", f"{str(path)!r} cannot be read: {error}", path) from None
    if not record.result.served:
        raise ParameterError("replay", f"{str(path)!r} has no finished request: give a longer recording", path)
    return replace(record, policy=f"recorded {record.policy}")


def _warn(experiments: Sequence[Experiment]) -> None:
    """Print each warning about the clusters to stderr once."""
    for warning in dict.fromkeys(w for experiment in experiments for w in experiment.resolved.warnings):
        note(warning)


def _print_policies(experiments: Sequence[Experiment]) -> None:
    """Print to stderr the policies to which names resolve, and the policies' hints about their options."""
    for experiment in experiments:
        policy = experiment.policy()
        if len(experiments) > 1 and policy.name != experiment.scheduling.policy:
            note(f"{experiment.scheduling.policy} is {policy.name} here")
        if policy.hint is not None:
            note(policy.hint)


def _print(experiments: Sequence[Experiment], numbers_of: Mapping[str, Numbers], *, as_json: bool) -> None:
    """Print the resolved cluster and the numbers of each policy."""
    simulated = list(numbers_of)[-len(experiments) :]  # after a recorded run
    clusters = dict(zip(simulated, (experiment.resolved for experiment in experiments), strict=True))
    if as_json:
        objects: dict[str, object] = {
            name: {**numbers, "cluster": clusters[name].as_json()} if name in clusters else numbers
            for name, numbers in numbers_of.items()
        }
        print(json.dumps(objects if len(objects) > 1 else next(iter(objects.values())), allow_nan=False))
        return
    print(f"cluster: {experiments[0].fleet}")
    instances = {name: str(cluster) for name, cluster in clusters.items()}
    for text in dict.fromkeys(instances.values()):
        names = [name for name, other in instances.items() if other == text]
        of = f" of {', '.join(names)}" if len(names) < len(instances) else ""
        print(f"instances{of}: {text}")
    Console().print(_table({policy: _flat(numbers) for policy, numbers in numbers_of.items()}))


def _run(
    experiment: Experiment,
    requests: Workload,
    workload: WorkloadSpec,
    level: ServiceLevel,
    results: ResultOptions,
    policy: str,
) -> tuple[Record, Numbers]:
    """Serve the requests by one policy, whose name in all results is `policy`."""
    from longspan.extras.timeline import Record, Timeline  # noqa: PLC0415

    timeline = Timeline()
    observers = timeline.observers(experiment.cost) if results.report or results.trace else None
    result = experiment.run(requests, observers, title=f"requests, {policy}")
    numbers = _numbers(result, level)
    if workload.offline:
        numbers |= {
            "num_transitions": len(result.transitions),
            "phase_s": dict(result.phase_s),
        }
    if experiment.cluster.host_blocks:
        numbers |= {
            "num_host_hits": result.num_host_hits,
            "num_disk_hits": result.num_disk_hits,
            "swap_bytes": round(result.num_swapped_blocks * experiment.block_bytes),
        }
    if results.find_max_rate:
        numbers |= _rates(experiment, requests, level, start=workload.rate or 1.0)
    return Record(policy=policy, cluster=experiment.cluster, result=result, timeline=timeline), numbers


def _numbers(result: Result, level: ServiceLevel) -> Numbers:
    numbers: Numbers = {**result.summary(level)}
    if level.classes:
        numbers["classes"] = {name: _of_class(part, level) for name, part in result.by_class(level).items()}
    return numbers


def _of_class(part: Result, level: ServiceLevel) -> FlatNumbers:
    summary = part.summary(level)
    num_requests = len(part.served) + len(part.refused)
    return {"num_requests": num_requests} | {name: summary[name] for name in _NUMBERS_OF_CLASS}


def _print_refused(result: Result, name: str) -> None:
    """Print to stderr which requests were refused or truncated."""
    if result.refused:
        index = min(result.refused)
        reason = result.refused[index].reason
        note(f"{name}{len(result.refused)} requests were refused, the first, {index}: {reason}")
    if result.truncated:
        first = result.truncated[0]
        note(
            f"{name}{len(result.truncated)} answers are shorter than requested, the first, {first.index}, by "
            f"{first.num_missing_tokens:,} tokens: at most its {first.num_prompt_tokens:,} + "
            f"{first.num_output_tokens:,} tokens fit (--max-model-len, --output-len, memory of the devices)"
        )


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show the number of finished requests on stderr if it is a terminal."""
    with tqdm(total=total, desc=title, unit="request", dynamic_ncols=True, leave=False, disable=None) as bar:
        yield lambda num_done: bar.update(num_done - bar.n)


def _print_improvement_rates(experiment: Experiment, workload: Workload, highest: float, *, as_json: bool) -> None:
    table, means_s = experiment.improvement_rates(workload, highest)
    if as_json:
        ttfts = {f"{rate:g}": {f"{tried:g}": s for tried, s in row.items()} for rate, row in means_s.items()}
        fields = {"improvement_rates": str(table), "ttft_mean_s": ttfts, "cluster": experiment.resolved.as_json()}
        print(json.dumps(fields, allow_nan=False))
    else:
        print(f"improvement_rates={table}")


def _rates(experiment: Experiment, workload: Workload, level: ServiceLevel, *, start: float) -> FlatNumbers:
    """Return the numbers that `--find-max-rate` adds."""
    from longspan.sim.experiment import ATTAINMENT, MAX_TIMES_LIGHT, near_light_load, within  # noqa: PLC0415
    from longspan.sim.run import percentile  # noqa: PLC0415

    light, policy = experiment.at_light_load(workload), experiment.scheduling.policy
    light_s = percentile(light.ttfts_s, 99)
    if light_s is None:
        raise ValueError("--find-max-rate: no request was served")
    keeps_up = within(level) if level.is_given else near_light_load(light_s)
    if level.is_given and not keeps_up(light):
        note(
            f"{policy}: max_rate is 0: only {light.attainment(level):.0%} of the requests meet --slo-ttft and "
            f"--slo-tbt when requests do not overlap, but {ATTAINMENT:.0%} must"
        )
        return {"max_rate": 0.0, "light_ttft_p99_s": light_s}
    max_rate = experiment.max_rate(workload, keeps_up, start=start)
    if max_rate is None:
        kept = (
            f"{ATTAINMENT:.0%} still meet the bounds"
            if level.is_given
            else f"P99 TTFT is still below {MAX_TIMES_LIGHT} times the {light_s:.3g} s of light load"
        )
        requests = f"all {len(workload.arrivals)} requests"
        note(f"{policy}: max_rate is null: if {requests} arrive at once, {kept}: give a larger --num-requests")
    return {"max_rate": max_rate, "light_ttft_p99_s": light_s}


def _check_results(results: ResultOptions, workload: WorkloadSpec, level: ServiceLevel) -> None:
    """Raise ValueError, before the run, for results that cannot be computed or written after it."""
    single_run: dict[str, object] = {
        "--find-max-rate": results.find_max_rate,
        "--report": results.report,
        "--trace": results.trace,
        "--slo-ttft": level.slo_ttft,
        "--slo-tbt": level.slo_tbt,
        "--slo-class": level.classes,
    }
    for flag, value in single_run.items():
        if value and results.profile_improvement_rates:
            raise ValueError(f"{flag} is for a single run, and --profile-improvement-rates makes many: leave one out")
    if results.profile_improvement_rates and workload.rate is None:
        raise ValueError("--profile-improvement-rates needs --rate: give the highest expected rate")
    if results.find_max_rate and workload.requests_per_s == math.inf:
        raise ValueError(
            "--offline and --rate inf let all requests arrive at once, but --find-max-rate varies the time between "
            "them: give a number"
        )
    if results.find_max_rate and workload.is_closed_loop:
        raise ValueError(
            "--find-max-rate varies the times of requests, which --concurrency and --batch-size ignore: leave one out"
        )
    for flag, path in (("--report", results.report), ("--trace", results.trace)):
        if path is not None:
            check_writable(flag, path)
    if results.report is not None:
        import longspan.extras.report  # noqa: F401, PLC0415 - raises ParameterError without plotly


def _settings(model: str, experiments: Sequence[Experiment], given: Sequence[object]) -> dict[str, object]:
    """Return the settings of a run for its page: resolved values, then the given options by their flags."""
    cluster = experiments[0].cluster
    schedulings = [experiment.scheduling for experiment in experiments]
    policies = [
        " ".join([scheduling.policy, *(f"{k}={v}" for k, v in scheduling.all_policy_options().items())])
        for scheduling in schedulings
    ]
    steps = [scheduling.max_num_batched_tokens for scheduling in schedulings]
    if len(set(steps)) > 1:
        policies = [f"{policy} (steps of {tokens:,})" for policy, tokens in zip(policies, steps, strict=True)]
    instances = str(cluster.num_instances)
    blocks = ", ".join(dict.fromkeys(f"{experiment.cluster.num_blocks[0]:,}" for experiment in experiments))
    if cluster.has_roles:
        prefill, decode = len(cluster.prefill), len(cluster.decode)
        instances = f"{prefill} prefill, {decode} decode, {cluster.backends} transfers at once to each"
        blocks += f", {cluster.num_blocks[-1]:,} to decode"
    resolved = {"model": model, "cluster": str(experiments[0].fleet), "instances": instances, "KV blocks": blocks}
    named = [
        (name, option, getattr(spec, name)) for spec in given for name, (option, _) in options_of(type(spec)).items()
    ]
    return {**resolved, "policy": ", ".join(policies)} | {
        option.flag(name): _words(value)
        for name, option, value in named
        if name not in _DERIVED_ON_PAGE and value not in (None, (), {})
    }


def _words(value: object) -> object:
    """Return a short form of an option's value. A file is shown by its name."""
    if isinstance(value, Mapping):
        return " ".join(f"{key}={item:g}" for key, item in value.items())
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return Path(value).name if isinstance(value, str | Path) else value


def _write_pictures(
    results: ResultOptions,
    records: Sequence[Record],
    numbers: Sequence[FlatNumbers],
    settings: dict[str, object],
    cluster: ClusterSpec,
    level: ServiceLevel,
) -> None:
    if results.report is not None:
        from longspan.extras.report import html_report  # noqa: PLC0415

        attention = cluster.attention or "flash"
        page = html_report(records, numbers, settings, level=level, hardware=cluster.hardware, attention=attention)
        write_result("--report", results.report, page)
    if results.trace is not None:
        from longspan.extras.trace import chrome_trace  # noqa: PLC0415

        write_result("--trace", results.trace, chrome_trace(records))
        for record in records:
            if not record.timeline.complete:
                num_blocks = len(record.timeline.blocks)
                note(f"--trace holds the first {num_blocks:,} blocks only")


def _flat(numbers: Numbers) -> FlatNumbers:
    """Return all numbers with names: a number of a group is named after the group and itself, as `phase_decode_s`."""
    flat: FlatNumbers = {}
    for name, value in numbers.items():
        if not isinstance(value, dict):
            flat[name] = value
            continue
        for key, item in value.items():
            if isinstance(item, dict):
                flat |= {f"{key} {inner}": number for inner, number in item.items()}
            else:
                flat[f"{name.removesuffix('_s')}_{key}_s"] = item
    return flat


def _table(numbers_of: Mapping[str, FlatNumbers]) -> Table:
    """Return a table with a column of numbers for each policy."""
    is_comparison = len(numbers_of) > 1
    table = Table("", *(numbers_of if is_comparison else ("",)), show_header=is_comparison)
    table.columns[0].style = "bold"
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(name for numbers in numbers_of.values() for name in numbers):
        cells = (quantity(name, numbers.get(name))[1] for numbers in numbers_of.values())
        table.add_row(quantity(name, None)[0], *cells)
    return table
