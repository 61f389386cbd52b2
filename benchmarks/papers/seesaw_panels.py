"""Seesaw: our numbers of its figures. Those of Figs. 10 to 14 are of the stored run of `seesaw_serving.py`."""

from __future__ import annotations

import numpy as np
from panels import Panel, Series
from seesaw import decoding, disaggregated, static_times
from seesaw_serving import ARXIV, Point, articles, chats, stored

_SPECS = ("pp8", "tp2pp4", "tp4pp2", "tp8")
_PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99)
_INSTANCES = {"TP8": 1, "2 x TP4": 2, "4 x TP2": 4}


def panels() -> list[Panel]:
    """Return the panels of Figs. 1, 4 and 9 to 15."""
    points = stored()
    return [*_static(), *_lengths(), *_bars(points), *_sweeps(points), *_data_parallel()]


def _static() -> list[Panel]:
    parts = disaggregated()
    return [
        *(
            Panel(
                name=f"Fig. 1, {phase}",
                title=f"{phase} of 13B on eight L4, 16 requests",
                x="parallelism",
                y="seconds",
                ours={part: [(spec, by_part[part]) for spec, by_part in times.items()] for part in _parts(times)},
                bars=True,
            )
            for phase, times in static_times(_SPECS).items()
        ),
        Panel(
            name="Fig. 4",
            title="70B on 4 + 4 GPUs of 40 GB, over decoding on 4",
            x="phase",
            y="ratio of tokens/s",
            ours={"ours": [(name, rate / parts["decode on 4"]) for name, rate in parts.items()]},
            bars=True,
        ),
    ]


def _parts(times: dict[str, dict[str, float]]) -> list[str]:
    return list(next(iter(times.values())))


def _lengths() -> list[Panel]:
    """Return quantiles of the lengths of both workloads."""
    workloads = {"arxiv": articles(ARXIV), "sharegpt": chats()}
    return [
        Panel(
            name=f"Fig. 9, {name}",
            title=f"{name}: lengths",
            x="tokens",
            y="% of the requests",
            ours={
                "input": _quantiles([len(arrival.prompt) for arrival in workload.arrivals]),
                "output": _quantiles([arrival.output_len for arrival in workload.arrivals]),
            },
            log="x",
        )
        for name, workload in workloads.items()
    ]


def _quantiles(lengths: list[int]) -> list[tuple[float | str, float]]:
    return list(zip(np.percentile(lengths, _PERCENTILES).tolist(), _PERCENTILES, strict=True))


def _bars(points: list[Point]) -> list[Panel]:
    """Return the throughput of Seesaw over that of the best single parallelism (Figs. 10 to 12)."""
    found = []
    for figure, groups, title in (
        (10, ("a10", "l4"), "over the best single parallelism"),
        (11, ("",), "70B on eight A100, over the best single parallelism"),
        (12, ("",), "34B on four A10, articles: requests/s"),
    ):
        for group in groups:
            own = [point for point in points if point.figure == figure and point.name.startswith(group)]
            found.append(
                Panel(
                    name=f"Fig. {figure}" + (f", {group}" if group else ""),
                    title=f"{group.upper()}: {title}" if group else title,
                    x="parallelism" if figure == 12 else "",
                    y="requests/s" if figure == 12 else "times the throughput",
                    ours=_throughputs(own[0])
                    if figure == 12 and own
                    else {"Seesaw": [(_short(point.name, group), point.ratio or 0.0) for point in own]},
                    bars=True,
                )
            )
    return found


def _short(name: str, group: str) -> str:
    return name.removeprefix(f"{group}, ").replace("-40g", "").replace("llama-2-", "").replace("llama-3-", "")


def _throughputs(point: Point) -> Series:
    rates = {**point.static, **point.pairs}
    return {"ours": [(spec, rate.requests_per_s) for spec, rate in rates.items()]}


def _sweeps(points: list[Point]) -> list[Panel]:
    """Return the throughput of each single parallelism and of Seesaw, over that of the best single one."""
    return [
        Panel(
            name=f"Fig. {figure}",
            title=title,
            x=x,
            y="over the best single",
            ours=_relative([point for point in points if point.figure == figure]),
            log="x",
        )
        for figure, title, x in (
            (13, "70B on eight A10, 3,000 tokens of input", "tokens of output"),
            (14, "34B on eight A10, articles", "speed of links, of PCIe's"),
        )
    ]


def _relative(points: list[Point]) -> Series:
    lines: dict[str, list[tuple[float | str, float]]] = {}
    for point in points:
        best = point.static[point.best_static].requests_per_s
        for spec, rate in point.static.items():
            lines.setdefault(spec, []).append((float(point.name), rate.requests_per_s / best))
        if point.ratio is not None:
            lines.setdefault("Seesaw", []).append((float(point.name), point.ratio))
    return lines


def _data_parallel() -> list[Panel]:
    taken = {name: decoding(instances) for name, instances in _INSTANCES.items()}
    return [
        Panel(
            name="Fig. 15",
            title="decoding 13B on eight L4, full memory",
            x="parallelism",
            y="ms of a token of a request",
            ours={
                part: [(name, times[place]) for name, times in taken.items()]
                for place, part in enumerate(("loads", "communication"))
            },
            bars=True,
        )
    ]
