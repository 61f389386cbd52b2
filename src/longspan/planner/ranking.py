"""Ranking by simulation: few requests for many candidates, more for the best, over several seeds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from longspan.planner.candidates import STATIC, Candidate
from longspan.planner.pruning import Forecast
from longspan.planner.samples import Outcome, Simulate, Work
from longspan.planner.values import Interval, Pruned
from longspan.sim.spec import ServiceLevel

_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles 0.975 of Student's t distribution, from 1 degree of freedom on."""
_NORMAL = 1.96
_FIRST_SHARE = 6
"""Divisor of the requests of a seed in the first round. Later rounds have all requests.

All rounds but the last have half of the seeds. Few long samples show an overload better than many short ones, in which
the queue has not grown yet.
"""
_KEPT, _SHARE = 4, 4
"""Candidates of a cost that stay for the next round: at least, and as a fraction. Short samples do not order more."""
_LEAST_REQUESTS = 30
"""Requests of the smallest sample of a seed. Closed loops have their own minimum."""
_QUOTAS = {STATIC: 5, "auto": 4}
"""Layouts of a policy that are simulated first for a number of devices, best forecast first. 1 of other policies."""
_FIRST = 24
"""Layouts that are simulated first in total, at least. With few numbers of devices, the quotas are larger."""
_WAVE = 2
"""Costs that are simulated at a time, to find the lowest that meets the level."""
_EQUAL = 0.005
"""Goodputs within this fraction count as equal, and latencies decide."""
_PRECISION = 1.05
"""Precision of the highest rate, as a factor."""
_LAST = 2
"""Candidates of a cost in the last round."""
_VARIED = 3
"""Candidates whose other step budgets and host tiers are simulated."""
_INEFFICIENT = 1.1
"""A cost is left out if its best forecast is worse than at a lower cost by this factor."""


