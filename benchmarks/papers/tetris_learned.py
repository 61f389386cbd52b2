"""Tetris: improvement rates that a server learns, compared with rates that were profiled before, simulated.

    python benchmarks/papers/tetris.py --learned [--models ...] [--workloads ...] [--num-requests N] [--jobs N]

Each trace is served twice in a row, at several shares of the highest stored rate of `tetris`. The server that learns
starts without any rate. Its mean TTFT in the second half is compared with that of profiled rates. The exit code is 1 if
it is more than a tenth higher in some case.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import tetris_serving
from rich.console import Console
from rich.table import Table
from tetris_serving import SETUPS, Setup, Systems
from tqdm import tqdm

from longspan.policy.tetris.rates import IMPROVEMENT_RATES
from longspan.sim.experiment import Experiment
from longspan.sim.run import Result
from longspan.workload.arrivals import Workload

LOADS = (0.5, 0.8, 0.95)
_STARTING_RATE, _PROFILED_SEED = "0.3", 1
_WITHIN = 1.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """Mean TTFT of both halves: with learned rates, with the `best` profiled rate, and with the rate of the start."""

    case: str
    load: float
    best: str
    learned_s: tuple[float, float]
    profiled_s: tuple[float, float]
    fixed_s: tuple[float, float]

    @property
    def is_near(self) -> bool:
        return self.learned_s[1] <= _WITHIN * self.profiled_s[1]


def twice(workload: Workload) -> Workload:
    """Return the requests and then the same requests again, as one workload."""
    arrivals = workload.arrivals
    span_s = arrivals[-1].due_s * (1 + 1 / len(arrivals))
    again = [replace(arrival, due_s=arrival.due_s + span_s) for arrival in arrivals]
    return replace(workload, arrivals=[*arrivals, *again])


def rows(setup: Setup, workload: str, num_requests: int) -> list[Row]:
    """Simulate one setup and workload."""
    systems = Systems(setup, workload, num_requests)
    start = systems.experiments["tetris"]
    profiled = systems.requests(seed=_PROFILED_SEED, output_len=1)
    highest = tetris_serving.stored()[setup.model].max_rates[workload]["tetris"]
    found = []
    for load in LOADS:
        requests = twice(systems.answers("tetris").at_rate(load * highest))
        best = best_rate(start, profiled.at_rate(load * highest))
        kinds = (start, *(start.with_options({"improvement_rate": rate}) for rate in (best, _STARTING_RATE)))
        learned_s, profiled_s, fixed_s = (_halves_s(kind.run(requests)) for kind in kinds)
        case = f"{setup.model}, {workload}"
        found.append(Row(case=case, load=load, best=best, learned_s=learned_s, profiled_s=profiled_s, fixed_s=fixed_s))
    return found


def best_rate(start: Experiment, requests: Workload) -> str:
    """Return the improvement rate with the lowest mean TTFT, as `Experiment.improvement_rates` finds it."""
    kinds = {str(rate): start.with_options({"improvement_rate": str(rate)}) for rate in IMPROVEMENT_RATES}
    return min(kinds, key=lambda rate: sum(kinds[rate].run(requests).ttfts_s))


def _halves_s(result: Result) -> tuple[float, float]:
    first, second = np.split(result.ttfts_s, 2)
    return float(first.mean()), float(second.mean())


def run(args: argparse.Namespace) -> bool:
    """Print all cases. Return True if learned rates are near profiled rates in each."""
    cases = list(product([setup for setup in SETUPS if setup.model in args.models], args.workloads))
    found = list[Row]()
    with ProcessPoolExecutor(max_workers=args.jobs) as pool:
        futures = [pool.submit(rows, *case, args.num_requests or 400) for case in cases]
        for future in tqdm(futures, desc="cases", disable=None):
            found += future.result()
    _print(found)
    return all(row.is_near for row in found)


def _print(found: Sequence[Row]) -> None:
    columns = ("learned", "profiled", f"always {_STARTING_RATE}")
    table = Table("", "load", "profiled rate", *columns, title="mean TTFT in seconds: first half, second half")
    for row in found:
        cells = (f"{first:.2f}, {second:.2f}" for first, second in (row.learned_s, row.profiled_s, row.fixed_s))
        table.add_row(row.case, f"{row.load:.0%}", row.best, *cells)
    Console(width=120).print(table)
