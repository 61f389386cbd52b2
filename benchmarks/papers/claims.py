"""Check every claim of every paper, and compute the numbers of its figures and of tables in the docs.

    python benchmarks/papers/claims.py             # some minutes; make claims and make figures write the pages, too
    python benchmarks/papers/claims.py --again     # also if no code and no stored run has changed

The results are in `claims.json` and `figures.json`. If neither code nor stored runs have changed since, they are only
printed. Exits with 1 if a required claim fails. Claims about serving use stored runs, see `runs.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import context_parallelism
import context_parallelism_panels
import csps
import csps_panels
import kv_runahead
import kv_runahead_panels
import runs
import seesaw
import seesaw_panels
import tetris
import tetris_panels
from panels import Panel
from stored_runs import HERE, code_version, hash_of
from verdicts import RULES, VERDICTS, Claim, PageTable, counts, report_claims

STORED = HERE / "claims.json"
FIGURES = HERE / "figures.json"


class Paper(NamedTuple):
    """Everything that is computed for a paper."""

    claims: Callable[[], list[Claim]]
    tables: Callable[[], dict[str, PageTable]]
    panels: Callable[[], list[Panel]]


PAPERS = {
    "Context Parallelism": Paper(
        context_parallelism.claims, context_parallelism.tables, context_parallelism_panels.panels
    ),
    "KV-Runahead": Paper(kv_runahead.claims, kv_runahead.tables, kv_runahead_panels.panels),
    "Tetris": Paper(tetris.claims, tetris.tables, tetris_panels.panels),
    "Seesaw": Paper(seesaw.claims, seesaw.tables, seesaw_panels.panels),
    "CSPS": Paper(csps.claims, csps.tables, csps_panels.panels),
}


def main(*, again: bool = False) -> bool:
    """Compute, print and store everything. Return True if every required claim holds."""
    made_of = inputs()
    stored: dict[str, Any] = json.loads(STORED.read_text(encoding="utf-8")) if STORED.is_file() else {}
    if again or stored.get("made_of") != made_of or not FIGURES.is_file():
        stored = compute(made_of)
    else:
        print("No code and no stored run has changed: these are the results of the last run.")
    _print_counts(stored["papers"])
    runs.print_outdated()
    rows = [row for rows in stored["papers"].values() for row in rows]
    return all(row["verdict"] == "holds" for row in rows if row["required"])


def inputs() -> str:
    """Return a hash of the code and the stored runs that decide the results."""
    data = sorted(path for path in HERE.glob("*.json") if path.name not in {STORED.name, FIGURES.name})
    scripts = hash_of([*sorted(HERE.glob("*.py")), *data])
    return hashlib.sha256(f"{code_version()} {scripts}".encode()).hexdigest()[:16]


def compute(made_of: str) -> dict[str, Any]:
    """Compute and store the claims, tables and panels of all papers. Return the stored claims and tables."""
    stored: dict[str, Any] = {"made_of": made_of, "rules": RULES, "papers": {}, "tables": {}}
    figures: dict[str, Any] = {}
    for name, paper in PAPERS.items():
        claims = paper.claims()
        report_claims(name, claims)
        stored["papers"][name] = [claim.row() for claim in claims]
        stored["tables"] |= {table: made._asdict() for table, made in paper.tables().items()}
        figures[name] = [panel.stored() for panel in paper.panels()]
    FIGURES.write_text(_lines(figures), encoding="utf-8")
    STORED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return stored


def _lines(figures: dict[str, list[dict[str, Any]]]) -> str:
    """Return JSON with a line for each panel."""
    papers = (
        f" {json.dumps(paper)}: [\n" + ",\n".join(f"  {json.dumps(panel)}" for panel in panels) + "\n ]"
        for paper, panels in figures.items()
    )
    return "{\n" + ",\n".join(papers) + "\n}\n"


def _print_counts(papers: dict[str, list[dict[str, Any]]]) -> None:
    for paper, rows in papers.items():
        numbers, weak = counts([row["verdict"] for row in rows]), sum(row["weak"] for row in rows)
        print(f"{paper}: " + ", ".join(f"{numbers[verdict]} {verdict}" for verdict in VERDICTS) + f" ({weak} weak)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="compute everything")
    sys.exit(not main(again=parser.parse_args().again))
