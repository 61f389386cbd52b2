"""Claims of papers, the rules that decide if they hold, and the printed tables of claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from cells import Cell, mean_error
from rich.console import Console
from rich.table import Table

_TOLERANCE = 0.10
_WORST = 0.25


def _percent(part: float, form: str = ".0f") -> str:
    return f"{100 * part:{form}} %"


RULES = {
    "numbers": f"each of ours is within {_percent(_TOLERANCE)} of the paper's",
    "table": f"the mean error of its cells is at most {_percent(_TOLERANCE)}, and none is off by more than "
    f"{_percent(_WORST)}",
    "range": f"each of ours is in the paper's range, widened at both ends by {_percent(_TOLERANCE)}",
    "order": "ours have the paper's order, without ties",
    "bound": f"each of ours keeps to the paper's bound, or to {_percent(_TOLERANCE)} where it has words such as hardly",
    "choice": "ours is the paper's in every case",
}
"""The condition of each rule for a claim to hold."""


class Check(NamedTuple):
    """The outcome of a rule: the paper's numbers and ours as text, and True if they agree."""

    rule: str
    paper: str
    ours: str
    holds: bool


@dataclass(frozen=True)
class Claim:
    """One claim of a paper.

    Attributes:
        where: section, figure or table.
        says: the claim in a sentence.
        check: numbers and the outcome. If the claim is not modelled, the paper's number as text.
        why: the known reason of a failure, or the reason for no model.
        required: if True, scripts exit with 1 if the claim fails.
        weak: the reason why the verdict says little, although the rule decides it. Shown with every verdict.
    """

    where: str
    says: str
    check: Check | str
    why: str = ""
    required: bool = False
    weak: str = ""

    @property
    def verdict(self) -> str:
        """The outcome, one of `VERDICTS`."""
        if isinstance(self.check, str):
            return "not modelled"
        return "holds" if self.check.holds else "fails"

    def row(self) -> dict[str, str | bool]:
        """Return the claim's texts for a table or a file. For a claim that holds, `why` is empty unless it is weak."""
        rule, paper, ours, _ = Check("", self.check, "", False) if isinstance(self.check, str) else self.check
        why = " ".join(filter(None, ["" if self.verdict == "holds" else self.why, self.weak]))
        return {
            "where": self.where,
            "says": self.says,
            "paper": paper,
            "ours": ours,
            "rule": rule,
            "verdict": self.verdict,
            "why": why,
            "required": self.required,
            "weak": bool(self.weak),
        }


class PageTable(NamedTuple):
    """A table of a page of the docs."""

    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def errors_table(named: Mapping[str, Sequence[Cell]]) -> PageTable:
    """Return the mean and the worst error of several tables of cells."""
    rows = []
    for name, cells in named.items():
        worst = max(cells, key=lambda cell: abs(cell.error))
        texts = _percent(mean_error(cells), ".1f"), f"{_percent(worst.error, '+.1f')} ({worst.name})"
        rows.append((f"{name} ({len(cells)} cells)", *texts))
    return PageTable(("", "mean error", "worst"), rows)


VERDICTS = ("holds", "fails", "not modelled")


def numbers(pairs: Mapping[str, tuple[float, float]]) -> Check:
    """Compare pairs of the paper's number and ours, by name."""
    return Check(
        "numbers",
        _listed({name: paper for name, (paper, _) in pairs.items()}),
        _listed({name: ours for name, (_, ours) in pairs.items()}),
        all(abs(ours / paper - 1) <= _TOLERANCE for paper, ours in pairs.values()),
    )


def table(cells: Sequence[Cell]) -> Check:
    """Compare all cells of a table."""
    mean, worst = mean_error(cells), max(cells, key=lambda cell: abs(cell.error))
    given = [cell.paper for cell in cells]
    return Check(
        "table",
        f"{len(cells)} cells of {_shown(min(given))} to {_shown(max(given))} {worst.unit}",
        f"mean error {_percent(mean, '.1f')}, worst {_percent(worst.error, '+.1f')} ({worst.name})",
        mean <= _TOLERANCE and abs(worst.error) <= _WORST,
    )


def in_range(low: float, high: float, ours: Mapping[str, float]) -> Check:
    """Compare numbers with the ends of a range."""
    inside = all(low * (1 - _TOLERANCE) <= value <= high * (1 + _TOLERANCE) for value in ours.values())
    return Check("range", f"{_shown(low)} to {_shown(high)}", _listed(ours), inside)


def order(rising: Mapping[str, Mapping[str, float]]) -> Check:
    """Check for each case that numbers rise in the paper's order."""
    return Check(
        "order",
        "; ".join(dict.fromkeys(" < ".join(series) for series in rising.values())),
        "; ".join(f"{case}: {_listed(series)}" if case else _listed(series) for case, series in rising.items()),
        all(low < high for series in rising.values() for low, high in pairwise(series.values())),
    )


def bound(ours: Mapping[str, float], *, least: float | None = None, most: float | None = None, unit: str = "") -> Check:
    """Check that numbers are at least `least` and at most `most`, if these are given."""
    limits = [("at least", least), ("at most", most)]
    return Check(
        "bound",
        " and ".join(f"{word} {_shown(limit)}{unit}" for word, limit in limits if limit is not None),
        _listed(ours),
        all((least is None or least <= value) and (most is None or value <= most) for value in ours.values()),
    )


def choice(pairs: Mapping[str, tuple[object, object]]) -> Check:
    """Compare the paper's choice or result with ours, by case."""
    return Check(
        "choice",
        ", ".join(f"{name}: {paper}" for name, (paper, _) in pairs.items()),
        ", ".join(f"{name}: {ours}" for name, (_, ours) in pairs.items()),
        all(paper == ours for paper, ours in pairs.values()),
    )


def counts(verdicts: Sequence[str]) -> dict[str, int]:
    """Return the number of each of `VERDICTS`."""
    return {verdict: verdicts.count(verdict) for verdict in VERDICTS}


def report_claims(paper: str, claims: Sequence[Claim]) -> bool:
    """Print a row per claim and the counts. Return True if all required claims hold."""
    shown = Table("where", "claim", "paper", "ours", "", title=f"{paper}: its claims", show_lines=True)
    for claim in claims:
        row = claim.row()
        colour = {"holds": "green", "fails": "red"}.get(claim.verdict, "dim")
        why = f"\n[dim]{row['why']}" if row["why"] else ""
        verdict = claim.verdict + (", weak" if claim.weak else "") + (", required" if claim.required else "")
        texts = claim.where, claim.says + why, str(row["paper"]), str(row["ours"])
        shown.add_row(*texts, f"[{colour}]{verdict}")
    Console(width=160).print(shown)
    numbers_of = counts([claim.verdict for claim in claims])
    weak = sum(bool(claim.weak) for claim in claims)
    print(f"{paper}: " + ", ".join(f"{number} {verdict}" for verdict, number in numbers_of.items()) + f" ({weak} weak)")
    failing = [claim for claim in claims if claim.required and claim.verdict != "holds"]
    for claim in failing:
        print(f"FAIL, and is required: {claim.where}: {claim.says}")
    print()
    return not failing


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_shown(value)}".strip() for name, value in values.items())


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
