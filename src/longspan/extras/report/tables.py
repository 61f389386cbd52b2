"""Tables of a page: metrics, settings, errors of predictions and the slowest requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from longspan.core.quantities import number, quantity, seconds
from longspan.cost import catalog
from longspan.cost.catalog import Kernels
from longspan.extras.report.page import folded, paragraph, section, table
from longspan.extras.report.verdict import signed_percent
from longspan.extras.timeline import Record, TimeSplit
from longspan.sim.run import Served

_NUM_SLOWEST = 10
_SPLIT = ("queue", "compute", "exposed communication", "transfer", "decode")


def compared(policies: Sequence[str], numbers: Sequence[Mapping[str, float | None]]) -> str:
    """Return all metrics, with a column for each policy."""
    rows = [
        (quantity(name, None)[0], *(quantity(name, metrics.get(name))[1] for metrics in numbers))
        for name in dict.fromkeys(name for metrics in numbers for name in metrics)
    ]
    return table(("", *policies), rows, stacks="two") if len(policies) > 1 else table((), rows)


def settings_table(settings: Mapping[str, object]) -> str:
    """Return the settings in a part of the page that opens by a click."""
    return folded("Settings", table((), [(name, _words(value)) for name, value in settings.items()]))


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return number(value) if isinstance(value, int | float) else str(value)


def accuracy(hardware: str | None, attention: Kernels, policies: Sequence[str]) -> str:
    """Return the recorded prediction errors of these policies, and for computed times of this hardware."""
    computed, served = catalog.errors()
    parts, covered = list[str](), set[str]()
    kind = None if hardware is None else hardware.partition("-")[0]
    shown = set(policies)
    matching = [e for e in computed if (e.hardware, e.attention) == (kind, attention) and shown & set(e.policies)]
    if matching:
        parts.append(paragraph(f"Computed prefills and decodes on {kind}, {attention} attention, against papers:"))
        rows = [
            (e.what, f"{e.mean:g} %", e.worst, ", ".join(policy for policy in policies if policy in e.policies))
            for e in matching
        ]
        parts.append(table(("measured by", "mean error", "worst", "policy"), rows, stacks="one"))
    against_real = [error for error in served if error.policy in shown]
    if against_real:
        parts.append(paragraph("Simulated against real latencies, on two CPU instances near full load:"))
        names = ("ttft_p50", "ttft_p90", "tbt_p50", "tbt_p90")
        errors = [(e.policy, *(signed_percent(getattr(e, name)) for name in names)) for e in against_real]
        parts.append(table(("policy", "TTFT P50", "TTFT P90", "TBT P50", "TBT P90"), errors, stacks="one"))
    covered.update(error.policy for error in against_real)
    covered.update(policy for error in matching for policy in error.policies)
    if missing := [policy for policy in policies if policy not in covered]:
        where = "" if hardware is None else f" on {kind}"
        parts.append(paragraph(f"No comparison with measurements covers {', '.join(missing)}{where}."))
    return section("Error of these predictions", "", *parts)


# ---------------------------------------------------------------- slowest requests


def slowest(records: Sequence[Record]) -> str:
    """Return a table of the requests with the highest TTFT, after a row with the mean of all requests."""
    head = ("request", "arrived", "prompt", "cached", "answer", "TTFT", "end to end", *_SPLIT)
    note = (
        "By TTFT. Queue: before its first token, no step of the request runs. Compute and exposed communication: steps "
        "with its prompt, which may include other requests. Transfer: until its KV is on the decode instance. The five "
        "times add up to the end-to-end time."
    )
    parts = []
    for place, record in enumerate(records):
        served, split = record.result.served, record.timeline.split
        if not served:
            continue
        rows = [_request_row("mean", served, [split(request) for request in served])]
        highest = sorted(served, key=lambda request: -request.ttft_s)[:_NUM_SLOWEST]
        rows += [_request_row(str(request.index), [request], [split(request)]) for request in highest]
        found = table(head, rows, stacks="two")
        parts.append(folded(record.policy, found, is_open=place == 0) if len(records) > 1 else found)
    return section("Slowest requests", note, *parts)


def _request_row(name: str, served: Sequence[Served], splits: Sequence[TimeSplit]) -> tuple[str, ...]:
    """Return a row with the means of requests. Unknown exposed communication is part of compute."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    by_cause = zip(*(asdict(split).values() for split in splits), strict=True)
    times = [[value for value in values if value is not None] for values in by_cause]
    return (
        name,
        seconds(served[0].arrival_s) if len(served) == 1 else "",
        *(
            number(round(mean([getattr(request, f"num_{what}_tokens") for request in served])))
            for what in ("prompt", "cached", "output")
        ),
        seconds(mean([request.ttft_s for request in served])),
        seconds(mean([request.e2e_s for request in served])),
        *(seconds(mean(values)) if values else "in compute" for values in times),
    )
