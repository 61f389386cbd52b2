"""The page of a simulation: what was simulated, numbers, the slowest requests, and pictures; policies side by side."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longspan.core.cluster import Cluster
from longspan.core.quantities import number, quantity, seconds
from longspan.cost import catalog
from longspan.cost.catalog import Kernels
from longspan.errors import ParameterError
from longspan.extras.timeline import Block, Record, Timeline, TimeSplit, Transfer, roles_of
from longspan.sim.run import Served, percentile

if TYPE_CHECKING:
    from plotly.graph_objects import Bar, Figure, Scatter

_MAX_BARS, _MAX_POINTS, _NUM_SLOWEST = 20_000, 5000, 10
_SAME_TIME_S = 1e-9
_LABELLED_PART = 0.005
"""A part of the whole time: shorter blocks have no room for a number."""
_NUMBERS = {"minsize": 8, "mode": "hide"}
_LAYOUT: dict[str, Any] = {"margin": {"l": 70, "r": 20, "t": 30, "b": 50}, "template": "plotly_white"}
_GOLDEN_ANGLE = 137.508
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")
"""One for each policy."""
_LINES = {"all": "solid", "prefill": "solid", "decode": "dash"}
_PERCENTS = np.concatenate([np.linspace(0, 99, 199), np.linspace(99.1, 100, 10)])
_MARKED = (50, 90, 99)
_ROW_PX, _LINE_PX, _GAP_PX = 26, 190, 60
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 0; } p { color: #555; margin: .3em 0; }
table { border-collapse: collapse; display: inline-table; vertical-align: top; margin: 0 3em .6em 0; }
th { text-align: right; font-weight: 600; padding: 0 1em .1em 0; } th:first-child { text-align: left; }
td { padding: .1em 1em .1em 0; white-space: nowrap; } td + td { text-align: right; font-variant-numeric: tabular-nums; }
"""


def check_report() -> None:
    """Raises ValueError when the drawing library is missing, with the remedy."""
    try:
        import plotly.graph_objects  # noqa: F401, PLC0415  # optional, and slow to import
    except ImportError:
        raise ParameterError("report", "needs plotly: pip install 'longspan[report]'") from None


def html_report(
    records: Sequence[Record],
    numbers: Sequence[Mapping[str, float | None]],
    settings: Mapping[str, object],
    *,
    hardware: str | None,
    attention: Kernels,
) -> str:
    """Writes the page.

    Args:
        records: one for each policy.
        numbers: of each, as they are printed.
        settings: what was simulated, in words.
        hardware: the device whose data sheet steps were computed from; None when they were measured.
        attention: the kernels that were computed with.
    """
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  # optional

    title = f"longspan simulate: {settings['model']}, {', '.join(one.policy for one in records)}"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _table((), [(name, _words(value)) for name, value in settings.items()]),
        _compared(records, numbers),
        _accuracy(hardware, attention, [one.policy for one in records]),
        _slowest(records),
    ]
    for name, note, figure in _figures(records):
        drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name.lower().replace(" ", "-"))
        parts.append(f"<h2>{name}</h2><p>{html.escape(note)}</p>{drawn}")
    return "\n".join([*parts, "</body></html>"]) + "\n"


# ---------------------------------------------------------------- tables


def _compared(records: Sequence[Record], numbers: Sequence[Mapping[str, float | None]]) -> str:
    rows = [
        (quantity(name, None)[0], *(quantity(name, one.get(name))[1] for one in numbers))
        for name in dict.fromkeys(name for one in numbers for name in one)
    ]
    return _table(("", *(one.policy for one in records)) if len(records) > 1 else (), rows)


def _accuracy(hardware: str | None, attention: Kernels, policies: Sequence[str]) -> str:
    """Tells the recorded errors of such predictions; or, if there are none, which others there are."""
    computed, served = catalog.errors()
    parts = ["<h2>How far from reality</h2>"]
    if hardware is not None:
        kind = hardware.partition("-")[0]
        found = [one for one in computed if (one.hardware, one.attention) == (kind, attention)]
        told = f"Prefills and decodes computed for {kind}, {attention} attention, against what papers measured."
        if not found:
            told = f"No paper's times were compared for {kind} with {attention} attention. Those that were:"
            found = list(computed)
        missing = [policy for policy in policies if not any(policy in one.policies for one in found)]
        if missing:
            told += f" None of them was measured with what {', '.join(missing)} does."
        rows = [
            (one.what, f"{one.hardware}, {one.attention}", f"{one.mean:g} %", one.worst, ", ".join(one.policies))
            for one in found
        ]
        parts += [f"<p>{html.escape(told)}</p>", _table(("", "kind", "mean error", "worst", "as served by"), rows)]
    chosen = [one for one in served if one.policy in policies] or list(served)
    told = "Latencies of served requests, simulated by a profile of two CPU instances near full load, over real ones."
    missing = [policy for policy in policies if policy not in {one.policy for one in served}]
    if missing:
        told += f" Those of {', '.join(missing)} have not been compared."
    errors = [
        (one.policy, *(f"{value:+g} %" for value in (one.ttft_p50, one.ttft_p90, one.tbt_p50, one.tbt_p90)))
        for one in chosen
    ]
    head = ("", "TTFT P50", "TTFT P90", "TBT P50", "TBT P90")
    return "\n".join([*parts, f"<p>{html.escape(told)}</p>", _table(head, errors)])


