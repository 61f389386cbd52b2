"""Seesaw's chats: the assumption that explains why pairs gain less here than in Figs. 10 and 11 of the paper.

    python benchmarks/papers/seesaw_chats.py                                        # by Eq. 1, a minute
    python benchmarks/papers/seesaw_chats.py --simulate 1 3 --json seesaw_chats.json

Prints sensitivity tables: the ratio of the best pair to the best single parallelism, if one assumption changes. Columns
are the chats of both figures, and with `--articles` the articles. By Eq. 1 all specs and sizes of passes are tried. It
has the mean lengths only, so rows about the spread are missing. `--simulate` simulates some columns as
`seesaw_serving.py` does. `--json` stores the cells, and stored cells are not simulated again. A cell takes minutes.

- Lengths: the paper shows a distribution without numbers. Rows scale inputs or outputs. Other rows change the spread:
  each length is raised to a power, and scaled to the same mean. With power 0 all lengths are equal.
- Batches: vLLM 0.5.4, the baseline of the paper, runs at most 256 sequences (`max_num_seqs`) per pipeline stage by
  default. Here memory alone bounds them. Rows limit the single parallelisms, or also the pair.
- Host time: vLLM 0.5.4 schedules and prepares inputs between two passes while devices wait. Rows add a constant to each
  pass, or seconds for each decoding request. In vLLM's blog of version 0.6.0, 62 % of the time of Llama 3 8B on H100
  was outside of the model before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import closed_form
import msgspec
import numpy as np
import seesaw_serving
from closed_form import OfflineWork
from rich.console import Console
from rich.table import Table
from seesaw_serving import ARXIV, PASS_TOKENS, Case, Machine, Point, articles, best_static, cases, chats, point
from tqdm import tqdm

from longspan.core.splits import ParallelSpec
from longspan.workload.arrivals import Arrival, Workload, text

_VLLM_SEQS, _MAX_LEN = 256, 4096
_SHORT = {"llama-3-15b": "15B", "codellama-34b": "34B", "llama-2-70b": "70B", "llama-3-70b": "70B"}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of an engine: see `seesaw_serving.Machine`."""

    stage_seqs: int | None = None
    host_s: float = 0.0
    seq_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One assumption that differs from the figures.

    Attributes:
        inputs, outputs: factors of the lengths.
        spread: the power of all lengths.
        static, pair: limits of the engine for single parallelisms, and for pairs.
    """

    name: str
    inputs: float = 1.0
    outputs: float = 1.0
    spread: float = 1.0
    static: Limits = field(default_factory=Limits)
    pair: Limits = field(default_factory=Limits)

    def requests(self, whole: Workload) -> Workload:
        """Return the requests with the lengths of the row."""
        lengths = np.array(_lengths(whole)) ** self.spread
        lengths *= np.mean(_lengths(whole), axis=0) / lengths.mean(axis=0) * (self.inputs, self.outputs)
        lengths = np.clip(np.rint(lengths), 1, _MAX_LEN).astype(int)
        arrivals = [
            Arrival(due_s=0.0, prompt=text(3 * index + 2, int(num_input)), output_len=int(num_output))
            for index, (num_input, num_output) in enumerate(lengths)
        ]
        return replace(whole, arrivals=arrivals)


def _lengths(requests: Workload) -> list[tuple[float, float]]:
    return [(float(len(arrival.prompt)), float(arrival.output_len)) for arrival in requests.arrivals]


_BATCH, _HOST = Limits(stage_seqs=_VLLM_SEQS), Limits(host_s=0.02)
ROWS = (
    Row(name="as in the figures"),
    Row(name="equal lengths", spread=0.0),
    Row(name="lengths to the power of 1.6", spread=1.6),
    Row(name="inputs and outputs x 2", inputs=2, outputs=2),
    Row(name="inputs x 2", inputs=2),
    Row(name="inputs x 4", inputs=4),
    Row(name="inputs x 8", inputs=8),
    Row(name="outputs x 2", outputs=2),
    Row(name="outputs x 1/2", outputs=0.5),
    Row(name="outputs x 1/4", outputs=0.25),
    Row(name="256 sequences per stage, single", static=_BATCH),
    Row(name="256 sequences per stage, both", static=_BATCH, pair=_BATCH),
    Row(name="host 10 ms per pass, single", static=Limits(host_s=0.01)),
    Row(name="host 20 ms per pass, single", static=_HOST),
    Row(name="host 20 ms per pass, both", static=_HOST, pair=_HOST),
    Row(name="host 50 us per sequence, single", static=Limits(seq_s=50e-6)),
    Row(name="host 50 us per sequence, both", static=Limits(seq_s=50e-6), pair=Limits(seq_s=50e-6)),
)


def main() -> int:
    """Print the table by Eq. 1, or simulate cells and print these."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", nargs="+", type=int, default=(), metavar="COLUMN", help="columns, from 0")
    parser.add_argument("--articles", action="store_true", help="articles instead of chats")
    parser.add_argument("--rows", nargs="+", type=int, default=range(len(ROWS)), help="rows to simulate, from 0")
    parser.add_argument("--json", type=Path, help="store simulated cells in this file, and simulate only missing ones")
    args = parser.parse_args()
    kind = "arxiv" if args.articles else "sharegpt"
    machines = {_title(case): case.machine for case in cases((10, 11), ARXIV) if kind in case.name}
    whole = articles(ARXIV) if args.articles else chats()
    if not args.simulate:
        lengths = _lengths(whole)
        mean, rows = tuple(np.mean(lengths, axis=0)), [row for row in ROWS if row.spread == 1]
        ratios = {row.name: [_ratio(row, machine, mean, len(lengths)) for machine in machines.values()] for row in rows}
        Console(width=200).print(_table(f"{kind} by Eq. 1: the best pair over the best single", [*machines], ratios))
        return 0
    columns, rows = [list(machines)[index] for index in args.simulate], [ROWS[index] for index in args.rows]
    kept = _stored(args.json)
    for column, row in tqdm([(column, row) for column in columns for row in rows], desc="cells", disable=None):
        cells = kept.setdefault(f"{kind}: {column}", {})
        if row.name not in cells:
            cells[row.name] = _simulated(row, machines[column], row.requests(whole))
            seesaw_serving.show(cells[row.name])
            if args.json:
                args.json.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
    shown = {row.name: [kept[f"{kind}: {column}"][row.name].ratio or 0.0 for column in columns] for row in rows}
    Console(width=200).print(_table(f"{kind}, simulated: the best pair over the best single", columns, shown))
    return 0


