"""Stored simulations of the papers' evaluations, which claims and figures share.

    python benchmarks/papers/runs.py             # simulate all cases that other code has simulated: up to some hours
    python benchmarks/papers/runs.py --list      # only print their number, and the command of each paper

Each command stores every case as soon as it is simulated, so an interrupted run continues with the next case.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys

import csps_oracle
import csps_serving
import seesaw_serving
import tetris_serving
from stored_runs import code_version

COMMANDS = {
    "CSPS, oracle": "csps_oracle.py",
    "CSPS": "csps.py --serving --json benchmarks/papers/csps_serving.json",
    "Seesaw": "seesaw.py --serving --json benchmarks/papers/seesaw_serving.json",
    "Tetris": "tetris.py --serving --json benchmarks/papers/tetris_serving.json",
}
"""Scripts of `benchmarks/papers` with their options, the quickest first."""


def outdated() -> dict[str, str]:
    """Return by name the number of cases that this version of the code has not simulated, if there are any."""
    versions = {
        "CSPS, oracle": (csps_oracle, [csps_oracle.stored()["code"]]),
        "CSPS": (csps_serving, [case.code for case in csps_serving.stored()]),
        "Seesaw": (seesaw_serving, [point.code for point in seesaw_serving.stored()]),
        "Tetris": (tetris_serving, [study.code for study in tetris_serving.stored_studies()]),
    }
    current = {name: codes.count(code_version(script.__file__)) for name, (script, codes) in versions.items()}
    expected = {
        "CSPS, oracle": 1,
        "CSPS": len(csps_serving.MODELS) * len(csps_serving.DATA_SETS),
        "Seesaw": len(seesaw_serving.cases(seesaw_serving.FIGURES, seesaw_serving.ARXIV)),
        "Tetris": len(tetris_serving.SETUPS) * len(tetris_serving.WORKLOADS),
    }
    missing = {name: number - current[name] for name, number in expected.items()}
    return {name: f"{number} of {expected[name]}" for name, number in missing.items() if number}


def print_outdated() -> None:
    """Print the cases that this version of the code has not simulated, and the commands that do."""
    for name, number in outdated().items():
        print(f"{name}: other code has simulated {number} stored cases. To simulate them again (make runs: all):")
        print(f"  python benchmarks/papers/{COMMANDS[name]}")


def main() -> None:
    """Simulate all outdated cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="simulate nothing")
    if parser.parse_args().list:
        print_outdated()
        return
    for name in outdated():
        print(f"{name}: python benchmarks/papers/{COMMANDS[name]}", flush=True)
        subprocess.run([sys.executable, *shlex.split(f"benchmarks/papers/{COMMANDS[name]}")], check=False)


if __name__ == "__main__":
    main()