_SPLIT = ("queue", "compute", "exposed communication", "transfer", "decode")


def _slowest(records: Sequence[Record]) -> str:
    """Lists the requests with the latest first tokens, below the mean of all."""
    head = ("request", "arrived", "prompt", "cached", "answer", "TTFT", "end to end", *_SPLIT)
    note = (
        "By TTFT. Queue: no step of it runs before its first token. Compute and exposed communication: the steps with "
        "its prompt, which others may share. Transfer: until its KV is where it decodes. These five add up to the time "
        "from end to end."
    )
    parts = [f"<h2>Slowest requests</h2><p>{note}</p>"]
    for record in records:
        served, split = record.result.served, record.timeline.split
        if not served:
            continue
        rows = [_request_row("mean", served, [split(one) for one in served])]
        slowest = sorted(served, key=lambda one: -one.ttft_s)[:_NUM_SLOWEST]
        rows += [_request_row(str(one.index), [one], [split(one)]) for one in slowest]
        named = f"<p><b>{html.escape(record.policy)}</b></p>" if len(records) > 1 else ""
        parts.append(named + _table(head, rows))
    return "\n".join(parts)


def _request_row(name: str, served: Sequence[Served], splits: Sequence[TimeSplit]) -> tuple[str, ...]:
    """Writes the means of some requests; exposed communication that is not told apart is part of computing."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    times = [[value for value in values if value is not None] for values in zip(*map(_seconds_of, splits), strict=True)]
    return (
        name,
        seconds(served[0].arrival_s) if len(served) == 1 else "",
        *(
            number(round(mean([getattr(one, f"num_{what}_tokens") for one in served])))
            for what in ("prompt", "cached", "output")
        ),
        seconds(mean([one.ttft_s for one in served])),
        seconds(mean([one.e2e_s for one in served])),
        *(seconds(mean(values)) if values else "in compute" for values in times),
    )


def _seconds_of(split: TimeSplit) -> tuple[float | None, ...]:
    return tuple(asdict(split).values())


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table>{f'<tr>{titles}</tr>' if head else ''}{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


# ---------------------------------------------------------------- pictures


def _figures(records: Sequence[Record]) -> list[tuple[str, str, Figure]]:
    note = "Part of all requests whose first token came within so many seconds."
    lengths = "Against the prompt's tokens, cached ones included."
    return [
        ("Instances", *_over_time(records)),
        ("TTFT by length", lengths + _thinned(records), _by_length(records)),
        ("TTFT", note, _distribution(records, lambda record: record.result.ttfts_s)),
        (
            "TBT",
            "Part of all times between tokens that were at most so long.",
            _distribution(records, lambda record: record.result.tbts_s),
        ),
    ]


def _over_time(records: Sequence[Record]) -> tuple[str, Figure]:
    """Draws what shares the axis of time: instances of each policy; TTFTs, the queue and KV of all policies."""
    from plotly.subplots import make_subplots  # noqa: PLC0415  # optional

    named, note = len(records) > 1, ""
    names = [_names(one.cluster) for one in records]
    heights = [_ROW_PX * len(one) + 20 for one in names] + 3 * [_LINE_PX]
    titles = [one.policy if named else "" for one in records]
    titles += ["TTFT, by arrival", "Requests that wait", "KV blocks, held and cached"]
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
        figure.add_trace(_gantt(bars, record.cluster), row, 1)
        figure.add_trace(_moved(record.timeline.transfers[:_MAX_BARS], record.cluster), row, 1)
        axis = {"tickvals": list(range(len(shown))), "ticktext": shown, "autorange": "reversed"}
        figure.update_yaxes(title="instance", **axis, row=row, col=1)
    for colour, record in zip(_COLOURS * len(records), records, strict=False):
        for offset, lines in enumerate((_ttfts(record), _queue(record), _kv(record)), start=1):
            for line in lines:
                called = " ".join(filter(None, (record.policy if named else "", line.name)))
                line.update(name=called, marker={"color": colour}, showlegend=offset != 1 or named)
                figure.add_trace(line, len(records) + offset, 1)
    for row, unit in enumerate(("seconds", "requests", "% of blocks"), start=len(records) + 1):
        figure.update_yaxes(title=unit, rangemode="tozero", row=row, col=1)
    figure.update_xaxes(showticklabels=True)
    figure.update_xaxes(title="seconds", row=len(heights), col=1)
    figure.update_layout(height=total + 140, bargap=0.12, barmode="overlay", uniformtext=_NUMBERS, **_LAYOUT)
    figure.update_layout(legend={"orientation": "h", "yanchor": "top", "y": -60 / total})
    return f"{note} Zooming one picture zooms all with the same axis of time.", figure


def _ttfts(record: Record) -> list[Scatter]:
    served = _points(record)
    return [_scatter(record, [one.arrival_s for one in served])]


def _queue(record: Record) -> list[Scatter]:
    return [_steps(record, [one.num_waiting for one in record.timeline.moments], "waiting", "solid")]


def _kv(record: Record) -> list[Scatter]:
    """Draws by role what requests held, and above it what was cached for others."""
    lines = []
    for role in roles_of(record.cluster):
        words = "" if role == "all" else f"{role} "
        held = [100 * one.held[role] for one in record.timeline.moments]
        cached = [100 * one.cached[role] for one in record.timeline.moments]
        both = [sum(pair) for pair in zip(held, cached, strict=True)]
        lines.append(_steps(record, held, f"{words}held", _LINES[role]))
        lines.append(_steps(record, both, f"{words}held or cached", "dot"))
    return lines


def _steps(record: Record, values: Sequence[float], name: str, dash: str) -> Scatter:
    from plotly.graph_objects import Scatter  # noqa: PLC0415  # optional

    return Scatter(
        x=[one.at_s for one in record.timeline.moments],
        y=values,
        mode="lines",
        line={"shape": "hv", "dash": dash},
        name=name,
    )


def _points(record: Record) -> Sequence[Served]:
    """Returns some of the requests, evenly spread, if they are too many to be drawn."""
    served = record.result.served
    return served[:: -(-len(served) // _MAX_POINTS) or 1]


def _thinned(records: Sequence[Record]) -> str:
    most = max((len(one.result.served) for one in records), default=0)
    return f" Of every {-(-most // _MAX_POINTS)} requests one is shown." if most > _MAX_POINTS else ""


def _by_length(records: Sequence[Record]) -> Figure:
    figure = _figure("tokens", "seconds")
    for colour, record in zip(_COLOURS * len(records), records, strict=False):
        points = _scatter(record, [one.num_prompt_tokens for one in _points(record)])
        figure.add_trace(points.update(name=record.policy, marker={"color": colour}))
    figure.update_layout(showlegend=len(records) > 1)
    if all(one.ttft_s > 0 for record in records for one in record.result.served):
        figure.update_xaxes(type="log")
        figure.update_yaxes(type="log")
    return figure


def _scatter(record: Record, x: Sequence[float]) -> Scatter:
    """Draws a point per request, at its TTFT."""
    from plotly.graph_objects import Scatter  # noqa: PLC0415  # optional

    served = _points(record)
    words = [
        f"request {one.index}<br>{one.num_prompt_tokens:,} tokens, {one.num_cached_tokens:,} cached<br>"
        f"TTFT {seconds(one.ttft_s)}"
        for one in served
    ]
    return Scatter(
        x=x, y=[one.ttft_s for one in served], mode="markers", name="TTFT", hovertext=words, hoverinfo="text"
    )


def _distribution(records: Sequence[Record], times: Callable[[Record], NDArray[np.float64]]) -> Figure:
    """Draws the cumulative distributions of some times, with percentiles marked."""
    from plotly.graph_objects import Scatter  # noqa: PLC0415  # optional

    figure, positive = _figure("seconds", "%"), True
    for colour, record in zip(_COLOURS * len(records), records, strict=False):
        times_s = times(record)
        if not len(times_s):
            continue
        points = np.percentile(times_s, _PERCENTS)
        positive = positive and points[0] > 0
        line = {"color": colour}
        figure.add_trace(Scatter(x=points.tolist(), y=_PERCENTS.tolist(), mode="lines", line=line, name=record.policy))
        marked = [percentile(times_s, percent) or 0.0 for percent in _MARKED]
        texts = [f"P{percent} {seconds(value)}" for percent, value in zip(_MARKED, marked, strict=True)]
        figure.add_trace(
            Scatter(
                x=marked,
                y=list(_MARKED),
                mode="markers+text",
                text=texts,
                textposition="top left",
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
    from plotly.graph_objects import Figure  # noqa: PLC0415  # optional

    figure = Figure()
    figure.update_layout(height=360, **_LAYOUT)
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, rangemode="tozero")
    return figure


# ---------------------------------------------------------------- what instances did


def _shown(timeline: Timeline, most: int) -> tuple[Sequence[Block], str]:
    """Returns the first blocks, as many as can be drawn, and a note about them."""
    note = (
        "Each request has a colour of its own, and its number where there is room; each block is what one step "
        "computes of its prompt; grey are decodes; thin bars are its KV on its way to that instance."
    )
    blocks = _joined(sorted(timeline.blocks, key=lambda one: (one.start_s, one.instance, one.stage)))
    if timeline.complete and len(blocks) <= most:
        return blocks, note
    blocks = blocks[:most]
    return blocks, f"{note} Shown are the first {blocks[-1].start_s:,.1f} seconds."


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """Joins neighbouring decodes of an instance in which as many requests take part."""
    found: list[Block] = []
    last: dict[tuple[int, int], int] = {}
    """The latest block of each stage of an instance, as its index."""
    for one in blocks:
        row = one.instance, one.stage
        before = found[last[row]] if row in last else None
        both_decode = before is not None and one.index is None is before.index and one.stop == before.stop
        if before is not None and both_decode and one.start_s - before.end_s < _SAME_TIME_S:
            found[last[row]] = replace(before, end_s=one.end_s)
        else:
            last[row] = len(found)
            found.append(one)
    return found


def _names(cluster: Cluster) -> list[str]:
    if not cluster.has_roles:
        return cluster.row_names
    roles = ["prefill" if instance in cluster.prefill else "decode" for instance, _ in cluster.rows]
    return [f"{role} {name}" for role, name in zip(roles, cluster.row_names, strict=True)]


def _gantt(blocks: Sequence[Block], cluster: Cluster) -> Bar:
    from plotly.graph_objects import Bar  # noqa: PLC0415  # optional

    wide_s = _LABELLED_PART * max((one.end_s for one in blocks), default=0.0)
    return Bar(
        orientation="h",
        y=[cluster.rows[one.instance, one.stage] for one in blocks],
        base=[one.start_s for one in blocks],
        x=[one.end_s - one.start_s for one in blocks],
        marker={
            "color": ["#ddd" if one.index is None else _colour(one.index) for one in blocks],
            "line": {"width": [0.0 if one.index is None else 0.5 for one in blocks], "color": "white"},
        },
        text=["" if one.index is None or one.end_s - one.start_s <= wide_s else str(one.index) for one in blocks],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[_described(one) for one in blocks],
        hoverinfo="text",
        showlegend=False,
    )


def _moved(transfers: Sequence[Transfer], cluster: Cluster) -> Bar:
    """Draws transfers as thin bars at the lower edge of the instances that receive them."""
    from plotly.graph_objects import Bar  # noqa: PLC0415  # optional

    bars = [(target, one) for one in transfers for target in one.targets]
    return Bar(
        orientation="h",
        y=[cluster.rows[target, 0] for target, _ in bars],
        base=[one.start_s for _, one in bars],
        x=[one.end_s - one.start_s for _, one in bars],
        width=0.2,
        offset=0.24,
        marker={"color": [_colour(one.index) for _, one in bars], "line": {"width": 0.5, "color": "#222"}},
        hovertext=[
            f"KV of request {one.index}<br>{one.num_blocks:,} blocks, instances {', '.join(map(str, one.sources))} to "
            f"{', '.join(map(str, one.targets))}<br>{one.start_s:.3f} to {one.end_s:.3f} s"
            for _, one in bars
        ],
        hoverinfo="text",
        showlegend=False,
    )


def _colour(index: int) -> str:
    """Gives neighbours in the order of arrival hues that are far apart; others differ at least in lightness."""
    return f"hsl({index * _GOLDEN_ANGLE % 360:.0f}, 62%, {48 + 8 * (index % 3)}%)"


def _described(block: Block) -> str:
    when = f"{block.start_s:.3f} to {block.end_s:.3f} s"
    if block.index is None:
        return f"{block.stop} decodes<br>{when}"
    tokens = f"tokens {block.start:,} to {block.stop:,}"
    return f"request {block.index}<br>{tokens}<br>{len(block.group)} instances, {block.exchange}<br>{when}"
