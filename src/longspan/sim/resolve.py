"""The resolver of a simulation: derives sizes, pools, prices and facts from options, a model and simulated hardware.

It shares `policy/facts.py` and `policy/step_size.py` with `longspan.resolve`, the resolver of an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from longspan.core.cluster import Cluster
from longspan.core.exchange import CHAIN, of_any_layout
from longspan.core.group_links import links_by_size
from longspan.core.kv_record import KvRecord, LayerRecord
from longspan.core.link_classes import slowest_link
from longspan.core.options import SchedulingArgs
from longspan.cost import catalog
from longspan.cost.architecture import Architecture
from longspan.cost.estimate import (
    activation_bytes,
    full_step,
    levelled_fractions,
    searched_fractions,
    whole_prompt_tokens,
)
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.forward import Roofline
from longspan.cost.memory import CPU_KV_BYTES, CPU_STEP_SHARE, USED_MEMORY, rank_block_bytes, with_pools
from longspan.cost.partition_table import PartitionTable
from longspan.cost.partitions import MAX_SEARCHED, ModelledPartitions, fractions_by, modelled_ttft
from longspan.cost.pricing import PricedPhases, predicted_profile, whole_prompt_s
from longspan.cost.profile import Profile, profiled_prompts
from longspan.cost.profile_key import ProfileKey
from longspan.cost.shape import Hardware
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices
from longspan.errors import ParameterError
from longspan.policy.facts import Facts, measured_phases
from longspan.policy.registry import make_policy
from longspan.policy.step_size import with_step_tokens
from longspan.sim.experiment import Experiment
from longspan.sim.noise import NoisyCost
from longspan.sim.resolved import Fleet
from longspan.sim.spec import ClusterSpec, Faults

_PROFILED_TOKENS = 2**20
"""KV tokens of an instance with unknown memory size."""
_DEVICE = "cuda"
"""The kind of devices with data sheets."""
_ACTIVATION_SHARE = 0.25
"""Share of the memory after weights for activations, so that a prompt fits one step. The rest is for KV."""
_PREDICTED_LENGTHS = tuple(2048 * 2**power for power in range(8))
"""Prompt lengths of the predicted profile. Fits to much longer prompts have errors of 10 % at common lengths."""


def computed_experiment(
    model: Architecture, spec: ClusterSpec, scheduling: SchedulingArgs, faults: Faults
) -> Experiment:
    """Build an experiment whose costs are computed from data sheets."""
    if spec.hardware is None:
        raise ParameterError("hardware", "must be a name that longspan estimate knows, if no `profile` is given")
    clusters = _clusters(spec, model, scheduling)
    cluster, hardware = clusters[0], spec.hardware
    speed, per_host = spec.link_gbytes_per_s, spec.devices_per_host(cluster)
    devices = Devices(
        hardware=hardware, gpus_per_host=per_host, hosts=spec.hosts, link=spec.link, link_gbytes_per_s=speed
    )
    kernels = spec.attention or "flash"
    cost = RooflineCost(model, devices, cluster, block_size=scheduling.block_size, kernels=kernels)
    line = cost.lines[0]
    estimate = None if scheduling.policy == "runahead" else partial(levelled_fractions, line)  # runahead searches
    partitions = ModelledPartitions(partial(searched_fractions, line, align=scheduling.block_size), estimate)
    phases = clusters if len(clusters) > 1 else ()
    early = Facts(model=model.name, partitions=partitions, cluster=cluster, phases=phases)
    scheduling = _with_step_tokens(scheduling, early, _DEVICE, partial(_device_tokens, cost.lines[0], scheduling))
    record = kv_record(model, scheduling.block_size)
    clusters = tuple([_with_pools(c, cost.resharded(c).lines, record, scheduling) for c in clusters])
    cluster, phases = clusters[0], clusters if phases else ()
    profile_key = ProfileKey(
        model=model.name,
        dtype=model.precision.weights,
        device=_DEVICE,
        tp=cluster.spec.tp,
        threads=1,
        kernel=kernels,
        machine=hardware,
    )
    options = scheduling.all_policy_options()
    named = [options.get("sp", ""), *options.get("sp_sizes", "").split(",")]  # policies refuse invalid values
    profile = predicted_profile(
        cost,
        profile_key,
        num_instances=cluster.spec.instances,
        classes=links_by_size(cluster),
        prompts=profiled_prompts(_PREDICTED_LENGTHS, 2 * _PREDICTED_LENGTHS[-1]),
        exchanges=(*of_any_layout(), CHAIN),
        sizes={int(size) for size in named if size.strip().isdecimal()},
        pieces=partial(_chain_pieces, line),
    )
    slow = _common_factor(faults, cluster, phases)
    flops_per_s = cluster.spec.tp * catalog.device(hardware).peak(model.precision.attention)
    facts = replace(
        early,
        shape=model.attention,
        profile=profile.slowed(slow),
        cluster=cluster,
        hardware=Hardware(flops_per_s=flops_per_s / slow, bytes_per_s=cost.lines[0].topology.bytes_per_s),
        phases=phases,
        phase_cost=PricedPhases(cost, phases, scheduling.block_size, slow) if phases else None,
        rates=partial(cost.rates, slow=slow),
        exact_s=partial(whole_prompt_s, cost, slow=slow),
    )
    fleet = Fleet.of(devices, model.precision)
    steps = NoisyCost(quiet=cost, noise=faults.noisy_link) if faults.noisy_link else cost
    return Experiment(cluster=cluster, cost=steps, facts=facts, fleet=fleet, scheduling=scheduling, faults=faults)


def measured_experiment(
    model: Architecture, profile: Profile, spec: ClusterSpec, scheduling: SchedulingArgs, faults: Faults
) -> Experiment:
    """Build an experiment whose costs are fitted to the measured profile of an instance."""
    if faults.noisy_link is not None:
        problem = f"{faults.noisy_link} needs `hardware`: the times of a profile include messages, so leave one out"
        raise ParameterError("noisy_link", problem, str(faults.noisy_link))
    key = profile.profile_key
    record, num_blocks = kv_record(model, scheduling.block_size), math.ceil(_PROFILED_TOKENS / scheduling.block_size)

    def memory(cluster: Cluster, instance: int) -> float:
        return num_blocks * rank_block_bytes(record, cluster, instance)

    clusters = tuple([with_pools(c, record, scheduling, memory, "") for c in _clusters(spec, model, scheduling)])
    cluster, phases = clusters[0], clusters if len(clusters) > 1 else ()
    if {c.tp(instance) for c in clusters for instance in c.instances} != {key.tp}:
        given = " and ".join(map(str, clusters))
        raise ParameterError("profile", f"is of instances with tp {key.tp}: use this tp, not {given}", spec.profile)
    partitions: PartitionTable | ModelledPartitions = PartitionTable()
    slowest = slowest_link(cluster.locations)
    if (ttft_s := modelled_ttft(profile, model.attention, slowest)) is not None:
        partitions = ModelledPartitions(partial(fractions_by, ttft_s, align=scheduling.block_size))
    cost = FittedCost(profile, model.attention, block_size=scheduling.block_size, cluster=cluster)
    slow = _common_factor(faults, cluster, phases)
    profile = profile.slowed(slow)
    facts = Facts(
        shape=model.attention,
        hardware=profile.speeds(model.attention, slowest),
        profile=profile,
        model=key.model,
        partitions=partitions,
        cluster=cluster,
        phases=phases,
        phase_cost=measured_phases(cost, phases, scheduling.block_size, slow),
        exact_s=partial(whole_prompt_s, cost, slow=slow),
    )
    whole_tokens = partial(_measured_tokens, model, key, cluster.num_ranks, scheduling)
    return Experiment(
        cluster=cluster,
        cost=cost,
        facts=facts,
        fleet=Fleet(
            hardware=f"{key.device} of {key.machine}",
            hosts=spec.hosts,
            gpus_per_host=spec.devices_per_host(cluster),
            precision=model.precision,
            details=f"{key.threads} threads per rank",
        ),
        scheduling=_with_step_tokens(scheduling, facts, key.device, whole_tokens),
        faults=faults,
    )


def _chain_pieces(line: Roofline, members: int, length: int) -> tuple[float, ...] | None:
    """Return the fractions of a chain with searched pieces. None if policies cut even pieces."""
    return levelled_fractions(line, members, length) if 1 < members <= MAX_SEARCHED else None


def _common_factor(faults: Faults, cluster: Cluster, phases: Sequence[Cluster]) -> float:
    """Return the slowdown factor that all instances of all clusters have in common."""
    return faults.common_factor(max(c.num_instances for c in (cluster, *phases)))


def _with_step_tokens(
    scheduling: SchedulingArgs, facts: Facts, device: str, whole_tokens: Callable[[int], int]
) -> SchedulingArgs:
    """Return options with the step size that the policy needs."""
    assert facts.cluster is not None
    options, num_instances = scheduling.all_policy_options(), facts.cluster.num_instances
    policy = make_policy(scheduling.policy, num_instances=num_instances, options=options, facts=facts)
    return with_step_tokens(scheduling, policy, device, whole_tokens)


def _device_tokens(line: Roofline, scheduling: SchedulingArgs, least: int) -> int:
    """Return the tokens of a step whose activations need `_ACTIVATION_SHARE` of the memory after weights."""

    def needed_bytes(tokens: int) -> float:
        full = full_step(line, tokens)
        return full.scores + full.activations

    idle = full_step(line, 0)
    usable_bytes = _ACTIVATION_SHARE * (USED_MEMORY * idle.capacity - idle.used)
    longest = scheduling.max_model_len or _PROFILED_TOKENS
    return whole_prompt_tokens(needed_bytes, usable_bytes, least=least, longest=longest)


def _measured_tokens(
    model: Architecture, key: ProfileKey, num_ranks: int, scheduling: SchedulingArgs, least: int
) -> int:
    """Return the tokens of a step, for CPUs like an engine does. The memory of a measured GPU is unknown."""
    return whole_prompt_tokens(
        lambda tokens: sum(activation_bytes(model, tokens, key.tp)),
        CPU_STEP_SHARE * (CPU_KV_BYTES // num_ranks) if key.device == "cpu" else math.inf,
        least=least,
        longest=scheduling.max_model_len or _PROFILED_TOKENS,
    )


def _with_pools(cluster: Cluster, lines: Sequence[Roofline], record: KvRecord, scheduling: SchedulingArgs) -> Cluster:
    """Return the cluster with device pools in the memory after weights and a full step, shared by its stages."""
    assert scheduling.max_num_batched_tokens is not None, "the step size is resolved"
    tokens = [-(-scheduling.max_num_batched_tokens // len(line.stages)) for line in lines]
    full = [full_step(*both) for both in zip(lines, tokens, strict=True)]
    tightest = min(range(len(full)), key=lambda role: full[role].kv_room)
    text = f"with a step of {tokens[tightest]} tokens, {USED_MEMORY:.0%} of a device hold {full[tightest].arithmetic}"
    advice = f"{text}: use a larger tp, or fewer `max_num_batched_tokens`"
    return with_pools(cluster, record, scheduling, lambda c, i: full[-1 if i in c.decode else 0].kv_room, advice)


def _clusters(spec: ClusterSpec, model: Architecture, scheduling: SchedulingArgs) -> tuple[Cluster, ...]:
    """Return the clusters of a policy's phases, or the only cluster, with the model's layers."""
    clusters = spec.clusters(scheduling.policy)
    return tuple(cluster.with_layers(model.attention.num_layers, model.head_layers) for cluster in clusters)


def kv_record(model: Architecture, block_size: int) -> KvRecord:
    """Build the record of a KV block of a model with equal layers."""
    shape = model.attention
    num_bytes = int(block_size * shape.head_dim * shape.bytes_per_kv_element)
    heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
    layer = LayerRecord(**heads, key_bytes=num_bytes, value_bytes=0 if shape.latent else num_bytes)
    return KvRecord(layers=(layer,) * shape.num_layers)
