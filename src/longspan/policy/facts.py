"""The facts that policies go by. Engines and simulations make them here, from a model, hardware and a cluster."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.core.cluster import Cluster
from longspan.cost.architecture import Hardware, ModelShape, typical_hardware
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.partitions import ModelledPartitions, PartitionTable
from longspan.cost.pricing import PricedTurns
from longspan.cost.profile import Profile, ProfileKey
from longspan.policy.choosing import Facts, TurnCost


def early_facts(
    cluster: Cluster,
    turns: Sequence[Cluster] = (),
    *,
    model: str = "",
    partitions: PartitionTable | ModelledPartitions | None = None,
) -> Facts:
    """Return the facts before pools and speeds are known, by which options are checked."""
    return Facts(model=model, partitions=partitions, cluster=cluster, turns=tuple(turns))


def known_facts(
    key: ProfileKey,
    shape: ModelShape,
    cluster: Cluster,
    *,
    profile: Profile | None,
    partitions: PartitionTable | ModelledPartitions,
    hardware: Hardware | None = None,
    turns: Sequence[Cluster] = (),
    turn_cost: TurnCost | None = None,
) -> Facts:
    """Return the facts of a cluster whose instances the key describes.

    Speeds are those of the profile. A profile without them leaves `hardware`, or typical speeds of such a device.
    """
    measured = None if profile is None else profile.hardware(shape)
    return Facts(
        shape=shape,
        hardware=measured or hardware or typical_hardware(key.device, key.threads),
        profile=profile,
        model=key.model,
        partitions=partitions,
        cluster=cluster,
        turns=tuple(turns),
        turn_cost=turn_cost,
    )


def measured_turns(
    cost: FittedCost, turns: Sequence[Cluster], block_size: int, slow: float = 1.0
) -> PricedTurns | None:
    """Price clusters that take turns by profiles. None on CUDA, where profiles lack the cost of a change.

    Args:
        slow: the factor by which instances take longer than their cost.

    Raises:
        ParameterError: for a profile that lacks instances of one cluster, or links.
    """
    return PricedTurns(cost, turns, block_size, slow) if turns and cost.device == "cpu" else None
