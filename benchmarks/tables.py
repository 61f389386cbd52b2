"""Samples to medians, rates and ratios, and these to tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

SAME_STEP_S = 1e-3
"""Time stamps that differ by less belong to one step: no step of the model is this short."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One quantity that every contestant is measured by.

    Attributes:
        length: prompt tokens per sequence.
        batch: sequences at a time.
        new_tokens: per sequence; 1 measures the time to first token, more measure decoding.
    """

    length: int
    batch: int = 1
    new_tokens: int = 1

    @property
    def is_ttft(self) -> bool:
        """Tells whether it is in seconds, of which fewer are better; otherwise tokens per second."""
        return self.new_tokens == 1

    @property
    def title(self) -> str:
        """Returns how tables and JSON name it."""
        return f"TTFT {self.length:,}" if self.is_ttft else f"tok/s, batch {self.batch}"

    def value(self, seconds: float, arrivals: Sequence[Sequence[float]]) -> float:
        """Reads TTFT in seconds, or decoded tokens per second, from what `serving` answers."""
        return seconds if self.is_ttft else decode_rate(arrivals)

    def text(self, value: float) -> str:
        """Writes a value with its unit."""
        return f"{value:.2f} s" if self.is_ttft else f"{value:.0f}"

    def ratio(self, value: float, reference: float) -> float:
        """Computes a ratio to the reference: above 1 is better."""
        return reference / value if self.is_ttft else value / reference

    def best(self, values: Sequence[float]) -> float:
        """Picks the best of some values."""
        return min(values) if self.is_ttft else max(values)


def decode_rate(arrivals: Sequence[Sequence[float]]) -> float:
    """Counts the tokens that come after every sequence has its first one, per second from there to the last token.

    When all sequences go in step, this is `(new_tokens - 1) * batch / (last - first)`.
    """
    first = max(times[0] for times in arrivals)
    last = max(times[-1] for times in arrivals)
    return sum(time > first + SAME_STEP_S for times in arrivals for time in times) / (last - first)


def speed_table(
    columns: Sequence[Column],
    samples: Mapping[str, Mapping[str, Sequence[float]]],
    failures: Mapping[str, str],
    peers: Sequence[str],
) -> Table:
    """Prints a row per contestant; under each median the ratio to the best peer, and to transformers."""
    medians = {
        name: {title: statistics.median(values) for title, values in titled.items()}
        for name, titled in samples.items()
        if name not in failures
    }
    table = Table("", *(column.title for column in columns), title="Medians; below: × best peer | × transformers")
    for name in samples:
        if name in failures:
            table.add_row(f"{name}\n[red]failed: see below", *("—" for _ in columns))
            continue
        cells = []
        for column in columns:
            value = medians[name][column.title]
            against_peers = [medians[peer][column.title] for peer in peers if peer in medians]
            best = f"{column.ratio(value, column.best(against_peers)):.2f}" if against_peers else "—"
            base = medians.get("transformers")
            to_base = f"{column.ratio(value, base[column.title]):.2f}" if base else "—"
            cells.append(f"{column.text(value)}\n[dim]{best} | {to_base}")
        table.add_row(name, *cells)
    return table


def largest_spread(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Says where the repeats of one cell differ most, which says how far to trust the rest."""
    spreads = [
        (max(values) / min(values), f"{name}, {title}")
        for name, titled in samples.items()
        for title, values in titled.items()
        if values
    ]
    if not spreads:
        return "nothing measured"
    factor, where = max(spreads)
    return f"largest spread between repeats: {factor:.2f}x ({where})"


def shares_table(shares: Mapping[tuple[str, str], Mapping[str, float]], failures: Mapping[str, str]) -> Table:
    """Prints where the workers' time goes: a row per contestant and phase, in percent of the sum over all its ranks."""
    categories = list(next(iter(shares.values()), {}))
    table = Table("", *categories, "total", title="Worker time in %")
    for (name, phase), seconds in shares.items():
        total = sum(seconds.values())
        table.add_row(f"{name}\n{phase}", *(f"{100 * part / total:.1f}" for part in seconds.values()), f"{total:.2f} s")
    for name in failures:
        table.add_row(f"{name}\n[red]failed: see below", *("—" for _ in categories), "—")
    return table
