"""Pages in headless Chromium, in wide and narrow windows: no label is cut, none covers another, and nothing scrolls."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report_pages import simulated
from test_plan_page import plan_of

from longspan.extras.plan_page import plan_html
from longspan.extras.report import html_report
from longspan.sim.spec import ServiceLevel, SloClass

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'longspan[dev]'")
PICTURE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "picture.py"))
if PICTURE["find_chromium"]() is None:
    pytest.skip("Chromium is not installed: apt-get install chromium", allow_module_level=True)

CUT = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(figure => {
    const frame = figure.getBoundingClientRect()
    const texts = [...figure.querySelectorAll('.xtick text, .ytick text, .y2tick text, .annotation-text')]
    return texts.filter(text => {
        const box = text.getBoundingClientRect()
        return box.width > 0 && (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 ||
            box.bottom > frame.bottom + 1)
    }).map(text => [figure.id, text.textContent])})"""
"""Labels that are not whole in their figure."""
COVERED = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(figure => {
    const texts = [...figure.querySelectorAll('.xtick text, .ytick text, .y2tick text, .annotation-text')].map(text =>
        ({text: text.textContent, box: text.getBoundingClientRect()})).filter(({box}) => box.width > 0)
    const cover = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3
    return texts.flatMap(({text, box}, i) => texts.slice(i + 1).filter(other => cover(box, other.box))
        .map(other => [figure.id, text, other.text]))})"""
"""Labels that cover another label."""
EMPTY = """() => [...document.querySelectorAll('.js-plotly-plot')].filter(figure =>
    !figure.querySelector('.scatterlayer path, .heatmaplayer image, .barlayer path')).map(figure => figure.id)"""
LEVEL = ServiceLevel(slo_ttft=2.0, slo_tbt=0.03)
CLASSES = ServiceLevel(
    slo_ttft=4.0,
    classes=(SloClass(name="chat", max_input_len=9000, slo_ttft=0.5), SloClass(name="c" * 40, slo_ttft=1.0)),
)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    few = [simulated(policy) for policy in ("chunked", "context", "auto")]
    large = [simulated("auto", num_gpus=64, num_requests=100)]
    roles = [simulated("tetris", num_gpus=8, prefill_parallel="4", decode_parallel="tp4", num_requests=8)]
    shown = {"large": (large, LEVEL), "roles": (roles, ServiceLevel()), "classes": (few, CLASSES)}
    reports = {
        name: html_report(records, [r.result.summary(level) for r in records], {"model": "llama-3-8b"}, level=level)
        for name, (records, level) in shown.items()
    }
    return {**reports, "plan": plan_html(plan_of(30))}


@pytest.fixture(params=[1400, 480])
def width(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


@pytest.fixture(params=["large", "roles", "classes", "plan"])
def page(pages: dict[str, str], request: pytest.FixtureRequest, width: int, tmp_path: Path) -> Iterator[Any]:
    path = tmp_path / "page.html"
    path.write_text(pages[request.param], encoding="utf-8")
    complaints, addresses = list[str](), list[str]()

    def watch(page: Any) -> None:
        page.set_viewport_size({"width": width, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda sent: addresses.append(sent.url))

    with PICTURE["opened"](path, watch) as opened:
        opened.wait_for_selector(PICTURE["DRAWN"])
        yield opened
        assert complaints == [] and addresses == [opened.url]


def test_labels_are_whole_and_apart_and_the_page_fits_the_window(page: Any, width: int) -> None:
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT) == []
    assert page.evaluate(COVERED) == []
    assert page.evaluate(EMPTY) == []
    frames = page.evaluate(
        "() => [...document.querySelectorAll('.wide')].map(({scrollWidth: s, clientWidth: c}) => s - c)"
    )
    assert max(frames) <= 0, "no table is cut"
    scale = "() => getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(scale) == "rgb(255, 255, 255)"
