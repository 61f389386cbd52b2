"""Draw the figures of the papers: our numbers over those of the papers, all panels of a paper in one picture.

`make figures` computes the numbers and draws `docs/figures/*.svg`. It needs Chromium, and the packages of
`longspan[dev]`. `--check` draws nothing, and reports pictures of other numbers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from picture import find_chromium, opened
from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

_DOCS = Path(__file__).parent
_PAPERS = _DOCS.parent / "benchmarks" / "papers"
_COLUMNS, _WIDTH, _ROW_PX = 3, 1200, 330
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22")
_IN_PANEL = 11
"""Size of text."""
_FONT = "verdana, arial, sans-serif"
_DEFAULTS = (
    f"font-family: {_FONT}; ",
    *("vector-effect: none; ", "white-space: pre;", "stroke-miterlimit: 2; "),
    *("fill-opacity: 1; ", "fill-opacity: 1;", "stroke-opacity: 1; ", "stroke-opacity: 1;"),
)
"""Parts of styles that change nothing, or that all text shares."""
_TO_SVG = (
    "([width, height]) => Plotly.toImage(document.querySelector('.plotly-graph-div'), {format: 'svg', width, height})"
)


def main() -> int:
    """Draw the pictures of other numbers. Return 1 with `--check` if there are any, and without Chromium."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="draw nothing")
    only_check = parser.parse_args().check
    stale = [paper for paper in numbers() if not is_current(paper)]
    if not stale:
        return 0
    if only_check or find_chromium() is None:
        reason = "run make figures" if only_check else "install Chromium, say by apt-get install chromium"
        print(f"figures of other numbers: {', '.join(stale)}: {reason}", file=sys.stderr)
        return 1
    for paper in stale:
        path_of(paper).write_text(drawn(paper), encoding="utf-8")
        print(f"drawn: {path_of(paper).relative_to(_DOCS.parent)}")
    return 0


def numbers() -> dict[str, list[dict[str, Any]]]:
    """Return the panels of each paper."""
    found: dict[str, list[dict[str, Any]]] = json.loads((_PAPERS / "figures.json").read_text(encoding="utf-8"))
    return found


def path_of(paper: str) -> Path:
    """Return the path of the picture of a paper."""
    return _DOCS / "figures" / f"{paper.lower().replace(' ', '-')}.svg"


def is_current(paper: str) -> bool:
    """Return True if the picture was drawn from the present numbers, by this script."""
    path = path_of(paper)
    return path.is_file() and _digest(paper) in path.read_text(encoding="utf-8")


def _digest(paper: str) -> str:
    drawing = Path(__file__).read_text(encoding="utf-8")
    made_of = json.dumps([drawing, numbers()[paper], _points(paper)])
    return hashlib.sha256(made_of.encode()).hexdigest()[:16]


def _points(paper: str) -> dict[str, dict[str, Any]]:
    """Return the paper's numbers by panel."""
    entries = tomllib.loads((_PAPERS / "points.toml").read_text(encoding="utf-8"))[paper]
    return {name: entry for entry in entries for name in entry["names"]}


