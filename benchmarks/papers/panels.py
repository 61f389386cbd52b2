"""Panels of figures: our numbers over those of a paper, which `points.toml` has.

A panel has the name of its figure. `docs/figures.py` draws the panels of a paper on one page.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

POINTS = Path(__file__).with_name("points.toml")
Series = Mapping[str, Sequence[tuple[float | str, float]]]
"""Points (x, y) by the name of their line or their kind of bars."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Our numbers of a figure, or of one of its parts.

    Attributes:
        name: as in `points.toml`, and the beginning of its figure's name.
        log: the axes with a logarithmic scale.
        bars: True to draw bars. Their x are names.
        missing: the command that simulates this figure, if no stored run has its numbers.
    """

    name: str
    title: str
    x: str
    y: str
    ours: Series
    log: str = ""
    bars: bool = False
    missing: str = ""

    def stored(self) -> dict[str, Any]:
        """Return a value for JSON, with numbers of four digits."""
        ours = {name: [(_short(x), _short(y)) for x, y in line] for name, line in self.ours.items()}
        return {**asdict(self), "ours": ours}


def _short(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.4g}")


def paper_points() -> dict[str, list[dict[str, Any]]]:
    """Return the entries of `points.toml` by paper."""
    return tomllib.loads(POINTS.read_text(encoding="utf-8"))
