"""The page of a real run, `--report`, in headless Chromium: its blocks, requests and lines are drawn."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM
from fake_llm import run

from longspan import SamplingParams

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'longspan[dev]'")
PICTURE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "picture.py"))
if PICTURE["find_chromium"]() is None:
    pytest.skip("Chromium is not installed: apt-get install chromium", allow_module_level=True)

OVERLAPS = """() => {
    const texts = [...document.querySelectorAll('.annotation-text, .xtitle, .ytitle, .legendtext')].map(text =>
        ({text: text.textContent, box: text.getBoundingClientRect()})).filter(({box}) => box.width > 0)
    const overlap = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom
    return texts.flatMap(({text, box}, i) =>
        texts.slice(i + 1).filter(other => overlap(box, other.box)).map(other => [text, other.text]))}"""
"""Pairs of titles and legends that overlap."""
PROMPTS = [list(range(first, first + 40)) for first in (1, 2, 3, 4)]


def check_picture(page: Any, path: Path) -> None:
    """Take a picture of the page, whose titles and legends do not overlap and whose width fits the window."""
    assert page.evaluate(OVERLAPS) == []
    assert not page.evaluate("() => document.documentElement.scrollWidth > document.documentElement.clientWidth")
    page.screenshot(path=path, full_page=True)
    assert path.stat().st_size > 50_000, "the picture is not blank"


def test_the_page_of_a_real_run_is_drawn_without_a_network(tiny: Path, tmp_path: Path) -> None:
    report = tmp_path / "run.html"
    with ThreadLLM(str(tiny), report=str(report), parallel="2", policy="chunked", skip_tokenizer_init=True) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    complaints, requests = list[str](), list[str]()

    def watch(page: object) -> None:
        page.on("console", lambda message: complaints.append(message.text))  # type: ignore[attr-defined]
        page.on("pageerror", lambda error: complaints.append(str(error)))  # type: ignore[attr-defined]
        page.on("request", lambda request: requests.append(request.url))  # type: ignore[attr-defined]

    with PICTURE["opened"](report, watch) as page:
        page.wait_for_selector(PICTURE["DRAWN"])
        for name in ("instances", "ttft-by-arrival", "waiting", "kv", "ttft-by-length", "ttft", "tpot", "tbt"):
            assert page.locator(f"#{name} .main-svg").count() > 0
        assert complaints == [] and requests == [page.url]
        assert page.locator("#ttft-by-length .point").count() == len(PROMPTS)
        drawn = page.locator("#instances .subplot.xy .trace.bars").first.locator("path").count()
        bars = page.evaluate("() => document.getElementById('instances').data[1].y")
        assert drawn == len(bars) > 0 and set(bars) == {"0", "1"}
        lines = [page.locator(f"#{name} .trace").count() for name in ("waiting", "kv")]
        assert lines == [1, 2]
        check_picture(page, tmp_path / "run.png")


def test_a_recorded_and_a_simulated_run_are_drawn_on_one_page(tiny: Path, tmp_path: Path) -> None:
    trace, report = tmp_path / "run.json", tmp_path / "page.html"
    with ThreadLLM(str(tiny), trace=str(trace), parallel="2", policy="chunked", skip_tokenizer_init=True) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    cluster = ("--hardware", "l4", "--gpus-per-host", "2", "--policy", "chunked")
    assert run("simulate", str(tiny), *cluster, "--replay", str(trace), "--report", str(report)) == 0
    with PICTURE["opened"](report) as page:
        page.wait_for_selector(PICTURE["DRAWN"])
        titles = page.locator("h3:has-text('Instances')").all_text_contents()
        assert titles == ["Instances, recorded chunked", "Instances, chunked"]
        for name in ("instances", "instances-2"):
            bars = page.locator(f"#{name} .subplot.xy .trace.bars").first
            assert bars.locator("path").count() > len(PROMPTS)
        policies = page.locator("table:has-text('TTFT P99') td:first-child").all_text_contents()
        assert policies == ["recorded chunked", "chunked"] == page.locator(".legend button").all_text_contents()
        check_picture(page, tmp_path / "page.png")
