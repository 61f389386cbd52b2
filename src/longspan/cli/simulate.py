"""The verb `simulate`: reads options, runs an experiment, and prints and draws what it showed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from longspan.cli.options import NameArgument, check_writable, verb, write_result
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
Numbers = dict[str, float | int | dict[str, float] | None]
_results = partial(Option, group="Results")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The options that say what is found and written."""

    as_json: Annotated[bool, _results("Print one JSON object and no table.", name="json")] = False
    find_max_rate: Annotated[
        bool,
        _results(
            "Also find the requests per second up to which 90 % keep within --slo-ttft and --slo-tbt; or, without "
            "these, P99 TTFT stays below 25 times that of light load."
        ),
    ] = False
    profile_improvement_rates: Annotated[
        bool,
        _results("Only find what -o improvement_rates= of tetris should say, for up to --rate requests per second."),
    ] = False
    report: Annotated[Path | None, _results("A page with pictures; needs longspan[report].", metavar="FILE.html")] = (
        None
    )
    trace: Annotated[Path | None, _results("A trace for Perfetto or Chrome.", metavar="FILE.json")] = None


_IN_OTHER_WORDS = ("hardware", "transfer_backends", "policy", "policy_options", "exchange", "layout", "fractions")
"""Options that the page tells with what was found."""
_CLUSTER, _SCHEDULING, _WORKLOAD, _FAULTS, _LEVEL, _RESULTS = (
    ClusterSpec(),
    ComparedScheduling(),
    WorkloadSpec(),
    Faults(),
    ServiceLevel(),
    ResultOptions(),
)


@verb
def simulate(
    model: NameArgument,
    *,
    cluster: ClusterSpec = _CLUSTER,
    scheduling: ComparedScheduling = _SCHEDULING,
    workload: WorkloadSpec = _WORKLOAD,
    faults: Faults = _FAULTS,
    results: ResultOptions = _RESULTS,
    level: ServiceLevel = _LEVEL,
) -> int:
    """Serves a workload on a cluster that is not there, by the policies that serve, and tells times and rates.

    The cluster as it was resolved is printed above the table: devices, links, instances and their KV.
    Steps take what longspan estimate computes, or what the profile of a machine says. Times are seconds of a virtual
    clock; the same options give the same numbers. docs/simulator.md says what each means.
    """
    from longspan.simulation import each_policy, make_experiment  # noqa: PLC0415 - other verbs need no engine
    from longspan.workload.requests import make_workload  # noqa: PLC0415

    _check_results(results, workload, level)
    if faults.restart_s is not None and not faults.lost_at_s:
        raise ParameterError("restart_s", f"{faults.restart_s:g} is of lost workers: give --lose-worker-at")
    chosen = each_policy(scheduling)
    if results.profile_improvement_rates and len(chosen) > 1:
        raise ParameterError("policy", f"must be tetris, which has improvement rates, but {scheduling.policy} given")
    experiments = [replace(make_experiment(model, cluster, one, faults), progress=_bar) for one in chosen]
    requests = make_workload(workload)
    _warn(experiments)
    if results.profile_improvement_rates:
        assert workload.rate is not None, "it was checked"
        _print_improvement_rates(experiments[0], requests, workload.rate, as_json=results.as_json)
        return 0
    _tell_policies(experiments)
    if results.find_max_rate and len(experiments) > 1 and not level.is_given:
        print(
            "longspan: each max_rate is told by the policy's own light load: give --slo-ttft or --slo-tbt to compare",
            file=sys.stderr,
        )
    found: dict[str, Numbers] = {}
    records = []
    for experiment in experiments:
        name = experiment.scheduling.policy if len(experiments) > 1 else experiment.policy().name
        record, numbers = _run(experiment, requests, workload, level, results, name)
        found[name] = numbers
        records.append(record)
        _tell(record.result, f"{name}: " if len(experiments) > 1 else "")
    if results.report or results.trace:
        given = (cluster, experiments[0].scheduling, workload, faults, level)
        _write_pictures(results, records, [*map(_flat, found.values())], _settings(model, experiments, given), cluster)
    _print(experiments, found, as_json=results.as_json)
    return 0 if all(one.result.served for one in records) else 1


def _warn(experiments: Sequence[Experiment]) -> None:
    """Says on stderr what of the clusters is probably not meant, each once."""
    for warning in dict.fromkeys(one for experiment in experiments for one in experiment.resolved.warnings):
        print(f"longspan: {warning}", file=sys.stderr)


