"""Laws of the page of runs: its verdict, its colours, its SLO lines, its errors, its size and its escaped text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_pages import blocks_of, colours_of, figures_of, result_of, simulated

from longspan.cost import catalog
from longspan.extras.report import html_report
from longspan.extras.report.lanes import lane_names, work_by_bin
from longspan.extras.report.page import GREY, GROUND, LINE, PALETTE, shortened, style_of
from longspan.extras.report.tables import accuracy
from longspan.extras.report.verdict import percent_text, verdict_sentence
from longspan.extras.timeline import Block, Record, Timeline
from longspan.sim.experiment import ATTAINMENT
from longspan.sim.spec import ServiceLevel, SloClass

MAX_COLOURS = 12
MAX_PAGE_BYTES = 1_000_000
"""Of a page of 100 requests on 64 instances, without the library that draws."""
LEVEL = ServiceLevel(slo_ttft=1.0, slo_tbt=0.05)
LATENCIES = {"ttft": "slo_ttft", "tpot": "slo_tbt", "tbt": "slo_tbt", "ttft-by-length": "slo_ttft"}
LATENCIES["ttft-by-arrival"] = "slo_ttft"
CLASSES = ServiceLevel(
    slo_ttft=4.0, classes=(SloClass(name="chat", max_input_len=9000, slo_ttft=0.5, slo_tbt=0.02), SloClass(name="free"))
)


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [simulated("chunked"), simulated("context"), simulated("tetris")]


@pytest.fixture(scope="module")
def large() -> Record:
    return simulated("auto", num_gpus=64, num_requests=100)


def page_of(records: list[Record], level: ServiceLevel = ServiceLevel(), hardware: str | None = "a100-sxm-80g") -> str:
    numbers = [record.result.summary(level) for record in records]
    return html_report(records, numbers, {"model": "llama-3-8b"}, level=level, hardware=hardware)


def many(record: Record, number: int) -> list[Record]:
    return [replace(record, policy=f"policy {place}") for place in range(number)]


# ---------------------------------------------------------------- the verdict


@settings(max_examples=60, deadline=None)
@given(
    times=st.lists(st.tuples(st.floats(0.01, 4), st.floats(0.001, 0.2)), min_size=1, max_size=30),
    num_refused=st.integers(0, 3),
    level=st.sampled_from([LEVEL, ServiceLevel(slo_ttft=2.0), ServiceLevel(slo_tbt=0.1), CLASSES]),
)
def test_the_verdict_of_a_policy_agrees_with_its_attainment(
    times: list[tuple[float, float]], num_refused: int, level: ServiceLevel
) -> None:
    result = result_of(times, num_refused)
    sentence = verdict_sentence({"auto": result}, level)
    assert sentence.startswith("auto meets " if result.attainment(level) >= ATTAINMENT else "auto misses ")
    assert f"attainment {percent_text(result.attainment(level))}" in sentence
    goodput = result.summary(level)["goodput_requests_per_s"]
    assert f"goodput {goodput:.4g} requests/s" in sentence


@pytest.mark.parametrize(
    ("attainments", "beginning"),
    [
        ((5, 3), "No policy meets "),
        ((10, 3), "Only a meets "),
        ((3, 9), "Only b meets "),
        ((9, 10), "2 of 2 policies meet "),
    ],
)
def test_the_verdict_counts_the_policies_that_meet_the_level(attainments: tuple[int, int], beginning: str) -> None:
    parts = {
        name: result_of([(0.5, 0.01)] * good + [(2.0, 0.01)] * (10 - good))
        for name, good in zip("ab", attainments, strict=True)
    }
    sentence = verdict_sentence(parts, LEVEL)
    assert sentence.startswith(beginning)
    best = max(parts, key=lambda name: parts[name].num_good(LEVEL) / parts[name].makespan_s)
    assert beginning.startswith("Only") or f". {best} has the highest goodput" in sentence


@given(st.floats(0, 1))
def test_a_percentage_is_never_rounded_up(fraction: float) -> None:
    shown = float(percent_text(fraction).removesuffix(" %"))
    assert shown <= 100 * fraction + 1e-6 and 100 * fraction - shown < 0.1 + 1e-6


def test_the_page_has_a_row_with_the_margins_of_each_policy(records: list[Record]) -> None:
    text = page_of(records, LEVEL).replace("\u00a0", " ")
    for record in records:
        row = re.search(rf"<tr><td[^>]*><i[^>]*></i>{record.policy}</td>(.*?)</tr>", text)
        assert row is not None
        cells = re.findall(r"<td[^>]*>(.*?)</td>", row[1])
        assert ("met" in cells[0]) == (record.result.attainment(LEVEL) >= ATTAINMENT)
        assert cells[1] == percent_text(record.result.attainment(LEVEL))
        ttft_s = float(np.percentile(record.result.ttfts_s, 100 * ATTAINMENT))
        margin = float(cells[3].partition(", ")[2].removesuffix(" %").replace("\N{MINUS SIGN}", "-").replace(",", ""))
        assert margin == pytest.approx(100 * (1 - ttft_s), abs=0.6)


def test_each_class_has_a_row_of_each_policy(records: list[Record]) -> None:
    text = page_of(records, CLASSES).replace("\u00a0", " ")
    for record in records:
        for name, part in record.result.by_class(CLASSES).items():
            number = len(part.served) + len(part.refused)
            cells = f'<td data-label="class">{name}</td><td data-label="requests">{number}</td>'
            attained = f'<td data-label="attainment">{percent_text(part.attainment(CLASSES))}</td>'
            assert (cells + attained in text) == (name != "free"), "a class without bounds has no verdict"


def test_a_page_without_a_level_names_the_numbers_that_decide(records: list[Record]) -> None:
    text = page_of(records)
    assert "No SLO was given, so these numbers decide." in text
    fastest = min(records, key=lambda record: np.percentile(record.result.ttfts_s, 99))
    assert f" {fastest.policy} has the lowest P99 of TTFT" in text


def test_a_page_of_no_served_request_is_written(records: list[Record]) -> None:
    empty = Record(policy="auto", cluster=records[0].cluster, result=result_of([], 2), timeline=Timeline())
    for level in (LEVEL, ServiceLevel(), CLASSES):
        assert "No request was served" in page_of([empty], level)


# ---------------------------------------------------------------- colours


def test_every_figure_has_at_most_twelve_colours(records: list[Record], large: Record) -> None:
    for shown in ([large], records, many(records[0], 20)):
        page = page_of(shown, LEVEL)
        figures = figures_of(page)
        assert len(figures) == 7 + len(shown)
        for name, (data, _) in figures.items():
            colours = colours_of(data)
            if name.startswith("instances"):
                colours |= {colour.lower() for colour in blocks_of(page, name)["colours"]}
            assert len(colours - {GROUND, LINE}) <= MAX_COLOURS, name


def test_a_policy_has_one_style_in_all_figures(records: list[Record]) -> None:
    for shown in (records, many(records[0], 20)):
        styles: dict[str, set[tuple[str, str | None]]] = {}
        for name, (data, _) in figures_of(page_of(shown, LEVEL)).items():
            for trace in data:
                if "meta" in trace and not name.startswith("instances"):
                    colour = trace.get("line", {}).get("color") or trace["marker"]["color"]
                    styles.setdefault(trace["meta"], set()).add(colour)
        assert styles.keys() == {record.policy for record in shown}
        assert all(len(style) == 1 for style in styles.values())
    numbered = [style_of(place) for place in range(3 * len(PALETTE))]
    assert len({(style.colour, style.dash, style.symbol) for style in numbered}) == len(numbered)


DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
"""Of linear RGB, by Machado, Oliveira and Fernandes (2009)."""
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    parts = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray[tuple[int], np.dtype[np.float64]]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    xyz = TO_XYZ @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", [np.eye(3), np.array(DEUTERANOPIA), np.array(PROTANOPIA)])
def test_colours_differ_with_common_colour_blindness(sight: np.ndarray[tuple[int, int], np.dtype[np.float64]]) -> None:
    """A distance of about 2.3 in CIELAB is just noticeable."""
    for one, other in combinations((*PALETTE, LINE), 2):
        distance = float(np.linalg.norm(lab(sight @ linear(one)) - lab(sight @ linear(other))))
        assert distance > 14, (one, other)
    luminance = {colour: float(TO_XYZ[1] @ linear(colour)) for colour in (*PALETTE, GREY)}
    assert all(1.05 / (value + 0.05) > 1.9 for value in luminance.values()), "they are visible on white"


# ---------------------------------------------------------------- lines of the service level


@pytest.mark.parametrize("level", [LEVEL, ServiceLevel(slo_ttft=30.0), ServiceLevel(slo_tbt=1e-4), CLASSES])
def test_every_plot_of_latency_has_the_lines_of_its_bounds(level: ServiceLevel, records: list[Record]) -> None:
    figures = figures_of(page_of(records, level))
    for name, bound in LATENCIES.items():
        data, layout = figures[name]
        along = "x" if name in ("ttft", "tpot", "tbt") else "y"
        drawn = [trace[along][0] for trace in data if trace["name"].startswith("SLO")]
        assert all(set(trace[along]) == {trace[along][0]} for trace in data if trace["name"].startswith("SLO"))
        bounds = [getattr(level, bound), *(getattr(one, bound) for one in level.classes)]
        assert sorted(drawn) == sorted(one for one in bounds if one is not None), name
        labels = [note["text"] for note in layout.get("annotations", ())]
        assert labels == [trace["name"] for trace in data if trace["name"].startswith("SLO")]


def test_there_is_no_line_without_a_level(records: list[Record]) -> None:
    assert not any(
        "SLO" in str(trace.get("name")) for data, _ in figures_of(page_of(records)).values() for trace in data
    )


# ---------------------------------------------------------------- errors of predictions

POLICIES = sorted({policy for error in catalog.errors()[0] for policy in error.policies} | {"chunked", "auto"})


@pytest.mark.parametrize("hardware", ["a100-sxm-80g", "h100-sxm-80g", "l4", None])
@pytest.mark.parametrize("policies", [*([one] for one in POLICIES), ["chunked", "tetris"], ["auto", "context"]])
def test_shown_errors_are_of_the_shown_policies_and_hardware(policies: list[str], hardware: str | None) -> None:
    text = accuracy(hardware, "flash", policies).replace("\u00a0", " ")
    computed, served = catalog.errors()
    kind = "" if hardware is None else hardware.partition("-")[0]
    concerned = [e for e in computed if (e.hardware, e.attention) == (kind, "flash") and {*policies} & {*e.policies}]
    assert {e.what for e in computed if e.what in text} == {e.what for e in concerned}
    for policy in POLICIES:
        named = bool(re.search(rf"\b{re.escape(policy)}(?![-\w])", re.sub(r"<th.*?</th>", "", text)))
        assert named == (policy in policies), policy
    rows = re.findall(r"<tr><td[^>]*>(\w+)</td><td[^>]*TTFT P50", text)
    assert rows == [error.policy for error in served if error.policy in policies]


# ---------------------------------------------------------------- lanes


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 9), st.floats(0, 3), st.sampled_from([None, 1]), st.integers(1, 3)),
        max_size=20,
    ),
    num_bins=st.integers(1, 50),
)
def test_bins_of_lanes_add_up_to_the_time_of_each_kind_of_work(
    steps: list[tuple[int, float, float, int | None, int]], num_bins: int
) -> None:
    blocks = [
        Block(
            step=place,
            instance=instance,
            stage=0,
            start_s=start_s,
            end_s=start_s + duration_s,
            index=index,
            start=0,
            stop=1,
            group=tuple(range(members)),
        )
        for place, (instance, start_s, duration_s, index, members) in enumerate(steps)
    ]
    busy = work_by_bin(blocks, [(row, 0) for row in range(3)], 12.0, num_bins)
    assert busy.shape == (3, 3, num_bins) and (busy >= 0).all()
    expected = np.zeros((3, 3))
    for block in blocks:
        kind = 0 if block.index is None else 1 if len(block.group) == 1 else 2
        expected[kind, block.instance] += block.end_s - block.start_s
    assert busy.sum(axis=2) == pytest.approx(expected, abs=1e-6)
    for place, block in enumerate(blocks):
        alone = work_by_bin([block], [(row, 0) for row in range(3)], 12.0, num_bins).sum(axis=(0, 1))
        edges = np.linspace(0, 12.0, num_bins + 1)
        overlap = np.minimum(block.end_s, edges[1:]) - np.maximum(block.start_s, edges[:-1])
        assert alone == pytest.approx(np.maximum(overlap, 0), abs=1e-6), place


def test_all_steps_and_all_time_of_many_instances_are_on_the_page(large: Record) -> None:
    page = page_of([large])
    data, layout = figures_of(page)["instances"]
    blocks = blocks_of(page)
    assert blocks["until"] is None and len(blocks["names"]) == 64
    prompts = dict.fromkeys(range(100), 0)
    for row, start, end, request, first, last, members, exchange in blocks["blocks"]:
        assert 0 <= row < 64 and 0 <= start <= end and members >= 1 and blocks["exchanges"][exchange]
        if request >= 0:
            prompts[request] = max(prompts[request], last)
            assert first < last
    assert prompts == {one.index: one.num_prompt_tokens for one in large.result.served}
    assert layout["height"] < 900
    assert data[0]["type"] == "heatmap" and data[0]["y"] == blocks["names"]


def test_the_page_of_many_instances_is_small(large: Record) -> None:
    from plotly.offline import get_plotlyjs

    assert len(page_of([large], LEVEL).encode()) - len(get_plotlyjs().encode()) < MAX_PAGE_BYTES


# ---------------------------------------------------------------- labels and text


def test_no_label_is_longer_than_its_place(large: Record) -> None:
    roles = simulated("tetris", num_gpus=8, prefill_parallel="4", decode_parallel="tp4", num_requests=5)
    for record in (large, roles):
        _, layout = figures_of(page_of([record], LEVEL))["instances"]
        assert layout["margin"]["l"] >= 7 * max(map(len, lane_names(record))) + 8
    long_name = "a" * 100
    level = ServiceLevel(classes=(SloClass(name=long_name, slo_ttft=2.0), SloClass(name="chat", slo_ttft=1.0)))
    for data, layout in figures_of(page_of([large], level)).values():
        texts = [note["text"] for note in layout.get("annotations", ())] + [trace["name"] for trace in data]
        assert max(map(len, texts)) <= 32
    assert shortened("chat") == "chat" and len(shortened(long_name)) == 20 == len(shortened("b" * 20))


def test_text_is_escaped(records: list[Record]) -> None:
    bad = "</script><script>alert(1)</script>"
    level = ServiceLevel(slo_ttft=1.0, classes=(SloClass(name=bad, slo_ttft=0.5),))
    named = [replace(record, policy=f"{bad}{place}") for place, record in enumerate(records)]
    splits = {request.index: named[0].timeline.split(request) for request in named[0].result.served}
    blocks = [replace(block, exchange=bad) for block in named[0].timeline.blocks]
    named[0] = replace(named[0], timeline=Timeline.of(blocks, (), (), splits))
    numbers = [record.result.summary(level) for record in named]
    page = html_report(named, numbers, {"model": bad, bad: bad}, level=level)
    before = page.index("<h1>")
    assert "alert(1)" in page[before:] and "<script>alert" not in page[before:]
    assert blocks_of(page)["exchanges"] == [bad]
    assert page[before:].count("</script>") == page[before:].count("<script")
