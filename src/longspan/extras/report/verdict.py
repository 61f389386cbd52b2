"""The answer of a page: which policy meets the service level, by how much, or which numbers decide without one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from longspan.core.quantities import number, seconds
from longspan.extras.report.page import Html, escaped, paragraph, shortened, style_of, table
from longspan.extras.timeline import Record
from longspan.sim.experiment import ATTAINMENT
from longspan.sim.run import Result, percentile
from longspan.sim.spec import DEFAULT_CLASS, ServiceLevel, SloClass

_TPOT = "TPOT is the mean time between the tokens of a request."
_TAIL = f"P{100 * ATTAINMENT:.0f}"
_BOUNDS = ("slo_ttft", "slo_tbt")


def verdict(records: Sequence[Record], level: ServiceLevel) -> str:
    """Return the sentence and the tables at the top of a page."""
    if not any(record.result.served for record in records):
        return paragraph("No request was served, so there are no latencies.", kind="verdict")
    if not level.is_given:
        return _without_level(records)
    sentence = verdict_sentence({record.policy: record.result for record in records}, level)
    tables = [_table_of_policies(records, level), *([_table_of_classes(records, level)] if level.classes else [])]
    note = (
        f"{_TAIL} because the SLO is for {percent_text(ATTAINMENT)} of all requests, refused requests included. "
        f"Margin: how far {_TAIL} is below the bound. Goodput: requests that meet all bounds. {_TPOT}"
    )
    return "\n".join([paragraph(sentence, kind="verdict"), *tables, paragraph(note)])


def _table_of_policies(records: Sequence[Record], level: ServiceLevel) -> str:
    """Return a row for each policy. Without classes, it has the margins."""
    bound = None if level.classes else bounds_of(level)[0]
    head = ("policy", "SLO", "attainment", "goodput", *(_margins(None, bound) if bound else {}), "refused")
    rows = []
    for place, record in enumerate(records):
        result = record.result
        margins = _margins(result, bound).values() if bound else ()
        cells = (
            met_cell(_meets(result, level)),
            percent_text(result.attainment(level)),
            _per_s(goodput(result, level)),
        )
        rows.append((name_cell(record.policy, place), *cells, *margins, number(len(result.refused))))
    return table(head, rows, stacks="one")


def _table_of_classes(records: Sequence[Record], level: ServiceLevel) -> str:
    """Return a row for each policy and class, with the margins to the bounds of the class."""
    bounds = bounds_of(level)
    titles = list(dict.fromkeys(title for bound in bounds for title in _margins(None, bound)))
    rows = []
    for place, record in enumerate(records):
        parts = record.result.by_class(level)
        for bound in bounds:
            if (part := parts.get(bound.name)) is not None:
                margins = _margins(part, bound)
                cells = (bound.name, number(len(part.served) + len(part.refused)), percent_text(part.attainment(level)))
                rows.append((name_cell(record.policy, place), *cells, *(margins.get(title, "") for title in titles)))
    return table(("policy", "class", "requests", "attainment", *titles), rows, stacks="one")


def verdict_sentence(results: dict[str, Result], level: ServiceLevel) -> str:
    """Return which policies meet the service level, and the best of them."""
    wanted = f"the SLO ({level_text(level)} for {percent_text(ATTAINMENT)} of requests)"
    meeting = [policy for policy, result in results.items() if _meets(result, level)]
    best = max(
        meeting or results, key=lambda policy: (goodput(results[policy], level), results[policy].attainment(level))
    )
    numbers = f"attainment {_attainments(results[best], level)}, goodput {_per_s(goodput(results[best], level))}"
    if len(results) == 1:
        return f"{best} {'meets' if meeting else 'misses'} {wanted}: {numbers}."
    if not meeting:
        return f"No policy meets {wanted}. {best} has the highest goodput: {numbers}."
    if len(meeting) == 1:
        return f"Only {best} meets {wanted}: {numbers}."
    return f"{len(meeting)} of {len(results)} policies meet {wanted}. {best} has the highest goodput: {numbers}."


def bounds_of(level: ServiceLevel) -> list[SloClass]:
    """Return the classes of a service level with a bound. All other requests are in the last."""
    other = SloClass(name=DEFAULT_CLASS, slo_ttft=level.slo_ttft, slo_tbt=level.slo_tbt)
    return [one for one in (*level.classes, other) if any(getattr(one, name) is not None for name in _BOUNDS)]


def slo_lines(level: ServiceLevel, name: Literal["slo_ttft", "slo_tbt"]) -> list[tuple[str, float]]:
    """Return the bounds of one latency with their labels."""
    return [
        (" ".join(["SLO", *([shortened(one.name)] if level.classes else []), seconds(bound)]), bound)
        for one in bounds_of(level)
        if (bound := getattr(one, name)) is not None
    ]


def level_text(level: ServiceLevel) -> str:
    """Return the bounds in words: `TTFT ≤ 4 s and TPOT ≤ 50 ms`."""
    texts = []
    for one in bounds_of(level):
        both = (("TTFT", one.slo_ttft), ("TPOT", one.slo_tbt))
        text = " and ".join(f"{name} ≤ {seconds(bound)}" for name, bound in both if bound is not None)
        texts.append(f"{one.name}: {text}" if level.classes else text)
    return ", ".join(texts)


def goodput(result: Result, level: ServiceLevel) -> float:
    """Return the requests per second of the makespan that meet the service level."""
    return result.num_good(level) / result.makespan_s if result.makespan_s else 0.0


def percent_text(fraction: float) -> str:
    """Format a fraction in percent, rounded down: a missed bound is never shown as met."""
    return f"{math.floor(round(1000 * fraction, 6)) / 10:g} %"


def signed_percent(percent: float) -> str:
    """Format a difference or an error in percent with its sign: `+9 %`, `−12.5 %`."""
    shown = round(percent) if abs(percent) >= 100 or percent == round(percent) else round(percent, 1)
    return f"{shown:+,} %".replace("-", "\N{MINUS SIGN}")


def met_cell(is_met: bool) -> Html:
    """Return a cell for a service level that is met or missed."""
    return Html('<span class="yes">met</span>' if is_met else '<span class="no">missed</span>')


def name_cell(policy: str, place: int) -> Html:
    """Return the name of a policy after a sample of its colour."""
    return Html(f"{style_of(place).sample}{escaped(policy)}")


def _meets(result: Result, level: ServiceLevel) -> bool:
    return result.attainment(level) >= ATTAINMENT


def _attainments(result: Result, level: ServiceLevel) -> str:
    parts = result.by_class(level) if level.classes else {}
    of_classes = ", ".join(f"{name} {percent_text(part.attainment(level))}" for name, part in parts.items())
    return percent_text(result.attainment(level)) + (f" ({of_classes})" if of_classes else "")


def _per_s(rate: float) -> str:
    return f"{number(rate)} requests/s"


def _margins(result: Result | None, bound: SloClass) -> dict[str, str]:
    """Return the titles of the margins to the given bounds, with the margins of a result."""
    texts = {}
    for name, bound_s in (("TTFT", bound.slo_ttft), ("TPOT", bound.slo_tbt)):
        if bound_s is not None:
            values = np.empty(0) if result is None else result.ttfts_s if name == "TTFT" else result.tpots_s
            texts[f"{_TAIL} {name}, margin"] = _margin(percentile(values, 100 * ATTAINMENT), bound_s)
    return texts


def _margin(value: float | None, bound: float) -> str:
    if value is None:
        return ""
    return f"{seconds(value)}, {signed_percent(round(100 * (1 - value / bound)))}"


# ---------------------------------------------------------------- without a service level

_Metric = tuple[str, Callable[[Result], float | None], Callable[[float], str], Callable[[Sequence[float]], float]]
_DECIDING: tuple[_Metric, ...] = (
    ("TTFT P50", lambda result: percentile(result.ttfts_s, 50), seconds, min),
    ("TTFT P99", lambda result: percentile(result.ttfts_s, 99), seconds, min),
    ("TPOT P99", lambda result: percentile(result.tpots_s, 99), seconds, min),
    ("tokens/s", lambda result: result.num_tokens / result.makespan_s if result.makespan_s else None, number, max),
    ("refused", lambda result: len(result.refused), number, min),
)
"""Name, value, format and the better of several values."""


def _without_level(records: Sequence[Record]) -> str:
    """Return the deciding numbers, with the best of each in bold."""
    columns = [[value(record.result) for record in records] for _, value, _, _ in _DECIDING]
    best = [
        better(known) if (known := [value for value in column if value is not None]) else None
        for column, (_, _, _, better) in zip(columns, _DECIDING, strict=True)
    ]
    rows = []
    for place, record in enumerate(records):
        cells: list[str] = [name_cell(record.policy, place)]
        for column, top, (_, _, shown, _) in zip(columns, best, _DECIDING, strict=True):
            value = column[place]
            text = "" if value is None else shown(value)
            cells.append(Html(f"<b>{text}</b>") if len(set(column)) > 1 and value == top else text)
        rows.append(cells)
    sentence = "No SLO was given, so these numbers decide."
    if len(records) > 1:
        tail, tokens = columns[1], columns[3]
        first = [records[column.index(top)].policy for column, top in ((tail, best[1]), (tokens, best[3])) if top]
        if len(set(first)) == 1:
            sentence += f" {first[0]} has the lowest P99 of TTFT and the highest throughput."
        elif len(first) == 2:
            sentence += f" {first[0]} has the lowest P99 of TTFT, {first[1]} the highest throughput."
    note = f"With --slo-ttft and --slo-tbt, longspan simulate shows the policies that meet an SLO. {_TPOT}"
    head = ("policy", *(name for name, _, _, _ in _DECIDING))
    return "\n".join([paragraph(sentence, kind="verdict"), table(head, rows, stacks="one"), paragraph(note)])
