"""Check every claim of every paper, and store the verdicts in `claims.json`. `docs/generate.py` makes the page of it.

    python benchmarks/papers/claims.py      # some minutes; make claims writes the page, too

Exits with 1 if a required claim fails. Claims about serving use the figures of stored runs, see `tetris_serving.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import context_parallelism
import csps
import kv_runahead
import seesaw
import tetris
from verdicts import RULES, report_claims

STORED = Path(__file__).with_name("claims.json")

PAPERS = {
    "Context Parallelism": context_parallelism.claims,
    "KV-Runahead": kv_runahead.claims,
    "Tetris": tetris.claims,
    "Seesaw": seesaw.claims,
    "CSPS": csps.claims,
}


def main() -> bool:
    """Print and store all claims. Return True if every required claim holds."""
    checked = {paper: claims() for paper, claims in PAPERS.items()}
    stored = {
        "rules": RULES,
        "papers": {paper: [claim.row() for claim in claims] for paper, claims in checked.items()},
    }
    STORED.write_text(json.dumps(stored, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    passed = [report_claims(paper, claims) for paper, claims in checked.items()]
    return all(passed)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    sys.exit(not main())
