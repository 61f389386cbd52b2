"""Draw the pictures of the docs with Chromium.

`docs/tetris.png` shows the instances of a simulation, from its report. `docs/sparse-quality.png` shows the loss of
sparse attention by drop ratio, from the results of `benchmarks/csa.py quality`. `python docs/picture.py` needs
Chromium, and the packages of `longspan[dev]`. `python docs/picture.py RUN.html` draws `docs/run.png` instead: the
charts over time of the page of a real run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from playwright.sync_api import Page, sync_playwright
from plotly.graph_objects import Figure, Scatter
from plotly.subplots import make_subplots

_DOCS = Path(__file__).parent
QUALITY_PICTURE, _QUALITY = _DOCS / "sparse-quality.png", _DOCS.parent / "benchmarks" / "csa_quality.json"
PICTURE, _RUN = _DOCS / "tetris.png", _DOCS / "run.png"
SIMULATION = (
    *("simulate", "llama-3-8b", "--hardware", "a100-sxm-80g", "--hosts", "4", "--gpus-per-host", "8"),
    *("--prefill-parallel", "16", "--decode-parallel", "2xtp8"),
    *("--policy", "tetris", "--workload", "short", "--rate", "6", "--num-requests", "40"),
)
DRAWN = "body[data-drawn]"
"""CSS selector of a report whose plots are all drawn in their final sizes."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_DRAWING_MS = 60_000
_DASHES = {"same": "solid", "rule": "dash"}


def find_chromium() -> str | None:
    """Return the path of the program, if it is installed."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def opened(path: Path, watch: Callable[[Page], None] = lambda _: None) -> Iterator[Page]:
    """Open a page in headless Chromium, which is installed. Call `watch` with it before it is loaded."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.set_default_timeout(_DRAWING_MS)
            watch(page)
            page.goto(path.as_uri())
            yield page
        finally:
            browser.close()


def main() -> int:
    """Draw the pictures. Return 1 without Chromium."""
    if find_chromium() is None:
        print(
            f"none of {', '.join(_NAMES)} is there: install Chromium, say by apt-get install chromium", file=sys.stderr
        )
        return 1
    if len(sys.argv) > 1:
        _draw_over_time(Path(sys.argv[1]), _RUN)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        subprocess.run([sys.executable, "-m", "longspan", *SIMULATION, "--report", str(page)], check=True)
        with opened(page) as report:
            report.wait_for_selector(DRAWN)
            report.locator("#instances").screenshot(path=PICTURE)
        _quality_figure(msgspec.json.decode(_QUALITY.read_bytes())).write_html(page)
        with opened(page) as drawn:
            drawn.wait_for_selector(".main-svg")
            drawn.locator(".main-svg").first.screenshot(path=QUALITY_PICTURE)
    return 0


def _draw_over_time(report: Path, path: Path) -> None:
    """Draw all charts over time of a page, with their titles."""
    with opened(report.resolve()) as page:
        page.wait_for_selector(DRAWN)
        first, last = (page.locator(f"#{name}").bounding_box() for name in ("instances", "kv"))
        assert first is not None and last is not None, "they are drawn"
        height = last["y"] + last["height"] - first["y"]
        page.screenshot(path=path, full_page=True, clip={**first, "height": height})


def _quality_figure(found: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot perplexity, KL divergence and keys found over the mean drop ratio, a line for each mode and rule."""
    shown = (("perplexity_ratio", "perplexity over exact"), ("kl", "KL divergence, nats"), ("needle", "keys found"))
    figure = make_subplots(1, len(shown), subplot_titles=[title for _, title in shown])
    [exact] = [one for one in found if one["mode"] == "exact"]
    lines = sorted({(one["mode"], one["ratios"]) for one in found if one is not exact})
    for mode, ratios in lines:
        own = [one for one in found if (one["mode"], one["ratios"]) == (mode, ratios)]
        own = ([exact] if ratios == "same" else []) + sorted(own, key=lambda one: one["drop"])
        for column, (name, _) in enumerate(shown, 1):
            line = Scatter(
                x=[100 * one["mean_drop_ratio"] for one in own],
                y=[one[name] for one in own],
                name=f"{mode}, {'same ratio at all levels' if ratios == 'same' else 'by the rule'}",
                mode="lines+markers",
                line={"color": {"kv": "#1f77b4", "qkv": "#d62728"}[mode], "dash": _DASHES[ratios]},
                showlegend=column == 1,
            )
            figure.add_trace(line, 1, column)
    figure.update_xaxes(title_text="dropped on average, %")
    figure.update_layout(template="plotly_white", width=1180, height=380, legend={"orientation": "h", "y": -0.3})
    return figure


if __name__ == "__main__":
    sys.exit(main())
