"""CSPS: chosen settings of sparse attention, compared with the best of an enumeration (Oracle, section 5).

    python benchmarks/papers/csps_oracle.py      # some two minutes

Runs `benchmarks/csa_configurator.py`, and stores its cases for the claims.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

from stored_runs import HERE, code_version

_STORED = HERE / "csps_oracle.json"


class Oracle(TypedDict):
    """The stored ratios of `csa_configurator.py`.

    Attributes:
        code: `code_version` of the run.
        time_ratios: seconds of chosen settings over seconds of the best, by case with a limited loss.
    """

    code: str
    time_ratios: list[float]


def stored() -> Oracle:
    """Read the stored comparison, which is empty before the first run."""
    if not _STORED.is_file():
        return Oracle(code="", time_ratios=[])
    kept: Oracle = json.loads(_STORED.read_text(encoding="utf-8"))
    return kept


def main() -> None:
    """Compare and store."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "cases.json"
        command = [sys.executable, str(HERE.parent / "csa_configurator.py"), "--json", str(found)]
        subprocess.run(command, check=True)
        cases = json.loads(found.read_text(encoding="utf-8"))
    ratios = [round(case["time_ratio"], 5) for case in cases if case["time_ratio"] is not None]
    _STORED.write_text(json.dumps(Oracle(code=code_version(__file__), time_ratios=ratios)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
