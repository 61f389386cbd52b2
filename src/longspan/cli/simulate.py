"""The verb `simulate`: what a policy would do on a cluster. `simulate_run` does it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from longspan.cli.bundles import bundled
from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.sheets import HardwareOptions
from longspan.workload.spec import WorkloadSpec

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
class WorkloadOptions(WorkloadSpec):
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
    from longspan.cli.simulate_run import run_simulation  # noqa: PLC0415  # numpy and the engine

    return run_simulation(model, cluster, scheduling, workload, faults, results)
