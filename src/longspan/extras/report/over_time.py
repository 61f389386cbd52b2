"""Charts over time: the kinds of work of each instance, TTFT by arrival, waiting requests and KV blocks."""

from __future__ import annotations

from collections.abc import Sequence

from plotly.graph_objects import Figure, Scatter

from longspan.extras.report.axes import count_axis, figure
from longspan.extras.report.lanes import LEGEND, align, instances
from longspan.extras.report.latency import by_arrival
from longspan.extras.report.page import chart, section, style_of
from longspan.extras.timeline import Record, roles_of
from longspan.sim.spec import ServiceLevel

_HEIGHT_PX = 190
_DASHES = {"all": "solid", "prefill": "solid", "decode": "dash"}


def over_time(records: Sequence[Record], level: ServiceLevel) -> str:
    """Return all charts with the axis of time. They are zoomed together."""
    end_s = max((_end_s(record) for record in records), default=0.0)
    lines = [
        ("ttft-by-arrival", "TTFT, by arrival", by_arrival(records, level, end_s)),
        ("waiting", "Waiting requests", _waiting(records)),
        ("kv", f"KV blocks in use{_kv_legend(records)}", _kv(records)),
    ]
    parts: list[str] = [LEGEND]
    for place, record in enumerate(records):
        name = "instances" if place == 0 else f"instances-{place + 1}"
        title = f"Instances, {record.policy}" if len(records) > 1 else "Instances"
        parts.append(instances(records, place, end_s, name, title))
    for name, title, drawn in lines:
        align(drawn, records, end_s)
        parts.append(chart(drawn, name, title=title, shares_time=True))
    note = "Zooming one chart zooms all charts over time. A double click shows the whole time again."
    return section("Over time", note, *parts)


def _end_s(record: Record) -> float:
    ends = (record.result.makespan_s, *(moment.at_s for moment in record.timeline.moments))
    return max(ends, default=0.0)


def _waiting(records: Sequence[Record]) -> Figure:
    drawn = figure(_HEIGHT_PX)
    for place, record in enumerate(records):
        drawn.add_trace(_steps(record, place, [moment.num_waiting for moment in record.timeline.moments]))
    highest = max((moment.num_waiting for record in records for moment in record.timeline.moments), default=0)
    drawn.update_yaxes(**count_axis(highest))
    return drawn


def _kv_legend(records: Sequence[Record]) -> str:
    has_roles = any(record.cluster.has_roles for record in records)
    roles = "solid: prefill, dashed: decode" if has_roles else ""
    cached = "dotted: cached blocks included" if len(records) == 1 else ""
    return f" ({', '.join(filter(None, (roles, cached)))})" if roles or cached else ""


def _kv(records: Sequence[Record]) -> Figure:
    """Plot by role the held blocks in percent. With one policy, also the held or cached blocks."""
    drawn = figure(_HEIGHT_PX)
    for place, record in enumerate(records):
        moments = record.timeline.moments
        for role in roles_of(record.cluster):
            held = [100 * moment.held.get(role, 0.0) for moment in moments]
            drawn.add_trace(_steps(record, place, held, _DASHES[role]))
            if len(records) == 1:
                cached = [100 * (moment.held.get(role, 0.0) + moment.cached.get(role, 0.0)) for moment in moments]
                drawn.add_trace(_steps(record, place, cached, "dot"))
    drawn.update_yaxes(ticksuffix="%", rangemode="tozero")
    return drawn


def _steps(record: Record, place: int, values: Sequence[float], dash: str | None = None) -> Scatter:
    style = style_of(place)
    return Scatter(
        x=[moment.at_s for moment in record.timeline.moments],
        y=values,
        mode="lines",
        line={"shape": "hv", "dash": dash or style.dash, "color": style.colour, "width": 1.5},
        name=record.policy,
        meta=record.policy,
    )
