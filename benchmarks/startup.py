"""Measure the time from the start of a longspan process to its first token, and to its help text.

    python benchmarks/startup.py [--repeats 5] [--before SRC] [--serve] [--require SECONDS]

The prompt has ten tokens. A first run of each case is not counted, so all files are in the page cache. Times are
medians. CPU seconds include all processes of a run, to its end. They are more reliable than wall-clock times on a
busy machine. `--before` names the folder `src` of an earlier version, which alternates with this version. The last
lines list the packages with the longest imports, in the process that prints and in the parent process of workers.

With --require, the exit code is 1 unless this version prints the first token of the first case within SECONDS.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

PROMPT = "one two three four five six seven eight nine ten"
ONE_TOKEN = ("generate", "--prompt", PROMPT, "--max-tokens", "1")
GENERATE = (*ONE_TOKEN, "--dtype", "float32")
CASES = {
    "generate": GENERATE,
    "generate, bfloat16": (*ONE_TOKEN, "--dtype", "bfloat16"),
    "generate, 2 instances": (*GENERATE, "--parallel", "2"),
    "generate, chunked": (*GENERATE, "--policy", "chunked"),
    "--help": ("--help",),
    "generate --help": ("generate", "--help"),
}
HERE = Path(__file__).parents[1] / "src"
IMPORTS = {
    "the process that prints": "from longspan.cli.app import app; import longspan; longspan.LLM",
    "the process that forks workers": "import gc; from longspan.runtime.executor import forkserver_main; "
    "gc.freeze = exit; forkserver_main.main()",
}
"""The code that each process runs while it starts. The second process is stopped before it waits for commands."""
NUM_PACKAGES = 8
POLL_S = 0.02
IMPORT_LINE = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The seconds from the start of a process to its first output (or answer) and to its end, and the CPU seconds."""

    first_s: float
    end_s: float
    cpu_s: float


def main() -> int:
    """Run all cases, alternating between the versions, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--serve", action="store_true", help="also: until the server's /health answers 200")
    parser.add_argument("--require", type=float, metavar="SECONDS")
    args = parser.parse_args()
    versions = {"": HERE} if args.before is None else {" (before)": args.before.resolve(), "": HERE}
    measures: dict[str, Callable[[Path], Run]] = {name: partial(run, flags) for name, flags in CASES.items()}
    if args.serve:
        measures["serve"] = run_server
    table = Table("case", "first output, s", "end, s", "CPU, s")
    firsts = {}
    for name, measure in measures.items():
        runs: dict[str, list[Run]] = {version: [] for version in versions}
        for number in range(1 + args.repeats):
            for version, src in versions.items():
                times = measure(src)
                if number:
                    runs[version].append(times)
        for version, times_of in runs.items():
            firsts[name + version] = statistics.median(times.first_s for times in times_of)
            shown = [
                median_and_range([getattr(times, field) for times in times_of])
                for field in ("first_s", "end_s", "cpu_s")
            ]
            table.add_row(name + version, *shown)
    Console().print(table)
    for process, code in IMPORTS.items():
        print(f"{process}: {', '.join(f'{package} {took_s:.2f}' for package, took_s in import_costs(code))} s")
    if args.require is not None and firsts["generate"] > args.require:
        print(f"the first token took {firsts['generate']:.2f} s, more than {args.require:g}", file=sys.stderr)
        return 1
    return 0


def median_and_range(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def run(flags: tuple[str, ...], src: Path) -> Run:
    """Run the command line once."""
    start_s, cpu_s = time.monotonic(), children_cpu_s()
    with subprocess.Popen(
        [sys.executable, "-m", "longspan", *flags], stdout=subprocess.PIPE, env=env_of(src)
    ) as process:
        assert process.stdout is not None, "asked for a pipe"
        os.read(process.stdout.fileno(), 1)
        first_s = time.monotonic() - start_s
        process.stdout.read()
        assert process.wait() == 0, "the process failed, and has printed the reason"
    return Run(first_s=first_s, end_s=time.monotonic() - start_s, cpu_s=children_cpu_s() - cpu_s)


def run_server(src: Path) -> Run:
    """Start a server, wait until it serves, and stop it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start_s, cpu_s = time.monotonic(), children_cpu_s()
    command = [sys.executable, "-m", "longspan", "serve", "--dtype", "float32", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env_of(src)) as process:
        while not serves(port):
            assert process.poll() is None, "the server has ended"
            time.sleep(POLL_S)
        first_s = time.monotonic() - start_s
        process.terminate()
    return Run(first_s=first_s, end_s=time.monotonic() - start_s, cpu_s=children_cpu_s() - cpu_s)


def serves(port: int) -> bool:
    """Return True if the server's /health answers 200."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError):
        return False


def import_costs(code: str) -> list[tuple[str, float]]:
    """Return the packages whose own modules take longest to run, each with its seconds."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    output = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=env_of(HERE), check=True).stderr
    microseconds: Counter[str] = Counter()
    for duration, package in IMPORT_LINE.findall(output):
        microseconds[package] += int(duration)
    return [(package, duration / 1e6) for package, duration in microseconds.most_common(NUM_PACKAGES)]


def env_of(src: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(src)}


def children_cpu_s() -> float:
    """Return the CPU seconds of all child processes that have ended, and of their children."""
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    sys.exit(main())
