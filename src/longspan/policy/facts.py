"""The known facts of a model, its hardware and a cluster. Engines and simulations make them for their policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.core.cluster import Cluster
from longspan.core.locations import Location, hosts_of
from longspan.cost.shape import Hardware, ModelShape

if TYPE_CHECKING:  # types alone: a machine without a profile needs no cost model
    from longspan.core.exchange import Exchange
    from longspan.cost.csa_pipeline import Rates
    from longspan.cost.fitted_cost import FittedCost
    from longspan.cost.partition_table import PartitionTable
    from longspan.cost.partitions import ModelledPartitions
    from longspan.cost.pricing import PricedPhases
    from longspan.cost.profile import Profile
    from longspan.policy.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The known facts of a model and its hardware, from which a policy is made.

    Attributes:
        profile: all measurements. `policy.group_times` selects the times of a group.
        model: the key of the model in the table of partitions.
        partitions: searched partitions. None before they are looked up. Then no prompt is refused.
        cluster: None if it is unknown. Then instances have no roles and are near each other.
        phases: the clusters that alternately prefill and decode on the same devices, if they do.
        phase_cost: the cost of these clusters. None if it is unknown.
        traffic: the requests before a restart. None if there are none.
        rates, exact_s: price sparse attention as `rates_of` and `prompt_s`, in place of the profile.
    """

    shape: ModelShape | None = None
    hardware: Hardware | None = None
    profile: Profile | None = None
    model: str = ""
    partitions: PartitionTable | ModelledPartitions | None = None
    cluster: Cluster | None = None
    phases: tuple[Cluster, ...] = ()
    phase_cost: PricedPhases | None = None
    traffic: Traffic | None = None
    rates: Callable[[tuple[int, ...]], Rates] | None = None
    exact_s: Callable[[Exchange, tuple[int, ...], int], float | None] | None = None

    @property
    def tp(self) -> int | None:
        """Shards of each prefill instance. None if the cluster is unknown."""
        return None if self.cluster is None else self.cluster.spec.tp

    @property
    def has_roles(self) -> bool:
        return self.cluster is not None and self.cluster.has_roles

    def prefill(self, num_instances: int) -> range:
        return range(num_instances) if self.cluster is None else self.cluster.prefill

    @property
    def decode(self) -> range:
        """The instances that only decode. Empty without roles."""
        return range(0) if self.cluster is None else self.cluster.decode

    def location(self, instance: int) -> Location:
        return Location(device=instance) if self.cluster is None else self.cluster.location(instance)

    def hosts(self, instances: Sequence[int]) -> tuple[int, ...]:
        """Return the host of each instance, by number of the instance."""
        return hosts_of([self.location(instance) for instance in sorted(instances)])

    def rates_of(self, hosts: tuple[int, ...]) -> Rates | None:
        """Return the speeds of a member of a group on these hosts, or None if they are unknown."""
        if self.rates is not None:
            return self.rates(hosts)
        from longspan.policy.group_times import measured_rates  # noqa: PLC0415 - few policies ask

        return measured_rates(self, hosts)

    def sparse_factor(self, hosts: tuple[int, ...], kind: str) -> float:
        """Return the seconds of measured sparse prompts of a group, relative to predicted seconds. 1 without any."""
        if self.profile is None:
            return 1.0
        from longspan.policy.group_times import sparse_factor  # noqa: PLC0415 - few policies ask

        return sparse_factor(self, hosts, kind)

    def prompt_s(self, exchange: Exchange, group: tuple[int, ...], num_tokens: int) -> float | None:
        """Return the seconds of a whole prompt on a group by an exact exchange, or None if they are unknown."""
        if self.exact_s is not None:
            return self.exact_s(exchange, group, num_tokens)
        from longspan.policy.group_times import class_of, times_over  # noqa: PLC0415 - few policies ask

        times = times_over(self, class_of(self, group)).get((len(group), exchange))
        return None if times is None else times.seconds(num_tokens)


def measured_phases(
    cost: FittedCost, phases: Sequence[Cluster], block_size: int, slow: float = 1.0
) -> PricedPhases | None:
    """Price alternating clusters by profiles, times `slow`. None on CUDA: profiles lack the cost of a change there.

    Raises:
        ParameterError: for a profile that lacks instances of one cluster, or links.
    """
    if not phases or cost.device != "cpu":
        return None
    from longspan.cost.pricing import PricedPhases  # noqa: PLC0415 - needs the cost of steps

    return PricedPhases(cost, phases, block_size, slow)
