"""The HTML page of simulated or recorded runs: settings, metrics, slowest requests and charts, side by side.

Importing this module needs plotly, which is optional and slow to import.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan.core.quantities import number, quantity, seconds
from longspan.cost import catalog
from longspan.cost.catalog import Kernels
from longspan.errors import ParameterError
from longspan.extras.timeline import Block, Record, Timeline, TimeSplit, roles_of
from longspan.sim.run import Served, percentile

try:
    from plotly.graph_objects import Bar, Figure, Scatter
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ImportError:
    raise ParameterError("report", "needs plotly: pip install 'longspan[report]'") from None

_MAX_BARS, _MAX_POINTS, _NUM_SLOWEST = 20_000, 5000, 10
_SAME_TIME_S = 1e-9
_LABELLED_PART = 0.005
"""Fraction of the whole time. Shorter blocks get no label."""
_NUMBERS = {"minsize": 8, "mode": "hide"}
_LAYOUT: dict[str, Any] = {"margin": {"l": 70, "r": 20, "t": 30, "b": 50}, "template": "plotly_white"}
_GOLDEN_ANGLE = 137.508
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")
"""One for each policy."""
_LINES = {"all": "solid", "prefill": "solid", "decode": "dash"}
_PERCENTS = np.concatenate([np.linspace(0, 99, 199), np.linspace(99.1, 100, 10)])
_MARKED = (50, 90, 99)
_UNBROKEN_CHARS = 24
_LEFT_PART = 0.15
"""Left fraction of a distribution. Labels there are right of their points, since the axis would cut them off."""
_ROW_PX, _LINE_PX, _GAP_PX = 26, 190, 60
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 0; } p { color: #555; margin: .3em 0; }
table { border-collapse: collapse; display: inline-table; vertical-align: top; margin: 0 3em .6em 0; }
th { text-align: right; font-weight: 600; padding: 0 1em .1em 0; } th:first-child { text-align: left; }
td { padding: .1em 1em .1em 0; } td + td { text-align: right; font-variant-numeric: tabular-nums; }
"""


def html_report(
    records: Sequence[Record],
    numbers: Sequence[Mapping[str, float | None]],
    settings: Mapping[str, object],
    *,
    hardware: str | None = None,
    attention: Kernels = "flash",
) -> str:
    """Return the page.

    Args:
        records: one for each policy, or for each run.
        numbers: the printed metrics of each record.
        settings: the settings of the runs, by name.
        hardware: the device whose data sheet gives the times of simulated steps. None for measured times.
        attention: the attention kernels of the cost model.
    """
    policies = [record.policy for record in records]
    simulated = [record.policy for record in records if not record.is_recorded]
    title = f"longspan {'simulate' if simulated else 'recording'}: {settings['model']}, {', '.join(policies)}"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _table((), [(name, _words(value)) for name, value in settings.items()]),
        _compared(policies, numbers),
        *([_accuracy(hardware, attention, simulated)] if simulated else []),
        _slowest(records),
    ]
    for name, note, figure in _figures(records):
        chart = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name.lower().replace(" ", "-"))
        parts.append(f"<h2>{name}</h2><p>{html.escape(note)}</p>{chart}")
    return "\n".join([*parts, "</body></html>"]) + "\n"


# ---------------------------------------------------------------- tables


def _compared(policies: Sequence[str], numbers: Sequence[Mapping[str, float | None]]) -> str:
    rows = [
        (quantity(name, None)[0], *(quantity(name, metrics.get(name))[1] for metrics in numbers))
        for name in dict.fromkeys(name for metrics in numbers for name in metrics)
    ]
    return _table(("", *policies) if len(policies) > 1 else (), rows)