def drawn(paper: str) -> str:
    """Return the picture as SVG. The same numbers give the same text."""
    panels, points = [panel for panel in numbers()[paper] if panel["ours"]], _points(paper)
    rows = -(-len(panels) // _COLUMNS)
    size = [_WIDTH, rows * _ROW_PX + 40]
    figure = make_subplots(
        rows,
        _COLUMNS,
        subplot_titles=[f"{panel['name']}<br><sup>{panel['title']}</sup>" for panel in panels],
        vertical_spacing=0.42 / rows,
        horizontal_spacing=0.075,
    )
    figure.update_annotations(font_size=13)
    for number, panel in enumerate(panels):
        _add(figure, panel, points[panel["name"]], number)
    font = {"size": _IN_PANEL, "family": _FONT}
    figure.update_layout(template="plotly_white", font=font, margin={"l": 55, "r": 15, "t": 60, "b": 60})
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        figure.write_html(page)
        with opened(page) as shown:
            shown.wait_for_selector(".main-svg")
            address = str(shown.evaluate(_TO_SVG, size))
    return _named(unquote(address.partition(",")[2]), paper)


def _add(figure: Figure, panel: dict[str, Any], given: dict[str, Any], number: int) -> None:
    """Draw a panel: ours as lines or bars, the paper's as diamonds, dashed lines and bands, and a legend."""
    row, column = number // _COLUMNS + 1, number % _COLUMNS + 1
    legend = f"legend{number + 1}" if number else "legend"
    for at, (name, line) in enumerate(panel["ours"].items()):
        xs, ys = [x for x, _ in line], [y for _, y in line]
        colour = _COLOURS[at % len(_COLOURS)]
        trace = (
            Bar(x=xs, y=ys, name=name, marker_color=colour, legend=legend)
            if panel["bars"]
            else Scatter(x=xs, y=ys, name=name, mode="lines+markers", line_color=colour, marker_size=4, legend=legend)
        )
        figure.add_trace(trace, row, column)
    names = list(panel["ours"])
    for name, line in given.get("points", {}).items():
        colour = "black" if panel["bars"] else _COLOURS[names.index(name) % len(_COLOURS)]
        marks = {"symbol": "diamond-open", "size": 9, "color": colour, "line_width": 2}
        xs, ys = [x for x, _ in line], [y for _, y in line]
        title = "the paper" if len(names) == 1 else f"{name}, the paper"
        paper = Scatter(x=xs, y=ys, name=title, mode="markers", marker=marks, legend=legend)
        figure.add_trace(paper, row, column)
    for name, (low, high) in given.get("ranges", {}).items():
        colour = _COLOURS[names.index(name) % len(_COLOURS)] if name in names else "#555555"
        label = {"annotation_text": f"{name}, the paper", "annotation_font_size": 9, "annotation_position": "top right"}
        if low == high:
            figure.add_hline(y=low, line_dash="dash", line_color=colour, **label, row=row, col=column)
        else:
            figure.add_hrect(low, high, fillcolor=colour, opacity=0.25, line_width=0, **label, row=row, col=column)
    for name, x in given.get("marks", {}).items():
        label = {"annotation_text": f"{name}, the paper", "annotation_font_size": 9}
        figure.add_vline(x=x, line_dash="dash", **label, row=row, col=column)
    _above(figure, panel, given, row, column)
    for axis in "xy":
        kind = {"type": "log"} if axis in panel["log"] else {}
        update = figure.update_xaxes if axis == "x" else figure.update_yaxes
        update(title_text=panel[axis], title_standoff=4, title_font_size=_IN_PANEL, **kind, row=row, col=column)
    x_ends, y_ends = (figure.layout[f"{axis}axis{number + 1 if number else ''}"].domain for axis in "xy")
    where = {"x": x_ends[0] + 0.004, "y": y_ends[1], "xanchor": "left", "yanchor": "top", "font_size": 9}
    figure.update_layout({legend: {**where, "bgcolor": "rgba(255,255,255,0.6)", "tracegroupgap": 0}})


def _above(figure: Figure, panel: dict[str, Any], given: dict[str, Any], row: int, column: int) -> None:
    """Leave space for the legend above all values of a panel."""
    lines = [*panel["ours"].values(), *given.get("points", {}).values()]
    values = [y for line in lines for _, y in line] + [end for ends in given.get("ranges", {}).values() for end in ends]
    part, low, high = (0.12 if panel["bars"] else 0.085) * len(lines), min(values), max(values)
    above = high * ((high / low) ** part - 1) if "y" in panel["log"] else part * (high - (0 if panel["bars"] else low))
    figure.update_yaxes(autorangeoptions_include=[high + above], row=row, col=column)


def _named(svg: str, paper: str) -> str:
    """Replace random names, leave out parts that are not drawn, round places, and add the digest of the numbers."""
    for number, name in enumerate(dict.fromkeys(re.findall(r'id="(?:clip|defs-|topdefs-)([0-9a-f]{6})', svg))):
        svg = svg.replace(name, f"part{number}")
    svg = re.sub(r"<[^>]*>", lambda tag: re.sub(r"-?\d+\.\d{2,}", _rounded, tag[0]), svg)
    for default in _DEFAULTS:
        svg = svg.replace(default, "")
    svg = re.sub(r' (?:class|data-[a-z]+|pointer-events)="[^"]*"| style="(?:opacity: 1;)?"', "", svg)
    svg = re.sub(r'<path(?: d="M0,0")?(?: style="fill: none;")?/>', "", svg)
    while (shorter := re.sub(r"<g(?: [^>]*)?></g>|<g(?: [^>]*)?/>", "", svg)) != svg:
        svg = shorter
    used = set(re.findall(r"url\(#([^)]*)\)", svg))
    svg = re.sub(r'<clipPath id="([^"]*)">.*?</clipPath>', lambda clip: clip[0] if clip[1] in used else "", svg)
    svg = svg.replace("<svg ", f'<svg style="font-family: {_FONT}" ', 1)
    return svg.replace("<defs", f"<desc>numbers {_digest(paper)}</desc><defs", 1) + "\n"


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


if __name__ == "__main__":
    sys.exit(main())
