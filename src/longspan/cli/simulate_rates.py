"""`longspan simulate --profile-improvement-rates`: the table that `-o improvement_rates=` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import typer
from tqdm import tqdm

from longspan.cli.simulate_scene import Experiment
from longspan.policy.tetris.policy import hint_of_a_constant_rate
from longspan.policy.tetris.rates import RateTable
from longspan.sim.result import best_improvement_rate, request_rates
from longspan.workload.spec import Workload

_TOLD = ("improvement_rate", "improvement_rates")


def print_improvement_rates(experiment: Experiment, workload: Workload, highest: float | None, *, as_json: bool) -> int:
    """Finds the table for request rates up to `highest`, prints it, and returns the exit code.

    Raises:
        ValueError: for another policy, options that say the rates, or no highest rate.
    """
    if experiment.scheduling.policy != "tetris":
        raise ValueError(
            f"--profile-improvement-rates is for --policy tetris, but --policy {experiment.scheduling.policy} given"
        )
    for option in _TOLD:
        if option in experiment.policy_options:
            raise ValueError(f"--profile-improvement-rates finds what -o {option} says: leave that out")
    if highest is None:
        raise ValueError("--profile-improvement-rates goes up to --rate: give the highest rate that is expected")
    table, means_s = profile_improvement_rates(experiment, workload, highest)
    if as_json:
        ttfts = {f"{rate:g}": {f"{tried:g}": s for tried, s in found.items()} for rate, found in means_s.items()}
        typer.echo(json.dumps({"improvement_rates": str(table), "ttft_mean_s": ttfts}, allow_nan=False))
    else:
        typer.echo(f"improvement_rates={table}")
    return 0


def tell_of_a_constant_rate(experiment: Experiment) -> None:
    """On stderr, when the improvement rate is to go by the request rate, but nobody said how."""
    if (
        hint := hint_of_a_constant_rate(experiment.policy().settings, has_roles=experiment.cluster.cluster.has_roles)
    ) is not None:
        typer.echo(f"longspan: {hint}", err=True)


def profile_improvement_rates(
    experiment: Experiment, workload: Workload, highest: float
) -> tuple[RateTable, Mapping[float, Mapping[float, float]]]:
    """The table, and mean TTFTs by request rate and improvement rate.

    Where others decode, answers count for nothing: they are one token long then, which takes less time to simulate.

    Raises:
        ValueError: when no request is served.
    """
    if experiment.cluster.cluster.has_roles:
        workload = replace(workload, arrivals=[replace(one, output_len=1) for one in workload.arrivals])
    best: dict[float, float] = {}
    means_s: dict[float, Mapping[float, float]] = {}
    for rate in tqdm(request_rates(highest), desc="request rates", leave=False, disable=None):
        at_rate = workload.at_rate(rate)
        best[rate], means_s[rate] = best_improvement_rate(partial(_mean_ttft_s, experiment, at_rate))
    return RateTable(entries=tuple(best.items())), means_s


def _mean_ttft_s(experiment: Experiment, workload: Workload, improvement_rate: float) -> float:
    tried = experiment.with_options({"improvement_rate": str(improvement_rate)})
    found = tried.run(workload, title=f"improvement rate {improvement_rate:g}").ttfts_s
    if not len(found):
        raise ValueError("--profile-improvement-rates: no request was served")
    return float(np.mean(found))