def _accuracy(hardware: str | None, attention: Kernels, policies: Sequence[str]) -> str:
    """Return the recorded prediction errors for this hardware and these policies, or all errors if there are none."""
    computed, served = catalog.errors()
    parts = ["<h2>Accuracy</h2>"]
    if hardware is not None:
        kind = hardware.partition("-")[0]
        matching = [error for error in computed if (error.hardware, error.attention) == (kind, attention)]
        note = f"Prefills and decodes computed for {kind}, {attention} attention, against times measured in papers."
        if not matching:
            note = f"No times of a paper were compared for {kind} with {attention} attention. All comparisons:"
            matching = list(computed)
        missing = [policy for policy in policies if not any(policy in error.policies for error in matching)]
        if missing:
            note += f" None of them applies to {', '.join(missing)}."
        rows = [
            (e.what, f"{e.hardware}, {e.attention}", f"{e.mean:g} %", e.worst, ", ".join(e.policies)) for e in matching
        ]
        parts += [f"<p>{html.escape(note)}</p>", _table(("", "kind", "mean error", "worst", "as served by"), rows)]
    chosen = [error for error in served if error.policy in policies] or list(served)
    note = "Errors of simulated latencies against real ones, with a profile of two CPU instances near full load."
    missing = [policy for policy in policies if policy not in {error.policy for error in served}]
    if missing:
        note += f" There is no comparison for {', '.join(missing)}."
    errors = [
        (error.policy, *(f"{value:+g} %" for value in (error.ttft_p50, error.ttft_p90, error.tbt_p50, error.tbt_p90)))
        for error in chosen
    ]
    head = ("", "TTFT P50", "TTFT P90", "TBT P50", "TBT P90")
    return "\n".join([*parts, f"<p>{html.escape(note)}</p>", _table(head, errors)])


_SPLIT = ("queue", "compute", "exposed communication", "transfer", "decode")


def _slowest(records: Sequence[Record]) -> str:
    """Return a table of the requests with the highest TTFT, after a row with the mean of all requests."""
    head = ("request", "arrived", "prompt", "cached", "answer", "TTFT", "end to end", *_SPLIT)
    note = (
        "By TTFT. Queue: before its first token, no step of the request runs. Compute and exposed communication: steps "
        "with its prompt, which may include other requests. Transfer: until its KV is on the decode instance. The five "
        "times add up to the end-to-end time."
    )
    parts = [f"<h2>Slowest requests</h2><p>{note}</p>"]
    for record in records:
        served, split = record.result.served, record.timeline.split
        if not served:
            continue
        rows = [_request_row("mean", served, [split(request) for request in served])]
        slowest = sorted(served, key=lambda request: -request.ttft_s)[:_NUM_SLOWEST]
        rows += [_request_row(str(request.index), [request], [split(request)]) for request in slowest]
        title = f"<p><b>{html.escape(record.policy)}</b></p>" if len(records) > 1 else ""
        parts.append(title + _table(head, rows))
    return "\n".join(parts)


