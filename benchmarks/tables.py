"""Computes medians and ratios of samples, and shows them as tables and plots."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from columns import Column
from rich.table import Table

Medians = Mapping[str, Mapping[str, float]]
"""Medians by contestant and by column title. Columns that a contestant does not support are missing."""
_BASE = "transformers"


def medians_of(samples: Mapping[str, Mapping[str, Sequence[float]]], failures: Mapping[str, str]) -> Medians:
    """Return the medians of all contestants that did not fail."""
    return {
        name: {title: statistics.median(values) for title, values in titled.items() if values}
        for name, titled in samples.items()
        if name not in failures
    }


def speed_table(
    columns: Sequence[Column], medians: Medians, failures: Mapping[str, str], theirs: Sequence[str]
) -> Table:
    """Return a table with a row per contestant. Below each median are the ratios to the best of `theirs` and to
    transformers.
    """
    table = Table("", *(column.title for column in columns), title="Medians; below: × best vLLM | × transformers")
    for name, of_contestant in medians.items():
        cells = []
        for column in columns:
            if column.title not in of_contestant:
                cells.append("—")
                continue
            value = of_contestant[column.title]
            ratios = [
                "—" if best is None else f"{column.ratio(value, best[1]):.2f}"
                for best in (best_of(column, medians, theirs), best_of(column, medians, [_BASE]))
            ]
            cells.append(f"{column.text(value)}\n[dim]{' | '.join(ratios)}")
        table.add_row(name, *cells)
    for name in failures:
        table.add_row(f"{name}\n[red]failed: see below", *("—" for _ in columns))
    return table


def best_of(column: Column, medians: Medians, names: Collection[str]) -> tuple[str, float] | None:
    """Return the contestant with the best median, and that median. Return None if there are no medians."""
    values = {name: medians[name][column.title] for name in names if column.title in medians.get(name, {})}
    return (name := column.best(values), values[name]) if values else None


def largest_spread(samples: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Return a line with the largest ratio between repeats of one cell, as a measure of the noise."""
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
    """Return a table of the workers' time: a row per contestant and phase, in percent of the sum over all ranks."""
    categories = list(next(iter(shares.values()), {}))
    table = Table("", *categories, "total", title="Worker time in %")
    for (name, phase), seconds in shares.items():
        total = sum(seconds.values())
        table.add_row(f"{name}\n{phase}", *(f"{100 * part / total:.1f}" for part in seconds.values()), f"{total:.2f} s")
    for name in failures:
        table.add_row(f"{name}\n[red]failed: see below", *("—" for _ in categories), "—")
    return table


def plot(columns: Sequence[Column], samples: Mapping[str, Mapping[str, Sequence[float]]], folder: Path) -> None:
    """Write `peers.html` with a panel per column: a bar per contestant up to its median, and a point per round."""
    import plotly.graph_objects as go  # noqa: PLC0415  # optional
    from plotly.colors import qualitative  # noqa: PLC0415
    from plotly.subplots import make_subplots  # noqa: PLC0415

    names, wide = list(samples), 4
    rows = -(-len(columns) // wide)
    page = make_subplots(rows=rows, cols=wide, subplot_titles=[column.title for column in columns])
    for place, column in enumerate(columns):
        where = {"row": place // wide + 1, "col": place % wide + 1}
        for index, name in enumerate(names):
            if values := samples[name][column.title]:
                color = qualitative.Dark24[index]
                page.add_trace(go.Bar(x=[name], y=[statistics.median(values)], marker_color=color), **where)
                points = {"color": "black", "size": 5}
                page.add_trace(go.Scatter(x=[name] * len(values), y=values, mode="markers", marker=points), **where)
        page.update_yaxes(title_text=column.form.partition("}")[2].strip() or "tok/s", rangemode="tozero", **where)
    page.update_layout(height=320 * rows, width=1500, template="plotly_white", showlegend=False)
    folder.mkdir(parents=True, exist_ok=True)
    page.write_html(folder / "peers.html")