def _title(case: Case) -> str:
    hardware, machine = case.machine.hardware.removesuffix("-40g").replace("-", " "), case.machine
    return f"{_SHORT[machine.model]}, {machine.gpus} {hardware}"


# ---------------------------------------------------------------- by Eq. 1


def _ratio(row: Row, machine: Machine, mean: Sequence[float], num_requests: int) -> float:
    """Return the ratio of the best pair to the best single parallelism, with the best sizes of passes."""
    work = OfflineWork(
        num_requests=num_requests,
        input_len=max(1, round(row.inputs * mean[0])),
        output_len=max(1, round(row.outputs * mean[1])),
    )
    static, paired = _limited(work, row.static), _limited(work, row.pair)
    specs = machine.specs()
    best = max(_static_rate(machine, static, spec, tokens) for spec, tokens in product(specs, PASS_TOKENS))
    pairs = [
        pair for pair in product(specs, specs) if pair[0] != pair[1] and _instances(pair[0]) == _instances(pair[1])
    ]
    rates = (
        seesaw_serving.expected_pair_throughput(machine, paired, tokens, *pair)
        for pair, tokens in product(pairs, PASS_TOKENS)
    )
    return max(rates) / best


def _limited(work: OfflineWork, limits: Limits) -> OfflineWork:
    seqs = work.stage_seqs if limits.stage_seqs is None else limits.stage_seqs
    return replace(work, stage_seqs=seqs, host_s=limits.host_s, seq_s=limits.seq_s)


def _instances(spec: str) -> int:
    return ParallelSpec.parse(spec).instances


def _static_rate(machine: Machine, work: OfflineWork, spec: str, tokens: int) -> float:
    try:
        line = machine.line(spec)
        return closed_form.static_throughput(line, _instances(spec), work, tokens * len(line.stages))
    except ValueError:
        return 0.0  # the model or a request does not fit


# ---------------------------------------------------------------- simulated


def _simulated(row: Row, machine: Machine, requests: Workload) -> Point:
    """Return the best single parallelism and the best pair of a row."""
    static = best_static(_with_limits(machine, row.static), requests)
    case = Case(figure=10, name=row.name, machine=_with_limits(machine, row.pair), requests=lambda: requests)
    return point(case, static)


def _with_limits(machine: Machine, limits: Limits) -> Machine:
    return replace(machine, stage_seqs=limits.stage_seqs, host_s=limits.host_s, seq_s=limits.seq_s)


def _stored(path: Path | None) -> dict[str, dict[str, Point]]:
    """Read the stored cells, by column and row."""
    if path is None or not path.is_file():
        return {}
    return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, Point]])


def _table(title: str, columns: Sequence[str], ratios: Mapping[str, Sequence[float]]) -> Table:
    shown = Table("assumption", title=title)
    for column in (*columns, "mean"):
        shown.add_column(column, justify="right")
    for name, of_row in ratios.items():
        shown.add_row(name, *(f"{ratio:.2f}" for ratio in (*of_row, statistics.geometric_mean(of_row))))
    return shown


if __name__ == "__main__":
    sys.exit(main())
