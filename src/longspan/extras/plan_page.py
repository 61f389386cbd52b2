"""The HTML page of a plan: the winner and its command, the Pareto front, why candidates lost, and the model's error.

Importing this module needs plotly, which is optional and slow to import.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from longspan.core.quantities import number, seconds
from longspan.extras.report.axes import add_slo, figure, seconds_axis
from longspan.extras.report.page import GREY, LINE, PALETTE, Html, chart, folded, page, paragraph, section, table
from longspan.extras.report.verdict import level_text, met_cell, percent_text, signed_percent, slo_lines
from longspan.planner.values import Current, Interval, Plan, Question, Ranked

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_NUM_OPEN_ROWS = 20
"""Rows of the table of candidates before the part that a click opens."""
_SPACE = 1.2
"""The end of an axis over its largest value, so that labels of points fit."""
_VARYING = re.compile(r"\S*\d\S*")
"""Words of a reason with numbers, which differ between candidates."""
_FRONT = "on the front"
_GROUPS = (
    ("winner", PALETTE[1], "star", 15),
    ("best static layout with chunked", PALETTE[2], "diamond", 11),
    ("layout now", PALETTE[3], "square", 10),
    (_FRONT, PALETTE[0], "circle", 9),
    ("other candidates", GREY, "circle-open", 7),
)
"""Name, colour, symbol and size of points, the most special group first."""


def plan_html(plan: Plan) -> str:
    """Return the page."""
    question = plan.question
    title = f"longspan plan: {question.model}, {question.workload} on {', '.join(question.hardware)}"
    return page(
        title,
        [
            *_verdict(plan),
            *([] if plan.current is None else [_now(plan.current)]),
            *([_front(plan), _candidates(plan)] if plan.ranked else []),
            *([_pruned(plan)] if plan.pruned else []),
            _accuracy(plan),
            section("Question", "", _question(plan)),
        ],
    )


# ---------------------------------------------------------------- the answer


def _verdict(plan: Plan) -> list[str]:
    """Return the answer, the command of the winner, and the notes, which compare it with the best static layout."""
    winner = plan.winner
    if winner is None:
        parts = [paragraph(f"No candidate fits {plan.question.num_gpus} GPUs or fewer.", kind="verdict")]
    else:
        parts = [paragraph(plan_sentence(plan), kind="verdict"), f"<pre>{escape(winner.command)}</pre>"]
    return [*parts, *(paragraph(note) for note in plan.notes)]


def plan_sentence(plan: Plan) -> str:
    """Return which candidate is best, and whether it meets the service level."""
    winner, question = plan.winner, plan.question
    assert winner is not None, "there is one"
    numbers = ", ".join(
        [
            f"goodput {number(winner.goodput_per_s.mean)} requests/s",
            f"attainment {percent_text(winner.attainment.mean)}",
            f"{winner.num_gpus} GPUs",
            *([] if winner.price_per_hour is None else [f"{number(winner.price_per_hour)} per hour"]),
        ]
    )
    if not question.level.is_given:
        return f"{winner.candidate} is best: {numbers}."
    wanted = f"the SLO ({level_text(question.level)} for {percent_text(question.attainment)} of requests)"
    if winner.meets:
        return f"{winner.candidate} meets {wanted}: {numbers}."
    rate = "" if plan.max_rate is None else f" It meets it up to {number(plan.max_rate)} requests/s."
    return f"No candidate meets {wanted}. {winner.candidate} is best: {numbers}.{rate}"


def _now(current: Current) -> str:
    """Return the numbers of the layout that serves the workload now, and the errors of its simulation."""
    row = current.ranked
    sentence = (
        f"{row.candidate}: goodput {_range(row.goodput_per_s, number)} requests/s, attainment "
        f"{_range(row.attainment, percent_text)}. Against the winner: {row.lost_because or 'none is better'}."
    )
    if not current.times:
        return section("Layout now", f"{sentence} The trace has no recorded times to compare with.")
    rows = [
        (time.what, seconds(time.recorded_s), seconds(time.simulated_s), signed_percent(time.error))
        for time in current.times
    ]
    return section("Layout now", sentence, table(("", "recorded", "simulated", "error"), rows))


# ---------------------------------------------------------------- the front


def _front(plan: Plan) -> str:
    """Return goodput over price or GPUs, and over the P99 of latencies, with the lines of the service level."""
    level, has_prices = plan.question.level, all(row.price_per_hour is not None for row in plan.ranked)
    cost = _figure(plan, lambda row: _exactly(row.price_per_hour if has_prices else row.num_gpus))
    cost.update_xaxes(rangemode="tozero", tickformat=",~r")
    if not has_prices:
        cost.update_xaxes(dtick=max(1, -(-plan.question.num_gpus // 8)))
    rate = plan.question.rate
    if level.is_given and rate is not None and math.isfinite(rate):
        wanted = rate * plan.question.attainment
        label = f"SLO {percent_text(plan.question.attainment)} of {number(rate)}/s"
        most = max(_exactly(row.price_per_hour if has_prices else row.num_gpus).high for row in plan.ranked)
        add_slo(cost, [(label, wanted)], "y", (0.0, most))
        cost.update_yaxes(range=[0.0, _SPACE * max(wanted, cost.layout.yaxis.range[1] / _SPACE)])
    parts = [chart(cost, "front", title=f"Goodput by {'price per hour' if has_prices else 'GPUs'}")]
    for name, title, get, lines in (
        ("goodput-by-ttft", "Goodput by P99 of TTFT", _ttft_p99, slo_lines(level, "slo_ttft")),
        ("goodput-by-tpot", "Goodput by P99 of TPOT", _tpot_p99, slo_lines(level, "slo_tbt")),
    ):
        values = [value for row in plan.ranked if (value := get(row)) is not None]
        if values:
            parts.append(_by_latency(plan, name, title, get, lines))
    kinds = {_group_of(row, plan) for row in plan.ranked}
    legend = "".join(
        f'<span class="box" style="background: {colour}"></span>{kind}'
        for kind, colour, _, _ in _GROUPS
        if kind in kinds
    )
    note = Html(f"{legend}. Goodput in requests/s, with confidence intervals over seeds. Numbers: places in the table.")
    cells = "".join(f"<div>{part}</div>" for part in parts)
    return section("Front", note, f'<div class="grid">{cells}</div>')


def _ttft_p99(row: Ranked) -> Interval | None:
    return row.ttft_p99_s


def _tpot_p99(row: Ranked) -> Interval | None:
    return row.tbt_p99_s


def _exactly(value: float | None) -> Interval:
    assert value is not None, "all candidates have prices"
    return Interval(mean=value, low=value, high=value)


def _by_latency(
    plan: Plan,
    name: str,
    title: str,
    get: Callable[[Ranked], Interval | None],
    lines: Sequence[tuple[str, float]],
) -> str:
    drawn = _figure(plan, get)
    means = [value.mean for row in plan.ranked if (value := get(row)) is not None]
    times = np.array([*means, *(bound for _, bound in lines)])
    drawn.update_xaxes(**seconds_axis(times))
    if np.all(times > 0):
        drawn.update_xaxes(range=np.log10([times.min() / _SPACE, times.max() * _SPACE]).tolist())
    add_slo(drawn, lines, "x", (0.0, drawn.layout.yaxis.range[1]))
    return chart(drawn, name, title=title)


def _figure(plan: Plan, x: Callable[[Ranked], Interval | None]) -> Figure:
    """Plot the goodput of candidates over another number, a trace for each group of candidates."""
    drawn = figure()
    # Intervals of few seeds may be many times as wide as the differences between candidates.
    drawn.update_yaxes(range=[0.0, _SPACE * max(row.goodput_per_s.mean for row in plan.ranked)])
    numbered = [(place, row, at) for place, row in enumerate(plan.ranked, start=1) if (at := x(row)) is not None]
    for kind, colour, symbol, size in reversed(_GROUPS):
        is_special = kind != _GROUPS[-1][0]
        points = [point for point in numbered if _group_of(point[1], plan) == kind]
        drawn.add_trace(
            {
                "type": "scatter",
                "x": [at.mean for _, _, at in points],
                "y": [row.goodput_per_s.mean for _, row, _ in points],
                "mode": "markers+text" if is_special else "markers",
                "text": [str(place) for place, _, _ in points],
                "textposition": "bottom left" if kind == _FRONT else "top right",
                "textfont": {"color": LINE},
                "marker": {"color": colour, "symbol": symbol, "size": size},
                "name": kind,
                "hovertext": [_described(place, row) for place, row, _ in points],
                "hoverinfo": "text",
                **(_bars(points, colour) if is_special else {}),
            }
        )
    return drawn


def _group_of(row: Ranked, plan: Plan) -> str:
    winner, baseline, now, front, other = (kind for kind, _, _, _ in _GROUPS)
    if plan.winner is not None and row.candidate == plan.winner.candidate:
        return winner
    if plan.baseline is not None and row.candidate == plan.baseline.candidate:
        return baseline
    if plan.current is not None and row.candidate == plan.current.ranked.candidate:
        return now
    return front if row.on_front else other


def _bars(points: Sequence[tuple[int, Ranked, Interval]], colour: str) -> dict[str, Any]:
    """Return the confidence intervals of points. Those of all candidates would cover the points."""
    return {
        name: {
            "type": "data",
            "array": [interval.high - interval.mean for interval in intervals],
            "arrayminus": [interval.mean - max(interval.low, 0.0) for interval in intervals],
            "color": colour,
            "thickness": 1,
            "width": 3,
        }
        for name, intervals in (
            ("error_x", [at for _, _, at in points]),
            ("error_y", [row.goodput_per_s for _, row, _ in points]),
        )
    }


def _described(place: int, row: Ranked) -> str:
    return "<br>".join(
        [
            f"{place}: {escape(str(row.candidate))}",
            f"{row.num_gpus} GPUs, goodput {_range(row.goodput_per_s, number)} requests/s",
            f"P99 of TTFT {_range(row.ttft_p99_s, seconds)}, of TPOT {_range(row.tbt_p99_s, seconds)}",
        ]
    )


def _range(interval: Interval | None, shown: Callable[[float], str]) -> str:
    """Return the mean, with half of the confidence interval in percent. A line may break between both."""
    if interval is None:
        return ""
    half = max(interval.high - interval.mean, interval.mean - interval.low)
    percent = f" ±\u00a0{number(round(100 * half / interval.mean))}\u00a0%" if half and interval.mean else ""
    return Html(shown(interval.mean).replace(" ", "\u00a0") + percent)


# ---------------------------------------------------------------- tables


def _candidates(plan: Plan) -> str:
    """Return all simulated candidates, best first, and why each lost."""
    has_prices = any(row.price_per_hour is not None for row in plan.ranked)
    rows = [_row(place, row) for place, row in enumerate(plan.ranked, start=1)]
    left_out = {
        *(() if has_prices else ("per hour",)),
        *(() if plan.question.level.is_given else ("SLO", "attainment")),
    }
    head = [name for name in rows[0] if name not in left_out]
    cells = [[row[name] for name in head] for row in rows]
    parts = [table(head, cells[:_NUM_OPEN_ROWS], stacks="one")]
    if more := cells[_NUM_OPEN_ROWS:]:
        parts.append(folded(f"{len(more)} more candidates", table(head, more, stacks="one")))
    simulated = number(plan.num_simulated_requests)
    note = f"{simulated} requests were simulated. After ±: half of the confidence interval over seeds."
    return section("Candidates", note, *parts)


def _row(place: int, row: Ranked) -> dict[str, str]:
    return {
        "candidate": f"{place}: {row.candidate}",
        "GPUs": number(row.num_gpus),
        "per hour": "" if row.price_per_hour is None else number(row.price_per_hour),
        "SLO": met_cell(row.meets),
        "attainment": percent_text(row.attainment.mean),
        "goodput": _range(row.goodput_per_s, number),
        "TTFT P99": _range(row.ttft_p99_s, seconds),
        "TPOT P99": _range(row.tbt_p99_s, seconds),
        "tokens/s/GPU": number(round(row.tokens_per_s_per_gpu.mean)),
        "why it lost": row.lost_because or "the winner",
    }


def _pruned(plan: Plan) -> str:
    """Return the number of candidates by the reason why they were not simulated, with an example of each."""
    groups: dict[str, list[str]] = {}
    for one in plan.pruned:
        groups.setdefault(_VARYING.sub("", one.reason), []).append(f"{one.candidate}: {one.reason}")
    rows = [(number(len(examples)), examples[0]) for examples in sorted(groups.values(), key=lambda group: -len(group))]
    note = f"{number(len(plan.pruned))} candidates were left out without a simulation."
    return section("Left out", note, table(("candidates", "for example"), rows))


def _accuracy(plan: Plan) -> str:
    """Return the errors of the cost model for this kind of prediction."""
    if plan.question.is_measured:
        return section("Error of these predictions", "Times are from the profile, so the cost model has no part.")
    if not plan.error:
        hardware = ", ".join(plan.question.hardware) if plan.winner is None else plan.winner.candidate.hardware
        return section("Error of these predictions", f"No comparison with measurements covers {hardware}.")
    rows = [(error.what, f"{error.mean:g} %", error.worst) for error in plan.error]
    return section("Error of these predictions", "", table(("measured by", "mean error", "worst"), rows, stacks="one"))


def _question(plan: Plan) -> str:
    question: Question = plan.question
    rate = "of the trace" if question.rate is None else f"{question.rate:g} requests/s"
    rows = [
        ("model", question.model),
        ("hardware", ", ".join(question.hardware)),
        ("GPUs", f"at most {question.num_gpus}"),
        ("workload", question.workload),
        ("rate", "all requests at once" if question.rate == math.inf else rate),
        ("SLO", level_text(question.level) or "none"),
        ("attainment", percent_text(question.attainment)),
        *((f"price of {name}", f"{number(price)} per device and hour") for name, price in question.prices.items()),
    ]
    return table((), rows)
