"""A record of each instance's work, of the queue and of the KV pools: as a trace for Perfetto, and as an HTML page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.core.runs import num_tokens
from longspan.core.steps import Part
from longspan.errors import ParameterError
from longspan.sim.executor import StepTiming
from longspan.sim.run import Observers, Result

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


_MAX_BLOCKS, _MAX_MOMENTS = 500_000, 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """The work of an instance for some time: a chunk of one request's prompt, or the decodes of a step.

    Attributes:
        index: of the request among the arrivals; None for decodes.
        start, stop: of the chunk, in tokens of the request; of decodes, 0 and how many there were.
    """

    instance: int
    start_s: float
    end_s: float
    index: int | None
    start: int
    stop: int
    group: tuple[int, ...] = ()
    exchange: str = ""


@dataclass(frozen=True, slots=True)
class Moment:
    """The number of requests that waited, and the part of all KV blocks that was held."""

    at_s: float
    num_waiting: int
    kv_used: float


class Timeline:
    """Writes down what a simulation does, through `watch`.

    Attributes:
        blocks: the first, in the order in which steps were planned.
        complete: whether `blocks` are all.
        moments: a bounded number, evenly spread over the whole time.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.moments: list[Moment] = []
        self.complete = True
        self._every_s, self._next_s = 0.0, 0.0
        self._indices: dict[int, int] = {}

    @property
    def watch(self) -> Observers:
        """The callbacks to give to `simulate`."""
        return Observers(ran=self._ran, moment=self._moment, admitted=self._indices.__setitem__, lost=self._lost)

    def _ran(self, ran: StepTiming) -> None:
        if len(self.blocks) >= _MAX_BLOCKS:
            self.complete = False
            return
        for instance, end_s in ran.ends_s.items():
            self._add(instance, ran, end_s)

    def _add(self, instance: int, ran: StepTiming, end_s: float) -> None:
        """Shares the time of a step on one instance among its chunks and all its decodes, by their tokens."""
        chunks: list[tuple[Part, int]] = []
        num_decodes = 0
        for part in ran.forward.parts:
            if instance not in part.group:
                continue
            if part.stop - part.start == 1:
                num_decodes += 1
            elif own := num_tokens(part.runs[part.group.index(instance)]):
                chunks.append((part, own))
        total = num_decodes + sum(own for _, own in chunks)
        at_s, per_token_s = ran.start_s, (end_s - ran.start_s) / max(1, total)
        for part, own in chunks:
            self.blocks.append(
                Block(
                    instance=instance,
                    start_s=at_s,
                    end_s=at_s + own * per_token_s,
                    index=self._indices.get(part.request_id, part.request_id),
                    start=part.start,
                    stop=part.stop,
                    group=part.group,
                    exchange=part.exchange.shown,
                )
            )
            at_s += own * per_token_s
        if num_decodes:
            self.blocks.append(
                Block(instance=instance, start_s=at_s, end_s=end_s, index=None, start=0, stop=num_decodes)
            )

    def _lost(self, at_s: float) -> None:
        """Cuts off all that had not ended at that time."""
        self.blocks = [replace(one, end_s=min(one.end_s, at_s)) for one in self.blocks if one.start_s < at_s]

    def _moment(self, at_s: float, engine: Engine) -> None:
        if at_s < self._next_s:
            return
        pools = [engine.account.pool(i) for i in engine.config.cluster.instances]
        kv_used = 1 - sum(pool.num_free for pool in pools) / sum(pool.num_blocks for pool in pools)
        self.moments.append(Moment(at_s, engine.num_waiting, kv_used))
        if len(self.moments) >= _MAX_MOMENTS:
            self.moments = self.moments[::2]
            self._every_s = at_s / len(self.moments)
        self._next_s = at_s + self._every_s


_CLUSTER, _REQUESTS = 1, 2  # the two processes that viewers show


