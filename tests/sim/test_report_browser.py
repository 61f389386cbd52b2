"""The page of `longspan simulate --report` in headless Chromium: every described plot is drawn."""

from __future__ import annotations

import runpy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_llm import run

pytest.importorskip("playwright", reason="playwright is not installed: pip install 'longspan[dev]'")
PICTURE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "picture.py"))
if PICTURE["find_chromium"]() is None:
    pytest.skip("Chromium is not installed: apt-get install chromium", allow_module_level=True)

FIGURES = ("instances", "ttft-by-length", "ttft", "tbt")
PATHS = """which => [...document.querySelectorAll(`#${which} path`)]
    .map(path => [path.getAttribute('d'), path.style.fill])"""
"""Of a part of a figure: the shape and the fill of everything that is drawn for data."""
STEPS = "instances .subplot.xy .trace.bars:nth-child(1)"
BARS = """() => {
    const {y, base, x, marker, hovertext} = document.getElementById('instances')._fullData[0]
    return {y, base, x, marker, hovertext}
}"""


@pytest.fixture(scope="module")
def watched() -> dict[str, list[str]]:
    """Return the errors of the page, and its network requests."""
    return {"complaints": [], "requests": []}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, watched: dict[str, list[str]]) -> Iterator[Any]:
    report = tmp_path_factory.mktemp("report") / "report.html"
    assert run(*PICTURE["SIMULATION"], "--report", str(report)) == 0

    def watch(page: Any) -> None:
        page.on("console", lambda message: watched["complaints"].append(message.text))
        page.on("pageerror", lambda error: watched["complaints"].append(str(error)))
        page.on("request", lambda request: watched["requests"].append(request.url))

    with PICTURE["opened"](report, watch) as opened:
        for name in FIGURES:
            opened.wait_for_selector(PICTURE["DRAWN"].format(name))
        yield opened


def test_the_page_asks_for_nothing_and_complains_of_nothing(page: Any, watched: dict[str, list[str]]) -> None:
    assert watched["complaints"] == []
    assert watched["requests"] == [page.url]
    assert page.url.startswith("file:")


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("ttft .trace", 1),
        ("tbt .trace", 1),
        ("instances .subplot.x3y3 .trace", 1),
        ("instances .subplot.x4y4 .trace", 4),  # held, and held or cached, by two roles
    ],
)
def test_distributions_queue_and_kv_are_lines_across_the_picture(page: Any, part: str, number: int) -> None:
    lines = [path for path, _ in page.evaluate(PATHS, part) if path and path.count("L") + path.count("H") > 5]
    assert len(lines) == number
    box = page.locator(f"#{part} .js-line").first.bounding_box()
    assert box["width"] > 800
    assert box["height"] > 90


@pytest.mark.parametrize("part", ["instances .subplot.x2y2", "ttft-by-length"])
def test_each_request_is_a_point_of_ttft(page: Any, part: str) -> None:
    assert page.locator(f"#{part} .point").count() == 40


@pytest.mark.parametrize("name", ["ttft", "tbt"])
def test_percentiles_are_marked(page: Any, name: str) -> None:
    texts = page.locator(f"#{name} .textpoint").all_text_contents()
    assert [text.split()[0] for text in texts] == ["P50", "P90", "P99"]


def test_transfers_are_drawn_where_they_arrive(page: Any) -> None:
    bars = page.evaluate("() => (({y, base, x}) => ({y, base, x}))(document.getElementById('instances')._fullData[1])")
    assert len(bars["y"]) >= 40 and set(bars["y"]) == {16, 17}
    assert page.locator("#instances .subplot.xy .trace.bars").nth(1).locator("path").count() == len(bars["y"])


def test_axes_of_time_are_linked(page: Any) -> None:
    ranges = "() => ['', 2, 3, 4].map(n => document.getElementById('instances')._fullLayout['xaxis' + n].range)"
    before = page.evaluate(ranges)
    page.evaluate("() => Plotly.relayout('instances', {'xaxis3.range': [1, 2]})")
    assert page.evaluate(ranges) == [[1, 2]] * 4
    page.evaluate("range => Plotly.relayout('instances', {'xaxis.range': range})", before[0])


def test_slowest_requests_have_their_time_split(page: Any) -> None:
    head = page.locator("table:has-text('exposed communication') th").all_text_contents()
    assert head[-5:] == ["queue", "compute", "exposed communication", "transfer", "decode"]
    assert page.locator("table:has-text('exposed communication') tr").count() == 12, "a head, the mean, and ten"


def test_every_block_of_the_gantt_chart_is_drawn(page: Any) -> None:
    bars, paths = page.evaluate(BARS), page.evaluate(PATHS, STEPS)
    assert len(bars["y"]) == len(paths) > 300
    assert all(path.startswith("M") and path.endswith("Z") for path, _ in paths)
    assert set(bars["y"]) == set(range(18))
    texts = page.locator("#instances .subplot.xy .bartext").all_text_contents()
    assert len(set(filter(None, texts))) > 20, "requests have their numbers"


def requests_of(bars: dict[str, Any]) -> dict[str, list[tuple[str, int, float, float, str]]]:
    """By request: colour, instance, begin and end of each block, and its words."""
    found = defaultdict(list)
    for y, base, x, colour, words in zip(
        bars["y"], bars["base"], bars["x"], bars["marker"]["color"], bars["hovertext"], strict=True
    ):
        if words.startswith("request "):
            found[words.partition("<br>")[0]].append((colour, y, base, base + x, words))
    return found


def test_a_request_has_one_colour_and_no_other_has_it(page: Any) -> None:
    requests = requests_of(page.evaluate(BARS))
    colours = [{block[0] for block in blocks} for blocks in requests.values()]
    assert len(requests) == 40
    assert all(len(one) == 1 for one in colours)
    assert len(set.union(*colours)) == 40
    fills = {fill for _, fill in page.evaluate(PATHS, STEPS)}
    assert len(fills) == 41, "and so it is drawn, with grey for decodes"


def test_chunks_on_growing_groups_are_in_the_picture(page: Any) -> None:
    """Later blocks of some request are on more instances, its earlier ones among them. The rest of a chunk may be too
    little for all of its group.
    """
    growing = 0
    for blocks in requests_of(page.evaluate(BARS)).values():
        groups: dict[int, set[int]] = defaultdict(set)
        for _, instance, _, _, words in blocks:
            groups[int(words.split()[2].replace(",", ""))].add(instance)  # request 3<br>tokens 1,024 to 2,048<br>...
        in_turn = [groups[start] for start in sorted(groups)]
        largest = in_turn[0]
        for computing in in_turn[1:]:
            assert computing >= largest or computing <= largest, in_turn
            growing += computing > largest
            largest = largest | computing
    assert growing >= 2


def test_blocks_of_an_instance_do_not_overlap(page: Any) -> None:
    bars = page.evaluate(BARS)
    ends: dict[int, float] = defaultdict(float)
    for base, y, x in sorted(zip(bars["base"], bars["y"], bars["x"], strict=True)):
        assert base >= ends[y] - 1e-6
        ends[y] = base + x


def test_the_picture_of_the_docs_is_there_and_small() -> None:
    assert 10_000 < PICTURE["PICTURE"].stat().st_size < 200_000