def _tell_policies(experiments: Sequence[Experiment]) -> None:
    """Says on stderr which policy another one stands for, and what policies make of their options."""
    for experiment in experiments:
        policy = experiment.policy()
        if len(experiments) > 1 and policy.name != experiment.scheduling.policy:
            print(f"longspan: {experiment.scheduling.policy} is {policy.name} here", file=sys.stderr)
        if policy.hint is not None:
            print(f"longspan: {policy.hint}", file=sys.stderr)


def _print(experiments: Sequence[Experiment], found: Mapping[str, Numbers], *, as_json: bool) -> None:
    """Prints the cluster as it was resolved, and the numbers of each policy."""
    clusters = dict(zip(found, (experiment.resolved for experiment in experiments), strict=True))
    if as_json:
        objects = {name: {**numbers, "cluster": clusters[name].as_json()} for name, numbers in found.items()}
        print(json.dumps(objects if len(objects) > 1 else next(iter(objects.values())), allow_nan=False))
        return
    print(f"cluster: {experiments[0].fleet}")
    instances = {name: str(cluster) for name, cluster in clusters.items()}
    for text in dict.fromkeys(instances.values()):
        names = [name for name, other in instances.items() if other == text]
        of = f" of {', '.join(names)}" if len(names) < len(instances) else ""
        print(f"instances{of}: {text}")
    Console().print(_table({policy: _flat(numbers) for policy, numbers in found.items()}))