def chrome_trace(result: Result, timeline: Timeline) -> str:
    """Writes a row per instance with what it did, a row per request from arrival to end, and counters, as JSON."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(result, timeline))}) + "\n"


def _events(result: Result, timeline: Timeline) -> Iterator[dict[str, Any]]:
    instances = [("thread_name", _CLUSTER, i, f"instance {i}") for i in range(len(result.busy_s))]
    processes = [("process_name", _CLUSTER, 0, "instances"), ("process_name", _REQUESTS, 0, "requests")]
    for kind, process, thread, name in processes + instances:
        yield {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
    for block in timeline.blocks:
        yield _of_block(block)
    for one in result.served:
        times = {"queue_s": one.scheduled_s - one.arrival_s, "ttft_s": one.ttft_s, "e2e_s": one.e2e_s}
        tokens = {"prompt_tokens": one.num_prompt_tokens, "output_tokens": one.num_output_tokens}
        common = {"cat": "request", "id": one.index, "pid": _REQUESTS, "tid": 0, "name": f"request {one.index}"}
        yield common | {"ph": "b", "ts": one.arrival_s * 1e6, "args": tokens | times}
        yield common | {"ph": "n", "ts": (one.arrival_s + one.ttft_s) * 1e6, "args": {"what": "first token"}}
        yield common | {"ph": "e", "ts": one.finished_s * 1e6}
    for moment in timeline.moments:
        common = {"ph": "C", "pid": _CLUSTER, "tid": 0, "ts": moment.at_s * 1e6}
        yield common | {"name": "waiting", "args": {"requests": moment.num_waiting}}
        yield common | {"name": "KV", "args": {"percent": 100 * moment.kv_used}}


def _of_block(block: Block) -> dict[str, Any]:
    event = {
        "ph": "X",
        "pid": _CLUSTER,
        "tid": block.instance,
        "ts": block.start_s * 1e6,
        "dur": (block.end_s - block.start_s) * 1e6,
    }
    if block.index is None:
        return event | {"name": f"{block.stop} decodes", "cat": "decode"}
    about = {"start": block.start, "stop": block.stop, "group": list(block.group), "exchange": block.exchange}
    return event | {"name": f"request {block.index}", "cat": "prefill", "args": about}


# ---------------------------------------------------------------- the page

_MAX_BARS = 20_000
_SAME_TIME_S = 1e-9
_LABELLED_PART = 0.005
"""A part of the whole time: shorter blocks have no room for a number."""
_NUMBERS = {"minsize": 8, "mode": "hide"}
_LAYOUT: dict[str, Any] = {"margin": {"l": 70, "r": 20, "t": 20, "b": 50}, "template": "plotly_white"}
_GOLDEN_ANGLE = 137.508
_PERCENTS = np.concatenate([np.linspace(0, 99, 199), np.linspace(99.1, 100, 10)])
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; padding: 0 1em; color: #222; }
h1 { font-size: 1.5em; } h2 { font-size: 1.15em; margin: 1.6em 0 0; } p { color: #555; margin: .3em 0; }
table { border-collapse: collapse; display: inline-table; vertical-align: top; margin-right: 3em; }
td { padding: .1em 1em .1em 0; } td + td { text-align: right; font-variant-numeric: tabular-nums; }
"""


def check_report() -> None:
    """Raises ValueError when the drawing library is missing, with the remedy."""
    try:
        import plotly.graph_objects  # noqa: F401, PLC0415  # optional, and slow to import
    except ImportError:
        raise ParameterError("report", "needs plotly: pip install 'longspan[report]'") from None


def html_report(result: Result, timeline: Timeline, settings: Mapping[str, object], cluster: Cluster) -> str:
    """Writes the page: what was simulated, the numbers, distributions of times, queue and KV, and instances."""
    from plotly.offline import get_plotlyjs  # noqa: PLC0415  # optional

    title = "longspan simulate: " + ", ".join(str(settings[key]) for key in ("model", "policy") if key in settings)
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style><script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _table(settings),
        _table(result.summary()),
    ]
    for name, note, figure in _figures(result, timeline, cluster):
        drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name.lower().replace(" ", "-"))
        parts.append(f"<h2>{name}</h2><p>{html.escape(note)}</p>{drawn}")
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _figures(result: Result, timeline: Timeline, cluster: Cluster) -> list[tuple[str, str, Figure]]:
    waiting = [(one.at_s, one.num_waiting) for one in timeline.moments]
    held = [(one.at_s, 100 * one.kv_used) for one in timeline.moments]
    bars, note = _shown(timeline)
    return [
        ("Instances", note, _gantt(bars, _names(cluster))),
        ("TTFT", "Part of all requests whose first token came within so many seconds.", _distribution(result.ttfts_s)),
        ("TBT", "Part of all times between tokens that were at most so long.", _distribution(result.tbts_s)),
        ("Queue", "Requests that waited.", _line(waiting, "requests", shape="hv")),
        ("KV", "Blocks that requests held, of all instances.", _line(held, "% of blocks", shape="hv")),
    ]


