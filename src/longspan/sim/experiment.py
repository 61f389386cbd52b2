"""An experiment: a simulated cluster with a policy, which runs workloads. `sim/resolve.py` creates it."""

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
from longspan.policy.tetris.rates import IMPROVEMENT_RATES, RateTable
from longspan.sim.resolved import Fleet, ResolvedCluster
from longspan.sim.run import Observers, Result, percentile, simulate
from longspan.sim.spec import Faults, ServiceLevel
from longspan.workload.arrivals import Workload

MAX_TIMES_LIGHT = 25
"""A rate is too high if P99 of TTFT is at least this multiple of its value under light load (Tetris §7.2)."""

ATTAINMENT = 0.9
"""A rate is too high if a smaller fraction of requests meets the service level (DistServe §6)."""

_GRID_PER_S = 0.5
_FAR_APART_S = 1e6
_MAX_DOUBLINGS = 24
_PRECISION = 1.02

ProgressBar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows a title and a total. Its callback gets the number of finished requests."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A simulated cluster, its policy, and its faults. It can run any workload.

    Attributes:
        cost: gives the seconds of its steps.
        facts: the policies' knowledge of it, including the clusters of alternating phases, if there are several.
        fleet: the devices.
        progress: shows the number of finished requests of a run.
    """

    cluster: Cluster
    cost: StepCost
    facts: Facts
    fleet: Fleet
    scheduling: SchedulingArgs
    faults: Faults
    progress: ProgressBar = lambda _title, _total: nullcontext(lambda _done: None)

    def with_options(self, options: Mapping[str, str]) -> Experiment:
        """Return a copy with these policy options set or replaced."""
        options = {**(self.scheduling.policy_options or {}), **options}
        return replace(self, scheduling=replace(self.scheduling, policy_options=options))

    @property
    def block_bytes(self) -> float:
        """Bytes of a KV block with all layers and heads."""
        shape = self.facts.shape
        assert shape is not None, "a simulation has the model's shape"
        return shape.block_bytes(self.scheduling.block_size)

    @property
    def resolved(self) -> ResolvedCluster:
        """The cluster with all derived sizes, for output."""
        clusters = self.facts.phases or (self.cluster,)
        return ResolvedCluster(fleet=self.fleet, clusters=tuple(clusters), block_size=self.scheduling.block_size)

    def policy(self) -> Policy:
        """Create the policy in its initial state."""
        return make_policy(
            self.scheduling.policy,
            num_instances=self.cluster.num_instances,
            options=self.scheduling.all_policy_options(),
            facts=self.facts,
        )

    def run(self, workload: Workload, observers: Observers | None = None, *, title: str = "requests") -> Result:
        """Serve all requests of a workload.

        Raises:
            ValueError: for an invalid policy or invalid options.
        """
        policy, scheduling = self.policy(), self.scheduling
        if not (workload.shares or self.cluster.host_blocks):
            scheduling = replace(scheduling, enable_prefix_caching=False)  # no prompts share a prefix
        config = EngineConfig.of(scheduling, self.cluster, policy, phases=self.facts.phases, swap=self._swap)
        with self.progress(title, len(workload.arrivals)) as finished:
            watch = replace(observers or Observers(), finished=finished)
            return simulate(
                workload.arrivals,
                config,
                policy,
                self.cost,
                clients=workload.clients,
                faults=self.faults,
                watch=watch,
            )

    def _swap(self, cluster: Cluster) -> SwapPrice:
        cost = self.cost if cluster == self.cluster else self.cost.resharded(cluster)
        return SwapPrice.of(cost, cluster, self.faults.common_factor(cluster.num_instances))

    def at_light_load(self, workload: Workload) -> Result:
        """Serve the requests far apart, so that they do not overlap."""
        return self.run(workload.one_by_one(_FAR_APART_S), title="light load")

    def max_rate(
        self, workload: Workload, keeps_up: Callable[[Result], bool], *, start: float, precision: float = _PRECISION
    ) -> float | None:
        """Find the highest rate whose result passes `keeps_up`, see `find_max_rate`, `near_light_load` and `within`."""

        def passes(rate: float) -> bool:
            return keeps_up(self.run(workload.at_rate(rate), title=f"rate {rate:.3g}"))

        return find_max_rate(passes, start=start, precision=precision)

    def improvement_rates(
        self, workload: Workload, highest: float
    ) -> tuple[RateTable, Mapping[float, Mapping[float, float]]]:
        """Find the best improvement rate of the policy `tetris` for request rates up to `highest`.

        With separate decode instances, answers do not affect TTFT. They are cut to one token to simulate faster.

        Returns:
            The table for `-o improvement_rates=`, and mean TTFTs by request rate and improvement rate.

        Raises:
            ValueError: for another policy, options that set the rates, or if no request is served.
        """
        if self.scheduling.policy != "tetris":
            problem = f"must be tetris, which has improvement rates, but {self.scheduling.policy} given"
            raise ParameterError("policy", problem, self.scheduling.policy)
        for option in ("improvement_rate", "improvement_rates"):
            if option in self.scheduling.all_policy_options():
                raise ValueError(f"-o {option} sets a rate that this search determines: leave it out")
        if self.cluster.has_roles:
            workload = replace(workload, arrivals=[replace(arrival, output_len=1) for arrival in workload.arrivals])
        best: dict[float, float] = {}
        means_s: dict[float, Mapping[float, float]] = {}
        rates = request_rates(highest)
        with self.progress("request rates", len(rates)) as finished:
            for number, rate in enumerate(rates, start=1):
                at_rate = workload.at_rate(rate)
                means_s[rate] = {option: self._mean_ttft_s(at_rate, option) for option in IMPROVEMENT_RATES}
                best[rate] = min(IMPROVEMENT_RATES, key=means_s[rate].__getitem__)  # the lowest of equals
                finished(number)
        return RateTable(entries=tuple(best.items())), means_s

    def _mean_ttft_s(self, workload: Workload, improvement_rate: float) -> float:
        experiment = self.with_options({"improvement_rate": str(improvement_rate)})
        ttfts_s = experiment.run(workload, title=f"improvement rate {improvement_rate:g}").ttfts_s
        if not len(ttfts_s):
            raise ValueError("no request was served, so no improvement rate is best")
        return float(np.mean(ttfts_s))


def near_light_load(light_s: float) -> Callable[[Result], bool]:
    """Return a test that P99 of TTFT is below `MAX_TIMES_LIGHT * light_s`."""

    def test(result: Result) -> bool:
        p99_s = percentile(result.ttfts_s, 99)
        return p99_s is not None and p99_s < MAX_TIMES_LIGHT * light_s

    return test


def within(level: ServiceLevel) -> Callable[[Result], bool]:
    """Return a test that enough requests meet a service level, see `ATTAINMENT`."""
    return lambda result: result.attainment(level) >= ATTAINMENT


def find_max_rate(keeps_up: Callable[[float], bool], *, start: float, precision: float = _PRECISION) -> float | None:
    """Find the highest rate that passes `keeps_up`, to a `precision` of 2 %, by doubling and halving `start`.

    Returns None if all requests at once pass. Finding a rate then needs more requests.
    """
    if keeps_up(math.inf):
        return None
    low = start
    for _ in range(_MAX_DOUBLINGS):
        if keeps_up(low):
            break
        low /= 2
    else:
        raise ValueError(f"even {low:g} requests per second are too many: check the workload and the service level")
    high = 2 * low
    while low >= start and keeps_up(high):
        low, high = high, 2 * high
    while high / low > precision:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def request_rates(highest: float) -> tuple[float, ...]:
    """List the rates of the grid, up to the first rate that is at least `highest`."""
    if not 0 < highest <= 1000:
        raise ValueError(f"request rates to profile must be above 0 and at most 1000 per second, {highest:g} given")
    rates = [_GRID_PER_S]
    while rates[-1] < highest:
        rates.append(_GRID_PER_S * (len(rates) + 1))
    return tuple(rates)
