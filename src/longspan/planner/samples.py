"""Samples of a workload by seed, and the numbers of a simulated sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

import numpy as np

from longspan.planner.candidates import Candidate
from longspan.planner.values import RecordedTime
from longspan.sim.run import Result, percentile
from longspan.sim.spec import ServiceLevel
from longspan.workload.arrivals import Arrival, Workload

_WARM_UP = 0.2
"""Share of the requests of a sample that fill the instances first, and are not counted."""
_HEADROOMS = (0.6, 0.8, 1.0, 1.25, 1.6)
"""Factors of the bounds of a service level."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A simulation to run: a candidate with a sample of the workload.

    Attributes:
        rate: requests per second. None is the workload's own rate.
    """

    candidate: Candidate
    seed: int
    num_requests: int
    rate: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The numbers of a simulated sample. All are 0 or None if there is a `problem`.

    Attributes:
        headroom: the mean attainment at bounds from 0.6 to 1.6 times the level. It orders short samples, in which few
            requests decide the attainment.
        bound_ratios: P99 times relative to their bounds: "TTFT", "TBT", or "TTFT of CLASS" for requests of a class.
        tbt_p99_s: P99 over requests of the mean time between tokens, to which `slo_tbt` applies.
    """

    attainment: float = 0.0
    headroom: float = 0.0
    goodput_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ttft_p99_s: float | None = None
    tbt_p99_s: float | None = None
    bound_ratios: Mapping[str, float] = field(default_factory=dict)
    num_requests: int = 0
    problem: str | None = None


def window(workload: Workload, seed: int, num: int, rate: float) -> Workload:
    """Return `num` consecutive requests of a trace at a rate. Seeds begin at different requests.

    The trace repeats after its end, with other tokens: a repeated prompt has no cached prefix of an earlier lap.
    A window begins with the first turn of a conversation.
    """
    arrivals = workload.arrivals
    start = round(len(arrivals) * (seed * 0.618034 % 1)) % len(arrivals)
    while arrivals[start].follows is not None:
        start -= 1
    period_s = max(a.due_s for a in arrivals if a.follows is None) * (1 + 1 / len(arrivals))
    chosen: list[Arrival] = []
    for index in range(start, start + num):
        lap, place = divmod(index, len(arrivals))
        arrival = arrivals[place]
        if lap:
            arrival = replace(arrival, cache_salt=f"{arrival.cache_salt} lap {lap}")
        if arrival.follows is None:
            arrival = replace(arrival, due_s=arrival.due_s + lap * period_s - arrivals[start].due_s)
        else:
            arrival = replace(arrival, follows=arrival.follows + lap * len(arrivals) - start)
        chosen.append(arrival)
    chosen_workload = replace(workload, arrivals=chosen)
    return chosen_workload if workload.clients is not None else chosen_workload.at_rate(rate)


def outcome_of(result: Result, workload: Workload, level: ServiceLevel, rate: float) -> Outcome:
    """Return the numbers of a run at a rate, without its first requests.

    Requests that all arrive at the start have no steady state, so all are counted, per second until the last answer.
    In a closed loop, and in conversations, requests wait for answers. The rate is then that of all answers from the
    first counted arrival to the last counted answer.
    """
    offline = math.isinf(rate) and workload.clients is None
    first = 0 if offline else int(_WARM_UP * len(workload.arrivals))
    counted = replace(
        result,
        served=tuple(request for request in result.served if request.index >= first),
        refused={index: reason for index, reason in result.refused.items() if index >= first},
    )
    num = len(counted.served) + len(counted.refused)
    attainment = counted.attainment(level)
    if offline:
        arrivals_per_s = num / result.makespan_s if result.makespan_s else 0.0
    elif workload.clients is None and workload.arrivals[-1].follows is None:
        arrivals_per_s = rate
    else:
        start_s = min((request.arrival_s for request in counted.served), default=0.0)
        end_s = max((request.finished_s for request in counted.served), default=0.0)
        num_ended = sum(start_s < request.finished_s <= end_s for request in result.served) + len(counted.refused)
        arrivals_per_s = num_ended / (end_s - start_s) if end_s > start_s else 0.0
    return Outcome(
        attainment=attainment,
        headroom=fmean(counted.attainment(_scaled(level, factor)) for factor in _HEADROOMS),
        goodput_per_s=attainment * arrivals_per_s,
        tokens_per_s=result.num_tokens / result.makespan_s if result.makespan_s else 0.0,
        ttft_p99_s=percentile(counted.ttfts_s, 99),
        tbt_p99_s=percentile(counted.tpots_s, 99),
        bound_ratios=_bound_ratios(counted, level),
        num_requests=len(workload.arrivals),
    )


def _bound_ratios(result: Result, level: ServiceLevel) -> dict[str, float]:
    """Return the P99 times of each class relative to its bounds, by their names."""
    classes, ratios = {one.name: one for one in level.classes}, {}
    for name, own in result.by_class(level).items():
        bound, suffix = (classes[name], f" of {name}") if name in classes else (level, "")
        for time, values_s, max_s in (("TTFT", own.ttfts_s, bound.slo_ttft), ("TBT", own.tpots_s, bound.slo_tbt)):
            if max_s is not None and (value_s := percentile(values_s, 99)) is not None:
                ratios[time + suffix] = value_s / max_s
    return ratios


def _scaled(level: ServiceLevel, factor: float) -> ServiceLevel:
    """Return the level with all bounds multiplied."""

    def scaled(bound: float | None) -> float | None:
        return None if bound is None else bound * factor

    classes = [replace(one, slo_ttft=scaled(one.slo_ttft), slo_tbt=scaled(one.slo_tbt)) for one in level.classes]
    return ServiceLevel(slo_ttft=scaled(level.slo_ttft), slo_tbt=scaled(level.slo_tbt), classes=tuple(classes))


def recorded_times(
    result: Result, ttfts_s: Sequence[float | None], tpots_s: Sequence[float | None]
) -> tuple[RecordedTime, ...]:
    """Compare percentiles of recorded times with those of their simulation. Requests without a time are left out."""
    pairs = {
        "TTFT": [(ttfts_s[one.index], one.ttft_s) for one in result.served],
        "TPOT": [(tpots_s[one.index], one.mean_tbt_s) for one in result.served if one.tbt_s],
    }
    times = []
    for name, both in pairs.items():
        known = np.array([(recorded, simulated) for recorded, simulated in both if recorded])
        for percent in (50, 90, 99) if len(known) else ():
            recorded_s, simulated_s = np.percentile(known, percent, axis=0).tolist()
            times.append(RecordedTime(what=f"P{percent} {name}", recorded_s=recorded_s, simulated_s=simulated_s))
    return tuple(times)


Simulate = Callable[[list[Work]], dict[Work, Outcome]]
"""Runs simulations, in any order."""
