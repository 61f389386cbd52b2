"""An experiment: a simulated cluster with a policy, and the results of its runs. `sim/resolve.py` makes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import numpy as np

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.options import SchedulingArgs
from longspan.core.policy import Policy
from longspan.cost.pricing import SwapPrice
from longspan.cost.step_cost import StepCost
from longspan.errors import ParameterError
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.policy.tetris.rates import RateTable
from longspan.sim.resolved import Fleet, ResolvedCluster
from longspan.sim.run import Observers, Result, percentile, simulate
from longspan.sim.spec import Faults, ServiceLevel
from longspan.workload.arrivals import Workload

MAX_TIMES_LIGHT = 25
"""A rate is too high when the 99th percentile of TTFT is this many times that of light load (Tetris §7.2)."""

ATTAINMENT = 0.9
"""A rate is too high when a smaller part of all requests keeps within a given service level (DistServe §6)."""

IMPROVEMENT_RATES = tuple(round(0.05 * step, 2) for step in range(1, 16))
"""These are tried for each request rate: 0.05 to 0.75."""
_GRID_PER_S = 0.5
_FAR_APART_S = 1e6
_MAX_DOUBLINGS = 24
_PRECISION = 1.02

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a title and a total; is then told how many are done."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A simulated cluster, its policy, and its faults; any workload can be run on it.

    Attributes:
        cost: seconds of its steps.
        facts: what policies know of it; also the clusters that take turns, if there are several.
        fleet: the devices.
        progress: is told how many requests of a run are done.
    """

    cluster: Cluster
    cost: StepCost
    facts: Facts
    fleet: Fleet
    scheduling: SchedulingArgs
    faults: Faults
    progress: ProgressBar = lambda _title, _total: nullcontext(lambda _done: None)

    def with_options(self, options: Mapping[str, str]) -> Experiment:
        """Returns an experiment with some options of the policy set or replaced."""
        options = {**(self.scheduling.policy_options or {}), **options}
        return replace(self, scheduling=replace(self.scheduling, policy_options=options))

    @property
    def block_bytes(self) -> float:
        """Counts the bytes of a KV block with all layers and heads."""
        shape = self.facts.shape
        assert shape is not None, "the model of a simulation is known"
        return shape.block_bytes(self.scheduling.block_size)

    @property
    def resolved(self) -> ResolvedCluster:
        """The cluster with all that was derived, for people."""
        clusters = self.facts.turns or (self.cluster,)
        return ResolvedCluster(fleet=self.fleet, clusters=tuple(clusters), block_size=self.scheduling.block_size)

    def policy(self) -> Policy:
        """Makes the policy as it is before the first request."""
        return make_policy(
            self.scheduling.policy,
            num_instances=self.cluster.num_instances,
            options=self.scheduling.all_policy_options(),
            facts=self.facts,
        )

    def run(self, workload: Workload, observers: Observers | None = None, *, title: str = "requests") -> Result:
        """Serves all requests of a workload.

        Raises:
            ValueError: for a policy or options that cannot be.
        """
        policy, scheduling = self.policy(), self.scheduling
        if not (workload.shares or self.cluster.host_blocks):
            scheduling = replace(scheduling, enable_prefix_caching=False)  # it would find nothing
        config = EngineConfig.of(scheduling, self.cluster, policy, turns=self.facts.turns, swap=self._swap)
        with self.progress(title, len(workload.arrivals)) as finished:
            watch = replace(observers or Observers(), finished=finished)
            return simulate(workload.arrivals, config, policy, self.cost, faults=self.faults, watch=watch)

    def _swap(self, cluster: Cluster) -> SwapPrice:
        cost = self.cost if cluster == self.cluster else self.cost.resharded(cluster)
        return SwapPrice.of(cost, cluster, self.faults.common_factor(cluster.num_instances))

    def at_light_load(self, workload: Workload) -> Result:
        """Serves the requests such that none meets another."""
        return self.run(workload.one_by_one(_FAR_APART_S), title="light load")

    def light_ttft_p99_s(self, workload: Workload) -> float | None:
        """Returns P99 of TTFT when no request meets another; None when none is served."""
        return percentile(self.at_light_load(workload).ttfts_s, 99)

    def max_rate(
        self, workload: Workload, keeps_up: Callable[[Result], bool], *, start: float, precision: float = _PRECISION
    ) -> float | None:
        """Finds, as `find_max_rate` does, the highest rate at which the result keeps up, see `near_light_load` and
        `within`.
        """

        def tried(rate: float) -> bool:
            return keeps_up(self.run(workload.at_rate(rate), title=f"rate {rate:.3g}"))

        return find_max_rate(tried, start=start, precision=precision)

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
        if self.cluster.has_roles:
            workload = replace(workload, arrivals=[replace(one, output_len=1) for one in workload.arrivals])
        best: dict[float, float] = {}
        means_s: dict[float, Mapping[float, float]] = {}
        rates = request_rates(highest)
        with self.progress("request rates", len(rates)) as finished:
            for number, rate in enumerate(rates, start=1):
                at_rate = workload.at_rate(rate)
                means_s[rate] = {one: self._mean_ttft_s(at_rate, one) for one in IMPROVEMENT_RATES}
                best[rate] = min(IMPROVEMENT_RATES, key=means_s[rate].__getitem__)  # the lowest of equals
                finished(number)
        return RateTable(entries=tuple(best.items())), means_s

    def _mean_ttft_s(self, workload: Workload, improvement_rate: float) -> float:
        tried = self.with_options({"improvement_rate": str(improvement_rate)})
        found = tried.run(workload, title=f"improvement rate {improvement_rate:g}").ttfts_s
        if not len(found):
            raise ValueError("no request was served, so no improvement rate is best")
        return float(np.mean(found))


def near_light_load(light_s: float) -> Callable[[Result], bool]:
    """Returns the test of a result whose P99 of TTFT stays below `MAX_TIMES_LIGHT` times that of light load."""

    def test(result: Result) -> bool:
        found = percentile(result.ttfts_s, 99)
        return found is not None and found < MAX_TIMES_LIGHT * light_s

    return test


def within(level: ServiceLevel) -> Callable[[Result], bool]:
    """Returns the test of a result with enough requests that keep within a service level, see `ATTAINMENT`."""
    return lambda result: result.attainment(level) >= ATTAINMENT


def find_max_rate(keeps_up: Callable[[float], bool], *, start: float, precision: float = _PRECISION) -> float | None:
    """Finds the highest rate, to a `precision` of 2 %, at which `keeps_up` holds, by doubling and halving `start`.

    None when all requests at once are not too many either: it takes more of them to find a rate.
    """
    if keeps_up(math.inf):
        return None
    low = start
    for _ in range(_MAX_DOUBLINGS):
        if keeps_up(low):
            break
        low /= 2
    else:
        raise ValueError(f"not even {low:g} requests per second are few enough")
    high = 2 * low
    while low >= start and keeps_up(high):
        low, high = high, 2 * high
    while high / low > precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def request_rates(highest: float) -> tuple[float, ...]:
    """Lists the rates of the grid, up to the first that is not below `highest`."""
    if not 0 < highest <= 1000:
        raise ValueError(f"request rates to profile are above 0 and at most 1000 per second, but {highest:g} given")
    rates = [_GRID_PER_S]
    while rates[-1] < highest:
        rates.append(_GRID_PER_S * (len(rates) + 1))
    return tuple(rates)
