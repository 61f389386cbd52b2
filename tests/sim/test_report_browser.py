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

FIGURES = ("instances", "ttft-by-arrival", "waiting", "kv", "ttft-by-length", "ttft", "tpot", "tbt")
PATHS = """which => [...document.querySelectorAll(`#${which} path`)]
    .map(path => [path.getAttribute('d'), path.style.fill])"""
"""Of a part of a figure: the shape and the fill of everything that is drawn for data."""
STEPS = "instances .subplot.xy .trace.bars:nth-child(1)"
BARS = """() => {
    const figure = document.getElementById('instances')
    const {y, base, x, marker, hovertext} = figure.data[1]
    const {names} = figure.blocks
    return {y: y.map(name => names.indexOf(name)), base, x, marker, hovertext}
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
        opened.wait_for_selector(PICTURE["DRAWN"])
        assert all(opened.locator(f"#{name} .main-svg").count() for name in FIGURES)
        yield opened


def test_the_page_asks_for_nothing_and_complains_of_nothing(page: Any, watched: dict[str, list[str]]) -> None:
    assert watched["complaints"] == []
    assert watched["requests"] == [page.url]
    assert page.url.startswith("file:")


@pytest.mark.parametrize(
    ("part", "number"),
    [
        ("ttft .trace", 1),
        ("tpot .trace", 1),
        ("tbt .trace", 1),
        ("waiting .trace", 1),
        ("kv .trace", 4),  # held, and held or cached, by two roles
    ],
)
def test_distributions_queue_and_kv_are_lines_across_the_picture(page: Any, part: str, number: int) -> None:
    lines = [path for path, _ in page.evaluate(PATHS, part) if path and path.count("L") + path.count("H") > 5]
    assert len(lines) == number
    box = page.locator(f"#{part} .js-line").first.bounding_box()
    assert box["width"] > 400
    assert box["height"] > 90


@pytest.mark.parametrize("part", ["ttft-by-arrival", "ttft-by-length"])
def test_each_request_is_a_point_of_ttft(page: Any, part: str) -> None:
    assert page.locator(f"#{part} .point").count() == 40


@pytest.mark.parametrize("name", ["ttft", "tpot", "tbt"])
def test_percentiles_are_marked_and_listed(page: Any, name: str) -> None:
    assert page.locator(f"#{name} .point").count() == 3
    below = page.locator(f".grid > div:has(#{name}) th").all_text_contents()
    assert below == ["", "P50", "P90", "P99"]


def test_transfers_are_drawn_where_they_arrive(page: Any) -> None:
    bars = page.evaluate("() => document.getElementById('instances').data[2].y")
    assert len(bars) >= 40 and set(bars) == {"decode 16", "decode 17"}
    assert page.locator("#instances .subplot.xy .trace.bars").nth(1).locator("path").count() == len(bars)


def test_charts_over_time_are_zoomed_together(page: Any) -> None:
    names = [name for name in FIGURES if page.locator(f".time #{name}").count()]
    assert names == ["instances", "ttft-by-arrival", "waiting", "kv"]
    ranges = f"() => {names}.map(name => document.getElementById(name)._fullLayout.xaxis.range)"
    before = page.evaluate(ranges)
    assert len({tuple(one) for one in before}) == 1
    page.evaluate("() => Plotly.relayout('waiting', {'xaxis.range': [1, 2]})")
    page.wait_for_function(
        f"() => {names}.every(name => document.getElementById(name)._fullLayout.xaxis.range[1] === 2)"
    )
    assert page.evaluate(ranges) == [[1, 2]] * 4
    page.wait_for_timeout(200)
    shown = page.evaluate(BARS)
    assert all(base < 2 and base + x > 1 for base, x in zip(shown["base"], shown["x"], strict=True))
    page.evaluate("range => Plotly.relayout('kv', {'xaxis.range': range})", before[0])
    page.wait_for_function("most => document.getElementById('instances').data[1].y.length > most", arg=len(shown["y"]))


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


def test_a_request_has_one_colour_that_differs_from_the_next_six(page: Any) -> None:
    requests = requests_of(page.evaluate(BARS))
    colours = {int(name.split()[1]): {block[0] for block in blocks} for name, blocks in requests.items()}
    assert len(colours) == 40
    assert all(len(one) == 1 for one in colours.values())
    assert all(colours[request] != colours[request + gap] for request in range(33) for gap in range(1, 7))
    fills = {fill for _, fill in page.evaluate(PATHS, STEPS)}
    assert len(fills) == 9, "eight for requests, and grey for decodes"


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
