"""longspan beside transformers and vLLM in one run: time to first token, decoding speed, and where workers spend time.

All contestants use the same cores, weights, precision (bfloat16), KV memory and token ids, and decode greedily. Each
has its own processes, and all but the one that is measured are stopped. They take turns on every single measurement, so
that a machine that gets slower or faster meanwhile does so for all of them. Random prompts: no prefix ever repeats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from contestants.contest import Contest
from contestants.roster import Entry, roster
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tables import Column, largest_spread, shares_table, speed_table

from longspan.model.smollm2 import CONTEXT_LENGTH
from longspan.model.source import smollm2_folder

REPOSITORY = Path(__file__).resolve().parent.parent
KV_BYTES = 1 << 30
BATCH = 8
Samples = dict[str, dict[str, list[float]]]
Shares = dict[tuple[str, str], dict[str, float]]


def main() -> None:
    """Measures all contestants that were chosen and prints the tables."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # contestants must not outlive us
    console = Console()
    console.print(f"SmolLM2-135M-Instruct, bfloat16, greedy, {options.rounds} rounds; {_hardware()}", highlight=False)
    entries = [roster(options.peers_venv.resolve())[name] for name in options.contestants]
    ours = [entry for entry in entries if not entry.is_peer]
    columns = [
        *(Column(length=length) for length in options.lengths),
        *(Column(length=options.decode_length, batch=batch, new_tokens=options.new_tokens) for batch in (1, BATCH)),
    ]
    try:
        with _progress(console, len(entries) * (3 + options.rounds * len(columns)) + len(ours) * 6 + 2) as tell:
            samples, speed = _measure_speed(entries, columns, options.rounds, tell)
            shares, timed = _measure_shares(ours, columns, tell)
    except KeyboardInterrupt:
        sys.exit(130)
    peers = [entry.name for entry in entries if entry.is_peer]
    console.print(speed_table(columns, samples, speed.failures, peers))
    console.print(largest_spread(samples), highlight=False)
    if ours:
        console.print(shares_table(shares, timed.failures))
    failures = timed.failures | speed.failures
    for name, reason in failures.items():
        console.print(f"[red]{name}[/] failed: {escape(reason)}", highlight=False)
    console.print(_words(speed.versions), highlight=False)
    if options.json:
        report = {
            "hardware": _hardware(),
            "options": vars(options),
            "versions": speed.versions,
            "samples": samples,
            "failures": failures,
            "worker_seconds": {f"{name}, {phase}": seconds for (name, phase), seconds in shares.items()},
        }
        options.json.write_text(json.dumps(report, indent=1, default=str) + "\n")


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Yields a bar, and the function that names the next of `total` steps."""
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda what: bar.update(task, description=what, advance=1)


def _measure_speed(
    entries: list[Entry], columns: list[Column], rounds: int, tell: Callable[[str], None]
) -> tuple[Samples, Contest]:
    """Collects one sample per round, contestant and column, after a warm-up of each contestant."""
    samples: Samples = {entry.name: {column.title: [] for column in columns} for entry in entries}
    with Contest(_start_options(record_times=False), tell) as contest:
        contest.start(entries)
        _warm_up(contest, columns)
        for number in range(rounds):
            for column in columns:
                prompts = _prompts(column.length, column.batch, f"round {number} of {column.title}")
                answers = contest.ask(f"round {number + 1}, {column.title}", prompts, column.new_tokens)
                for name, answer in answers.items():
                    samples[name][column.title].append(column.value(answer["seconds"], answer["arrivals"]))
    return samples, contest


def _measure_shares(entries: list[Entry], columns: list[Column], tell: Callable[[str], None]) -> tuple[Shares, Contest]:
    """Measures worker seconds per category of longspan, in engines of their own because the timers cost something.

    Decoding is what a run with many new tokens takes beyond one that stops at the first.
    """
    prefill = max((column for column in columns if column.is_ttft), key=lambda column: column.length)
    decode = columns[-1]
    shares: Shares = {}
    with Contest(_start_options(record_times=True), tell) as contest:
        contest.start(entries)
        _warm_up(contest, columns)
        whole = contest.ask("where prefill time goes", _prompts(prefill.length, 1, "shares"), 1)
        first = contest.ask("where decode time goes", _prompts(decode.length, decode.batch, "shares, first"), 1)
        more = contest.ask(
            "where decode time goes", _prompts(decode.length, decode.batch, "shares, all"), decode.new_tokens
        )
    for name in more:
        shares[name, f"prefill {prefill.length:,}"] = _over_ranks(whole[name])
        until_first, until_last = _over_ranks(first[name]), _over_ranks(more[name])
        beyond = {key: max(0.0, seconds - until_first[key]) for key, seconds in until_last.items()}
        shares[name, f"decode x {decode.batch}"] = beyond
    return shares, contest


def _warm_up(contest: Contest, columns: list[Column]) -> None:
    """Makes the first uses of kernels and memory, at the shortest length and at the largest batch."""
    contest.ask("warm-up", _prompts(columns[0].length, 1, "warm-up"), 1)
    contest.ask("warm-up", _prompts(columns[-1].length, columns[-1].batch, "warm-up"), 4)


def _over_ranks(answer: dict[str, Any]) -> dict[str, float]:
    ranks: list[dict[str, float]] = answer["worker_times"]
    return {key: sum(rank[key] for rank in ranks) for key in ranks[0]}


def _prompts(length: int, batch: int, seed: str) -> list[list[int]]:
    """Draws random ids; no two prompts begin alike, and every contestant gets the same."""
    generator = random.Random(f"{seed} {length} {batch}")
    return [[generator.randrange(100, 49_000) for _ in range(length)] for _ in range(batch)]


def _start_options(*, record_times: bool) -> dict[str, Any]:
    return {
        "model": str(smollm2_folder()),
        "cores": len(os.sched_getaffinity(0)),
        "max_model_len": CONTEXT_LENGTH,
        "kv_cache_memory_bytes": KV_BYTES,
        "record_times": record_times,
    }


def _hardware() -> str:
    """Describes the processor, usable cores, and the instruction sets that decide how fast bfloat16 is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16")
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    sets = " ".join(name for name in known if name in flags)
    name, cores = facts.get("model name", platform.machine()), len(os.sched_getaffinity(0))
    return f"{name}, {cores} cores, {sets or 'none of ' + ', '.join(known)}"


def _words(versions: dict[str, dict[str, str]]) -> str:
    """Lists each set of versions once, with those who run on it."""
    users: dict[str, list[str]] = {}
    for name, packages in versions.items():
        users.setdefault(", ".join(f"{package} {version}" for package, version in packages.items()), []).append(name)
    return "\n".join(f"{', '.join(names)}: {packages}" for packages, names in users.items())


def _options() -> argparse.Namespace:
    names = list(roster(Path()))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000], help="prompt tokens for TTFT")
    parser.add_argument("--decode-length", type=int, default=512, help="prompt tokens before decoding")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per sequence when decoding")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the raw numbers there")
    parser.add_argument("--peers-venv", type=Path, default=REPOSITORY / ".venv-peers", help="vLLM's environment")
    return parser.parse_args()


if __name__ == "__main__":
    main()
