"""Ranking by simulation: few requests for many candidates, more for the best, over several seeds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from longspan.planner.candidates import Candidate
from longspan.planner.pruning import Forecast
from longspan.planner.samples import Outcome, Simulate, Work
from longspan.planner.values import Interval, Pruned
from longspan.sim.spec import ServiceLevel

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles 0.975 of Student's t distribution, from 1 degree of freedom on."""
_NORMAL = 1.96
_SHARE = 3
"""Successive halving: the best of this many candidates stay, and get this many times the requests."""
_ROUNDS = 3
_LEAST_REQUESTS = 30
"""Requests of the smallest sample of a seed."""
_PER_LEVEL = 6
"""Families that are simulated first for a number of devices, by forecast."""
_WAVE = 3
"""Numbers of devices that are simulated at a time, ascending in cost."""
_EQUAL = 0.005
"""Goodputs within this fraction count as equal, and latencies decide."""
_REFINED = 3
"""Candidates whose other step budgets and host tiers are simulated."""


def interval(values: Sequence[float]) -> Interval:
    """Return the mean of values, and its 95 % confidence interval by Student's t distribution."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, low=mean, high=mean)
    freedom = len(values) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    half = student * stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=mean - half, high=mean + half)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A candidate with the outcomes of its seeds, of the longest samples."""

    candidate: Candidate
    outcomes: tuple[Outcome, ...]
    cost: float

    @property
    def problem(self) -> str | None:
        return next((outcome.problem for outcome in self.outcomes if outcome.problem is not None), None)

    @property
    def attainment(self) -> float:
        return fmean(outcome.attainment for outcome in self.outcomes)

    @property
    def goodput_per_s(self) -> float:
        return fmean(outcome.goodput_per_s for outcome in self.outcomes)

    @property
    def num_requests(self) -> int:
        return sum(outcome.num_requests for outcome in self.outcomes)

    def mean_p99_s(self, name: str) -> float | None:
        """Return the mean of `ttft_p99_s` or `tbt_p99_s`. None if a seed has no value."""
        values = [getattr(outcome, name) for outcome in self.outcomes]
        return None if None in values else fmean(values)

    def tightness(self, level: ServiceLevel) -> float:
        """Return the larger ratio of the P99 times to their bounds, or P99 TTFT without bounds."""
        pairs = [(self.mean_p99_s("ttft_p99_s"), level.slo_ttft), (self.mean_p99_s("tbt_p99_s"), level.slo_tbt)]
        ratios = [math.inf if value is None else value / bound for value, bound in pairs if bound is not None]
        return max(ratios) if ratios else self.mean_p99_s("ttft_p99_s") or math.inf

    @property
    def _margin(self) -> float:
        """Two standard errors of the attainment, and at least one request."""
        num, mean = max(1, self.num_requests), self.attainment
        return 2 * math.sqrt(max(mean * (1 - mean), 1 / num) / num)

    def may_meet(self, attainment: float) -> bool:
        return self.problem is None and self.attainment + self._margin >= attainment

    def surely_meets(self, attainment: float) -> bool:
        """Return True if the attainment is met, with a margin unless no request missed the level."""
        return self.problem is None and (self.attainment == 1 or self.attainment - self._margin >= attainment)


def order_key(scored: Scored, level: ServiceLevel, attainment: float) -> tuple[float, ...]:
    """Return the key by which candidates are sorted, best first.

    Candidates that meet the level come first, the cheapest of them at the front. Then goodput decides, then latency.
    """
    if scored.problem is not None:
        return (2, 0, 0, math.inf, 0)
    meets = scored.attainment >= attainment
    steps = round(math.log(max(scored.goodput_per_s, 1e-9)) / _EQUAL)
    return (not meets, scored.cost if meets else 0, -steps, scored.tightness(level), scored.cost)