def _shown(timeline: Timeline) -> tuple[Sequence[Block], str]:
    """Returns the first blocks, as many as can be drawn, and a note about them."""
    note = (
        "Each request has a colour of its own, and its number where there is room; each block is what one step "
        "computes of its prompt; grey are decodes."
    )
    blocks = _joined(sorted(timeline.blocks, key=lambda one: (one.start_s, one.instance)))
    if timeline.complete and len(blocks) <= _MAX_BARS:
        return blocks, note
    blocks = blocks[:_MAX_BARS]
    return blocks, f"{note} Shown are the first {blocks[-1].start_s:,.1f} seconds."


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """Joins neighbouring decodes of an instance in which as many requests take part."""
    found: list[Block] = []
    last: dict[int, int] = {}
    """The latest block of each instance, as its index."""
    for one in blocks:
        before = found[last[one.instance]] if one.instance in last else None
        both_decode = before is not None and one.index is None is before.index and one.stop == before.stop
        if before is not None and both_decode and one.start_s - before.end_s < _SAME_TIME_S:
            found[last[one.instance]] = replace(before, end_s=one.end_s)
        else:
            last[one.instance] = len(found)
            found.append(one)
    return found


def _names(cluster: Cluster) -> list[str]:
    if not cluster.has_roles:
        return [str(instance) for instance in cluster.instances]
    return [*(f"prefill {one}" for one in cluster.prefill), *(f"decode {one}" for one in cluster.decode)]


def _gantt(blocks: Sequence[Block], names: Sequence[str]) -> Figure:
    from plotly.graph_objects import Bar, Figure  # noqa: PLC0415  # optional

    wide_s = _LABELLED_PART * max((one.end_s for one in blocks), default=0.0)
    figure = Figure(
        Bar(
            orientation="h",
            y=[one.instance for one in blocks],
            base=[one.start_s for one in blocks],
            x=[one.end_s - one.start_s for one in blocks],
            marker={
                "color": [_colour(one) for one in blocks],
                "line": {"width": [0.0 if one.index is None else 0.5 for one in blocks], "color": "white"},
            },
            text=["" if one.index is None or one.end_s - one.start_s <= wide_s else str(one.index) for one in blocks],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            hovertext=[_described(one) for one in blocks],
            hoverinfo="text",
        )
    )
    figure.update_layout(height=140 + 26 * len(names), bargap=0.12, uniformtext=_NUMBERS, **_LAYOUT)
    figure.update_yaxes(title="instance", tickvals=list(range(len(names))), ticktext=names, autorange="reversed")
    figure.update_xaxes(title="seconds")
    return figure


def _colour(block: Block) -> str:
    """Gives neighbours in the order of arrival hues that are far apart; others differ at least in lightness."""
    if block.index is None:
        return "#ddd"
    return f"hsl({block.index * _GOLDEN_ANGLE % 360:.0f}, 62%, {48 + 8 * (block.index % 3)}%)"


def _described(block: Block) -> str:
    when = f"{block.start_s:.3f} to {block.end_s:.3f} s"
    if block.index is None:
        return f"{block.stop} decodes<br>{when}"
    tokens = f"tokens {block.start:,} to {block.stop:,}"
    return f"request {block.index}<br>{tokens}<br>{len(block.group)} instances, {block.exchange}<br>{when}"


def _distribution(times_s: NDArray[np.float64]) -> Figure:
    points = np.percentile(times_s, _PERCENTS) if len(times_s) else np.empty(0)
    figure = _line(list(zip(points.tolist(), _PERCENTS.tolist(), strict=False)), "%")
    if len(points) and points[0] > 0:
        figure.update_xaxes(type="log")
    return figure


def _line(points: Sequence[tuple[float, float]], unit: str, shape: str = "linear") -> Figure:
    from plotly.graph_objects import Figure, Scatter  # noqa: PLC0415  # optional

    figure = Figure(Scatter(x=[x for x, _ in points], y=[y for _, y in points], mode="lines", line={"shape": shape}))
    figure.update_layout(height=320, **_LAYOUT)
    figure.update_yaxes(title=unit, rangemode="tozero")
    figure.update_xaxes(title="seconds")
    return figure


def _table(rows: Mapping[str, object]) -> str:
    cells = (
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(_short(value))}</td></tr>" for name, value in rows.items()
    )
    return f"<table>{''.join(cells)}</table>"


def _short(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
