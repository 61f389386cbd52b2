"""The cluster of `longspan simulate`: how many instances there are, where, what they cost and what fits into them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from longspan.cli.model_config import architecture
from longspan.cli.model_config import cluster_of as devices_of
from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.simulate import ClusterOptions
from longspan.cli.simulate_fleet import devices_per_host, instances_of
from longspan.core.cluster import Cluster, Location, locations_of_ranks
from longspan.core.exchange import CHAIN, LOCAL, of_any_layout
from longspan.core.runs import Run
from longspan.cost import catalog
from longspan.cost.architecture import Hardware
from longspan.cost.channels import Channel, Shares, share_of
from longspan.cost.cluster import Devices, memory, slowest_link
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.forward import Roofline
from longspan.cost.partitions import PartitionTable
from longspan.cost.profile import Profile, ProfileKey, profiled_prompts
from longspan.cost.step_cost import RooflineCost, StepCost
from longspan.policy.choosing import Facts
from longspan.policy.tetris.times import named_sizes
from longspan.sim.predicted import predicted_profile

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


def cluster_of(model: str, options: ClusterOptions, scheduling: SchedulingOptions) -> SimulatedCluster:
    """The cluster.

    Raises:
        ValueError: for degrees that do not fit the devices, unknown names, a model that does not fit the memory, or a
            profile that cannot be read.
    """
    _at_least_one(
        {
            "--hosts": options.hosts,
            "--gpus-per-host": options.gpus_per_host,
            "--block-size": scheduling.block_size,
            "--num-gpu-blocks-override": scheduling.num_gpu_blocks_override,
            "--max-model-len": scheduling.max_model_len,
        }
    )
    if (options.hardware is None) == (options.profile is None):
        raise ValueError(
            "give --hardware NAME (see longspan estimate) or --profile FILE (of longspan profile), and one"
        )
    cluster = instances_of(options)
    cluster = replace(cluster, locations=_locations(options, cluster))
    if options.profile is not None:
        return _measured(model, options.profile, options, cluster, scheduling)
    assert options.hardware is not None
    return _computed(model, options.hardware, options, cluster, scheduling)


def _computed(
    model: str, hardware: str, options: ClusterOptions, cluster: Cluster, scheduling: SchedulingOptions
) -> SimulatedCluster:
    """By data sheets."""
    devices = devices_of(hardware, devices_per_host(options, cluster.num_ranks), options.hosts, options)
    sizes, kernels = architecture(model, dtype=options.dtype, ffn_dtype=options.ffn_dtype), options.attention or "flash"
    cost = RooflineCost(sizes, devices, cluster, block_size=scheduling.block_size, kernels=kernels)
    blocks = [scheduling.num_gpu_blocks_override or _num_blocks(line, scheduling) for line in cost.lines]
    cluster = cluster.with_blocks([blocks[-1 if instance in cluster.decode else 0] for instance in cluster.instances])
    profile_key = ProfileKey(
        model=model,
        dtype=options.dtype,
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
        sizes=named_sizes(scheduling.policy_options()),
    )
    topology = cost.lines[0].topology
    wire = topology.between if options.hosts > 1 else topology.inside
    flops_per_s = catalog.device(hardware).peak(sizes.attention.bytes_per_element)
    facts = Facts(
        shape=sizes.attention,
        hardware=Hardware(flops_per_s=flops_per_s, bytes_per_s=wire.bytes_per_s),
        profile=profile,
        model=model,
        partitions=PartitionTable(),
        cluster=cluster,
    )
    return SimulatedCluster(
        cluster=cluster,
        cost=cost,
        facts=facts,
        words=_words(devices),
    )


def _words(devices: Devices) -> str:
    """The devices, and what connects hosts, or those of a single one."""
    speed = "" if devices.link_bytes_per_s is None else f" at {devices.link_bytes_per_s / 1e9:g} GB/s"
    return f"{devices.hosts} × {devices.gpus_per_host} {devices.hardware}, {slowest_link(devices)}{speed}"


def _num_blocks(line: Roofline, scheduling: SchedulingOptions) -> int:
    """What the memory holds beside weights and the activations of a full step."""
    tokens, layer = scheduling.max_num_batched_tokens, line.layer
    share = share_of((Run(0, tokens),), cached=0.0, width=tokens)
    whole = Channel(exchange=LOCAL, group=(0,), shares=Shares.of([share]), keys=tokens, decode=False)
    full = memory(layer, whole, tokens)
    block = scheduling.block_size * layer.kv_bytes * layer.model.attention.num_layers
    found = int((_USED_MEMORY * full.capacity - full.used + full.kv) // block)
    if found < 1:
        raise ValueError(
            f"no KV block fits into {_USED_MEMORY:.0%} of a device's memory beside a step of {tokens} tokens: "
            f"{full.arithmetic}: use a larger tp, or fewer --max-num-batched-tokens"
        )
    return found


def _measured(
    model: str, path: Path, options: ClusterOptions, cluster: Cluster, scheduling: SchedulingOptions
) -> SimulatedCluster:
    """By a profile."""
    unused = {
        "--link": options.link,
        "--link-gbytes-per-s": options.link_gbytes_per_s,
        "--dtype": None if options.dtype == "auto" else options.dtype,
        "--ffn-dtype": options.ffn_dtype,
        "--attention": options.attention,
    }
    for flag, value in unused.items():
        if value is not None:
            raise ValueError(
                f"{flag} {value} is for --hardware: with --profile all is as it was measured; leave it out"
            )
    profile = _read(path)
    measured = profile.profile_key.model
    if _last_name(model) != _last_name(measured):  # folders may lie elsewhere than on that machine
        raise ValueError(f"--profile is of model {measured}, but {model} given: give that, or a profile of {model}")
    if {cluster.tp(instance) for instance in cluster.instances} != {profile.profile_key.tp}:
        raise ValueError(f"--profile is of instances with tp {profile.profile_key.tp}, but {cluster} given")
    key = profile.profile_key
    sizes = architecture(model, dtype=key.dtype)
    num_blocks = scheduling.num_gpu_blocks_override or math.ceil(_PROFILED_TOKENS / scheduling.block_size)
    cluster = cluster.with_blocks([num_blocks] * cluster.num_instances)
    return SimulatedCluster(
        cluster=cluster,
        cost=FittedCost(profile, sizes.attention, block_size=scheduling.block_size),
        facts=Facts(
            profile=profile,
            model=profile.profile_key.model,
            partitions=PartitionTable(),
            cluster=cluster,
        ),
        words=f"{key.machine}, {key.dtype}, {key.threads} threads per rank",
    )


def _last_name(model: str) -> str:
    """Of a folder, a file in it, a hub id or an alias."""
    path = Path(model).expanduser()
    folder = path.resolve() if path.is_dir() else path.parent if path.is_file() else path
    return folder.name.lower()


def _locations(options: ClusterOptions, cluster: Cluster) -> tuple[Location, ...]:
    """Locates every rank. By data sheets, hosts are filled one after the other, as in their cost."""
    if options.profile is not None:
        return locations_of_ranks(cluster.num_ranks, str(options.hosts))
    per_host = devices_per_host(options, cluster.num_ranks)
    return tuple(Location(host=rank // per_host, device=rank) for rank in range(cluster.num_ranks))


def _at_least_one(numbers: Mapping[str, int | None]) -> None:
    for flag, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, but {value} given")


def _read(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--profile {str(path)!r} cannot be read: {error}") from None
