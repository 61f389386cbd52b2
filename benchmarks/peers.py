"""Compare longspan with vLLM, transformers and llama.cpp in one run.

The tables have the time to first token, the decoding speed, and TBT of chats during the prefill of a long document.
They also have the time of longspan's workers by category.

All contestants use the same cores, weights, precision (bfloat16), KV memory and token ids, and decode greedily. Only
llama.cpp has weights of 4 bits. Each contestant has its own processes, and all processes are stopped except for those
of the measured contestant. Contestants alternate after every measurement. A machine that becomes slower or faster in
between affects all of them. Every round also measures the machine's limits. Prompts are random, so no prefix repeats.

`--require ttft-8000=1.6,decode-1=2` requires these ratios of medians, of the best longspan to the best vLLM. The exit
code is 1, with a line per missed ratio, if one is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ceilings import Machine, report
from columns import Column, Load, decode_column, mixed_columns, ttft_column
from contestants.contest import Contest
from contestants.roster import Entry, Side, roster
from contestants.serving import Answer
from required import compare, comparison_table, missed_lines, parse_required
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from tables import Medians, largest_spread, medians_of, plot, shares_table, speed_table

from longspan.cost.architecture import from_config
from longspan.model.source import smollm2_folder, smollm2_gguf

REPOSITORY = Path(__file__).resolve().parent.parent
KV_BYTES = 1 << 30
CONTEXT_LENGTH = 8192
"""Tokens, of SmolLM2."""
_PIPED_WIDTH = 160
"""Characters of a line if the output is no terminal: enough for the whole table."""
Samples = dict[str, dict[str, list[float]]]
Shares = dict[tuple[str, str], dict[str, float]]
Tell = Callable[[str], None]


def main() -> int:
    """Measure the chosen contestants, print the tables, and return the exit code."""
    options, columns, required = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # contestants must end with this process
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    console.print(f"SmolLM2-135M-Instruct, bfloat16, greedy, {options.rounds} rounds; {_hardware()}")
    entries = [roster(options.peers_venv.resolve())[name] for name in options.contestants]
    ours, theirs = ([entry for entry in entries if entry.side is side] for side in (Side.OURS, Side.THEIRS))
    try:
        with _progress(console) as tell, Machine() as machine:
            samples, speed = _measure_speed(entries, columns, options.rounds, machine, tell)
            shares, timed = _measure_shares(ours, options, tell)
    except KeyboardInterrupt:
        return 130
    medians = medians_of(samples, speed.failures)
    comparisons = compare(columns, medians, [entry.name for entry in ours], [entry.name for entry in theirs], required)
    failures = timed.failures | speed.failures | machine.failures
    console.print(speed_table(columns, medians, speed.failures, [entry.name for entry in theirs]))
    console.print(largest_spread(samples))
    if ours:
        console.print(shares_table(shares, timed.failures))
    for name, reason in failures.items():
        console.print(f"[red]{name}[/] failed: {escape(reason)}")
    console.print(_words(speed.versions))
    for line in _ceilings(machine, medians, max(options.lengths)):
        console.print(line)
    console.print(comparison_table(comparisons))
    missed = [*missed_lines(comparisons)]
    for line in missed:
        console.print(line)
    if options.plots:
        plot(columns, samples, options.plots)
    if options.json:
        results = {
            "hardware": _hardware(),
            "options": vars(options),
            "versions": speed.versions,
            "samples": samples,
            "machine": machine.samples,
            "failures": failures,
            "worker_seconds": {f"{name}, {phase}": seconds for (name, phase), seconds in shares.items()},
            "ratios": {comparison.column.key: comparison.ratio for comparison in comparisons},
        }
        options.json.write_text(json.dumps(results, indent=1, default=str) + "\n")
    return 1 if missed else 0


def _ceilings(machine: Machine, medians: Medians, length: int) -> list[str]:
    """Return lines with the machine's limits, and the share that each longspan contestant reaches for a prompt."""
    title = ttft_column(length).title
    ttfts_s = {
        name: of_contestant[title]
        for name, of_contestant in medians.items()
        if name.startswith("longspan") and title in of_contestant
    }
    config = json.loads((smollm2_folder() / "config.json").read_text(encoding="utf-8"))
    return report(machine.samples, ttfts_s, length, from_config(config, name="smollm2").prefill_flops(length))


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Tell]:
    """Yield a function that shows a description of the next action."""
    with Progress(TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda description: bar.update(task, description=description)


def _measure_speed(
    entries: Sequence[Entry], columns: Sequence[Column], rounds: int, machine: Machine, tell: Tell
) -> tuple[Samples, Contest]:
    """Collect one sample per round, contestant and column, after a warm-up of each contestant."""
    samples: Samples = {entry.name: {column.title: [] for column in columns} for entry in entries}
    loads = list(dict.fromkeys(column.load for column in columns))
    with Contest(_start_options(record_times=False), tell) as contest:
        contest.start(entries)
        _warm_up(contest, loads)
        for number in range(rounds):
            tell(f"round {number + 1}, the machine alone")
            machine.measure()
            for load in loads:
                answers = contest.ask(f"round {number + 1}, {load.title}", load.submissions(f"round {number}"))
                for (name, answer), column in product(answers.items(), columns):
                    if column.load == load:
                        samples[name][column.title].append(column.read(answer))
    return samples, contest


def _measure_shares(entries: Sequence[Entry], options: argparse.Namespace, tell: Tell) -> tuple[Shares, Contest]:
    """Measure longspan's worker seconds per category, in separate engines because the timers cost time.

    The seconds of decoding are a run with many new tokens minus a run with one new token.
    """
    longest, batch, length = max(options.lengths), max(options.batches), options.decode_length
    prefill = ttft_column(longest).load
    first, all_tokens = (decode_column(batch, length, number).load for number in (1, options.new_tokens))
    shares: Shares = {}
    with Contest(_start_options(record_times=True), tell) as contest:
        contest.start(entries)
        _warm_up(contest, [prefill, all_tokens])
        whole = contest.ask("where prefill time goes", prefill.submissions("shares"))
        few = contest.ask("where decode time goes", first.submissions("shares, first"))
        more = contest.ask("where decode time goes", all_tokens.submissions("shares, all"))
    for name in more:
        shares[name, f"prefill {longest:,}"] = _over_ranks(whole[name])
        until_first, until_last = _over_ranks(few[name]), _over_ranks(more[name])
        beyond = {key: max(0.0, seconds - until_first[key]) for key, seconds in until_last.items()}
        shares[name, f"decode x {batch}"] = beyond
    return shares, contest


def _warm_up(contest: Contest, loads: Sequence[Load]) -> None:
    """Run each kernel and allocation once: with the first load, some decoding, and the load with most prompts."""
    largest = max(loads, key=lambda load: len(load.shapes))
    for load, new_tokens in ((loads[0], 1), (loads[0], 4), (largest, 4)):
        shapes = tuple(replace(shape, new_tokens=new_tokens) for shape in load.shapes)
        contest.ask("warm-up", replace(load, shapes=shapes).submissions(f"warm-up, {new_tokens}"))


def _over_ranks(answer: Answer) -> dict[str, float]:
    ranks = answer.worker_times
    return {key: sum(rank[key] for rank in ranks) for key in ranks[0]}


def _start_options(*, record_times: bool) -> dict[str, Any]:
    return {
        "model": str(smollm2_folder()),
        "gguf": str(smollm2_gguf()),
        "cores": len(os.sched_getaffinity(0)),
        "max_model_len": CONTEXT_LENGTH,
        "kv_cache_memory_bytes": KV_BYTES,
        "record_times": record_times,
    }


def _hardware() -> str:
    """Return the processor's name, the number of usable cores, and the instruction sets that bfloat16 kernels use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    relevant = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    sets = " ".join(name for name in relevant if name in flags)
    name, cores = facts.get("model name", platform.machine()), len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, {sets or 'none of ' + ', '.join(relevant)}"


def _words(versions: dict[str, dict[str, str]]) -> str:
    """Return a line per set of versions, with the contestants that use it."""
    users: dict[str, list[str]] = {}
    for name, packages in versions.items():
        users.setdefault(", ".join(f"{package} {version}" for package, version in packages.items()), []).append(name)
    return "\n".join(f"{', '.join(names)}: {packages}" for packages, names in users.items())


def _options() -> tuple[argparse.Namespace, list[Column], dict[str, float]]:
    """Return the options, the columns to measure, and the required ratios by column."""
    names = list(roster(Path()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000], help="prompt tokens for TTFT")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], help="prompts decoded at a time")
    parser.add_argument("--decode-length", type=int, default=512, help="prompt tokens before decoding")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per sequence when decoding")
    parser.add_argument("--document-length", type=int, default=8000, help="prompt tokens of the document")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--require", metavar="COLUMN=RATIO,...", default="", help="minimum ratios to vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers to this file")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write peers.html to this folder; needs plotly")
    parser.add_argument("--peers-venv", type=Path, default=REPOSITORY / ".venv-peers", help="the peers' environment")
    options = parser.parse_args()
    columns = [
        *map(ttft_column, options.lengths),
        *(decode_column(batch, options.decode_length, options.new_tokens) for batch in options.batches),
        *mixed_columns(options.document_length),
    ]
    try:
        required = parse_required(options.require, [column.key for column in columns]) if options.require else {}
    except ValueError as error:
        parser.error(f"--require: {error}")
    return options, columns, required


if __name__ == "__main__":
    sys.exit(main())
