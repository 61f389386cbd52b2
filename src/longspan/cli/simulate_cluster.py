"""The cluster of `longspan simulate`: how many instances there are, where, what they cost and what fits into them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from longspan.cli.simulate import ClusterOptions, SchedulingOptions
from longspan.core.parallel import ParallelSpec
from longspan.core.places import places_of_ranks
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.partition_table import PartitionTable
from longspan.cost.profile import Profile
from longspan.policy.choosing import Facts
from longspan.sim.executor import StepCost

_PROFILED_TOKENS = 2**20
"""KV tokens of an instance whose memory nobody told."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What is simulated.

    Attributes:
        num_blocks: KV blocks of each instance.
        words: what it is, for people.
    """

    num_instances: int
    num_blocks: int
    cost: StepCost
    facts: Facts
    words: str


def cluster_of(model: str, options: ClusterOptions, scheduling: SchedulingOptions) -> Cluster:
    """The cluster.

    Raises:
        ValueError: for degrees that do not fit the devices, or a profile that cannot be read.
    """
    spec = _spec(options)
    for flag, value in (
        ("--block-size", scheduling.block_size),
        ("--num-gpu-blocks-override", scheduling.num_gpu_blocks_override),
        ("--max-model-len", scheduling.max_model_len),
    ):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, but {value} given")
    if options.profile is None:
        raise ValueError("--profile FILE is needed: what longspan profile measured")
    profile = _read(options.profile)
    if profile.subject.tp != spec.tp:
        raise ValueError(f"--profile is of instances with tp {profile.subject.tp}, but --parallel {spec} given")
    return Cluster(
        num_instances=spec.instances,
        num_blocks=scheduling.num_gpu_blocks_override or -(-_PROFILED_TOKENS // scheduling.block_size),
        cost=FittedCost(profile),
        facts=Facts(
            profile=profile,
            model=profile.subject.model,
            partitions=PartitionTable(),
            tp=spec.tp,
            places=places_of_ranks(spec.num_ranks, str(options.hosts))[:: spec.tp],
        ),
        words=f"{profile.subject.machine}, {profile.subject.threads} threads per rank",
    )


def _spec(options: ClusterOptions) -> ParallelSpec:
    for flag, value in (("--hosts", options.hosts), ("--gpus-per-host", options.gpus_per_host)):
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, but {value} given")
    if options.parallel is None:
        return ParallelSpec(instances=options.hosts * (options.gpus_per_host or 1))
    spec = ParallelSpec.parse(options.parallel)
    num_devices = spec.num_ranks if options.gpus_per_host is None else options.hosts * options.gpus_per_host
    if spec.num_ranks != num_devices:
        raise ValueError(
            f"--parallel {spec}: instances({spec.instances}) * tp({spec.tp}) = {spec.num_ranks} devices, but "
            f"--hosts {options.hosts} * --gpus-per-host {options.gpus_per_host} = {num_devices}: make them equal"
        )
    return spec


def _read(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--profile {str(path)!r} cannot be read: {error}") from None
