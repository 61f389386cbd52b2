"""Plots of latencies: TTFT by prompt length and by arrival, and distributions, with the lines of the service level."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from plotly.graph_objects import Figure, Scatter

from longspan.core.quantities import seconds
from longspan.extras.report.axes import add_slo, figure, log_axis, seconds_axis
from longspan.extras.report.page import chart, section, style_of, table
from longspan.extras.report.verdict import name_cell, slo_lines
from longspan.extras.timeline import Record
from longspan.sim.run import Result, Served, percentile
from longspan.sim.spec import ServiceLevel

_MAX_POINTS = 5000
_PERCENTS = np.concatenate([np.linspace(0, 99, 199), np.linspace(99.1, 100, 10)])
_MARKED = (50, 90, 99)
_OPACITY = 0.7
"""Opacity of points. Points may cover each other."""


def latencies(records: Sequence[Record], level: ServiceLevel) -> str:
    """Return the distributions of latencies, and TTFT by length."""
    ttft, tpot = slo_lines(level, "slo_ttft"), slo_lines(level, "slo_tbt")
    plots = (
        ("ttft", "TTFT", ttft, lambda result: result.ttfts_s),
        ("tpot", "TPOT, the mean time between tokens of a request", tpot, lambda result: result.tpots_s),
        ("tbt", "TBT, all times between tokens", tpot, lambda result: result.tbts_s),
    )
    parts = [distribution(records, name, title, lines, of) for name, title, lines, of in plots]
    bound = " The bound of TPOT is also shown with TBT." if tpot else ""
    note = f"Percent of requests, or of times, that are at most as long.{bound}"
    parts.append(chart(_by_length(records, level), "ttft-by-length", title="TTFT by tokens of the prompt"))
    cells = "".join(f"<div>{part}</div>" for part in parts if part)
    return section("Latencies", note + _thinned(records), f'<div class="grid">{cells}</div>')


# ---------------------------------------------------------------- distributions


def distribution(
    records: Sequence[Record],
    name: str,
    title: str,
    lines: Sequence[tuple[str, float]],
    times: Callable[[Result], NDArray[np.float64]],
) -> str:
    """Return the cumulative distribution of times per policy, and a table of its percentiles if there are several."""
    all_times = [times(record.result) for record in records]
    if not any(len(times_s) for times_s in all_times):
        return ""
    drawn, rows = figure(), list[tuple[str, ...]]()
    drawn.update_xaxes(**seconds_axis(_with_bounds(all_times, lines)))
    drawn.update_yaxes(ticksuffix="%", range=[0, 104])
    least_s = _least(all_times)
    for place, (record, times_s) in enumerate(zip(records, all_times, strict=True)):
        if not len(times_s):
            continue
        style, shown_s = style_of(place), np.maximum(times_s, least_s)
        points = np.percentile(shown_s, _PERCENTS)
        marked = [percentile(times_s, percent) or 0.0 for percent in _MARKED]
        texts = [f"P{percent} {seconds(value)}" for percent, value in zip(_MARKED, marked, strict=True)]
        drawn.add_trace(
            Scatter(
                x=points.tolist(),
                y=_PERCENTS.tolist(),
                mode="lines",
                line={"color": style.colour, "dash": style.dash},
                name=record.policy,
                meta=record.policy,
                hovertemplate=f"{record.policy}<br>%{{y:.1f}}% ≤ %{{x:.4s}}s<extra></extra>",
            )
        )
        drawn.add_trace(
            Scatter(
                x=np.maximum(marked, least_s).tolist(),
                y=list(_MARKED),
                mode="markers",
                name=record.policy,
                meta=record.policy,
                hovertext=[f"{record.policy}<br>{text}" for text in texts],
                hoverinfo="text",
                marker={"color": style.colour, "symbol": style.symbol},
            )
        )
        rows.append((name_cell(record.policy, place), *(seconds(value) for value in marked)))
    add_slo(drawn, lines, "x", (0.0, 100.0))
    percentiles = table(("", *(f"P{percent}" for percent in _MARKED)), rows)
    return chart(drawn, name, title=title) + percentiles


def _least(all_times: Sequence[NDArray[np.float64]]) -> float:
    """Return the shortest positive time. On a logarithmic axis times of 0 are shown there."""
    positive = [float(times_s[times_s > 0].min()) for times_s in all_times if np.any(times_s > 0)]
    return min(positive, default=0.0)


def _with_bounds(all_times: Sequence[NDArray[np.float64]], lines: Sequence[tuple[str, float]]) -> NDArray[np.float64]:
    return np.concatenate([*all_times, [bound_s for _, bound_s in lines]])


# ---------------------------------------------------------------- a point per request


def by_arrival(records: Sequence[Record], level: ServiceLevel, end_s: float) -> Figure:
    """Plot the TTFT of each request at its arrival."""
    return _ttfts(records, level, lambda request: request.arrival_s, (0.0, end_s), height=240)


def _by_length(records: Sequence[Record], level: ServiceLevel) -> Figure:
    lengths = [request.num_prompt_tokens for record in records for request in record.result.served] or [1]
    drawn = _ttfts(records, level, lambda request: request.num_prompt_tokens, (min(lengths), max(lengths)))
    drawn.update_xaxes(tickformat="~s")
    if min(lengths) > 0:
        drawn.update_xaxes(**log_axis(np.array(lengths)))
    return drawn


def _ttfts(
    records: Sequence[Record],
    level: ServiceLevel,
    x: Callable[[Served], float],
    ends: tuple[float, float],
    height: int = 320,
) -> Figure:
    drawn = figure(height)
    times, lines = [record.result.ttfts_s for record in records], slo_lines(level, "slo_ttft")
    drawn.update_yaxes(**seconds_axis(_with_bounds(times, lines)))
    least_s = _least(times)
    for place, record in enumerate(records):
        style, served = style_of(place), _points(record)
        drawn.add_trace(
            Scatter(
                x=[x(request) for request in served],
                y=[max(request.ttft_s, least_s) for request in served],
                mode="markers",
                name=record.policy,
                meta=record.policy,
                hovertext=[f"{record.policy}, {_described(request)}" for request in served],
                hoverinfo="text",
                marker={"color": style.colour, "symbol": style.symbol, "size": 6, "opacity": _OPACITY},
                cliponaxis=False,
            )
        )
    add_slo(drawn, lines, "y", ends)
    return drawn


def _points(record: Record) -> Sequence[Served]:
    """Return all requests, or an even selection if there are more than `_MAX_POINTS`."""
    served = record.result.served
    return served[:: -(-len(served) // _MAX_POINTS) or 1]


def _thinned(records: Sequence[Record]) -> str:
    max_requests = max((len(record.result.served) for record in records), default=0)
    return f" Of every {-(-max_requests // _MAX_POINTS)} requests one is shown." if max_requests > _MAX_POINTS else ""


def _described(request: Served) -> str:
    return (
        f"request {request.index}<br>{request.num_prompt_tokens:,} tokens, {request.num_cached_tokens:,} cached<br>"
        f"TTFT {seconds(request.ttft_s)}"
    )
