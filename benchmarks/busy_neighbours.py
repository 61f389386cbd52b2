"""Measures how much slower answers get beside processes that each keep a core busy (8 minutes on two cores).

    python benchmarks/busy_neighbours.py [--model smollm2-135m] [--before ../earlier/src]

One instance on all cores answers alone, beside one such process and beside two: seconds to the first token of a long
prompt, and time per token of a short one. Two settings take turns, while the other is stopped: threads that wait as
OpenMP has it by itself, which spin for milliseconds, and as longspan has it for its workers, which sleep sooner. With
`--before` the first is an earlier version of longspan, whose `src` that is. Medians of the rounds; random prompts.

Exits with 1 if an answer's tokens take more than twice the time beside one process, or alone more than 1.05 times as
long as in the first setting.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from contestants.child import Child
from contestants.roster import Entry
from contestants.serving import Submission
from rich.console import Console
from rich.progress import track
from rich.table import Table

BEFORE, NOW = "before", "now"
_NEIGHBOURS = (0, 1, 2)
_MOST_BESIDE_ONE, _MOST_IDLE = 2.0, 1.05
_SETTLE_S = 0.5
_SPINS = {"GOMP_SPINCOUNT": "300000"}
"""GNU's OpenMP lets threads spin so often where nobody has said how they wait."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
Samples = dict[tuple[str, int], list[float]]
"""Seconds per setting and number of busy processes."""


def main() -> None:
    """Measures and prints; with `--json` writes every sample."""
    options = _options()
    for name in _WAITING:  # the settings say how threads wait
        os.environ.pop(name, None)
    prompts = random.Random(0)
    ttft_s: Samples = defaultdict(list)
    token_s: Samples = defaultdict(list)
    with ExitStack() as stack:
        children = {entry.name: _started(entry, options, stack) for entry in _settings(options.before)}
        turns = [(number, name) for _ in range(options.rounds) for number in _NEIGHBOURS for name in children]
        for number, name in track(turns, "measuring", console=Console(stderr=True)):
            child = children[name]
            with _busy(number):
                long, short = ([prompts.randrange(10, options.ids) for _ in range(n)] for n in (options.length, 8))
                ttft_s[name, number].append(child.run([Submission(prompt=long, new_tokens=1)]).seconds)
                [timeline] = child.run([Submission(prompt=short, new_tokens=options.tokens)]).timelines
                first_s, *_, last_s = timeline.arrivals_s
                token_s[name, number].append((last_s - first_s) / (options.tokens - 1))
            child.pause()
    Console().print(_report(ttft_s, token_s, options.length))
    print(f"{options.model}, {os.cpu_count()} x {platform.processor() or platform.machine()}, {options.rounds} rounds")
    if options.json:
        kinds = {"ttft_s": ttft_s, "token_s": token_s}
        flat = {kind: {f"{name}, {n}": found for (name, n), found in one.items()} for kind, one in kinds.items()}
        options.json.write_text(json.dumps(flat, indent=1) + "\n")
    sys.exit(_verdict(token_s))


def _settings(before: Path | None) -> list[Entry]:
    environment = _SPINS if before is None else {"PYTHONPATH": str(before.resolve())}
    python = Path(sys.executable)
    return [
        Entry(name=BEFORE, module="longspan_llm", python=python, environment=environment),
        Entry(name=NOW, module="longspan_llm", python=python),
    ]


def _started(entry: Entry, options: argparse.Namespace, stack: ExitStack) -> Child:
    arguments: dict[str, Any] = {
        "model": options.model,
        "instances": 1,
        "max_model_len": options.length + options.tokens + 8,
        "kv_cache_memory_bytes": None,
        "record_times": False,
    }
    child = Child(entry, arguments)
    stack.callback(child.kill)
    child.start()
    child.run([Submission(prompt=[10] * options.length, new_tokens=2)])  # first times are slower
    child.pause()
    return child


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Keeps so many cores busy with processes that do nothing else."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _report(ttft_s: Samples, token_s: Samples, length: int) -> Table:
    table = Table(title="Beside processes that keep a core busy: medians, lowest to highest, and times that alone")
    table.add_column("busy processes", justify="right")
    for what in ("ms per token", f"ms to the first of {length}"):
        for name in (BEFORE, NOW):
            table.add_column(f"{what}, {name}", justify="right")
        table.add_column("now / before", justify="right")
    for number in _NEIGHBOURS:
        cells = [str(number)]
        for samples in (token_s, ttft_s):
            cells += [_cell(samples, name, number) for name in (BEFORE, NOW)]
            cells.append(f"{_median(samples, NOW, number) / _median(samples, BEFORE, number):.2f}")
        table.add_row(*cells)
    return table


def _cell(samples: Samples, name: str, number: int) -> str:
    found, median = samples[name, number], _median(samples, name, number)
    spread = f"{min(found) * 1e3:,.0f} to {max(found) * 1e3:,.0f}"
    return f"{median * 1e3:,.0f}\n({spread})\nx {median / _median(samples, name, 0):.2f}"


def _verdict(token_s: Samples) -> int:
    """Prints both demands and returns the exit status."""
    beside_one = _median(token_s, NOW, 1) / _median(token_s, NOW, 0)
    idle = _median(token_s, NOW, 0) / _median(token_s, BEFORE, 0)
    print(f"per token: beside one process x {beside_one:.2f} (at most {_MOST_BESIDE_ONE:g})")
    print(f"           alone x {idle:.2f} of before (at most {_MOST_IDLE:g})")
    return int(beside_one > _MOST_BESIDE_ONE or idle > _MOST_IDLE)


def _median(samples: Samples, name: str, number: int) -> float:
    return statistics.median(samples[name, number])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="the `src` of an earlier version to compare with")
    parser.add_argument("--length", type=int, default=2000, metavar="TOKENS", help="of the long prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of the answer to the short prompt")
    parser.add_argument("--ids", type=int, default=49_000, help="prompts are made of token ids below this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every sample there")
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 2 or options.length < 1:
        sys.exit("--rounds and --length must be at least 1, and --tokens at least 2")
    return options


if __name__ == "__main__":
    main()
