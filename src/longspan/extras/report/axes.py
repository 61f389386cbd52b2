"""Figures of one size and font, with axes of seconds and the lines of a service level."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from plotly.graph_objects import Figure, Scatter

from longspan.extras.report.page import GROUND, LINE

HEIGHT_PX = 320
_FEW = 5
_GRID = "#e4e6ea"
_TOP_PX, _LABEL_PX, _LABEL_PART = 26, 16, 0.3
_D2_DECADES = 0.5, 2.2
"""Decades of an axis with ticks at 1, 2 and 5. Of more decades only the powers of ten have ticks."""
_NUMBERS = [digit * place for digit in range(1, 10) for place in (1, 10, 100)]
_ALIASES = {f"{number}{unit}": f"{number}{unit}s" for number in _NUMBERS for unit in ("µ", "m", "")}
_ALIASES |= {f"{number}k{suffix}": f"{number * 1000:,}s" for number in _NUMBERS for suffix in ("", "s")}
"""Plotly leaves out the suffix of ticks between powers of ten. Kiloseconds are uncommon."""


def figure(height: int = HEIGHT_PX) -> Figure:
    drawn, ticks = Figure(), {"ticks": "outside", "ticklen": 5, "tickcolor": GROUND}
    drawn.update_layout(
        height=height,
        margin={"l": 10, "r": 16, "t": _TOP_PX, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 12, "color": LINE},
        paper_bgcolor=GROUND,
        plot_bgcolor=GROUND,
        showlegend=False,
        hovermode="closest",
        # Axes move when their labels get wider, so that no label is cut.
        xaxis={"automargin": True, "gridcolor": _GRID, "zeroline": False, "nticks": 8, "tickangle": 0} | ticks,
        yaxis={"automargin": True, "gridcolor": _GRID, "zeroline": False, "nticks": 8} | ticks,
    )
    return drawn


def seconds_axis(values_s: NDArray[np.float64]) -> dict[str, Any]:
    """Return the options of an axis of seconds whose ticks have units. Without a positive value it is linear."""
    options: dict[str, Any] = {"tickformat": "~s", "ticksuffix": "s", "labelalias": _ALIASES, "nticks": 0}
    return options | log_axis(values_s) if np.any(values_s > 0) else options


def log_axis(values: NDArray[np.float64]) -> dict[str, Any]:
    """Return the options of a logarithmic axis, with as many ticks as fit a narrow window."""
    positive = values[values > 0]
    decades = float(np.log10(positive.max() / positive.min()))
    low, high = _D2_DECADES
    spacing = {} if decades < low else {"dtick": "D2"} if decades < high else {"dtick": 1}
    return {"type": "log", **spacing}


def count_axis(highest: float) -> dict[str, Any]:
    """Return the options of an axis of numbers of things, without ticks between whole numbers."""
    return {"rangemode": "tozero", "tickformat": ",~r", **({"dtick": 1} if highest <= _FEW else {})}


def add_slo(
    drawn: Figure, lines: Sequence[tuple[str, float]], along: Literal["x", "y"], ends: tuple[float, float]
) -> None:
    """Add the lines of bounds with their labels, from one end to the other of the other axis.

    A line is a trace, so that the axis reaches to it. Labels of several lines are at different places.
    """
    for place, (label, bound_s) in enumerate(lines):
        line, both = list(ends), [bound_s, bound_s]
        x, y = (both, line) if along == "x" else (line, both)
        style = {"color": LINE, "width": 1.5, "dash": "dash"}
        drawn.add_trace(Scatter(x=x, y=y, mode="lines", line=style, name=label, hoverinfo="name"))
        is_log = getattr(drawn.layout, f"{along}axis").type == "log"
        at = float(np.log10(bound_s)) if is_log else bound_s
        text = {"text": escape(label), "showarrow": False, "font": {"color": LINE}, "bgcolor": "rgba(255,255,255,0.75)"}
        if along == "x":
            drawn.add_annotation(x=at, y=1, yref="paper", yanchor="bottom", yshift=_LABEL_PX * place, **text)
        else:
            left = _LABEL_PART * place
            drawn.add_annotation(y=at, x=left, xref="paper", xanchor="left", yanchor="bottom", **text)
    if along == "x":
        drawn.update_layout(margin={"t": _TOP_PX + _LABEL_PX * max(0, len(lines) - 1)})
