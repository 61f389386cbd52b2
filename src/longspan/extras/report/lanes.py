"""The lanes of instances over time: kinds of work at low zoom, and the blocks of each step when a window has few.

The page has the kinds of work as a picture of `_NUM_BINS` columns, and the blocks as compact numbers. `page.js` draws
the blocks of the shown window, so that a page of many instances stays small and quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from plotly.graph_objects import Bar, Figure, Heatmap, Scatter

from longspan.extras.report.axes import figure
from longspan.extras.report.page import GREY, GROUND, PALETTE, Html, chart, paragraph
from longspan.extras.timeline import Block, Record

MAX_BLOCKS = 20_000
"""Blocks of all policies on a page. More make it slow to load."""
_NUM_BINS, _BINS_PER_AREA = 600, 5
_BUSY = 0.5
"""Fraction of a bin from which its colour is full."""
_IDLE = 0.02
"""Fraction of a bin below which an instance is shown as idle."""
_SAME_TIME_S = 1e-9
_US = 1e6
_KINDS = (
    ("decode", GREY, "#dddfe3"),
    ("prompts, each on one instance", PALETTE[0], "#9cc5e0"),
    ("prompts shared by instances", PALETTE[1], "#f0b78f"),
)
"""Name, colour, and colour of a bin that is idle most of its time."""
_AREA_PX, _GAP_PX, _AXIS_PX = 80, 34, 60
_ROW_PX, _ALL_ROWS_PX, _TICK_PX = 26, 560, 14
_MIN_GAP_ROW_PX = 3
_MIN_MARGIN_PX, _CHAR_PX = 54, 7
LEGEND = Html(
    '<p class="note">'
    + "".join(f'<span class="box" style="background: {colour}"></span>{name}' for name, colour, _ in _KINDS)
    + ". A bin that is idle most of its time is light. When the shown window has few steps, each block is a step: a "
    "colour for each request with its number, grey for decodes, and thin bars for received KV. Zoom in to see them.</p>"
)


def instances(records: Sequence[Record], place: int, end_s: float, name: str, title: str) -> str:
    """Return the chart of the instances of a policy, with the blocks that a zoom shows."""
    record, max_blocks = records[place], MAX_BLOCKS // len(records)
    blocks = sorted(record.timeline.blocks, key=lambda block: (block.start_s, block.instance, block.stage))
    joined = _joined(blocks)
    shown, notes = joined[:max_blocks], []
    if not record.timeline.complete:
        notes.append(f"Shown are the first {blocks[-1].start_s:,.1f} seconds.")
    until_s = shown[-1].start_s if len(shown) < len(joined) else None
    if until_s is not None:
        notes.append(f"Steps can be shown in the first {until_s:,.1f} seconds.")
    lanes = _figure(record, blocks, end_s)
    align(lanes, records, end_s)
    drawn = chart(lanes, name, title=title, shares_time=True)
    details = json.dumps(_details(record, shown, until_s), separators=(",", ":")).replace("<", "\\u003c")
    script = f'<script type="application/json" id="{name}-blocks">{details}</script>'
    return "\n".join([drawn, *(paragraph(note) for note in notes), script])


def align(drawn: Figure, records: Sequence[Record], end_s: float) -> None:
    """Give a figure the axis of time that all charts over time share, with one margin for the names of all lanes."""
    longest = max((len(name) for record in records for name in lane_names(record)), default=0)
    drawn.update_xaxes(range=[0.0, end_s], tickformat=",~r", ticksuffix="s")
    drawn.update_yaxes(automargin=False)
    drawn.update_layout(margin={"l": max(_MIN_MARGIN_PX, 12 + _CHAR_PX * longest), "b": 30})


def lane_names(record: Record) -> list[str]:
    """Return a name for each row of the chart."""
    cluster = record.cluster
    if not cluster.has_roles:
        return list(record.rows.values())
    roles = ["prefill" if instance in cluster.prefill else "decode" for instance, _ in record.rows]
    return [f"{role} {name}" for role, name in zip(roles, record.rows.values(), strict=True)]


def _figure(record: Record, blocks: Sequence[Block], end_s: float) -> Figure:
    """Draw the kinds of work of each row, and above them the percent of all rows."""
    names = lane_names(record)
    row_px = min(_ROW_PX, _ALL_ROWS_PX / max(1, len(names)))
    height = _AREA_PX + _GAP_PX + _AXIS_PX + row_px * len(names)
    drawn = figure(round(height))
    lanes = row_px * len(names) / (height - _AXIS_PX)
    drawn.update_layout(
        yaxis={
            "domain": [0, lanes],
            "type": "category",
            "categoryarray": names,
            "categoryorder": "array",
            "range": [len(names) - 0.5, -0.5],
            "nticks": round(row_px * len(names) / _TICK_PX),
            "showgrid": False,
        },
        yaxis2={
            "domain": [1 - _AREA_PX / (height - _AXIS_PX), 1],
            "range": [0, 100],
            "ticksuffix": "%",
            "dtick": 50,
            "fixedrange": True,
            "zeroline": False,
        },
        barmode="overlay",
        uniformtext={"minsize": 8, "mode": "hide"},
    )
    busy = work_by_bin(blocks, list(record.rows), end_s)
    bin_s = end_s / _NUM_BINS
    drawn.add_trace(
        Heatmap(
            z=_levels(busy, bin_s),
            y=names,
            x0=bin_s / 2,
            dx=bin_s,
            zmin=0,
            zmax=2 * len(_KINDS),
            colorscale=_scale(),
            showscale=False,
            ygap=1 if row_px > _MIN_GAP_ROW_PX else 0,
            hoverinfo="y",
            name="kinds",
        )
    )
    empty = {"orientation": "h", "x": [], "y": [], "hoverinfo": "text", "textposition": "inside", "textangle": 0}
    drawn.add_trace(Bar(**empty, name="steps", width=0.88, insidetextanchor="middle"))
    drawn.add_trace(Bar(**empty, name="KV", width=0.2, offset=0.24))
    grouped = busy.reshape(*busy.shape[:2], -1, _BINS_PER_AREA).sum(axis=(1, 3))
    whole_s = max(bin_s * _BINS_PER_AREA * len(names), _SAME_TIME_S)
    at_s = (np.arange(grouped.shape[1]) + 0.5) * bin_s * _BINS_PER_AREA
    for (kind, colour, _), seconds in zip(_KINDS, grouped, strict=True):
        line = {"width": 0, "shape": "hvh"}
        area = {"stackgroup": "kinds", "fillcolor": colour, "mode": "lines", "line": line}
        text = f"%{{y:.0f}}% of instances: {kind}<extra></extra>"
        percent = (100 * seconds / whole_s).round(1)
        drawn.add_trace(Scatter(x=at_s, y=percent, yaxis="y2", name=kind, hovertemplate=text, **area))
    return drawn


def work_by_bin(
    blocks: Iterable[Block], rows: Sequence[tuple[int, int]], end_s: float, num_bins: int = _NUM_BINS
) -> NDArray[np.float64]:
    """Return the seconds of each kind of work in each bin of each row, `[kind, row, bin]`."""
    places = {row: place for place, row in enumerate(rows)}
    values = [
        (0 if block.index is None else 1 + (len(block.group) > 1), places[block.instance, block.stage], *_ends(block))
        for block in blocks
    ]
    shape = len(_KINDS), len(rows), num_bins
    if not values or not end_s:
        return np.zeros(shape)
    kinds, lanes, starts_s, ends_s = np.array(values).T
    lane = (kinds * len(rows) + lanes).astype(int)
    bin_s = end_s / num_bins
    filled = _filled(lane, ends_s / bin_s, shape) - _filled(lane, starts_s / bin_s, shape)
    return np.maximum(filled * bin_s, 0.0)


def _ends(block: Block) -> tuple[float, float]:
    return block.start_s, block.end_s


def _filled(lane: NDArray[np.int_], ends: NDArray[np.float64], shape: tuple[int, int, int]) -> NDArray[np.float64]:
    """Sum, over times that all begin at 0, the part of each bin before their ends."""
    num_lanes, num_bins = shape[0] * shape[1], shape[2]
    ends = np.clip(ends, 0, num_bins)
    last = np.minimum(ends.astype(int), num_bins - 1)
    flat, size = lane * num_bins + last, num_lanes * num_bins
    part = np.bincount(flat, weights=ends - last, minlength=size).reshape(num_lanes, num_bins)
    number = np.bincount(flat, minlength=size).reshape(num_lanes, num_bins)
    later = number[:, ::-1].cumsum(axis=1)[:, ::-1] - number
    return np.add(part, later, dtype=np.float64).reshape(shape)


def _levels(busy: NDArray[np.float64], bin_s: float) -> NDArray[np.uint8]:
    """Return 0 for an idle bin, else the place of its most frequent kind in the scale of colours, `[row, bin]`."""
    total = busy.sum(axis=0)
    level = 2 * busy.argmax(axis=0) + 1 + (total >= _BUSY * bin_s)
    return np.where(total > _IDLE * bin_s, level, 0).astype(np.uint8)


def _scale() -> list[tuple[float, str]]:
    """Return the colours of idle bins and of each kind, in equal steps."""
    colours = [GROUND, *(colour for _, full, light in _KINDS for colour in (light, full))]
    steps = np.linspace(0, 1, len(colours) + 1)
    pairs = zip(colours, steps[:-1], steps[1:], strict=True)
    return [(float(edge), colour) for colour, *edges in pairs for edge in edges]


# ---------------------------------------------------------------- blocks of a zoomed window


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


def _details(record: Record, blocks: Sequence[Block], until_s: float | None) -> dict[str, object]:
    """Return the blocks and transfers as numbers, with times in microseconds. A decode has request -1.

    `until_s` is the time from which blocks are missing, if there is one.
    """
    rows = {row: place for place, row in enumerate(record.rows)}
    exchanges = sorted({block.exchange for block in blocks})
    across = islice((move for move in record.timeline.transfers if move.way == "across"), MAX_BLOCKS)
    return {
        "names": lane_names(record),
        "colours": [*PALETTE, GREY],
        "exchanges": exchanges,
        "until": None if until_s is None else round(until_s * _US),
        "blocks": [
            [
                *(rows[block.instance, block.stage], round(block.start_s * _US), round(block.end_s * _US)),
                *(-1 if block.index is None else block.index, block.start, block.stop),
                *(len(block.group), exchanges.index(block.exchange)),
            ]
            for block in blocks
        ],
        "transfers": [
            [
                *(rows[target, 0], round(move.start_s * _US), round(move.end_s * _US)),
                *(move.index, move.num_blocks, list(move.sources), list(move.targets)),
            ]
            for move in across
            for target in move.targets
            if (target, 0) in rows
        ],
    }
