"""Ratios that longspan has to reach: the best of ours over the best of theirs, column by column."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from columns import Column
from rich.table import Table
from tables import Medians, best_of


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best of ours beside the best of theirs, in one column.

    Attributes:
        ours, theirs: a contestant and its median; None where nobody of that side was measured.
        required: the least ratio; None if any will do.
    """

    column: Column
    ours: tuple[str, float] | None
    theirs: tuple[str, float] | None
    required: float | None

    @property
    def ratio(self) -> float | None:
        """Above 1, ours is better; None where a side is missing."""
        return self.column.ratio(self.ours[1], self.theirs[1]) if self.ours and self.theirs else None

    @property
    def is_missed(self) -> bool:
        """A required ratio that could not be measured is missed, too."""
        return self.required is not None and (self.ratio is None or self.ratio < self.required)


def parse_required(text: str, keys: Collection[str]) -> dict[str, float]:
    """Reads `key=ratio,key=ratio`; raises ValueError for what is not that, or a key that there is not."""
    found = {}
    for one in text.split(","):
        key, _, ratio = one.strip().partition("=")
        if key not in keys:
            raise ValueError(f"no column {key!r}; there are {', '.join(keys)}")
        try:
            found[key] = float(ratio)
        except ValueError:
            raise ValueError(f"{one!r} needs a number, such as {key}=1.5") from None
    return found


def compare(
    columns: Sequence[Column],
    medians: Medians,
    ours: Collection[str],
    theirs: Collection[str],
    required: Mapping[str, float],
) -> list[Comparison]:
    """Finds both sides' best in each column."""
    return [
        Comparison(
            column=column,
            ours=best_of(column, medians, ours),
            theirs=best_of(column, medians, theirs),
            required=required.get(column.key),
        )
        for column in columns
    ]


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """Prints a row per column, whether something is required of it or not."""
    table = Table("", "best of longspan", "best of vLLM", "ratio", "required", title="longspan over vLLM")
    for one in comparisons:
        sides = ("—" if side is None else f"{side[0]} {one.column.text(side[1])}" for side in (one.ours, one.theirs))
        ratio = "—" if one.ratio is None else f"{one.ratio:.2f}"
        table.add_row(one.column.key, *sides, ratio, _verdict(one))
    return table


def missed_lines(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yields a line per required ratio that is missed."""
    for one in comparisons:
        if one.is_missed:
            ratio = "not measured" if one.ratio is None else f"{one.ratio:.2f}"
            yield f"missed: {one.column.key} is {ratio}, required {one.required:g}"


def _verdict(one: Comparison) -> str:
    if one.required is None:
        return ""
    return f"{one.required:g} [red]missed[/]" if one.is_missed else f"{one.required:g} met"
