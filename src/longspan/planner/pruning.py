"""Pruning by estimates: memory, unloaded latencies, capacity, and layouts that another one dominates."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from longspan.core.exchange import LOCAL
from longspan.cost.estimate import estimate_decode, estimate_prefill, full_step
from longspan.cost.forward import Roofline
from longspan.planner.candidates import STATIC, Candidate
from longspan.planner.demand import Demand, Size
from longspan.planner.values import Pruned
from longspan.sim.spec import ServiceLevel, SloClass

SLACK = 1.25
"""Factor of the errors of estimates. A candidate is pruned only if it misses a bound by more than this."""
_DOMINATED = 1.2
"""A layout is dominated if another one is better by this factor in load, TTFT and TBT."""
_MAX_SEQS = 128
_SHARED_EFFICIENCY = 0.8
"""Predicted speed of a prompt on several instances, relative to the sum of the instances."""
_STEP = 8192
_TAIL = 2.0
"""The wait of a slow request, relative to the mean wait."""
_OVERLOADED = 10
"""Largest ratio of a predicted time to its bound, per load. It keeps the order of overloaded candidates."""

Lines = Callable[[str, int, int], "Roofline | str"]
"""Returns the cost of one instance by hardware, tp and pp, or why it cannot run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """Estimates for one instance.

    Attributes:
        single: the cost of the same instance without pipeline stages, for the work of a prompt.
    """

    line: Roofline
    single: Roofline
    demand: Demand

    @property
    def _pp(self) -> int:
        return len(self.line.stages)

    @lru_cache(maxsize=16)  # noqa: B019 - instances live as long as a search
    def kv_tokens(self, step: int) -> float:
        """Return the tokens whose KV fits, with the activations of a step. Negative if the step does not fit."""
        layers = max(map(len, self.line.stages))
        return full_step(self.line, -(-step // self._pp)).kv_room / (self.line.layer.kv_bytes * layers)

    @cached_property
    def prefills_s(self) -> Sequence[tuple[float, float]]:
        """Unloaded seconds of each prompt, and the seconds for which each occupies the instance."""
        return [
            (self._prefill_s(self.line, size), self._prefill_s(self.single, size) / self._pp) for size in self._sizes
        ]

    @property
    def _sizes(self) -> Sequence[Size]:
        return self.demand.sizes

    @staticmethod
    def _prefill_s(line: Roofline, size: Size) -> float:
        return estimate_prefill(line, 1, LOCAL, size.prompt, size.prompt - size.new).seconds

    @cached_property
    def occupied_s(self) -> float:
        """Mean seconds for which a prompt occupies the instance."""
        return sum(occupied_s for _, occupied_s in self.prefills_s) / len(self.prefills_s)

    @lru_cache(maxsize=64)  # noqa: B019
    def decode_s(self, batch: int) -> float:
        """Return the time between tokens of `batch` requests with the mean context."""
        return estimate_decode(self.line, 1, LOCAL, max(1, round(self.demand.mean_context)), batch).seconds

    @lru_cache(maxsize=16)  # noqa: B019
    def step_s(self, tokens: int) -> float:
        """Return the seconds of a step with this many prompt tokens in the middle of a mean prompt."""
        prompt = max(1, round(self.demand.mean_prompt))
        new = min(tokens, prompt)
        return estimate_prefill(self.line, 1, LOCAL, new + (prompt - new) // 2, (prompt - new) // 2).seconds

    def decode_rate(self, step: int, max_tbt_s: float) -> float:
        """Return the tokens per second of the largest batch that memory and a time between tokens allow."""
        largest = max(1, min(_MAX_SEQS, int(self.kv_tokens(step) // max(1.0, self.demand.mean_context))))
        batches = [2**power for power in range(largest.bit_length()) if 2**power < largest] + [largest]
        rates = [batch / self.decode_s(batch) for batch in batches if self.decode_s(batch) <= max_tbt_s]
        return max(rates, default=1 / self.decode_s(1))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The estimates for a candidate.

    Attributes:
        load: the busiest role's demand, as a fraction of its capacity. 0 for requests that all arrive at the start.
        least_ttfts_s: unloaded times to first token of the sampled requests, at best.
        least_tbt_s: the time between tokens of a request alone.
        ttft_s, tbt_s: the predicted times of a slow request under load. `ttft_s` is infinite above capacity.
        refused: the share of requests that exceed the KV memory.
        tightness: the largest of the load and of the ratios of predicted times to their bounds. Lower is better.
    """

    load: float
    least_ttfts_s: tuple[float, ...]
    least_tbt_s: float
    ttft_s: float
    tbt_s: float
    refused: float
    tightness: float

    @classmethod
    def unknown(cls) -> Forecast:
        """Return the forecast of measured instances, which are simulated without estimates."""
        return cls(load=0, least_ttfts_s=(), least_tbt_s=0, ttft_s=0, tbt_s=0, refused=0, tightness=0)


class Estimator:
    """Forecasts candidates for a demand. Instances with the same hardware and degrees share their estimates."""

    def __init__(self, lines: Lines, demand: Demand, level: ServiceLevel) -> None:
        self._lines, self._demand = lines, demand
        self.bounds = tuple(level.of(size.slo_class, size.prompt) for size in demand.sizes)
        """The class of service level of each sampled request."""
        self._instances: dict[tuple[str, int, int], Instance | str] = {}

    def instance(self, hardware: str, tp: int, pp: int) -> Instance | str:
        """Return the estimates of an instance, or why it cannot run."""
        key = hardware, tp, pp
        if key not in self._instances:
            line, single = self._lines(hardware, tp, pp), self._lines(hardware, tp, 1)
            if isinstance(line, str) or isinstance(single, str):
                self._instances[key] = line if isinstance(line, str) else str(single)
            else:
                self._instances[key] = Instance(line=line, single=single, demand=self._demand)
        return self._instances[key]

    def forecast(self, candidate: Candidate) -> Forecast | str:
        """Return the forecast of a candidate, or why it cannot run."""
        roles = []
        for spec in (candidate.spec, candidate.decode or candidate.spec):
            instance = self.instance(candidate.hardware, spec.tp, spec.pp)
            if isinstance(instance, str):
                return instance
            step = candidate.max_num_batched_tokens or _STEP
            if (tokens := instance.kv_tokens(step)) < 1:
                memory = full_step(instance.line, -(-step // spec.pp))
                return f"a step of {step:,} tokens does not fit: {memory.arithmetic}"
            roles.append((spec.instances, instance, tokens))
        return self._forecast(candidate, *roles)

    def _forecast(
        self, candidate: Candidate, prefill: tuple[int, Instance, float], decode: tuple[int, Instance, float]
    ) -> Forecast:
        demand = self._demand
        (num_prefill, first, _), (num_decode, last, last_tokens) = prefill, decode
        step = candidate.max_num_batched_tokens or _STEP
        group = 1 if candidate.policy in {STATIC, "seesaw"} else num_prefill
        rate = 0.0 if math.isinf(demand.rate) else demand.rate
        prefill_load = rate * first.occupied_s / num_prefill
        max_tbt_s = SLACK * max(bound.slo_tbt or math.inf for bound in self.bounds)
        decode_load = rate * demand.mean_output / (num_decode * last.decode_rate(step, max_tbt_s))
        load = max(prefill_load, decode_load)
        batch = max(1, min(_MAX_SEQS, round(decode_load * _MAX_SEQS / 2)))
        decode_s = last.decode_s(2 ** (batch.bit_length() - 1))
        tbt_s = decode_s
        if candidate.decode is None:
            tbt_s = _interleaved_s(
                first.step_s(step), decode_s, first.occupied_s / (1 - min(load, 0.75)), demand.short_output
            )
        alone_s = [seconds for seconds, _ in first.prefills_s]
        shared = 1.0 if group == 1 else group * _SHARED_EFFICIENCY
        servers = num_prefill if group == 1 else 1
        waits_s = _wait_s(load, servers, first.occupied_s * (1 if group == 1 else 1 / shared), _spread(first))
        ttft_s = _TAIL * waits_s + _slow(alone_s) / shared
        ratios = []
        for bound in set(self.bounds):
            own_s = [seconds for seconds, own in zip(alone_s, self.bounds, strict=True) if own == bound]
            times_s = (_TAIL * waits_s + _slow(own_s) / shared, bound.slo_ttft), (tbt_s, bound.slo_tbt)
            ratios += [time_s / max_s for time_s, max_s in times_s if max_s is not None]
        if not rate:
            ratios = [
                first.occupied_s / num_prefill + demand.mean_output / (num_decode * last.decode_rate(step, math.inf))
            ]
        return Forecast(
            load=load,
            least_ttfts_s=tuple(seconds / group for seconds in alone_s),
            least_tbt_s=last.decode_s(1),
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            refused=demand.share_above(last_tokens * (1 if group == 1 else num_decode)),
            tightness=max([load, *(min(ratio, _OVERLOADED * load) if rate else ratio for ratio in ratios)]),
        )


def _slow(times_s: Sequence[float]) -> float:
    """Return the time of a slow request. Times are in order of prompt length."""
    return times_s[int(0.9 * (len(times_s) - 1))]


def _interleaved_s(step_s: float, decode_s: float, queued_s: float, num_tokens: int) -> float:
    """Return the mean time between `num_tokens` tokens of a request while prompts of `queued_s` are computed."""
    num_steps = min(queued_s / step_s, num_tokens)
    return decode_s + num_steps * step_s / num_tokens


def _spread(instance: Instance) -> float:
    """Return the squared coefficient of variation of prompts' times."""
    times_s = [occupied_s for _, occupied_s in instance.prefills_s]
    return sum((time_s / instance.occupied_s - 1) ** 2 for time_s in times_s) / len(times_s)


def _wait_s(load: float, servers: int, mean_s: float, spread: float) -> float:
    """Return the mean wait of an M/G/c queue by Sakasegawa's approximation. Infinite above capacity."""
    if load >= 1:
        return math.inf
    return float(load ** (math.sqrt(2 * (servers + 1)) - 1) / (servers * (1 - load)) * mean_s * (1 + spread) / 2)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Candidates with their forecasts, and the pruned candidates."""

    forecasts: Mapping[Candidate, Forecast]
    pruned: tuple[Pruned, ...]


def prune(candidates: Iterable[Candidate], estimator: Estimator, attainment: float) -> Kept:
    """Divide candidates by estimates, and give the reason for each pruned one.

    Candidates that cannot run are always pruned. Other candidates are pruned for a service level only if
    some candidate may meet it. Otherwise all of them miss it, and the simulation finds the nearest.
    """
    forecasts: dict[Candidate, Forecast] = {}
    pruned, missing = [], []
    for candidate in candidates:
        forecast = estimator.forecast(candidate)
        if isinstance(forecast, str):
            pruned.append(Pruned(candidate=candidate, reason=forecast))
            continue
        forecasts[candidate] = forecast
        if (reason := misses(forecast, estimator.bounds, attainment)) is not None:
            missing.append(Pruned(candidate=candidate, reason=reason))
    if len(missing) < len(forecasts):
        for one in missing:
            del forecasts[one.candidate]
        pruned += missing
    dominated = list(_dominated(forecasts))
    for one in dominated:
        del forecasts[one.candidate]
    return Kept(forecasts=forecasts, pruned=(*pruned, *dominated))


def misses(forecast: Forecast, bounds: Sequence[SloClass], attainment: float) -> str | None:
    """Return why a candidate surely misses the service level. None if it may meet it."""
    if forecast.refused > 1 - attainment and forecast.refused:
        return f"{forecast.refused:.0%} of requests exceed the KV memory"
    if forecast.load > SLACK:
        return f"the rate is {forecast.load:.2f} times the estimated capacity"
    pairs = zip(forecast.least_ttfts_s, (bound.slo_ttft or math.inf for bound in bounds), strict=True)
    late = [(seconds, max_s) for seconds, max_s in pairs if seconds > SLACK * max_s]
    if len(late) > (1 - attainment) * len(bounds):
        (seconds, max_s), share = min(late), len(late) / len(bounds)
        return f"{share:.0%} of prompts need at least {seconds:.3g} s without load, above {max_s:g} s"
    slow = [bound.slo_tbt for bound in bounds if bound.slo_tbt and forecast.least_tbt_s > SLACK * bound.slo_tbt]
    if len(slow) > (1 - attainment) * len(bounds):
        return f"a decode alone takes {forecast.least_tbt_s * 1e3:.3g} ms per token, above {max(slow) * 1e3:g} ms"
    return None


def _dominated(forecasts: Mapping[Candidate, Forecast]) -> Iterable[Pruned]:
    """Yield candidates that another one with equal devices, policy and options beats clearly in every estimate."""
    alike: defaultdict[tuple[object, ...], list[Candidate]] = defaultdict(list)
    for candidate in forecasts:
        roles, tier = candidate.decode is not None, candidate.host_kv_gib
        key = (candidate.hardware, candidate.num_gpus, candidate.policy, candidate.policy_options, roles, tier)
        alike[*key, candidate.max_num_batched_tokens].append(candidate)
    for group in alike.values():
        ordered = sorted(group, key=lambda candidate: forecasts[candidate].tightness)
        for index, candidate in enumerate(ordered):
            for better in ordered[:index]:
                if (ratios := _ratios(forecasts[better], forecasts[candidate])) is not None:
                    reason = f"{better.layout} is better by {ratios} in load, TTFT and TBT, by estimate"
                    yield Pruned(candidate=candidate, reason=reason)
                    break


def _ratios(better: Forecast, worse: Forecast) -> str | None:
    """Return the factors by which a forecast is better in all times, or None."""
    pairs = [
        (better.load, worse.load),
        (sum(better.least_ttfts_s), sum(worse.least_ttfts_s)),
        (better.tbt_s, worse.tbt_s),
    ]
    if not all(first * _DOMINATED < second for first, second in pairs if first or second):
        return None
    return ", ".join(f"{second / first:.2g}x" for first, second in pairs if first)
