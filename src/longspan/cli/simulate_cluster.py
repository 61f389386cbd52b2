"""The cluster of `longspan simulate`: how many instances there are, where, what they cost and what fits into them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longspan.cli.model_config import architecture
from longspan.cli.model_config import cluster_of as devices_of
from longspan.cli.scheduling import SchedulingOptions
from longspan.cli.simulate import ClusterOptions
from longspan.cli.simulate_fleet import devices_per_host, fleet_of, roles_of
from longspan.core.cluster import Fleet, Location, Roles, locations_of_ranks
from longspan.core.exchange import CHAIN, LOCAL, of_any_layout
from longspan.core.runs import Run
from longspan.cost import catalog
from longspan.cost.architecture import Hardware
from longspan.cost.channels import Channel, Shares, share_of
from longspan.cost.cluster import Cluster as Devices
from longspan.cost.cluster import memory, slowest_link
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
class Cluster:
    """What is simulated.

    Attributes:
        num_blocks: KV blocks of each instance; with roles, of each that prefills.
        decode_blocks: of each that decodes; None without roles.
        words: what it is, for people.
    """

    num_instances: int
    num_blocks: int
    decode_blocks: int | None
    roles: Roles | None
    cost: StepCost
    facts: Facts
    words: str


def cluster_of(model: str, options: ClusterOptions, scheduling: SchedulingOptions) -> Cluster:
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
    fleet = fleet_of(options)
    if options.profile is not None:
        return _measured(model, options.profile, options, fleet, scheduling)
    assert options.hardware is not None
    return _computed(model, options.hardware, options, fleet, scheduling)


def _computed(
    model: str, hardware: str, options: ClusterOptions, fleet: Fleet, scheduling: SchedulingOptions
) -> Cluster:
    """By data sheets."""
    devices = devices_of(hardware, devices_per_host(options, fleet.num_ranks), options.hosts, options)
    sizes, kernels = architecture(model, dtype=options.dtype, ffn_dtype=options.ffn_dtype), options.attention or "flash"
    cost = RooflineCost(sizes, devices, fleet, block_size=scheduling.block_size, kernels=kernels)
    blocks = [scheduling.num_gpu_blocks_override or _num_blocks(line, scheduling) for line in cost.lines]
    profile_key = ProfileKey(
        model=model,
        dtype=options.dtype,
        device="cuda",
        tp=fleet.spec.tp,
        threads=1,
        kernel=kernels,
        machine=hardware,
    )
    profile = predicted_profile(
        cost,
        profile_key,
        num_instances=fleet.spec.instances,
        prompts=profiled_prompts(_PREDICTED_LENGTHS, 2 * _PREDICTED_LENGTHS[-1]),
        exchanges=(*of_any_layout(), CHAIN),
        sizes=named_sizes(scheduling.policy_options()),
    )
    topology, roles = cost.lines[0].topology, roles_of(fleet, options)
    wire = topology.between if options.hosts > 1 else topology.inside
    flops_per_s = catalog.device(hardware).peak(sizes.attention.bytes_per_element)
    facts = Facts(
        shape=sizes.attention,
        hardware=Hardware(flops_per_s=flops_per_s, bytes_per_s=wire.bytes_per_s),
        profile=profile,
        model=model,
        partitions=PartitionTable(),
        tp=fleet.spec.tp,
        places=_places(options, fleet),
        roles=roles,
    )
    return Cluster(
        num_instances=fleet.num_instances,
        num_blocks=blocks[0],
        decode_blocks=None if roles is None else blocks[-1],
        roles=roles,
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


def _measured(model: str, path: Path, options: ClusterOptions, fleet: Fleet, scheduling: SchedulingOptions) -> Cluster:
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
    profile, roles = _read(path), roles_of(fleet, options)
    measured = profile.profile_key.model
    if _last_name(model) != _last_name(measured):  # folders may lie elsewhere than on that machine
        raise ValueError(f"--profile is of model {measured}, but {model} given: give that, or a profile of {model}")
    if set(fleet.tps) != {profile.profile_key.tp}:
        raise ValueError(f"--profile is of instances with tp {profile.profile_key.tp}, but {fleet} given")
    key = profile.profile_key
    sizes = architecture(model, dtype=key.dtype)
    num_blocks = scheduling.num_gpu_blocks_override or math.ceil(_PROFILED_TOKENS / scheduling.block_size)
    return Cluster(
        num_instances=fleet.num_instances,
        num_blocks=num_blocks,
        decode_blocks=None if roles is None else num_blocks,
        roles=roles,
        cost=FittedCost(profile, sizes.attention, block_size=scheduling.block_size),
        facts=Facts(
            profile=profile,
            model=profile.profile_key.model,
            partitions=PartitionTable(),
            tp=fleet.spec.tp,
            places=_places(options, fleet),
            roles=roles,
        ),
        words=f"{key.machine}, {key.dtype}, {key.threads} threads per rank",
    )


def _last_name(model: str) -> str:
    """Of a folder, a file in it, a hub id or an alias."""
    path = Path(model).expanduser()
    folder = path.resolve() if path.is_dir() else path.parent if path.is_file() else path
    return folder.name.lower()


def _places(options: ClusterOptions, fleet: Fleet) -> tuple[Location, ...]:
    """Of the first rank of each instance. By data sheets, hosts are filled one after the other, as in their cost."""
    places: Sequence[Location]
    if options.profile is not None:
        places = locations_of_ranks(fleet.num_ranks, str(options.hosts))
    else:
        per_host = devices_per_host(options, fleet.num_ranks)
        places = [Location(host=rank // per_host, device=rank) for rank in range(fleet.num_ranks)]
    return tuple(places[fleet.ranks(instance)[0]] for instance in range(fleet.num_instances))


def _at_least_one(numbers: Mapping[str, int | None]) -> None:
    for flag, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{flag} must be at least 1, but {value} given")


def _read(path: Path) -> Profile:
    try:
        return Profile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--profile {str(path)!r} cannot be read: {error}") from None
