"""The frame of a page of results: one HTML file with its style, its scripts and its figures, and no network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#882255")
"""Colours that differ with every common colour blindness. The first six are of Okabe and Ito."""
GREY, LINE, GROUND = "#b4b8c0", "#222222", "#ffffff"
_DASHES, _SYMBOLS = ("solid", "dash", "dot"), ("circle", "diamond", "square-open")
_UNBROKEN_CHARS = 24
_CONFIG = {"responsive": True, "displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "toImage"]}


class Html(str):
    """Text that is HTML already. All other text of a page is escaped."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class Style:
    """The look of a policy in all plots. `sample` is its line in tables."""

    colour: str
    dash: str
    symbol: str

    @property
    def sample(self) -> Html:
        line = {"solid": "solid", "dash": "dashed", "dot": "dotted"}[self.dash]
        return Html(f'<i class="sample" style="border-top: 4px {line} {self.colour}"></i>')


def style_of(number: int) -> Style:
    """Return the style of a policy by its place among the shown policies. Colours repeat with another dash."""
    turn = number // len(PALETTE) % len(_DASHES)
    return Style(colour=PALETTE[number % len(PALETTE)], dash=_DASHES[turn], symbol=_SYMBOLS[turn])


def page(title: str, parts: Sequence[str]) -> str:
    """Return the whole page. `parts` are HTML."""
    shown = html.escape(title)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{shown}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_resource('page.css')}</style><script>{get_plotlyjs()}</script></head><body>",
            f"<h1>{shown}</h1>",
            *parts,
            f"<script>{_resource('page.js')}</script></body></html>\n",
        ]
    )


def _resource(name: str) -> str:
    return (files("longspan.extras.report") / name).read_text(encoding="utf-8")


def escaped(text: str) -> str:
    return text if isinstance(text, Html) else html.escape(text)


def shortened(text: str, max_chars: int = 20) -> str:
    """Return a label that fits its place. A longer one ends with an ellipsis."""
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}\N{HORIZONTAL ELLIPSIS}"


def paragraph(text: str, *, kind: str = "note") -> str:
    return f'<p class="{kind}">{escaped(text)}</p>'


def policy_legend(policies: Sequence[str]) -> str:
    """Return the colours of several policies. A click on a policy hides it in all plots."""
    if len(policies) < 2:
        return ""
    buttons = [
        f'<button data-policy="{html.escape(policy)}">{style_of(place).sample}{html.escape(policy)}</button>'
        for place, policy in enumerate(policies)
    ]
    return f'<div class="legend">{"".join(buttons)}</div>'


def section(title: str, note: str, *parts: str) -> str:
    """Return a part of the page with a heading and a note."""
    return "\n".join([f"<h2>{escaped(title)}</h2>", *([paragraph(note)] if note else []), *parts])


def folded(title: str, content: str, *, is_open: bool = False) -> str:
    """Return content that a click on its title opens and closes."""
    return f"<details{' open' if is_open else ''}><summary>{escaped(title)}</summary>{content}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, stacks: Literal["", "one", "two"] = "") -> str:
    """Return a table. On narrow windows it scrolls in its own frame, or each row becomes a list if it `stacks`.

    Args:
        head: names of columns.
        rows: cells.
        stacks: the number of columns of these lists.
    """
    texts = {i for row in rows for i, cell in enumerate(row) if _is_long(cell)}
    titles = "".join(f"<th{_attributes(i in texts)}>{escaped(cell)}</th>" for i, cell in enumerate(head))
    lines = [
        "".join(
            f"<td{_attributes(i in texts, head[i] if stacks else '')}>{_cell(cell)}</td>" for i, cell in enumerate(row)
        )
        for row in rows
    ]
    body = f"{f'<tr>{titles}</tr>' if head else ''}{''.join(f'<tr>{line}</tr>' for line in lines)}"
    kind = f' class="stacks {stacks}"' if stacks else ""
    return f'<div class="wide"><table{kind}>{body}</table></div>'


def _is_long(cell: str) -> bool:
    return not isinstance(cell, Html) and len(cell) > _UNBROKEN_CHARS


def _attributes(is_text: bool, label: str = "") -> str:
    return (' class="text"' if is_text else "") + (f' data-label="{html.escape(label)}"' if label else "")


def _cell(cell: str) -> str:
    """Return a short cell with spaces that do not break its line. A long cell breaks, so that the page fits."""
    return escaped(cell if isinstance(cell, Html) or _is_long(cell) else cell.replace(" ", "\u00a0"))


def chart(figure: Figure, name: str, *, title: str = "", shares_time: bool = False) -> str:
    """Return a figure whose element has the id `name`. Figures that share the axis of time are zoomed together."""
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=_CONFIG)
    heading = f"<h3>{escaped(title)}</h3>" if title else ""
    return f'{heading}<div class="chart{" time" if shares_time else ""}">{drawn}</div>'
