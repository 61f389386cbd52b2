"""A run's numbers as tables, and as JSON with the names of vLLM's `bench serve`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from longspan.loadgen.metrics import PERCENTILES, Slo, Spread, Summary, failures_of
from longspan.loadgen.results import Answered, Run

_TITLES = {
    "ttft": "TTFT (first token)",
    "itl": "TBT (between tokens)",
    "tpot": "TPOT (per token after the first)",
    "e2el": "E2E (whole answer)",
    "client_queue_time": "sent later than due",
}
_MOST_LISTED = 10
_LATE_MS = 50.0


def tables(run: Run, summary: Summary, slo: Slo, *, max_concurrency: int | None) -> RenderableType:
    """What is printed at the end."""
    parts: list[RenderableType] = [_counts(summary, slo), _times(summary)]
    late = summary.spreads["client_queue_time"]
    if max_concurrency is None and late is not None and late.percentiles[-1] > _LATE_MS:
        parts.append(
            Text(
                "The load generator itself was late: some requests were sent much later than due. Their times count "
                "from when they were due, so this is in the numbers. Use a lower rate or a quieter machine.",
                style="yellow",
            )
        )
    if summary.failures:
        parts.append(_failures(run, summary))
    return Group(*parts)


def as_json(run: Run, summary: Summary, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and numbers: seconds in lists, milliseconds where the name says so, null where there is none.

    Lists go by request, in order. As an extension of vLLM's fields there are `num_unfinished`, `goodput_ratio`,
    `failures`, `output_tokens_asked` and `input_tokens_asked`.
    """
    answers = [result.outcome if isinstance(result.outcome, Answered) else None for result in run.results]
    failures = {result.index: failure for result, failure in failures_of(run.results)}
    found: dict[str, Any] = {
        **settings,
        "duration": summary.duration_s,
        "completed": summary.completed,
        "failed": summary.failed,
        "num_unfinished": summary.unfinished,
        "failures": summary.failures,
        "total_input_tokens": summary.num_input_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "input_tokens_asked": sum(result.input_len for result in run.results),
        "output_tokens_asked": sum(result.output_len for result in run.results),
        "request_throughput": summary.per_s(summary.completed),
        "request_goodput": summary.goodput,
        "goodput_ratio": None if summary.good is None or not run.results else summary.good / len(run.results),
        "output_throughput": summary.per_s(summary.num_output_tokens),
        "total_token_throughput": summary.per_s(summary.num_input_tokens + summary.num_output_tokens),
        "max_concurrent_requests": summary.max_concurrent,
    }
    for name, spread in summary.spreads.items():
        found |= _spread_fields(name, spread)
    return found | {
        "input_lens": [0 if one is None else one.num_prompt_tokens for one in answers],
        "output_lens": [0 if one is None else one.num_output_tokens for one in answers],
        "ttfts": [None if one is None else one.ttft_s for one in answers],
        "itls": [[] if one is None else list(one.tbt_s) for one in answers],
        "latencies": [None if one is None else one.e2el_s for one in answers],
        "due_times": [result.due_s for result in run.results],
        "start_times": [result.sent_s for result in run.results],
        "queue_times": [result.late_s for result in run.results],
        "errors": [
            f"{failures[result.index].kind}: {failures[result.index].message}" if result.index in failures else ""
            for result in run.results
        ],
    }


def _spread_fields(name: str, spread: Spread | None) -> dict[str, float | None]:
    if spread is None:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES))}
    percentiles = {f"p{p}_{name}_ms": value for p, value in zip(PERCENTILES, spread.percentiles, strict=True)}
    return {
        f"mean_{name}_ms": spread.mean,
        f"median_{name}_ms": spread.median,
        f"std_{name}_ms": spread.std,
        **percentiles,
    }


def _counts(summary: Summary, slo: Slo) -> Table:
    table = Table(title="Serving benchmark", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("successful requests", f"{summary.completed:,}")
    table.add_row("failed requests", f"{summary.failed:,}")
    if summary.unfinished:
        table.add_row("unfinished when interrupted", f"{summary.unfinished:,}")
    table.add_row("duration", f"{summary.duration_s:.2f} s")
    table.add_row("input tokens", f"{summary.num_input_tokens:,}")
    table.add_row("output tokens", f"{summary.num_output_tokens:,}")
    table.add_row("most requests at once", f"{summary.max_concurrent:,}")
    table.add_row("request throughput", f"{summary.per_s(summary.completed):.2f} /s")
    if summary.good is not None:
        limits = [("TTFT", slo.ttft_ms), ("mean TBT", slo.tbt_ms)]
        within = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in limits if limit is not None)
        total = summary.completed + summary.failed
        table.add_row(f"goodput ({within})", f"{summary.goodput:.2f} /s, {summary.good} of {total}")
    table.add_row("output token throughput", f"{summary.per_s(summary.num_output_tokens):,.1f} /s")
    table.add_row(
        "total token throughput", f"{summary.per_s(summary.num_input_tokens + summary.num_output_tokens):,.1f} /s"
    )
    return table


def _times(summary: Summary) -> Table:
    table = Table(title="Milliseconds, from when a request was due", title_justify="left")
    table.add_column("")
    for name in ("mean", *(f"p{p}" for p in PERCENTILES)):
        table.add_column("median (p50)" if name == "p50" else name, justify="right")
    for name, title in _TITLES.items():
        spread = summary.spreads[name]
        values = () if spread is None else (spread.mean, *spread.percentiles)
        table.add_row(title, *(f"{value:,.1f}" for value in values))
    return table


def _failures(run: Run, summary: Summary) -> Table:
    table = Table(title="Failed requests", title_justify="left")
    table.add_column("request", justify="right")
    table.add_column("reason")
    table.add_column("message")
    for kind, count in summary.failures.items():
        table.add_row(f"{count} times", Text(kind), "")
    table.add_section()
    failures = failures_of(run.results)
    for result, failure in failures[:_MOST_LISTED]:
        table.add_row(str(result.index), Text(failure.kind), Text(failure.message))
    if len(failures) > _MOST_LISTED:
        table.add_row("…", f"{len(failures) - _MOST_LISTED} more", "")
    return table
