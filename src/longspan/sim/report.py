"""A simulation as one HTML page with pictures, which needs nothing from the network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longspan.sim.result import Result, summary
from longspan.sim.timeline import Block, Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MOST_BARS = 20_000
_GOLDEN_ANGLE = 137.508
_PERCENTS = np.concatenate([np.linspace(0, 99, 199), np.linspace(99.1, 100, 10)])
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 0; } p { color: #555; margin: .3em 0; }
table { border-collapse: collapse; display: inline-table; vertical-align: top; margin-right: 3em; }
td { padding: .1em 1em .1em 0; } td + td { text-align: right; font-variant-numeric: tabular-nums; }
"""


def check_report() -> None:
    """Raises ValueError when the library that draws is not there, with the remedy."""
    try:
        import plotly.graph_objects  # noqa: F401, PLC0415  # optional, and slow to import
    except ImportError:
        raise ValueError("--report needs plotly: pip install 'longspan[report]'") from None


def html_report(result: Result, timeline: Timeline, settings: Mapping[str, object]) -> str:
    """The page: what was simulated, the numbers, distributions of times, queue and KV, and what instances did."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  # optional

    title = "longspan simulate: " + ", ".join(str(settings[key]) for key in ("model", "policy") if key in settings)
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _table(settings),
        _table(summary(result)),
    ]
    for name, note, figure in _figures(result, timeline):
        drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name.lower().replace(" ", "-"))
        parts.append(f"<h2>{name}</h2><p>{html.escape(note)}</p>{drawn}")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _figures(result: Result, timeline: Timeline) -> list[tuple[str, str, Figure]]:
    waiting = [(one.at_s, one.num_waiting) for one in timeline.moments]
    held = [(one.at_s, 100 * one.kv_used) for one in timeline.moments]
    bars, note = _shown(timeline)
    return [
        ("Instances", note, _gantt(bars, len(result.busy_s))),
        ("TTFT", "Part of all requests whose first token came within so many seconds.", _share(result.ttfts_s)),
        ("TBT", "Part of all times between tokens that were at most so long.", _share(result.tbts_s)),
        ("Queue", "Requests that waited.", _line(waiting, "requests")),
        ("KV", "Blocks that requests held, of all instances.", _line(held, "% of blocks")),
    ]


def _shown(timeline: Timeline) -> tuple[Sequence[Block], str]:
    """The first blocks, as many as can be drawn, and what to say about them."""
    note = "Each request has a colour of its own, each block is a chunk of its prompt; grey are decodes."
    blocks = sorted(timeline.blocks, key=lambda one: (one.start_s, one.instance))
    if timeline.complete and len(blocks) <= _MOST_BARS:
        return blocks, note
    blocks = blocks[:_MOST_BARS]
    return blocks, f"{note} Shown are the first {blocks[-1].start_s:,.1f} seconds."


def _gantt(blocks: Sequence[Block], num_instances: int) -> Figure:
    from plotly.graph_objects import Bar, Figure  # noqa: PLC0415  # optional

    figure = Figure(
        Bar(
            orientation="h",
            y=[one.instance for one in blocks],
            base=[one.start_s for one in blocks],
            x=[one.end_s - one.start_s for one in blocks],
            marker={"color": [_colour(one) for one in blocks], "line": {"width": 0.5, "color": "white"}},
            hovertext=[_words(one) for one in blocks],
            hoverinfo="text",
        )
    )
    figure.update_layout(height=140 + 26 * num_instances, bargap=0.12, **_LAYOUT)
    figure.update_yaxes(title="instance", dtick=1, autorange="reversed")
    figure.update_xaxes(title="seconds")
    return figure


def _colour(block: Block) -> str:
    """Neighbours in the order of arrival are far apart in the circle of hues."""
    return "#ddd" if block.place is None else f"hsl({block.place * _GOLDEN_ANGLE % 360:.0f}, 62%, 55%)"


def _words(block: Block) -> str:
    when = f"{block.start_s:.3f} to {block.end_s:.3f} s"
    if block.place is None:
        return f"{block.stop} decodes<br>{when}"
    tokens = f"tokens {block.start:,} to {block.stop:,}"
    return f"request {block.place}<br>{tokens}<br>{len(block.group)} instances, {block.exchange}<br>{when}"


def _share(times_s: NDArray[np.float64]) -> Figure:
    points = np.percentile(times_s, _PERCENTS) if len(times_s) else np.empty(0)
    figure = _line(list(zip(points.tolist(), _PERCENTS.tolist(), strict=False)), "%")
    if len(points) and points[0] > 0:
        figure.update_xaxes(type="log")
    return figure


def _line(points: Sequence[tuple[float, float]], unit: str) -> Figure:
    from plotly.graph_objects import Figure, Scatter  # noqa: PLC0415  # optional

    figure = Figure(Scatter(x=[x for x, _ in points], y=[y for _, y in points], mode="lines"))
    figure.update_layout(height=320, **_LAYOUT)
    figure.update_yaxes(title=unit, rangemode="tozero")
    figure.update_xaxes(title="seconds")
    return figure


_LAYOUT: dict[str, Any] = {"margin": {"l": 70, "r": 20, "t": 20, "b": 50}, "template": "plotly_white"}


def _table(rows: Mapping[str, object]) -> str:
    cells = (
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_shortly(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _shortly(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
