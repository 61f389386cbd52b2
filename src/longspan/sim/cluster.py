"""A simulated cluster: how many instances there are, where, what their steps cost and what fits into their memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from longspan.core.cluster import Cluster, Location, ParallelSpec, locations_of_ranks
from longspan.core.config import Limits
from longspan.core.exchange import CHAIN, LOCAL, Exchange, of_any_layout
from longspan.core.runs import Run, shard_span
from longspan.core.steps import Forward, Part
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, Hardware
from longspan.cost.channels import Channel, Shares, share_of
from longspan.cost.cluster import Devices, link_speed, memory, slowest_link
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.forward import Roofline
from longspan.cost.partitions import PartitionTable
from longspan.cost.profile import Prefill, Profile, ProfileKey, profiled_prompts
from longspan.cost.step_cost import RooflineCost, StepCost
from longspan.errors import ParameterError
from longspan.policy.choosing import Facts
from longspan.policy.tetris.times import named_sizes

_GPUS_PER_HOST = 8
_ONE_OF = "give --hardware NAME (see longspan estimate) or --profile FILE (of longspan profile), and one"
_PROFILED_TOKENS = 2**20
"""KV tokens of an instance whose memory nobody told."""
_USED_MEMORY = 0.9
"""How much of a device's memory is used, as vLLM's gpu_memory_utilization."""
_PREDICTED_LENGTHS = tuple(2048 * 2**power for power in range(8))
"""No more than prompts have: a fit to much longer ones is off by a tenth where most of them are."""


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Describes a cluster: which devices there are, and which instances on them.

    Attributes:
        hardware: a device of the catalog, such as `a100-sxm-80g`.
        profile: instead, the file of what `longspan profile` measured; instances are of that machine.
        hosts: how many hosts there are.
        gpus_per_host: devices of each host. If None, as many as the instances need, or else 8.
        parallel: `[N][xtpT]`: N instances of T devices each, which take all devices. If None, one per device.
        prefill_parallel: instead, the instances that prefill only, on the first devices.
        decode_parallel: with it, those that decode only; prompts' KV is sent to them.
        transfer_backends: how many transfers a decode instance receives at once. If None, one per prefill instance.
        link: what connects hosts, or the devices of a single host. If None, what such devices come with.
        link_gbytes_per_s: instead, its nominal speed, one way, in 10^9 bytes per second.
        dtype: of weights, keys and values; auto is 16 bits.
        ffn_dtype: of the feed-forward weights; if None, as `dtype`.
        attention: fused (`flash`, also if None), or as Hugging Face's single operators compute it.
    """

    hardware: str | None = None
    profile: Path | None = None
    hosts: int = 1
    gpus_per_host: int | None = None
    parallel: str | None = None
    prefill_parallel: str | None = None
    decode_parallel: str | None = None
    transfer_backends: int | None = None
    link: str | None = None
    link_gbytes_per_s: float | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    ffn_dtype: Literal["bfloat16", "float16", "float32", "fp8"] | None = None
    attention: Literal["flash", "eager"] | None = None

    def __post_init__(self) -> None:
        for name in ("hosts", "gpus_per_host", "transfer_backends"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ParameterError(name, f"must be at least 1, but {value} given", value)
        if self.hardware is not None and self.profile is not None:
            raise ValueError(_ONE_OF)
        roles = (self.prefill_parallel, self.decode_parallel)
        if (roles[0] is None) != (roles[1] is None):
            raise ValueError(
                "instances that prefill need others that decode: give --prefill-parallel and --decode-parallel"
            )
        if self.parallel is not None and roles[0] is not None:
            raise ParameterError(
                "parallel",
                f"{self.parallel} has all instances do both, but --prefill-parallel {roles[0]} has some prefill only: "
                "give one of them",
            )
        if self.transfer_backends is not None and roles[1] is None:
            raise ParameterError(
                "transfer_backends",
                f"{self.transfer_backends} is for KV that is sent to instances which decode only: give "
                "--prefill-parallel and --decode-parallel, or leave it out",
            )
        if self.profile is not None:
            self._check_measured()
        self._check_devices()

    def _check_measured(self) -> None:
        """Refuses what data sheets are asked for."""
        for name in ("link", "link_gbytes_per_s", "dtype", "ffn_dtype", "attention"):
            if (value := getattr(self, name)) not in (None, "auto"):
                problem = f"{value} is for --hardware: with --profile all is as it was measured; leave it out"
                raise ParameterError(name, problem, value)

    def _check_devices(self) -> None:
        """Refuses instances that do not take all devices, or leave a host empty."""
        specs = {name: getattr(self, name) for name in ("parallel", "prefill_parallel", "decode_parallel")}
        given = {name: ParallelSpec.parse(spec) for name, spec in specs.items() if spec is not None}
        if not given:
            return
        needed, per_host = self._instances.num_ranks, self.devices_per_host
        if self.gpus_per_host is not None and needed != (there := self.hosts * per_host):
            shown = ", ".join(f"--{name.replace('_', '-')} {spec}" for name, spec in given.items())
            sums = " + ".join(f"instances({spec.instances}) * tp({spec.tp})" for spec in given.values())
            raise ValueError(
                f"{shown}: {sums} = {needed} devices, but --hosts {self.hosts} * --gpus-per-host {per_host} = {there}: "
                "make them equal"
            )
        if self.profile is None and (taken := math.ceil(needed / per_host)) < self.hosts:
            raise ValueError(
                f"{needed} devices, {per_host} to a host, take {taken} hosts, but --hosts {self.hosts} given: give "
                f"--hosts {taken}, or as many devices as fill them"
            )

    @property
    def cluster(self) -> Cluster:
        """Returns all instances, on all devices. By data sheets, hosts are filled one after the other."""
        found = self._instances
        if self.profile is not None:
            return replace(found, locations=locations_of_ranks(found.num_ranks, str(self.hosts)))
        per_host = self.devices_per_host
        locations = (Location(host=rank // per_host, device=rank) for rank in range(found.num_ranks))
        return replace(found, locations=tuple(locations))

    @property
    def _instances(self) -> Cluster:
        if self.prefill_parallel is not None:
            found = Cluster.of(self.prefill_parallel, self.decode_parallel)
            return replace(found, transfer_backends=self.transfer_backends)
        if self.parallel is not None:
            return Cluster.of(self.parallel)
        return Cluster(spec=ParallelSpec(instances=self.hosts * (self.gpus_per_host or _GPUS_PER_HOST)))

    @property
    def devices_per_host(self) -> int:
        """Devices of each host but perhaps the last: hosts are filled one after the other."""
        return self.gpus_per_host or math.ceil(self._instances.num_ranks / self.hosts)


@dataclass(frozen=True, kw_only=True)
class Scheduling:
    """Names who decides the steps of a simulated engine, and within which bounds.

    Attributes:
        max_model_len: longest prompt plus output, in tokens; if None, what KV pools allow.
        block_size: tokens per KV block.
        max_num_batched_tokens: most tokens of one step on one instance.
        max_num_seqs: most requests that run at once on one instance.
        num_gpu_blocks_override: KV blocks of each instance; if None, what memory holds.
        enable_prefix_caching: reuse the KV of prompts that begin alike.
        async_scheduling: plan a step while the last one runs.
    """

    policy: str = "auto"
    policy_options: Mapping[str, str] = field(default_factory=dict)
    max_model_len: int | None = None
    block_size: int = 256
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 128
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    async_scheduling: bool = True

    def __post_init__(self) -> None:
        for name in ("block_size", "num_gpu_blocks_override", "max_model_len"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ParameterError(name, f"must be at least 1, but {value} given", value)

    @property
    def limits(self) -> Limits:
        return Limits(max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)


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


def computed_cluster(model: Architecture, spec: ClusterSpec, scheduling: Scheduling) -> SimulatedCluster:
    """Makes a cluster that costs what data sheets say.

    Raises:
        ValueError: for unknown names, degrees that do not fit the model, or one that does not fit the memory.
    """
    if spec.hardware is None:
        raise ValueError(_ONE_OF)
    cluster, hardware = spec.cluster, spec.hardware
    devices = Devices(
        hardware=hardware,
        gpus_per_host=spec.devices_per_host,
        hosts=spec.hosts,
        link=spec.link,
        link_bytes_per_s=link_speed(spec.link, spec.link_gbytes_per_s),
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
        sizes=named_sizes(scheduling.policy_options),
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
    model: Architecture, profile: Profile, spec: ClusterSpec, scheduling: Scheduling
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
    speed = "" if devices.link_bytes_per_s is None else f" at {devices.link_bytes_per_s / 1e9:g} GB/s"
    return f"{devices.hosts} × {devices.gpus_per_host} {devices.hardware}, {slowest_link(devices)}{speed}"


def _num_blocks(line: Roofline, scheduling: Scheduling) -> int:
    """Counts the blocks that the memory holds beside weights and the activations of a full step."""
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