def interval(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> Interval:
    """Return the mean of values, and its 95 % confidence interval by Student's t distribution, within bounds."""
    mean = fmean(values)
    if len(values) < 2:
        return Interval(mean=mean, low=mean, high=mean)
    freedom = len(values) - 1
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL + (_NORMAL**3 + _NORMAL) / (4 * freedom)
    half = student * stdev(values) / math.sqrt(len(values))
    return Interval(mean=mean, low=max(low, mean - half), high=min(high, mean + half))


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
    def headroom(self) -> float:
        return fmean(outcome.headroom for outcome in self.outcomes)

    @property
    def num_requests(self) -> int:
        return sum(outcome.num_requests for outcome in self.outcomes)

    def mean_p99_s(self, name: str) -> float | None:
        """Return the mean of `ttft_p99_s` or `tbt_p99_s`. None if a seed has no value."""
        values = [getattr(outcome, name) for outcome in self.outcomes]
        return None if None in values else fmean(values)

    def tightness(self, level: ServiceLevel) -> float:
        """Return the largest ratio of P99 times to their bounds, or P99 TTFT without bounds."""
        if level.is_given:
            return max(self.bound_ratios.values(), default=math.inf)
        return self.mean_p99_s("ttft_p99_s") or math.inf

    @property
    def bound_ratios(self) -> dict[str, float]:
        """P99 times relative to their bounds, as means over the seeds that have them."""
        every = [outcome.bound_ratios for outcome in self.outcomes]
        return {name: fmean(one[name] for one in every if name in one) for one in every for name in one}

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
        min_requests: requests of each seed in the first round, at least, if the last round has as many.
        scored: all simulated candidates, with the outcomes of their longest samples.
    """

    simulate: Simulate
    level: ServiceLevel
    attainment: float
    num_seeds: int
    num_requests: int
    costs: Mapping[Candidate, float]
    min_requests: int = _LEAST_REQUESTS
    scored: dict[Candidate, Scored] = field(default_factory=dict)

    def run(self, forecasts: Mapping[Candidate, Forecast]) -> None:
        """Simulate the candidates that may be the best."""
        first = min(self.num_requests, max(_LEAST_REQUESTS, self.min_requests, self.num_requests // _FIRST_SHARE))
        measured = self._first_round(forecasts, first)
        measured += self._variants(forecasts, self._survivors(self._sorted(measured)), first)
        measured = self._survivors(self._sorted(measured))
        self._measure(measured, self.num_requests)
        self._last_round(self._survivors(self._sorted(measured)))

    def include(self, candidate: Candidate, cost: float) -> None:
        """Simulate a candidate with all requests, as the last ones are."""
        self.costs = {**self.costs, candidate: cost}
        self._measure([candidate], self.num_requests, num_seeds=self.num_seeds)

    def sorted(self) -> list[Scored]:
        """Return all simulated candidates, best first. A longer sample counts more than a shorter one."""
        return sorted(self.scored.values(), key=lambda one: (-one.num_requests, self._key(one)))

    def unsimulated(self, forecasts: Mapping[Candidate, Forecast]) -> list[Pruned]:
        """Return the candidates that the search left out, with the number that decided."""
        ordered = self.sorted()
        families = {scored.candidate.family: scored for scored in reversed(ordered)}
        best = {scored.cost: scored for scored in reversed(ordered) if scored.candidate in forecasts}
        able = [scored for scored in ordered if scored.may_meet(self.attainment)]
        decisive = min(able, key=lambda scored: scored.cost) if able else ordered[0]
        left_out = []
        for candidate, forecast in forecasts.items():
            if candidate in self.scored:
                if (problem := self.scored[candidate].problem) is not None:
                    left_out.append(Pruned(candidate=candidate, reason=problem))
                continue
            scored = families.get(candidate.family) or best.get(self.costs[candidate]) or decisive
            reason = f"{scored.candidate} has an attainment of {scored.attainment:.1%}"
            if candidate.family not in families and self.costs[candidate] in best:
                least = forecasts[scored.candidate].tightness
                reason = (
                    f"its forecast is {forecast.tightness:.2f} of the bounds, and {least:.2f} for {scored.candidate}"
                )
            left_out.append(Pruned(candidate=candidate, reason=reason))
        return left_out

    # ---------------------------------------------------------------- rounds

    def _first_round(self, forecasts: Mapping[Candidate, Forecast], size: int) -> list[Candidate]:
        """Simulate the best forecasts of the costs, by bisection to the lowest cost that may meet the level."""
        measured: list[Candidate] = []
        representatives = _representatives(forecasts)
        for hardware in dict.fromkeys(candidate.hardware for candidate in representatives):
            levels: defaultdict[float, list[Candidate]] = defaultdict(list)
            for candidate in representatives:
                if candidate.hardware == hardware:
                    levels[self.costs[candidate]].append(candidate)
            measured += self._bisected(_efficient(levels, forecasts), forecasts, size)
        return measured

    def _bisected(
        self, levels: Sequence[Sequence[Candidate]], forecasts: Mapping[Candidate, Forecast], size: int
    ) -> list[Candidate]:
        """Simulate the most able level of a hardware, then levels of lower costs between failure and success."""
        chosen = [_first(level, forecasts, len(levels)) for level in levels]
        measured: list[Candidate] = []

        def may_meet(indices: Sequence[int]) -> list[int]:
            added = [candidate for index in indices for candidate in chosen[index]]
            self._measure(added, size)
            measured.extend(added)
            return [i for i in indices if any(self.scored[one].may_meet(self.attainment) for one in chosen[i])]

        low, high = -1, len(levels) - 1
        able = may_meet([high])
        while able and high - low > 1:
            between = range(low + 1, high)
            step = max(1, len(between) // _WAVE)
            picks = between[step // 2 :: step][:_WAVE]
            high = min([high, *may_meet(picks)])
            low = max([low, *(index for index in picks if index < high)])
        return measured

    def _survivors(self, ordered: Sequence[Scored]) -> list[Candidate]:
        """Return the best of each cost that may meet the level, up to one cost above the first that surely does.

        The best of the highest cost stays for the front, and the best static layout as the baseline. If no candidate
        may meet the level, the best stay.
        """
        able = [one for one in ordered if one.may_meet(self.attainment)]
        if not able:
            return self._best(ordered)
        levels: defaultdict[float, list[Scored]] = defaultdict(list)
        for one in able:
            levels[one.cost].append(one)
        kept, is_sure = dict[Candidate, None](), False
        for cost in sorted(levels):
            kept |= dict.fromkeys(self._best(levels[cost]))
            if is_sure:
                break
            is_sure = any(one.surely_meets(self.attainment) for one in levels[cost])
        kept |= dict.fromkeys(self._best(levels[max(levels)])[:1])
        return list(kept | dict.fromkeys(self._best_static(sorted(ordered, key=self._key))))

    def _best(self, ordered: Sequence[Scored]) -> list[Candidate]:
        """Return the best share of candidates, with the best static layout."""
        best = sorted(ordered, key=self._short_key)
        kept = [one.candidate for one in best[: max(_KEPT, round(len(ordered) / _SHARE))]]
        return list(dict.fromkeys([*kept, *self._best_static(best)]))

    @staticmethod
    def _best_static(ordered: Sequence[Scored]) -> list[Candidate]:
        return [one.candidate for one in ordered if one.candidate.is_static][:1]

    def _variants(
        self, forecasts: Mapping[Candidate, Forecast], survivors: Sequence[Candidate], size: int
    ) -> list[Candidate]:
        """Simulate the other step budgets and host tiers of candidates."""
        best = sorted(survivors, key=lambda one: self._short_key(self.scored[one]))
        families = {candidate.family for candidate in best[:_VARIED]}
        families |= {candidate.family for candidate in survivors if candidate.is_static}
        added = [one for one in forecasts if one.family in families and one not in self.scored]
        self._measure(added, size)
        return added

    def _last_round(self, survivors: Sequence[Candidate]) -> None:
        """Simulate the best candidates of each cost with all seeds, and the best static layout."""
        levels: defaultdict[float, list[Scored]] = defaultdict(list)
        for candidate in survivors:
            levels[self.costs[candidate]].append(self.scored[candidate])
        last = [one for level in levels.values() for one in sorted(level, key=self._short_key)[:_LAST]]
        static = self._best_static(sorted((self.scored[one] for one in survivors), key=self._short_key))
        self._measure(
            dict.fromkeys([*(one.candidate for one in last), *static]), self.num_requests, num_seeds=self.num_seeds
        )

    def _measure(self, candidates: Iterable[Candidate], size: int, num_seeds: int | None = None) -> None:
        """Simulate candidates with `size` requests of each seed. `num_seeds` is half of all if None."""
        seeds = range(num_seeds or max(1, self.num_seeds // 2))
        work = [Work(candidate=one, seed=seed, num_requests=size) for one in candidates for seed in seeds]
        outcomes = self.simulate(work)
        for candidate in dict.fromkeys(one.candidate for one in work):
            own = tuple(outcomes[one] for one in work if one.candidate == candidate)
            self.scored[candidate] = Scored(candidate=candidate, outcomes=own, cost=self.costs[candidate])

    def _short_key(self, scored: Scored) -> tuple[float, ...]:
        """Return the key by which short samples are sorted, best first."""
        return (-scored.headroom, -scored.goodput_per_s, scored.tightness(self.level))

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


def _efficient(
    levels: Mapping[float, Sequence[Candidate]], forecasts: Mapping[Candidate, Forecast]
) -> list[Sequence[Candidate]]:
    """Return the levels of ascending costs. A level is left out if a lower cost has as good a forecast."""
    kept: list[Sequence[Candidate]] = []
    least = math.inf
    for cost in sorted(levels):
        best = min(forecasts[candidate].tightness for candidate in levels[cost])
        if best <= _INEFFICIENT * least:
            kept.append(levels[cost])
            least = min(least, best)
    return kept


def _first(
    candidates: Sequence[Candidate], forecasts: Mapping[Candidate, Forecast], num_levels: int
) -> list[Candidate]:
    """Return the candidates of one cost with the best forecasts, by the quotas of policies."""
    factor = max(1, _FIRST // (num_levels * (sum(_QUOTAS.values()) + 4)))
    chosen, counts = [], Counter[tuple[str, bool]]()
    for candidate in sorted(candidates, key=lambda candidate: forecasts[candidate].tightness):
        kind = candidate.policy, candidate.decode is not None
        counts[kind] += 1
        if counts[kind] <= factor * _QUOTAS.get(candidate.policy, 1):
            chosen.append(candidate)
    return chosen


def max_rate(
    simulate: Simulate,
    candidate: Candidate,
    rate: float,
    *,
    num_requests: int,
    seeds: int,
    attainment: float,
) -> float | None:
    """Find the highest rate below `rate` that a candidate serves within the level, to 5 %.

    Return None if that is less than a 64th.
    """

    def passes(lower: float) -> bool:
        work = [Work(candidate=candidate, seed=seed, num_requests=num_requests, rate=lower) for seed in range(seeds)]
        return fmean(outcome.attainment for outcome in simulate(work).values()) >= attainment

    low, high = rate / 2, rate
    while not passes(low):
        low, high = low / 2, low
        if low < rate / 64:
            return None
    while high / low > _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low
