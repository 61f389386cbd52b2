"""Measure how much other processes that each keep a core busy slow longspan down (8 minutes on two cores).

    python benchmarks/busy_neighbours.py [--model smollm2-135m] [--before ../earlier/src]

One instance on all cores answers random prompts alone, and concurrently with one and two busy processes. Measured are
the seconds to the first token of a long prompt, and the seconds per token of a short one. Two settings alternate. The
process of the other setting is stopped meanwhile. In `before`, waiting threads spin for milliseconds, which is OpenMP's
default. In `now`, they sleep sooner, as longspan configures its workers. With `--before`, the first setting is an
earlier version of longspan instead, given by its folder `src`. The table has medians of the rounds.

Exits with 1 if one busy process more than doubles the time per token. Also exits with 1 if the time per token without
any is more than 1.05 times that of `before`.
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
_MAX_SLOWDOWN, _MAX_IDLE_RATIO = 2.0, 1.05
_SETTLE_S = 0.5
_SPINS = {"GOMP_SPINCOUNT": "300000"}
"""The number of spins of a waiting thread in GNU's OpenMP if no environment variable sets it."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
Samples = dict[tuple[str, int], list[float]]
"""Seconds per setting and number of busy processes."""


def main() -> None:
    """Measure and print medians. Write every sample with `--json`."""
    options = _options()
    for name in _WAITING:  # each setting has its own
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
        flat = {
            kind: {f"{name}, {n}": times for (name, n), times in samples.items()} for kind, samples in kinds.items()
        }
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
    """Keep `number` cores busy with endless loops, one process each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        time.sleep(_SETTLE_S)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _report(ttft_s: Samples, token_s: Samples, length: int) -> Table:
    table = Table(title="With processes that keep a core busy: median, lowest to highest, ratio to 0 busy processes")
    table.add_column("busy processes", justify="right")
    for quantity in ("ms per token", f"ms to the first of {length}"):
        for name in (BEFORE, NOW):
            table.add_column(f"{quantity}, {name}", justify="right")
        table.add_column("now / before", justify="right")
    for number in _NEIGHBOURS:
        cells = [str(number)]
        for samples in (token_s, ttft_s):
            cells += [_cell(samples, name, number) for name in (BEFORE, NOW)]
            cells.append(f"{_median(samples, NOW, number) / _median(samples, BEFORE, number):.2f}")
        table.add_row(*cells)
    return table


def _cell(samples: Samples, name: str, number: int) -> str:
    times, median = samples[name, number], _median(samples, name, number)
    spread = f"{min(times) * 1e3:,.0f} to {max(times) * 1e3:,.0f}"
    return f"{median * 1e3:,.0f}\n({spread})\nx {median / _median(samples, name, 0):.2f}"


def _verdict(token_s: Samples) -> int:
    """Print both ratios with their limits and return the exit status."""
    slowdown = _median(token_s, NOW, 1) / _median(token_s, NOW, 0)
    idle_ratio = _median(token_s, NOW, 0) / _median(token_s, BEFORE, 0)
    print(f"per token: with one busy process x {slowdown:.2f} (at most {_MAX_SLOWDOWN:g})")
    print(f"           alone x {idle_ratio:.2f} of before (at most {_MAX_IDLE_RATIO:g})")
    return int(slowdown > _MAX_SLOWDOWN or idle_ratio > _MAX_IDLE_RATIO)


def _median(samples: Samples, name: str, number: int) -> float:
    return statistics.median(samples[name, number])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--before", type=Path, metavar="FOLDER", help="the `src` of an earlier version to compare with")
    parser.add_argument("--length", type=int, default=2000, metavar="TOKENS", help="length of the long prompt")
    parser.add_argument("--tokens", type=int, default=32, help="length of the answer to the short prompt")
    parser.add_argument("--ids", type=int, default=49_000, help="draw token ids of prompts below this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    if options.rounds < 1 or options.tokens < 2 or options.length < 1:
        sys.exit("--rounds and --length must be at least 1, and --tokens at least 2")
    return options


if __name__ == "__main__":
    main()