@dataclass(kw_only=True)
class Search:
    """A search by successive halving.

    Attributes:
        simulate: runs simulations.
        costs: the price or the devices of a candidate.
        num_requests: requests of each seed in the last round.
        scored: all simulated candidates, with the outcomes of their longest samples.
    """

    simulate: Simulate
    level: ServiceLevel
    attainment: float
    num_seeds: int
    num_requests: int
    costs: Mapping[Candidate, float]
    scored: dict[Candidate, Scored] = field(default_factory=dict)

    def run(self, forecasts: Mapping[Candidate, Forecast]) -> None:
        """Simulate the candidates that may be the best."""
        sizes = sorted({max(_LEAST_REQUESTS, self.num_requests // _SHARE**power) for power in range(_ROUNDS)})
        sizes = [min(size, self.num_requests) for size in sizes]
        survivors = self._first_round(forecasts, sizes[0])
        for number, size in enumerate(sizes[1:], start=1):
            if number == len(sizes) - 1:
                survivors += self._refined(forecasts, survivors, sizes[-2])
                survivors = self._survivors(self._sorted(survivors))
            self._measure(survivors, size)
            if number < len(sizes) - 1:
                survivors = self._survivors(self._sorted(survivors))

    def sorted(self) -> list[Scored]:
        """Return all simulated candidates, best first. A longer sample counts more than a shorter one."""
        return sorted(self.scored.values(), key=lambda one: (-one.num_requests, self._key(one)))

    def unsimulated(self, forecasts: Mapping[Candidate, Forecast]) -> list[Pruned]:
        """Return the candidates that the search left out, with the number that decided."""
        families = {candidate.family: scored for candidate, scored in self.scored.items()}
        best = {}
        for candidate in self.scored:
            level = self.costs[candidate]
            best[level] = min(best.get(level, math.inf), forecasts[candidate].tightness)
        left_out = []
        for candidate, forecast in forecasts.items():
            if candidate in self.scored:
                continue
            cost = self.costs[candidate]
            if candidate.family in families:
                scored = families[candidate.family]
                reason = f"{scored.candidate} has {scored.goodput_per_s:.3g} good requests/s, so it was not refined"
            elif cost in best:
                reason = f"its forecast is {forecast.tightness:.2f} of the bounds, the best for its devices {best[cost]:.2f}"
            else:
                cheapest = min((one for one in self.scored.values() if one.may_meet(self.attainment)), key=lambda one: one.cost)
                reason = f"fewer devices do: {cheapest.candidate} has an attainment of {cheapest.attainment:.1%}"
            left_out.append(Pruned(candidate=candidate, reason=reason))
        return left_out

    # ---------------------------------------------------------------- rounds

    def _first_round(self, forecasts: Mapping[Candidate, Forecast], size: int) -> list[Candidate]:
        """Simulate the best forecasts of each cost, ascending, until a cost surely meets the level. Add the highest."""
        levels: defaultdict[float, list[Candidate]] = defaultdict(list)
        for candidate in _representatives(forecasts):
            levels[self.costs[candidate]].append(candidate)
        costs = sorted(levels)
        chosen = {cost: _first(levels[cost], forecasts) for cost in costs}
        pending = costs[:-1]
        measured = list(chosen[costs[-1]])
        self._measure(measured, size)
        while pending and any(self.scored[candidate].may_meet(self.attainment) for candidate in measured):
            wave, pending = pending[:_WAVE], pending[_WAVE:]
            added = [candidate for cost in wave for candidate in chosen[cost]]
            self._measure(added, size)
            measured += added
            if any(self.scored[candidate].surely_meets(self.attainment) for candidate in added):
                break
        return self._survivors(self._sorted(measured))

    def _survivors(self, ordered: Sequence[Scored]) -> list[Candidate]:
        """Return the best of each cost that may meet the level, up to the first cost that surely does.

        One candidate of the highest cost stays for the front. If no candidate may meet the level, the best stay.
        """
        able = [one for one in ordered if one.may_meet(self.attainment)]
        if not able:
            return self._best(ordered)
        levels: defaultdict[float, list[Scored]] = defaultdict(list)
        for one in able:
            levels[one.cost].append(one)
        kept: list[Candidate] = []
        for cost in sorted(levels):
            kept += self._best(levels[cost])
            if any(one.surely_meets(self.attainment) for one in levels[cost]):
                break
        most = max(levels)
        if levels[most][0].candidate not in kept:
            kept.append(levels[most][0].candidate)
        static = next((one.candidate for one in ordered if one.candidate.is_static), None)
        return kept if static is None or static in kept else [*kept, static]

    def _best(self, ordered: Sequence[Scored]) -> list[Candidate]:
        """Return the best share of sorted candidates, with the best static layout."""
        by_goodput = sorted(ordered, key=lambda one: (-one.goodput_per_s, one.tightness(self.level)))
        kept = [one.candidate for one in by_goodput[: max(1, round(len(ordered) / _SHARE))]]
        static = next((one.candidate for one in by_goodput if one.candidate.is_static), None)
        return kept if static is None or static in kept else [*kept, static]

    def _refined(self, forecasts: Mapping[Candidate, Forecast], survivors: Sequence[Candidate], size: int) -> list[Candidate]:
        """Simulate the other step budgets and host tiers of the best candidates."""
        best = {candidate.family for candidate in survivors[:_REFINED]}
        best |= {candidate.family for candidate in survivors if candidate.is_static}
        others = [candidate for candidate in forecasts if candidate.family in best and candidate not in self.scored]
        self._measure(others, size)
        return others

    def _measure(self, candidates: Iterable[Candidate], size: int) -> None:
        """Simulate all seeds of the candidates with `size` requests each."""
        work = [
            Work(candidate=candidate, seed=seed, num_requests=size)
            for candidate in candidates
            for seed in range(self.num_seeds)
        ]
        outcomes = self.simulate(work)
        for candidate in dict.fromkeys(one.candidate for one in work):
            own = tuple(outcomes[one] for one in work if one.candidate == candidate)
            self.scored[candidate] = Scored(candidate=candidate, outcomes=own, cost=self.costs[candidate])

    def _key(self, scored: Scored) -> tuple[float, ...]:
        return order_key(scored, self.level, self.attainment)

    def _sorted(self, candidates: Iterable[Candidate]) -> list[Scored]:
        return sorted((self.scored[candidate] for candidate in candidates), key=self._key)


def _representatives(forecasts: Mapping[Candidate, Forecast]) -> list[Candidate]:
    """Return the candidate with the best forecast of each family. Of equals, the largest step."""
    best: dict[Candidate, Candidate] = {}
    for candidate in sorted(
        forecasts, key=lambda one: (forecasts[one].tightness, -(one.max_num_batched_tokens or 0), one.host_kv_gib)
    ):
        best.setdefault(candidate.family, candidate)
    return list(best.values())


def _first(candidates: Sequence[Candidate], forecasts: Mapping[Candidate, Forecast]) -> list[Candidate]:
    """Return the candidates of one cost with the best forecasts. Each policy has at least one."""
    ordered = sorted(candidates, key=lambda candidate: forecasts[candidate].tightness)
    by_policy = {(one.policy, one.decode is None): one for one in reversed(ordered)}
    return list(dict.fromkeys([*by_policy.values(), *ordered[:_PER_LEVEL]]))
