"""Laws of the page of a plan: its verdict and command, its front, its tables and its escaped text."""

from __future__ import annotations

import re
from dataclasses import replace
from html import escape

import pytest
from report_pages import colours_of, figures_of

from longspan.core.splits import ParallelSpec
from longspan.extras.plan_page import plan_html, plan_sentence
from longspan.extras.report.page import GROUND, LINE
from longspan.planner.candidates import Candidate
from longspan.planner.values import Current, Interval, ModelError, Plan, Pruned, Question, Ranked, RecordedTime
from longspan.sim.spec import ServiceLevel

LAYOUTS = ("4xtp2", "8", "2xtp4", "tp8", "4")
PRICES = {"a100-sxm-80g": 2.0, "h100-sxm-80g": 4.5}


def interval(mean: float) -> Interval:
    return Interval(mean=mean, low=0.9 * mean, high=1.2 * mean)


def ranked(place: int, *, prices: bool, meets: bool) -> Ranked:
    hardware = list(PRICES)[place % 2]
    policy = "chunked" if place % 3 == 2 else "auto"
    candidate = Candidate(hardware=hardware, spec=ParallelSpec.parse(LAYOUTS[place % len(LAYOUTS)]), policy=policy)
    return Ranked(
        candidate=candidate,
        num_gpus=candidate.num_gpus,
        price_per_hour=PRICES[hardware] * candidate.num_gpus if prices else None,
        goodput_per_s=interval(3.0 / (1 + place)),
        tokens_per_s_per_gpu=interval(1000.0),
        ttft_p99_s=None if place == 4 else interval(0.5 + place),
        tbt_p99_s=interval(0.01 * (1 + place)),
        attainment=Interval(mean=0.99 / (1 + place), low=0.9 / (1 + place), high=1 / (1 + place)),
        meets=meets and place < 2,
        on_front=place < 3,
        command=f"longspan serve llama-3-8b {' '.join(candidate.flags)}",
        lost_because=f"its goodput is {place} % lower" if place else "",
        num_requests=100,
    )


def plan_of(
    number: int = 5,
    *,
    prices: bool = True,
    meets: bool = True,
    level: ServiceLevel = ServiceLevel(slo_ttft=2, slo_tbt=0.05),
) -> Plan:
    rows = tuple(ranked(place, prices=prices, meets=meets) for place in range(number))
    reasons = ["the weights need 140 GiB of 80 GiB", "the weights need 90 GiB of 24 GiB", "its load is 1.5 of 1"]
    return Plan(
        question=Question(
            model="llama-3-8b",
            hardware=tuple(PRICES),
            num_gpus=8,
            workload="short",
            rate=3.0,
            level=level,
            attainment=0.95,
            prices=PRICES if prices else {},
        ),
        ranked=rows,
        pruned=tuple(Pruned(candidate=rows[0].candidate, reason=reason) for reason in reasons) if rows else (),
        winner=rows[0] if rows else None,
        baseline=next((row for row in rows if row.candidate.is_static), None),
        error=(ModelError(what="A table (3 cells)", mean=4.5, worst="9 %"),),
        max_rate=None if meets else 1.25,
        num_simulated_requests=1234,
        notes=("The winner beats the best static layout.",),
    )


