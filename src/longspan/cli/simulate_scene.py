"""All of a simulation but its requests, which can then be run at several rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tqdm import tqdm

from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.simulate import ClusterOptions
from longspan.cli.simulate_cluster import SimulatedCluster, cluster_of
from longspan.core.config import EngineConfig, capacity_tokens
from longspan.policy import make_policy
from longspan.policy.spec import ChosenPolicy
from longspan.sim.result import MOST_TIMES_LIGHT, Result, find_max_rate, percentile
from longspan.sim.run import Faults, Watch, simulate
from longspan.sim.timeline import Timeline
from longspan.workload.spec import Workload

_FAR_APART_S = 1e6


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A cluster, who decides on it, and what goes wrong.

    Attributes:
        policy_options: of the policy `scheduling` names.
    """

    cluster: SimulatedCluster
    scheduling: SchedulingOptions
    policy_options: Mapping[str, str]
    faults: Faults = field(default_factory=Faults)

    @classmethod
    def of(cls, model: str, cluster: ClusterOptions, scheduling: SchedulingOptions, faults: Faults) -> Experiment:
        """By options of the command line.

        Raises:
            ValueError: see `cluster_of`.
        """
        return cls(
            cluster=cluster_of(model, cluster, scheduling),
            scheduling=scheduling,
            policy_options=scheduling.policy_options(),
            faults=faults,
        )

    def with_options(self, options: Mapping[str, str]) -> Experiment:
        """The same with some options of the policy set or replaced."""
        return replace(self, policy_options={**self.policy_options, **options})

    def policy(self) -> ChosenPolicy:
        """As it is before the first request.

        Raises:
            ValueError: for a policy or options that cannot be.
        """
        return make_policy(
            self.scheduling.policy,
            num_instances=self.cluster.cluster.num_instances,
            options=self.policy_options,
            facts=self.cluster.facts,
        )

    def run(self, workload: Workload, timeline: Timeline | None = None, *, title: str = "requests") -> Result:
        """With a progress bar on stderr, if that is a terminal.

        Raises:
            ValueError: for a policy or options that cannot be.
        """
        policy = self.policy()
        capacity = capacity_tokens(policy, self.cluster.cluster, self.scheduling.block_size)
        with _bar(len(workload.arrivals), title) as finished:
            watch = replace(timeline.watch if timeline else Watch(), finished=finished)
            config = self._config(capacity, shares=workload.shares)
            return simulate(workload.arrivals, config, policy, self.cluster.cost, faults=self.faults, watch=watch)

    def light_ttft_p99_s(self, workload: Workload) -> float | None:
        """When no request meets another; None when none is served."""
        return percentile(self.run(workload.one_by_one(_FAR_APART_S), title="light load").ttfts_s, 99)

    def max_rate(self, workload: Workload, light_s: float, *, start: float, precision: float = 1.02) -> float | None:
        """The highest rate whose P99 of TTFT stays below so many times `light_s`, looked for from `start`.

        Raises:
            ValueError: see `find_max_rate`.
        """

        def keeps_up(rate: float) -> bool:
            found = percentile(self.run(workload.at_rate(rate), title=f"rate {rate:.3g}").ttfts_s, 99)
            return found is not None and found < MOST_TIMES_LIGHT * light_s

        return find_max_rate(keeps_up, start=start, precision=precision)

    def _config(self, capacity: int, *, shares: bool) -> EngineConfig:
        options = self.scheduling
        return EngineConfig(
            cluster=self.cluster.cluster,
            block_size=options.block_size,
            max_model_len=options.max_model_len or capacity,
            limits=options.limits(),
            prefix_caching=options.enable_prefix_caching and shares,  # else nothing would be found
            max_steps_in_flight=2 if options.async_scheduling else 1,
        )


@contextmanager
def _bar(total: int, title: str) -> Iterator[Callable[[int], None]]:
    with tqdm(total=total, desc=title, unit="request", dynamic_ncols=True, leave=False, disable=None) as bar:
        yield lambda num_done: bar.update(num_done - bar.n)