def _request_row(name: str, served: Sequence[Served], splits: Sequence[TimeSplit]) -> tuple[str, ...]:
    """Return a row with the means of requests. Unknown exposed communication is part of compute."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    by_cause = zip(*(asdict(split).values() for split in splits), strict=True)
    times = [[value for value in values if value is not None] for values in by_cause]
    return (
        name,
        seconds(served[0].arrival_s) if len(served) == 1 else "",
        *(
            number(round(mean([getattr(request, f"num_{what}_tokens") for request in served])))
            for what in ("prompt", "cached", "output")
        ),
        seconds(mean([request.ttft_s for request in served])),
        seconds(mean([request.e2e_s for request in served])),
        *(seconds(mean(values)) if values else "in compute" for values in times),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{html.escape(_unbroken(cell))}</td>" for cell in row) for row in rows]
    return f"<table>{f'<tr>{titles}</tr>' if head else ''}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _unbroken(cell: str) -> str:
    """Return a short cell with spaces that do not break its line. A long cell breaks, so that the page fits."""
    return cell.replace(" ", "\u00a0") if len(cell) <= _UNBROKEN_CHARS else cell


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


# ---------------------------------------------------------------- charts


def _figures(records: Sequence[Record]) -> list[tuple[str, str, Figure]]:
    ttft, tbt = "Fraction of requests by maximum TTFT.", "Fraction of all times between tokens by maximum time."
    lengths = "TTFT by prompt tokens, including cached tokens."
    return [
        ("Instances", *_over_time(records)),
        ("TTFT by length", lengths + _thinned(records), _by_length(records)),
        ("TTFT", ttft, _distribution(records, lambda record: record.result.ttfts_s)),
        ("TBT", tbt, _distribution(records, lambda record: record.result.tbts_s)),
    ]


def _over_time(records: Sequence[Record]) -> tuple[str, Figure]:
    """Plot all charts over time: the instances of each policy, then TTFTs, the queue and KV of all policies."""
    named, note = len(records) > 1, ""
    names = [_names(record) for record in records]
    heights = [_ROW_PX * len(rows) + 20 for rows in names] + 3 * [_LINE_PX]
    titles = [record.policy if named else "" for record in records]
    titles += ["TTFT, by arrival", "Waiting requests", "KV blocks, held and cached"]
    total = sum(heights) + _GAP_PX * (len(heights) - 1)
    figure = make_subplots(
        rows=len(heights),
        shared_xaxes=True,
        row_heights=heights,
        vertical_spacing=_GAP_PX / total,
        subplot_titles=titles,
    )
    for row, (record, shown) in enumerate(zip(records, names, strict=True), start=1):
        bars, note = _shown(record.timeline, _MAX_BARS // len(records))
        figure.add_trace(_gantt(bars, record), row, 1)
        figure.add_trace(_moved(record), row, 1)
        axis = {"tickvals": list(range(len(shown))), "ticktext": shown, "autorange": "reversed"}
        figure.update_yaxes(title="instance", **axis, row=row, col=1)
    for colour, record in zip(_COLOURS * len(records), records, strict=False):
        ttfts = _scatter(record, [request.arrival_s for request in _points(record)])
        queue = _steps(record, [moment.num_waiting for moment in record.timeline.moments], "waiting", "solid")
        for offset, lines in enumerate(([ttfts], [queue], _kv(record)), start=1):
            for line in lines:
                name = " ".join(filter(None, (record.policy if named else "", line.name)))
                line.update(name=name, marker={"color": colour}, showlegend=offset != 1 or named)
                figure.add_trace(line, len(records) + offset, 1)
    for row, unit in enumerate(("seconds", "requests", "% of blocks"), start=len(records) + 1):
        figure.update_yaxes(title=unit, rangemode="tozero", row=row, col=1)
    figure.update_xaxes(showticklabels=True)
    figure.update_xaxes(title="seconds", row=len(heights), col=1)
    figure.update_layout(height=total + 140, bargap=0.12, barmode="overlay", uniformtext=_NUMBERS, **_LAYOUT)
    figure.update_layout(legend={"orientation": "h", "yanchor": "top", "y": -60 / total})
    return f"{note} Zooming one chart zooms all charts over time.", figure


def _kv(record: Record) -> list[Scatter]:
    """Plot by role the held blocks, and above them the held or cached blocks, in percent."""
    lines = []
    for role in roles_of(record.cluster):
        prefix = "" if role == "all" else f"{role} "
        held = [100 * moment.held.get(role, 0.0) for moment in record.timeline.moments]
        cached = [100 * moment.cached.get(role, 0.0) for moment in record.timeline.moments]
        both = [sum(pair) for pair in zip(held, cached, strict=True)]
        lines.append(_steps(record, held, f"{prefix}held", _LINES[role]))
        lines.append(_steps(record, both, f"{prefix}held or cached", "dot"))
    return lines


def _steps(record: Record, values: Sequence[float], name: str, dash: str) -> Scatter:
    return Scatter(
        x=[moment.at_s for moment in record.timeline.moments],
        y=values,
        mode="lines",
        line={"shape": "hv", "dash": dash},
        name=name,
    )


def _points(record: Record) -> Sequence[Served]:
    """Return all requests, or an even selection if there are more than `_MAX_POINTS`."""
    served = record.result.served
    return served[:: -(-len(served) // _MAX_POINTS) or 1]


def _thinned(records: Sequence[Record]) -> str:
    max_requests = max((len(record.result.served) for record in records), default=0)
    return f" Of every {-(-max_requests // _MAX_POINTS)} requests one is shown." if max_requests > _MAX_POINTS else ""


def _by_length(records: Sequence[Record]) -> Figure:
    figure = _figure("tokens", "seconds")
    for colour, record in zip(_COLOURS * len(records), records, strict=False):
        points = _scatter(record, [request.num_prompt_tokens for request in _points(record)])
        figure.add_trace(points.update(name=record.policy, marker={"color": colour}))
    figure.update_layout(showlegend=len(records) > 1)
    if all(request.ttft_s > 0 for record in records for request in record.result.served):
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
    return figure


def _scatter(record: Record, x: Sequence[float]) -> Scatter:
    """Plot a point per request, with its TTFT as y."""
    served = _points(record)
    texts = [
        f"request {request.index}<br>{request.num_prompt_tokens:,} tokens, {request.num_cached_tokens:,} cached<br>"
        f"TTFT {seconds(request.ttft_s)}"
        for request in served
    ]
    return Scatter(
        x=x, y=[request.ttft_s for request in served], mode="markers", name="TTFT", hovertext=texts, hoverinfo="text"
    )


def _distribution(records: Sequence[Record], times: Callable[[Record], NDArray[np.float64]]) -> Figure:
    """Plot the cumulative distribution of times per policy, with marked percentiles."""
    figure = _figure("seconds", "%")
    every = np.concatenate([times(record) for record in records]) if records else np.empty(0)
    positive = len(every) == 0 or float(every.min()) > 0
    places = np.log(every) if positive else every
    left = places.min() + _LEFT_PART * np.ptp(places) if len(every) and np.ptp(every) > 0 else -np.inf
    for colour, record in zip(_COLOURS * len(records), records, strict=False):
        times_s = times(record)
        if not len(times_s):
            continue
        points = np.percentile(times_s, _PERCENTS)
        line = {"color": colour}
        figure.add_trace(Scatter(x=points.tolist(), y=_PERCENTS.tolist(), mode="lines", line=line, name=record.policy))
        marked = [percentile(times_s, percent) or 0.0 for percent in _MARKED]
        sides = ["right" if (np.log(value) if positive else value) <= left else "left" for value in marked]
        texts = [f"P{percent} {seconds(value)}" for percent, value in zip(_MARKED, marked, strict=True)]
        figure.add_trace(
            Scatter(
                x=marked,
                y=list(_MARKED),
                mode="markers+text",
                text=texts,
                textposition=[f"top {side}" for side in sides],
                marker={"color": colour},
                textfont={"color": colour},
                showlegend=False,
            )
        )
    if positive:
        figure.update_xaxes(type="log")
    figure.update_layout(showlegend=len(records) > 1)
    return figure


def _figure(x: str, y: str) -> Figure:
    figure = Figure()
    figure.update_layout(height=360, **_LAYOUT)
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


# ---------------------------------------------------------------- instances over time


def _shown(timeline: Timeline, max_blocks: int) -> tuple[Sequence[Block], str]:
    """Return the first blocks, at most `max_blocks`, and a note about them."""
    note = (
        "Each request has its own colour, and long blocks show its number. Each block is a prompt chunk in one step. "
        "Grey blocks are decodes. Thin bars are KV transfers to that instance."
    )
    blocks = _joined(sorted(timeline.blocks, key=lambda block: (block.start_s, block.instance, block.stage)))
    if timeline.complete and len(blocks) <= max_blocks:
        return blocks, note
    blocks = blocks[:max_blocks]
    return blocks, f"{note} Shown are the first {blocks[-1].start_s:,.1f} seconds."


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """Join consecutive decodes of a stage by the same group with equally many requests."""
    joined: list[Block] = []
    last: dict[tuple[int, int], int] = {}  # by instance and stage: the index of its latest block
    for block in blocks:
        row = block.instance, block.stage
        before = joined[last[row]] if row in last else None
        both_decode = before is not None and block.index is None is before.index
        is_alike = before is not None and (block.stop, block.group) == (before.stop, before.group)
        if before is not None and both_decode and is_alike and block.start_s - before.end_s < _SAME_TIME_S:
            joined[last[row]] = replace(before, end_s=block.end_s)
        else:
            last[row] = len(joined)
            joined.append(block)
    return joined


def _names(record: Record) -> list[str]:
    cluster = record.cluster
    if not cluster.has_roles:
        return list(record.rows.values())
    roles = ["prefill" if instance in cluster.prefill else "decode" for instance, _ in record.rows]
    return [f"{role} {name}" for role, name in zip(roles, record.rows.values(), strict=True)]


def _gantt(blocks: Sequence[Block], record: Record) -> Bar:
    rows = {pair: number for number, pair in enumerate(record.rows)}
    wide_s = _LABELLED_PART * max((block.end_s for block in blocks), default=0.0)
    return Bar(
        orientation="h",
        y=[rows[block.instance, block.stage] for block in blocks],
        base=[block.start_s for block in blocks],
        x=[block.end_s - block.start_s for block in blocks],
        marker={
            "color": ["#ddd" if block.index is None else _colour(block.index) for block in blocks],
            "line": {"width": [0.0 if block.index is None else 0.5 for block in blocks], "color": "white"},
        },
        text=["" if b.index is None or b.end_s - b.start_s <= wide_s else str(b.index) for b in blocks],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[_described(block) for block in blocks],
        hoverinfo="text",
        showlegend=False,
    )


def _moved(record: Record) -> Bar:
    """Plot transfers between instances as thin bars at the lower edge of the receiving instances."""
    rows = {pair: number for number, pair in enumerate(record.rows)}
    transfers = islice((move for move in record.timeline.transfers if move.way == "across"), _MAX_BARS)
    bars = [(target, move) for move in transfers for target in move.targets if (target, 0) in rows]
    return Bar(
        orientation="h",
        y=[rows[target, 0] for target, _ in bars],
        base=[move.start_s for _, move in bars],
        x=[move.end_s - move.start_s for _, move in bars],
        width=0.2,
        offset=0.24,
        marker={"color": [_colour(move.index) for _, move in bars], "line": {"width": 0.5, "color": "#222"}},
        hovertext=[
            f"KV of request {move.index}<br>{move.num_blocks:,} blocks, instances {', '.join(map(str, move.sources))} "
            f"to {', '.join(map(str, move.targets))}<br>{move.start_s:.3f} to {move.end_s:.3f} s"
            for _, move in bars
        ],
        hoverinfo="text",
        showlegend=False,
    )


def _colour(index: int) -> str:
    """Return a colour. Consecutive arrivals get distant hues, similar hues differ in lightness."""
    return f"hsl({index * _GOLDEN_ANGLE % 360:.0f}, 62%, {48 + 8 * (index % 3)}%)"


def _described(block: Block) -> str:
    when = f"{block.start_s:.3f} to {block.end_s:.3f} s"
    if block.index is None:
        return f"{block.stop} decodes<br>{when}"
    tokens = f"tokens {block.start:,} to {block.stop:,}"
    return f"request {block.index}<br>{tokens}<br>{len(block.group)} instances, {block.exchange}<br>{when}"
