"""A simulation as one HTML page with pictures, which needs nothing from the network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longspan.core.cluster import Cluster
from longspan.sim.result import Result
from longspan.sim.timeline import Block, Timeline

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_MOST_BARS = 20_000
_SAME_TIME_S = 1e-9
_LABELLED_PART = 0.005
"""Of the whole time: shorter blocks have no room for a number."""
_NUMBERS = {"minsize": 8, "mode": "hide"}
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


def html_report(result: Result, timeline: Timeline, settings: Mapping[str, object], cluster: Cluster) -> str:
    """Writes the page: what was simulated, the numbers, distributions of times, queue and KV, and instances."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  # optional

    title = "longspan simulate: " + ", ".join(str(settings[key]) for key in ("model", "policy") if key in settings)
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _table(settings),
        _table(result.summary()),
    ]
    for name, note, figure in _figures(result, timeline, cluster):
        drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name.lower().replace(" ", "-"))
        parts.append(f"<h2>{name}</h2><p>{html.escape(note)}</p>{drawn}")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _figures(result: Result, timeline: Timeline, cluster: Cluster) -> list[tuple[str, str, Figure]]:
    waiting = [(one.at_s, one.num_waiting) for one in timeline.moments]
    held = [(one.at_s, 100 * one.kv_used) for one in timeline.moments]
    bars, note = _shown(timeline)
    return [
        ("Instances", note, _gantt(bars, _names(cluster))),
        ("TTFT", "Part of all requests whose first token came within so many seconds.", _share(result.ttfts_s)),
        ("TBT", "Part of all times between tokens that were at most so long.", _share(result.tbts_s)),
        ("Queue", "Requests that waited.", _line(waiting, "requests", shape="hv")),
        ("KV", "Blocks that requests held, of all instances.", _line(held, "% of blocks", shape="hv")),
    ]


def _shown(timeline: Timeline) -> tuple[Sequence[Block], str]:
    """Returns the first blocks, as many as can be drawn, and what to say about them."""
    note = (
        "Each request has a colour of its own, and its number where there is room; each block is what one step "
        "computes of its prompt; grey are decodes."
    )
    blocks = _joined(sorted(timeline.blocks, key=lambda one: (one.start_s, one.instance)))
    if timeline.complete and len(blocks) <= _MOST_BARS:
        return blocks, note
    blocks = blocks[:_MOST_BARS]
    return blocks, f"{note} Shown are the first {blocks[-1].start_s:,.1f} seconds."


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """Joins decodes that follow each other on an instance, if as many requests take part."""
    found: list[Block] = []
    last: dict[int, int] = {}
    """The latest block of each instance, as its index."""
    for one in blocks:
        before = found[last[one.instance]] if one.instance in last else None
        if before is not None and one.index is None is before.index and _follows(one, before):
            found[last[one.instance]] = replace(before, end_s=one.end_s)
        else:
            last[one.instance] = len(found)
            found.append(one)
    return found


def _follows(one: Block, before: Block) -> bool:
    return one.stop == before.stop and one.start_s - before.end_s < _SAME_TIME_S


def _names(cluster: Cluster) -> list[str]:
    if not cluster.has_roles:
        return [str(instance) for instance in cluster.instances]
    return [*(f"prefill {one}" for one in cluster.prefill), *(f"decode {one}" for one in cluster.decode)]


def _gantt(blocks: Sequence[Block], names: Sequence[str]) -> Figure:
    from plotly.graph_objects import Bar, Figure  # noqa: PLC0415  # optional

    end_s = max((one.end_s for one in blocks), default=0.0)
    figure = Figure(
        Bar(
            orientation="h",
            y=[one.instance for one in blocks],
            base=[one.start_s for one in blocks],
            x=[one.end_s - one.start_s for one in blocks],
            marker={
                "color": [_colour(one) for one in blocks],
                "line": {"width": [0.0 if one.index is None else 0.5 for one in blocks], "color": "white"},
            },
            text=[_label(one, end_s) for one in blocks],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[_words(one) for one in blocks],
            hoverinfo="text",
        )
    )
    figure.update_layout(height=140 + 26 * len(names), bargap=0.12, uniformtext=_NUMBERS, **_LAYOUT)
    figure.update_yaxes(title="instance", tickvals=list(range(len(names))), ticktext=names, autorange="reversed")
    figure.update_xaxes(title="seconds")
    return figure


def _colour(block: Block) -> str:
    """Neighbours in the order of arrival are far apart in the circle of hues, others at least in lightness."""
    if block.index is None:
        return "#ddd"
    return f"hsl({block.index * _GOLDEN_ANGLE % 360:.0f}, 62%, {48 + 8 * (block.index % 3)}%)"


def _label(block: Block, end_s: float) -> str:
    """Returns the number of the request, where there is room for one."""
    is_wide = block.end_s - block.start_s > _LABELLED_PART * end_s
    return "" if block.index is None or not is_wide else str(block.index)


def _words(block: Block) -> str:
    when = f"{block.start_s:.3f} to {block.end_s:.3f} s"
    if block.index is None:
        return f"{block.stop} decodes<br>{when}"
    tokens = f"tokens {block.start:,} to {block.stop:,}"
    return f"request {block.index}<br>{tokens}<br>{len(block.group)} instances, {block.exchange}<br>{when}"


def _share(times_s: NDArray[np.float64]) -> Figure:
    points = np.percentile(times_s, _PERCENTS) if len(times_s) else np.empty(0)
    figure = _line(list(zip(points.tolist(), _PERCENTS.tolist(), strict=False)), "%")
    if len(points) and points[0] > 0:
        figure.update_xaxes(type="log")
    return figure


def _line(points: Sequence[tuple[float, float]], unit: str, shape: str = "linear") -> Figure:
    from plotly.graph_objects import Figure, Scatter  # noqa: PLC0415  # optional

    figure = Figure(Scatter(x=[x for x, _ in points], y=[y for _, y in points], mode="lines", line={"shape": shape}))
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
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
