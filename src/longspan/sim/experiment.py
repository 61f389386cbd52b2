"""An experiment: a simulated cluster with a policy, and what several runs of it find out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import numpy as np

from longspan.core.engine import EngineConfig, capacity_tokens
from longspan.core.options import SchedulingArgs
from longspan.errors import ParameterError
from longspan.policy import make_policy
from longspan.policy.spec import ChosenPolicy
from longspan.policy.tetris.policy import hint_of_a_constant_rate
from longspan.policy.tetris.rates import GRID_PER_S, IMPROVEMENT_RATES, RateTable
from longspan.sim.cluster import SimulatedCluster
from longspan.sim.result import Result, percentile
from longspan.sim.run import Watch, simulate
from longspan.sim.spec import Faults
from longspan.sim.timeline import Timeline
from longspan.workload.arrivals import Workload

MOST_TIMES_LIGHT = 25
"""A rate is too high when the 99th percentile of TTFT is so many times that of light load (Tetris §7.2)."""

_FAR_APART_S = 1e6
_MOST_DOUBLINGS = 24
_PRECISION = 1.02

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a title and a total; is then told how many are done."""


def _unseen(_title: str, _total: int) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _done: None)


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A cluster, who decides on it, and what goes wrong; any workload can be run on it.

    Attributes:
        progress: is told how many requests of a run are done.
    """

    cluster: SimulatedCluster
    scheduling: SchedulingArgs
    faults: Faults = field(default_factory=Faults)
    progress: Progress = _unseen

    def with_options(self, options: Mapping[str, str]) -> Experiment:
        """Sets or replaces some options of the policy."""
        options = {**(self.scheduling.policy_options or {}), **options}
        return replace(self, scheduling=replace(self.scheduling, policy_options=options))

    def policy(self) -> ChosenPolicy:
        """Makes the policy as it is before the first request.

        Raises:
            ValueError: for a policy or options that cannot be.
        """
        return make_policy(
            self.scheduling.policy,
            num_instances=self.cluster.cluster.num_instances,
            options=self.scheduling.all_policy_options(),
            facts=self.cluster.facts,
        )

    def hint(self) -> str | None:
        """Tells users what they might have forgotten to say, if anything."""
        return hint_of_a_constant_rate(self.policy().settings, has_roles=self.cluster.cluster.has_roles)

    def run(self, workload: Workload, timeline: Timeline | None = None, *, title: str = "requests") -> Result:
        """Serves all requests of a workload.

        Raises:
            ValueError: for a policy or options that cannot be.
        """
        policy = self.policy()
        capacity = capacity_tokens(policy, self.cluster.cluster, self.scheduling.block_size)
        with self.progress(title, len(workload.arrivals)) as finished:
            watch = replace(timeline.watch if timeline else Watch(), finished=finished)
            config = self._config(capacity, shares=workload.shares)
            return simulate(workload.arrivals, config, policy, self.cluster.cost, faults=self.faults, watch=watch)

    def light_ttft_p99_s(self, workload: Workload) -> float | None:
        """Returns P99 of TTFT when no request meets another; None when none is served."""
        return percentile(self.run(workload.one_by_one(_FAR_APART_S), title="light load").ttfts_s, 99)

    def max_rate(
        self, workload: Workload, light_s: float, *, start: float, precision: float = _PRECISION
    ) -> float | None:
        """Finds the highest rate whose P99 of TTFT stays below `MOST_TIMES_LIGHT` times `light_s`.

        Raises:
            ValueError: see `find_max_rate`.
        """

        def keeps_up(rate: float) -> bool:
            found = percentile(self.run(workload.at_rate(rate), title=f"rate {rate:.3g}").ttfts_s, 99)
            return found is not None and found < MOST_TIMES_LIGHT * light_s

        return find_max_rate(keeps_up, start=start, precision=precision)

    def improvement_rates(
        self, workload: Workload, highest: float
    ) -> tuple[RateTable, Mapping[float, Mapping[float, float]]]:
        """Finds which improvement rate of the policy `tetris` is best at request rates up to `highest`.

        Where others decode, answers count for nothing: they are one token long then, which takes less time to simulate.

        Returns:
            The table for `-o improvement_rates=`, and mean TTFTs by request rate and improvement rate.

        Raises:
            ValueError: for another policy, options that say the rates, or when no request is served.
        """
        if self.scheduling.policy != "tetris":
            problem = f"must be tetris, which has improvement rates, but {self.scheduling.policy} given"
            raise ParameterError("policy", problem, self.scheduling.policy)
        for option in ("improvement_rate", "improvement_rates"):
            if option in self.scheduling.all_policy_options():
                raise ValueError(f"what -o {option} says is to be found: leave that out")
        if self.cluster.cluster.has_roles:
            workload = replace(workload, arrivals=[replace(one, output_len=1) for one in workload.arrivals])
        best: dict[float, float] = {}
        means_s: dict[float, Mapping[float, float]] = {}
        rates = request_rates(highest)
        with self.progress("request rates", len(rates)) as finished:
            for number, rate in enumerate(rates, start=1):
                at_rate = workload.at_rate(rate)
                means_s[rate] = {one: self._mean_ttft_s(at_rate, one) for one in IMPROVEMENT_RATES}
                best[rate] = least(means_s[rate])
                finished(number)
        return RateTable(entries=tuple(best.items())), means_s

    def _mean_ttft_s(self, workload: Workload, improvement_rate: float) -> float:
        tried = self.with_options({"improvement_rate": str(improvement_rate)})
        found = tried.run(workload, title=f"improvement rate {improvement_rate:g}").ttfts_s
        if not len(found):
            raise ValueError("no request was served, so no improvement rate is best")
        return float(np.mean(found))

    def _config(self, capacity: int, *, shares: bool) -> EngineConfig:
        options = self.scheduling
        return EngineConfig(
            cluster=self.cluster.cluster,
            block_size=options.block_size,
            max_model_len=options.max_model_len or capacity,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            prefix_caching=options.enable_prefix_caching and shares,  # else nothing would be found
            max_steps_in_flight=2 if options.async_scheduling else 1,
        )


def find_max_rate(keeps_up: Callable[[float], bool], *, start: float, precision: float = _PRECISION) -> float | None:
    """Finds the highest rate, to a `precision` of 2 %, at which `keeps_up` holds, by doubling and halving `start`.

    None when all requests at once are not too many either: it takes more of them to find a rate.

    Raises:
        ValueError: when no rate does.
    """
    if keeps_up(math.inf):
        return None
    low = start
    for _ in range(_MOST_DOUBLINGS):
        if keeps_up(low):
            break
        low /= 2
    else:
        raise ValueError(f"not even {low:g} requests per second leave TTFT near that of light load")
    high = 2 * low
    while low >= start and keeps_up(high):
        low, high = high, 2 * high
    while high / low > precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def request_rates(highest: float) -> tuple[float, ...]:
    """Lists the rates of the grid, up to the first that is not below `highest`.

    Raises:
        ValueError: when there is none.
    """
    if not 0 < highest <= 1000:
        raise ValueError(f"request rates to profile are above 0 and at most 1000 per second, but {highest:g} given")
    rates = [GRID_PER_S]
    while rates[-1] < highest:
        rates.append(GRID_PER_S * (len(rates) + 1))
    return tuple(rates)


def least(values: Mapping[float, float]) -> float:
    """Returns the key of the least value, the first of equals."""
    return min(values, key=values.__getitem__)
