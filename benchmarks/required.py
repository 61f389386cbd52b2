"""Required ratios of the best longspan contestant to the best vLLM contestant, for each column."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from columns import Column
from rich.table import Table
from tables import Medians, best_of


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best contestants of longspan and vLLM in one column.

    Attributes:
        ours, theirs: a contestant and its median. None if no contestant of that side was measured.
        required: the minimum ratio. None if there is none.
    """

    column: Column
    ours: tuple[str, float] | None
    theirs: tuple[str, float] | None
    required: float | None

    @property
    def ratio(self) -> float | None:
        """The ratio of both medians. Above 1, longspan is better. None if a side is missing."""
        return self.column.ratio(self.ours[1], self.theirs[1]) if self.ours and self.theirs else None

    @property
    def is_missed(self) -> bool:
        """True if a required ratio was not reached or not measured."""
        return self.required is not None and (self.ratio is None or self.ratio < self.required)


def parse_required(text: str, keys: Collection[str]) -> dict[str, float]:
    """Parse a text such as `key=ratio,key=ratio`.

    Raises:
        ValueError: for another format, or a key that is not in `keys`.
    """
    ratios = {}
    for item in text.split(","):
        key, _, ratio = item.strip().partition("=")
        if key not in keys:
            raise ValueError(f"no column {key!r}; there are {', '.join(keys)}")
        try:
            ratios[key] = float(ratio)
        except ValueError:
            raise ValueError(f"{item!r} needs a number, such as {key}=1.5") from None
    return ratios


def compare(
    columns: Sequence[Column],
    medians: Medians,
    ours: Collection[str],
    theirs: Collection[str],
    required: Mapping[str, float],
) -> list[Comparison]:
    """Return a comparison of both sides' best contestants for each column."""
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
    """Return a table with a row per column, with or without a required ratio."""
    table = Table("", "best of longspan", "best of vLLM", "ratio", "required", title="longspan over vLLM")
    for comparison in comparisons:
        sides = (
            "—" if side is None else f"{side[0]} {comparison.column.text(side[1])}"
            for side in (comparison.ours, comparison.theirs)
        )
        ratio = "—" if comparison.ratio is None else f"{comparison.ratio:.2f}"
        table.add_row(comparison.column.key, *sides, ratio, _verdict(comparison))
    return table


def missed_lines(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield a line per missed ratio."""
    for comparison in comparisons:
        if comparison.is_missed:
            ratio = "not measured" if comparison.ratio is None else f"{comparison.ratio:.2f}"
            yield f"missed: {comparison.column.key} is {ratio}, required {comparison.required:g}"


def _verdict(comparison: Comparison) -> str:
    if comparison.required is None:
        return ""
    return f"{comparison.required:g} [red]missed[/]" if comparison.is_missed else f"{comparison.required:g} met"
