"""A simulated cluster: how many instances there are, where, what their steps cost and what fits into their memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from longspan.core.cluster import Cluster
from longspan.core.exchange import CHAIN, LOCAL, Exchange, of_any_layout
from longspan.core.options import SchedulingArgs
from longspan.core.runs import Run, shard_span
from longspan.core.steps import Forward, Part
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, Hardware
from longspan.cost.channels import Channel, Shares, shares_of
from longspan.cost.estimate import memory
from longspan.cost.forward import Roofline
from longspan.cost.partitions import PartitionTable
from longspan.cost.profile import Prefill, Profile, ProfileKey, profiled_prompts
from longspan.cost.step_cost import FittedCost, RooflineCost, StepCost
from longspan.cost.topology import Devices
from longspan.errors import ParameterError
from longspan.policy.choosing import Facts
from longspan.policy.tetris.times import named_sizes
from longspan.sim.spec import ClusterSpec

_PROFILED_TOKENS = 2**20
"""KV tokens of an instance whose memory nobody told."""
_USED_MEMORY = 0.9
"""How much of a device's memory is used, as vLLM's gpu_memory_utilization."""
_PREDICTED_LENGTHS = tuple(2048 * 2**power for power in range(8))
"""No more than prompts have: a fit to much longer ones is off by a tenth where most of them are."""


@dataclass(frozen=True, kw_only=True)
class SimulatedCluster:
    """A cluster, what is known of it, and what steps cost on it.

    Attributes:
        words: a description for people.
    """

    cluster: Cluster
    cost: StepCost
    facts: Facts
    words: str


def computed_cluster(model: Architecture, spec: ClusterSpec, scheduling: SchedulingArgs) -> SimulatedCluster:
    """Makes a cluster that costs what data sheets say.

    Raises:
        ValueError: for unknown names, degrees that do not fit the model, or one that does not fit the memory.
    """
    if spec.hardware is None:
        raise ParameterError("hardware", "must be a name that longspan estimate knows, if no profile is given")
    cluster, hardware = spec.cluster, spec.hardware
    devices = Devices(
        hardware=hardware,
        gpus_per_host=spec.devices_per_host,
        hosts=spec.hosts,
        link=spec.link,
        link_gbytes_per_s=spec.link_gbytes_per_s,
    )
    kernels = spec.attention or "flash"
    cost = RooflineCost(model, devices, cluster, block_size=scheduling.block_size, kernels=kernels)
    blocks = [scheduling.num_gpu_blocks_override or _num_blocks(line, scheduling) for line in cost.lines]
    cluster = cluster.with_blocks([blocks[-1 if instance in cluster.decode else 0] for instance in cluster.instances])
    profile_key = ProfileKey(
        model=model.name,
        dtype=spec.dtype,
        device="cuda",
        tp=cluster.spec.tp,
        threads=1,
        kernel=kernels,
        machine=hardware,
    )
    profile = predicted_profile(
        cost,
        profile_key,
        num_instances=cluster.spec.instances,
        prompts=profiled_prompts(_PREDICTED_LENGTHS, 2 * _PREDICTED_LENGTHS[-1]),
        exchanges=(*of_any_layout(), CHAIN),
        sizes=named_sizes(scheduling.all_policy_options()),
    )
    topology = cost.lines[0].topology
    wire = topology.between if spec.hosts > 1 else topology.inside
    flops_per_s = catalog.device(hardware).peak(model.attention.bytes_per_element)
    facts = Facts(
        shape=model.attention,
        hardware=Hardware(flops_per_s=flops_per_s, bytes_per_s=wire.bytes_per_s),
        profile=profile,
        model=model.name,
        partitions=PartitionTable(),
        cluster=cluster,
    )
    return SimulatedCluster(cluster=cluster, cost=cost, facts=facts, words=_words(devices))


def measured_cluster(
    model: Architecture, profile: Profile, spec: ClusterSpec, scheduling: SchedulingArgs
) -> SimulatedCluster:
    """Makes a cluster of instances that cost what was measured of one.

    Raises:
        ValueError: for instances of another size than was measured, or a profile that says too little.
    """
    cluster, key = spec.cluster, profile.profile_key
    if {cluster.tp(instance) for instance in cluster.instances} != {key.tp}:
        raise ParameterError("profile", f"is of instances with tp {key.tp}, but {cluster} given", spec.profile)
    num_blocks = scheduling.num_gpu_blocks_override or math.ceil(_PROFILED_TOKENS / scheduling.block_size)
    cluster = cluster.with_blocks([num_blocks] * cluster.num_instances)
    return SimulatedCluster(
        cluster=cluster,
        cost=FittedCost(profile, model.attention, block_size=scheduling.block_size),
        facts=Facts(profile=profile, model=key.model, partitions=PartitionTable(), cluster=cluster),
        words=f"{key.machine}, {key.dtype}, {key.threads} threads per rank",
    )


def _words(devices: Devices) -> str:
    """Names the devices, and what connects hosts, or those of a single one."""
    speed = "" if devices.link_gbytes_per_s is None else f" at {devices.link_gbytes_per_s:g} GB/s"
    return f"{devices.hosts} × {devices.gpus_per_host} {devices.hardware}, {devices.slowest_link}{speed}"


def _num_blocks(line: Roofline, scheduling: SchedulingArgs) -> int:
    """Counts the blocks that the memory holds beside weights and the activations of a full step."""
    tokens, layer = scheduling.max_num_batched_tokens, line.layer
    shares = Shares.of(shares_of(LOCAL, ((Run(0, tokens),),), 0, tokens))
    whole = Channel(exchange=LOCAL, group=(0,), shares=shares, keys=tokens, decode=False)
    full = memory(layer, whole, tokens)
    block = scheduling.block_size * layer.kv_bytes * layer.model.attention.num_layers
    found = int((_USED_MEMORY * full.capacity - full.used + full.kv) // block)
    if found < 1:
        raise ValueError(
            f"no KV block fits into {_USED_MEMORY:.0%} of a device's memory beside a step of {tokens} tokens: "
            f"{full.arithmetic}: use a larger tp, or fewer max_num_batched_tokens"
        )
    return found


def predicted_profile(
    cost: StepCost,
    profile_key: ProfileKey,
    *,
    num_instances: int,
    prompts: Iterable[tuple[int, int]],
    exchanges: Sequence[Exchange],
    sizes: Collection[int] = (),
) -> Profile:
    """Predicts the profile of a machine that is only known by its cost, so that policies choose as on a real one.

    Prefills of (new, cached) tokens are one step each, on one instance and on groups of 2, 4, 8 and so on to all.

    Args:
        sizes: of further groups, as far as there are so many instances.
    """
    powers = {2**power for power in range(num_instances.bit_length())}
    wanted = {size for size in powers.union(sizes) if 1 <= size <= num_instances}
    prefills = [
        Prefill(
            members=members,
            exchange=str(exchange),
            new_tokens=new,
            cached_tokens=cached,
            seconds=(max(cost.seconds(_prefill(members, exchange, new, cached)).values()),),
        )
        for members in sorted(wanted | {num_instances})
        for exchange in (exchanges if members > 1 else (LOCAL,))
        for new, cached in prompts
    ]
    return Profile(profile_key=profile_key, prefills=tuple(prefills))


def _prefill(members: int, exchange: Exchange, new: int, cached: int) -> Forward:
    """Makes the step of a prompt, sharded as policies shard it."""
    part = Part(
        request_id=0,
        start=cached,
        stop=cached + new,
        tokens=range(new),
        group=tuple(range(members)),
        runs=shard_span(exchange.traits.layouts[0], cached, cached + new, members, head=0),
        exchange=exchange,
        first_block=0,
        blocks=(),
        sample=None,
    )
    return Forward(number=1, parts=(part,))