def cells_of(page: str) -> list[list[str]]:
    text = page.replace("\u00a0", " ")
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [[re.sub(r"<[^>]+>", "", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows]


def test_a_plan_of_profiles_says_so() -> None:
    plan = plan_of()
    measured = replace(plan, question=replace(plan.question, is_measured=True), error=())
    assert "Times are from the profile" in plan_html(measured)
    assert "Times are from the profile" not in plan_html(plan)


@pytest.mark.parametrize("prices", [True, False])
@pytest.mark.parametrize("meets", [True, False])
def test_the_page_answers_first_with_the_winner_and_its_command(prices: bool, meets: bool) -> None:
    plan = plan_of(prices=prices, meets=meets)
    assert plan.winner is not None
    sentence = plan_sentence(plan)
    assert sentence.startswith(f"{plan.winner.candidate} meets the SLO" if meets else "No candidate meets the SLO")
    assert ("It meets it up to 1.25 requests/s." in sentence) == (not meets)
    assert (" per hour" in sentence) == prices
    page = plan_html(plan)
    top = page[page.index("<h1>") : page.index("<h2>")]
    assert escape(sentence) in top and f"<pre>{escape(plan.winner.command)}</pre>" in top
    assert all(note in top for note in plan.notes)


def test_every_candidate_has_a_row_with_the_reason_why_it_lost() -> None:
    plan = plan_of(45)
    rows = {row[0]: row for row in cells_of(plan_html(plan)) if len(row) == 10}
    assert list(rows) == [f"{place}: {row.candidate}" for place, row in enumerate(plan.ranked, start=1)]
    assert [row[-1] for row in rows.values()] == ["the winner", *(row.lost_because for row in plan.ranked[1:])]
    assert [row[3] for row in rows.values()] == ["met" if row.meets else "missed" for row in plan.ranked]
    assert {row[5].partition(" ± ")[2] for row in rows.values()} == {"20 %"}


def test_pruned_candidates_are_counted_by_reason() -> None:
    plan = plan_of()
    rows = cells_of(plan_html(plan))
    assert ["2", f"{plan.ranked[0].candidate}: the weights need 140 GiB of 80 GiB"] in rows
    assert ["1", f"{plan.ranked[0].candidate}: its load is 1.5 of 1"] in rows


@pytest.mark.parametrize("prices", [True, False])
def test_every_candidate_is_a_point_with_its_intervals(prices: bool) -> None:
    plan = plan_of(prices=prices)
    figures = figures_of(plan_html(plan))
    assert figures.keys() == {"front", "goodput-by-ttft", "goodput-by-tpot"}
    for name, (data, _) in figures.items():
        points = [trace for trace in data if not trace["name"].startswith("SLO")]
        shown = [row for row in plan.ranked if name != "goodput-by-ttft" or row.ttft_p99_s is not None]
        goodputs = {y for trace in points for y in trace["y"]}
        assert goodputs == {row.goodput_per_s.mean for row in shown}
        barred = [trace for trace in points if trace["name"] != "other candidates"]
        highs = {round(y + high, 9) for t in barred for y, high in zip(t["y"], t["error_y"]["array"], strict=True)}
        assert highs == {round(row.goodput_per_s.high, 9) for row in shown if row.on_front}
        assert len(colours_of(data) - {GROUND, LINE}) <= 12
    costs = {x for trace in figures["front"][0] if not trace["name"].startswith("SLO") for x in trace["x"]}
    assert costs == {row.price_per_hour if prices else row.num_gpus for row in plan.ranked}


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (ServiceLevel(), (0, 0, 0)),
        (ServiceLevel(slo_ttft=2), (1, 1, 0)),
        (ServiceLevel(slo_tbt=0.1), (1, 0, 1)),
        (ServiceLevel(slo_ttft=2, slo_tbt=0.1), (1, 1, 1)),
    ],
)
def test_plots_have_the_lines_of_the_level(level: ServiceLevel, lines: tuple[int, int, int]) -> None:
    figures = figures_of(plan_html(plan_of(level=level)))
    found = {name: [t for t in data if t["name"].startswith("SLO")] for name, (data, _) in figures.items()}
    assert tuple(len(found[name]) for name in ("front", "goodput-by-ttft", "goodput-by-tpot")) == lines
    if found["front"]:
        assert found["front"][0]["y"][0] == pytest.approx(0.95 * 3.0)
    if found["goodput-by-ttft"]:
        assert found["goodput-by-ttft"][0]["x"] == [2, 2]


def test_the_layout_now_is_compared_with_its_recording() -> None:
    plan = plan_of()
    times = (RecordedTime(what="P50 TTFT", recorded_s=0.8, simulated_s=1.0),)
    page = plan_html(replace(plan, current=Current(ranked=plan.ranked[3], times=times)))
    assert ["P50 TTFT", "800 ms", "1 s", "+25 %"] in cells_of(page)
    points = {trace["name"]: trace["y"] for trace in figures_of(page)["front"][0]}
    assert points["layout now"] == [plan.ranked[3].goodput_per_s.mean]
    without = plan_html(replace(plan, current=Current(ranked=plan.ranked[3], times=())))
    assert "The trace has no recorded times" in without and "The trace has no" not in page


def test_a_plan_without_a_candidate_is_a_page() -> None:
    page = plan_html(plan_of(0))
    assert "No candidate fits 8 GPUs or fewer." in page and not figures_of(page)


def test_text_is_escaped() -> None:
    bad = "</script><script>alert(1)</script>"
    plan = plan_of()
    row = replace(plan.ranked[0], command=bad, candidate=replace(plan.ranked[0].candidate, hardware=bad))
    plan = replace(
        plan,
        question=replace(plan.question, model=bad, workload=bad),
        ranked=(row, *plan.ranked[1:]),
        winner=row,
        notes=(bad,),
        pruned=(Pruned(candidate=row.candidate, reason=bad),),
        error=(ModelError(what=bad, mean=1.0, worst=bad),),
    )
    page = plan_html(plan)
    before = page.index("<h1>")
    assert "alert(1)" in page[before:] and "<script>alert" not in page[before:]
    assert page[before:].count("</script>") == page[before:].count("<script")