def _run(
    experiment: Experiment,
    requests: Workload,
    workload: WorkloadSpec,
    level: ServiceLevel,
    results: ResultOptions,
    policy: str,
) -> tuple[Record, Numbers]:
    """Serves the requests by one policy, which is called `policy` in all that is written."""
    from longspan.extras.timeline import Record, Timeline  # noqa: PLC0415

    timeline = Timeline()
    watched = timeline.observers(experiment.cost) if results.report or results.trace else None
    result = experiment.run(requests, watched, title=f"requests, {policy}")
    numbers: Numbers = {**result.summary(level)}
    if workload.offline:
        numbers |= {
            "throughput_requests_per_s": len(result.served) / result.makespan_s if result.makespan_s else None,
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


def _tell(result: Result, name: str) -> None:
    """Says on stderr which requests were refused or cut."""
    if result.refused:
        index, reason = next(iter(sorted(result.refused.items())))
        print(
            f"longspan: {name}{len(result.refused)} requests were refused, the first, {index}: {reason}",
            file=sys.stderr,
        )
    if result.truncated:
        one = result.truncated[0]
        print(
            f"longspan: {name}{len(result.truncated)} answers are shorter than asked for, the first, {one.index}, by "
            f"{one.num_missing_tokens:,} tokens: there is no room for more than its {one.num_prompt_tokens:,} + "
            f"{one.num_output_tokens:,} (--max-model-len, --output-len, memory of the devices)",
            file=sys.stderr,
        )


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many are done, if that is a terminal."""
    with tqdm(total=total, desc=title, unit="request", dynamic_ncols=True, leave=False, disable=None) as bar:
        yield lambda num_done: bar.update(num_done - bar.n)


def _print_improvement_rates(experiment: Experiment, workload: Workload, highest: float, *, as_json: bool) -> None:
    table, means_s = experiment.improvement_rates(workload, highest)
    if as_json:
        ttfts = {f"{rate:g}": {f"{tried:g}": s for tried, s in found.items()} for rate, found in means_s.items()}
        found = {"improvement_rates": str(table), "ttft_mean_s": ttfts, "cluster": experiment.resolved.as_json()}
        print(json.dumps(found, allow_nan=False))
    else:
        print(f"improvement_rates={table}")


def _rates(experiment: Experiment, workload: Workload, level: ServiceLevel, *, start: float) -> FlatNumbers:
    """Finds the numbers that `--find-max-rate` adds."""
    from longspan.sim.experiment import ATTAINMENT, MAX_TIMES_LIGHT, near_light_load, within  # noqa: PLC0415
    from longspan.sim.run import percentile  # noqa: PLC0415

    light, policy = experiment.at_light_load(workload), experiment.scheduling.policy
    light_s = percentile(light.ttfts_s, 99)
    if light_s is None:
        raise ValueError("--find-max-rate: no request was served")
    keeps_up = within(level) if level.is_given else near_light_load(light_s)
    if level.is_given and not keeps_up(light):
        print(
            f"longspan: {policy}: max_rate is 0: only {light.attainment(level):.0%} of the requests keep within "
            f"--slo-ttft and --slo-tbt when none meets another, but {ATTAINMENT:.0%} must",
            file=sys.stderr,
        )
        return {"max_rate": 0.0, "light_ttft_p99_s": light_s}
    found = experiment.max_rate(workload, keeps_up, start=start)
    if found is None:
        kept = (
            f"{ATTAINMENT:.0%} still keep within the bounds"
            if level.is_given
            else f"P99 TTFT is still below {MAX_TIMES_LIGHT} times the {light_s:.3g} s of light load"
        )
        print(
            f"longspan: {policy}: max_rate is null: when all {len(workload.arrivals)} requests come at once, {kept}: "
            "give a larger --num-requests",
            file=sys.stderr,
        )
    return {"max_rate": found, "light_ttft_p99_s": light_s}


def _check_results(results: ResultOptions, workload: WorkloadSpec, level: ServiceLevel) -> None:
    """Refuses, before the run, what cannot be found or written after it."""
    others: dict[str, object] = {
        "--find-max-rate": results.find_max_rate,
        "--report": results.report,
        "--trace": results.trace,
        "--slo-ttft": level.slo_ttft,
        "--slo-tbt": level.slo_tbt,
    }
    for flag, value in others.items():
        if value and results.profile_improvement_rates:
            raise ValueError(f"{flag} is of a single run, and --profile-improvement-rates makes many: leave one out")
    if results.profile_improvement_rates and workload.rate is None:
        raise ValueError("--profile-improvement-rates goes up to --rate: give the highest rate that is expected")
    if results.find_max_rate and workload.requests_per_s == math.inf:
        raise ValueError(
            "--offline and --rate inf have all requests come at once, but --find-max-rate varies the time between "
            "them: give a number"
        )
    for flag, path in (("--report", results.report), ("--trace", results.trace)):
        if path is not None:
            check_writable(flag, path)
    if results.report is not None:
        import longspan.extras.report  # noqa: F401, PLC0415 - raises ParameterError without plotly


def _settings(model: str, experiments: Sequence[Experiment], given: Sequence[object]) -> dict[str, object]:
    """Lists what the run was, for its page: what was found, then all options by their flags, but those not given."""
    cluster = experiments[0].cluster
    policies = [
        " ".join([one.scheduling.policy, *(f"{k}={v}" for k, v in one.scheduling.all_policy_options().items())])
        for one in experiments
    ]
    steps = [one.scheduling.max_num_batched_tokens for one in experiments]
    if len(set(steps)) > 1:
        policies = [f"{policy} (steps of {tokens:,})" for policy, tokens in zip(policies, steps, strict=True)]
    instances = str(cluster.num_instances)
    blocks = ", ".join(dict.fromkeys(f"{one.cluster.num_blocks[0]:,}" for one in experiments))
    if cluster.has_roles:
        prefill, decode = len(cluster.prefill), len(cluster.decode)
        instances = f"{prefill} prefill, {decode} decode, {cluster.backends} transfers at once to each"
        blocks += f", {cluster.num_blocks[-1]:,} to decode"
    found = {"model": model, "cluster": str(experiments[0].fleet), "instances": instances, "KV blocks": blocks}
    named = [(name, option, getattr(one, name)) for one in given for name, (option, _) in options_of(type(one)).items()]
    return {**found, "policy": ", ".join(policies)} | {
        option.flag(name): _words(value)
        for name, option, value in named
        if name not in _IN_OTHER_WORDS and value not in (None, (), {})
    }


def _words(value: object) -> object:
    """Shortens an option's value for people: a file is shown by its name."""
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
) -> None:
    if results.report is not None:
        from longspan.extras.report import html_report  # noqa: PLC0415

        attention = cluster.attention or "flash"
        page = html_report(records, numbers, settings, hardware=cluster.hardware, attention=attention)
        write_result("--report", results.report, page)
    if results.trace is not None:
        from longspan.extras.timeline import chrome_trace  # noqa: PLC0415

        write_result("--trace", results.trace, chrome_trace(records))
        for one in records:
            if not one.timeline.complete:
                num_blocks = len(one.timeline.blocks)
                print(f"longspan: --trace holds the first {num_blocks:,} blocks only", file=sys.stderr)


def _flat(numbers: Numbers) -> FlatNumbers:
    """Names each number of several by the name of these and its own: `phase_decode_s`."""
    flat: FlatNumbers = {}
    for name, value in numbers.items():
        if isinstance(value, dict):
            flat |= {f"{name.removesuffix('_s')}_{key}_s": seconds for key, seconds in value.items()}
        else:
            flat[name] = value
    return flat


def _table(found: Mapping[str, FlatNumbers]) -> Table:
    """Lists the numbers of each policy in a column."""
    table = Table("", *(found if len(found) > 1 else ("",)), show_header=len(found) > 1)
    table.columns[0].style = "bold"
    for column in table.columns[1:]:
        column.justify = "right"
    for name in dict.fromkeys(name for numbers in found.values() for name in numbers):
        table.add_row(quantity(name, None)[0], *(quantity(name, numbers.get(name))[1] for numbers in found.values()))
    return table
