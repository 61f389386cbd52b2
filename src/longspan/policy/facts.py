"""The known facts of a model, its hardware and a cluster. Engines and simulations make them for their policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.cost.architecture import Hardware, ModelShape, typical_hardware

if TYPE_CHECKING:  # types alone: a machine without a profile needs no cost model
    from longspan.core.exchange import Exchange
    from longspan.cost.csa_pipeline import Rates
    from longspan.cost.fitted_cost import FittedCost
    from longspan.cost.partition_table import PartitionTable
    from longspan.cost.partitions import ModelledPartitions
    from longspan.cost.pricing import PricedPhases
    from longspan.cost.profile import Profile
    from longspan.cost.profile_key import ProfileKey


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The known facts of a model and its hardware, from which a policy is made.

    Attributes:
        model: the key of the model in the table of partitions.
        partitions: searched partitions. None before they are looked up. Then no prompt is refused.
        cluster: None if it is unknown. Then instances have no roles and are near each other.
        phases: the clusters that alternately prefill and decode on the same devices, if they do.
        phase_cost: the cost of these clusters. None if it is unknown.
        rates, exact_s: price sparse attention. They return the speeds of a member by the hosts of its group, and the
            seconds of a whole prompt by its exchange, group and length.
    """

    shape: ModelShape | None = None
    hardware: Hardware | None = None
    profile: Profile | None = None
    model: str = ""
    partitions: PartitionTable | ModelledPartitions | None = None
    cluster: Cluster | None = None
    phases: tuple[Cluster, ...] = ()
    phase_cost: PricedPhases | None = None
    rates: Callable[[tuple[int, ...]], Rates | None] | None = None
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


def known_facts(
    key: ProfileKey,
    shape: ModelShape,
    cluster: Cluster,
    *,
    profile: Profile | None,
    partitions: PartitionTable | ModelledPartitions,
    hardware: Hardware | None = None,
    phases: Sequence[Cluster] = (),
    phase_cost: PricedPhases | None = None,
    rates: Callable[[tuple[int, ...]], Rates] | None = None,
    exact_s: Callable[[Exchange, tuple[int, ...], int], float | None] | None = None,
) -> Facts:
    """Return the facts of a cluster whose instances the key describes.

    Speeds are those of the profile, or else of `hardware`, or else typical speeds of such a device.
    """
    measured = None if profile is None else profile.hardware(shape)
    return Facts(
        shape=shape,
        hardware=measured or hardware or typical_hardware(key.device, key.threads),
        profile=profile,
        model=key.model,
        partitions=partitions,
        cluster=cluster,
        phases=tuple(phases),
        phase_cost=phase_cost,
        rates=rates or (None if profile is None else partial(_measured_rates, profile, shape)),
        exact_s=exact_s or (None if profile is None else partial(_measured_prompt_s, profile)),
    )


def _measured_rates(profile: Profile, shape: ModelShape, hosts: tuple[int, ...]) -> Rates | None:
    from longspan.cost.csa_price import rates_of_profile  # noqa: PLC0415 - few policies ask

    return rates_of_profile(profile, shape, len(hosts))


def _measured_prompt_s(profile: Profile, exchange: Exchange, group: tuple[int, ...], num_tokens: int) -> float | None:
    times = profile.times().get((len(group), exchange))
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
