"""The verb `simulate`: reads options, runs an experiment, and prints and draws what it showed."""

from __future__ import annotations

import json
import math
import os
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

from longspan.cli.options import NameArgument, verb
from longspan.cli.quantities import number, seconds
from longspan.core.options import Option, SchedulingArgs, options_of
from longspan.errors import ParameterError
from longspan.sim.spec import SIMULATED_SCHEDULING, ClusterSpec, Faults
from longspan.workload.spec import WorkloadSpec

if TYPE_CHECKING:
    from longspan.core.cluster import Cluster
    from longspan.sim.experiment import Experiment
    from longspan.sim.run import Result
    from longspan.sim.timeline import Timeline
    from longspan.workload.arrivals import Workload

_results = partial(Option, group="Results")


@dataclass(frozen=True, kw_only=True)
class ResultOptions:
    """The options that say what is found and written."""

    as_json: Annotated[bool, _results("Print one JSON object and no table.", name="json")] = False
    find_max_rate: Annotated[
        bool,
        _results("Also find the requests per second up to which P99 TTFT stays below 25 times that of light load."),
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
_CLUSTER, _WORKLOAD, _FAULTS, _RESULTS = ClusterSpec(), WorkloadSpec(), Faults(), ResultOptions()


@verb
def simulate(
    model: NameArgument,
    *,
    cluster: ClusterSpec = _CLUSTER,
    scheduling: SchedulingArgs = SIMULATED_SCHEDULING,
    workload: WorkloadSpec = _WORKLOAD,
    faults: Faults = _FAULTS,
    results: ResultOptions = _RESULTS,
) -> int:
    """Serves a workload on a cluster that is not there, by the policies that serve, and tells times and rates.

    Steps take what longspan estimate computes, or what the profile of a machine says. Times are seconds of a virtual
    clock; the same options give the same numbers. docs/simulator.md says what each means.
    """
    from longspan.sim.timeline import Timeline  # noqa: PLC0415 - other verbs need neither numpy nor the engine
    from longspan.simulation import make_experiment  # noqa: PLC0415
    from longspan.workload.requests import make_workload  # noqa: PLC0415

    _check_results(results, workload)
    if faults.restart_s is not None and not faults.lost_at_s:
        raise ParameterError("restart_s", f"{faults.restart_s:g} is of lost workers: give --lose-worker-at")
    experiment = replace(make_experiment(model, cluster, scheduling, faults), progress=_bar)
    requests = make_workload(workload)
    if results.profile_improvement_rates:
        assert workload.rate is not None, "it was checked"
        _print_improvement_rates(experiment, requests, workload.rate, as_json=results.as_json)
        return 0
    if (hint := experiment.policy().hint) is not None:
        print(f"longspan: {hint}", file=sys.stderr)
    timeline = Timeline() if results.report or results.trace else None
    result = experiment.run(requests, timeline)
    numbers: dict[str, float | int | None] = result.summary()
    if results.find_max_rate:
        numbers |= _rates(experiment, requests, start=workload.rate or 1.0)
    if timeline is not None:
        settings = _settings(model, experiment, (cluster, experiment.scheduling, workload, faults))
        _write_pictures(results, result, timeline, settings, experiment.cluster)
    if results.as_json:
        print(json.dumps(numbers, allow_nan=False))
    else:
        Console().print(_table(numbers))
    if result.refused:
        index, reason = next(iter(sorted(result.refused.items())))
        print(f"longspan: {len(result.refused)} requests were refused, the first, {index}: {reason}", file=sys.stderr)
    if result.truncated:
        one = result.truncated[0]
        print(
            f"longspan: {len(result.truncated)} answers are shorter than asked for, the first, {one.index}, by "
            f"{one.num_missing_tokens:,} tokens: there is no room for more than its {one.num_prompt_tokens:,} + "
            f"{one.num_output_tokens:,} (--max-model-len, --output-len, memory of the devices)",
            file=sys.stderr,
        )
    return 0 if result.served else 1


@contextmanager
def _bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many are done, if that is a terminal."""
    with tqdm(total=total, desc=title, unit="request", dynamic_ncols=True, leave=False, disable=None) as bar:
        yield lambda num_done: bar.update(num_done - bar.n)


def _print_improvement_rates(experiment: Experiment, workload: Workload, highest: float, *, as_json: bool) -> None:
    table, means_s = experiment.improvement_rates(workload, highest)
    if as_json:
        ttfts = {f"{rate:g}": {f"{tried:g}": s for tried, s in found.items()} for rate, found in means_s.items()}
        print(json.dumps({"improvement_rates": str(table), "ttft_mean_s": ttfts}, allow_nan=False))
    else:
        print(f"improvement_rates={table}")


def _rates(experiment: Experiment, workload: Workload, *, start: float) -> dict[str, float | None]:
    """Finds the numbers that `--find-max-rate` adds."""
    from longspan.sim.experiment import MAX_TIMES_LIGHT  # noqa: PLC0415

    light_s = experiment.light_ttft_p99_s(workload)
    if light_s is None:
        raise ValueError("--find-max-rate: no request was served")
    found = experiment.max_rate(workload, light_s, start=start)
    if found is None:
        print(
            f"longspan: max_rate is null: when all {len(workload.arrivals)} requests come at once, P99 TTFT is still "
            f"below {MAX_TIMES_LIGHT} times the {light_s:.3g} s of light load: give a larger --num-requests",
            file=sys.stderr,
        )
    return {"max_rate": found, "light_ttft_p99_s": light_s}


def _check_results(results: ResultOptions, workload: WorkloadSpec) -> None:
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
        if path is None:
            continue
        if not path.absolute().parent.is_dir():
            raise ValueError(f"{flag}: the folder {str(path.parent)!r} is not there")
        if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            reason = "Is a directory" if path.is_dir() else "Permission denied"
            raise ValueError(f"{flag} {str(path)!r} cannot be written: {reason}")
    if results.report is not None:
        from longspan.sim.timeline import check_report  # noqa: PLC0415

        check_report()


def _settings(model: str, experiment: Experiment, given: Sequence[object]) -> dict[str, object]:
    """Lists what the run was, for its page: what was found, then all options by their flags, but those not given."""
    cluster, policy = experiment.cluster, [experiment.scheduling.policy]
    policy += (f"{key}={value}" for key, value in experiment.scheduling.all_policy_options().items())
    instances, blocks = str(cluster.num_instances), f"{cluster.num_blocks[0]:,}"
    if cluster.has_roles:
        prefill, decode = len(cluster.prefill), len(cluster.decode)
        instances = f"{prefill} prefill, {decode} decode, {cluster.backends} transfers at once to each"
        blocks += f", {cluster.num_blocks[-1]:,} to decode"
    found = {"model": model, "cluster": experiment.description, "instances": instances, "KV blocks": blocks}
    named = [(name, option, getattr(one, name)) for one in given for name, (option, _) in options_of(type(one)).items()]
    return {**found, "policy": " ".join(policy)} | {
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
    results: ResultOptions, result: Result, timeline: Timeline, settings: dict[str, object], cluster: Cluster
) -> None:
    from longspan.sim.timeline import chrome_trace, html_report  # noqa: PLC0415

    if results.report is not None:
        _write("--report", results.report, html_report(result, timeline, settings, cluster=cluster))
    if results.trace is not None:
        _write("--trace", results.trace, chrome_trace(result, timeline))
        if not timeline.complete:
            print(f"longspan: --trace holds the first {len(timeline.blocks):,} blocks only", file=sys.stderr)


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
        is_time = name.endswith("_s") and not name.endswith("_per_s")
        shown = "" if value is None else seconds(value) if is_time else number(value)
        table.add_row(name.removesuffix("_s") if is_time else name, shown)
    return table
