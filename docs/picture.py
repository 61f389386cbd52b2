"""Makes `docs/tetris.png`: what instances did in a simulation, as Chromium draws the report's first picture.

`python docs/picture.py` needs Chromium, and the packages of `longspan[dev]`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURE = Path(__file__).with_name("tetris.png")
SIMULATION = (
    *("simulate", "llama-3-8b", "--hardware", "a100-sxm-80g", "--hosts", "4", "--gpus-per-host", "8"),
    *("--prefill-parallel", "16", "--decode-parallel", "2xtp8"),
    *("--policy", "tetris", "--workload", "short", "--rate", "6", "--num-requests", "40"),
)
DRAWN = "#{} .main-svg"
"""The plot that plotly makes in the place of a picture."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_DRAWING_MS = 60_000
_TICKS_PX = 30
"""The axis below a picture."""


def find_chromium() -> str | None:
    """Returns the path of the program, if it is installed."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


@contextmanager
def opened(path: Path, watch: Callable[[Page], None] = lambda _: None) -> Iterator[Page]:
    """Opens a page in headless Chromium, which must have been found; `watch` sees it before it is loaded."""
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
    """Draws the picture; returns 1 without Chromium."""
    if find_chromium() is None:
        print(
            f"none of {', '.join(_NAMES)} is there: install Chromium, say by apt-get install chromium", file=sys.stderr
        )
        return 1
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "longspan", *SIMULATION, "--report", str(report)], check=True)
        with opened(report) as page:
            page.wait_for_selector(DRAWN.format("instances"))
            figure, first = (page.locator(f"#instances{part}").bounding_box() for part in ("", " .xy .nsewdrag"))
            assert figure is not None and first is not None, "they are drawn"
            height = first["y"] + first["height"] + _TICKS_PX - figure["y"]
            page.screenshot(path=PICTURE, full_page=True, clip={**figure, "height": height})
    return 0


if __name__ == "__main__":
    sys.exit(main())
