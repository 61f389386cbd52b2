"""Checks every claim of every paper, and keeps the verdicts in `claims.json`, from which `docs/claims.md` is made.

    python benchmarks/papers/claims.py      # some minutes; make claims writes the page, too

Exits with 1 when a required claim fails. Claims about serving go by stored runs, see `tetris_serving.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import context_parallelism
import kv_runahead
import seesaw
import tetris
from verdicts import RULES, Claim, report_claims

STORED = Path(__file__).with_name("claims.json")
_SPARSE = "The policy, its sparse attention and its pipelining are missing; two of its exchanges are here."


def csps() -> list[Claim]:
    """Lists the claims of a paper whose policy is not here."""
    claimed = (
        (
            "3.1, Fig. 2",
            "With chunks one after the other TTFT grows to 213 s at 1M tokens, and TBT to 9.6 s.",
            "1.6 to 213 s",
        ),
        ("3.2.3, Fig. 5", "SP-NTP spends 13 to 34 % on messages and 18 to 43 % on attention.", "13 to 34 %"),
        (
            "4.1, Table 3",
            "Sending queries takes 1 ms a layer, sending keys and values about a second.",
            "1 and 879 to 1173 ms",
        ),
        ("5.3, Fig. 14", "TTFT of Sarathi-Serve is 6.1 to 7.5 times as long.", "6.1 to 7.5"),
        ("5.3, Fig. 15", "TBT of Sarathi-Serve is 1.6 to 1.92 times as long.", "1.6 to 1.92"),
        (
            "5.3",
            "SP-NTP has 1.32 to 1.51 times the TTFT of SP-TP, although it is preferred for long prompts.",
            "1.32 to 1.51",
        ),
        (
            "5.3",
            "Without loss of accuracy 22 % of the tokens are dropped, and 19 % of the messages' time.",
            "22 %, 19 %, 28 %",
        ),
        ("5.3, Fig. 16", "Response times of Sarathi-Serve are 8.3 to 9.8 times as long.", "8.3 to 9.8"),
        (
            "5.3, Table 4",
            "Throughput is 7.1 to 8.2 times larger for prefill, and 4.3 to 5.2 times for decoding.",
            "7.1 to 8.2",
        ),
        ("5.3, Fig. 17", "1.6 to 2.5 times the request rate of Sarathi-Serve is served.", "1.6 to 2.5"),
        ("Supplement A", "SP-NTP with gathered weights sends less than SP-TP from a length on.", "96K"),
    )
    return [Claim(where, says, given, _SPARSE) for where, says, given in claimed]


PAPERS = {
    "Context Parallelism": context_parallelism.claims,
    "KV-Runahead": kv_runahead.claims,
    "Tetris": tetris.claims,
    "Seesaw": seesaw.claims,
    "CSPS": csps,
}


def main() -> bool:
    """Prints and stores all; returns whether every required claim holds."""
    found = {paper: claims() for paper, claims in PAPERS.items()}
    kept = {
        "rules": RULES,
        "papers": {paper: [claim.row() for claim in claims] for paper, claims in found.items()},
    }
    STORED.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    passed = [report_claims(paper, claims) for paper, claims in found.items()]
    return all(passed)


if __name__ == "__main__":
    sys.exit(not main())
