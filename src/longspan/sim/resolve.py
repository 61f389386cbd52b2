"""The resolver of a simulation: derives sizes, pools, prices and facts from options, a model and simulated hardware.

It shares `policy/facts.py` and `policy/step_size.py` with the resolver of an engine, `longspan.resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from longspan.core.cluster import Cluster
from longspan.core.exchange import CHAIN, of_any_layout
from longspan.core.kv_record import KvRecord, LayerRecord
from longspan.core.options import SchedulingArgs
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, Hardware
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
from longspan.cost.pricing import PricedTurns, predicted_profile, whole_prompt_s
from longspan.cost.profile import Profile, profiled_prompts
from longspan.cost.profile_key import ProfileKey
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices
from longspan.errors import ParameterError
from longspan.policy.facts import Facts, known_facts, measured_turns
from longspan.policy.registry import make_policy
from longspan.policy.step_size import with_step_tokens
from longspan.sim.experiment import Experiment
from longspan.sim.resolved import Fleet
from longspan.sim.spec import ClusterSpec, Faults

_PROFILED_TOKENS = 2**20
"""KV tokens of an instance whose memory is not known."""
_DEVICE = "cuda"
"""The kind of devices with data sheets."""
_ACTIVATION_SHARE = 0.25
"""The part of what weights leave that activations may take, so that a prompt is one step. The rest is for KV."""
_PREDICTED_LENGTHS = tuple(2048 * 2**power for power in range(8))
"""No more than prompts have: a fit to much longer ones is off by a tenth where most of them are."""


def computed_experiment(
    model: Architecture, spec: ClusterSpec, scheduling: SchedulingArgs, faults: Faults
) -> Experiment:
    """Makes an experiment on a cluster that costs what data sheets say."""
    if spec.hardware is None:
        raise ParameterError("hardware", "must be a name that longspan estimate knows, if no profile is given")
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
    turns = clusters if len(clusters) > 1 else ()
    early = Facts(model=model.name, partitions=partitions, cluster=cluster, turns=turns)
    scheduling = _with_step_tokens(scheduling, early, _DEVICE, partial(_device_tokens, cost.lines[0], scheduling))
    record = kv_record(model, scheduling.block_size)
    clusters = tuple([_with_pools(one, cost.resharded(one).lines, record, scheduling) for one in clusters])
    cluster, turns = clusters[0], clusters if turns else ()
    profile_key = ProfileKey(
        model=model.name,
        dtype=spec.dtype,
        device=_DEVICE,
        tp=cluster.spec.tp,
        threads=1,
        kernel=kernels,
        machine=hardware,
    )
    options = scheduling.all_policy_options()
    named = [options.get("sp", ""), *options.get("sp_sizes", "").split(",")]  # policies refuse wrong ones
    profile = predicted_profile(
        cost,
        profile_key,
        num_instances=cluster.spec.instances,
        prompts=profiled_prompts(_PREDICTED_LENGTHS, 2 * _PREDICTED_LENGTHS[-1]),
        exchanges=(*of_any_layout(), CHAIN),
        sizes={int(size) for size in named if size.strip().isdecimal()},
        pieces=partial(_chain_pieces, line),
    )
    slow = _common_factor(faults, cluster, turns)
    flops_per_s = cluster.spec.tp * catalog.device(hardware).peak(model.attention.bytes_per_element)
    facts = known_facts(
        profile_key,
        model.attention,
        cluster,
        profile=profile.slowed(slow),
        partitions=partitions,
        hardware=Hardware(flops_per_s=flops_per_s / slow, bytes_per_s=cost.lines[0].topology.bytes_per_s),
        turns=turns,
        turn_cost=PricedTurns(cost, turns, scheduling.block_size, slow) if turns else None,
        rates=partial(cost.rates, slow=slow),
        exact_s=partial(whole_prompt_s, cost, slow=slow),
    )
    fleet = Fleet.of(devices, dtype=spec.dtype, ffn_dtype=spec.ffn_dtype)
    return Experiment(cluster=cluster, cost=cost, facts=facts, fleet=fleet, scheduling=scheduling, faults=faults)


def measured_experiment(
    model: Architecture, profile: Profile, spec: ClusterSpec, scheduling: SchedulingArgs, faults: Faults
) -> Experiment:
    """Makes an experiment on a cluster of instances that cost what was measured of one."""
    key = profile.profile_key
    record, num_blocks = kv_record(model, scheduling.block_size), math.ceil(_PROFILED_TOKENS / scheduling.block_size)

    def memory(one: Cluster, instance: int) -> float:
        return num_blocks * rank_block_bytes(record, one, instance)

    clusters = tuple([with_pools(one, record, scheduling, memory, "") for one in _clusters(spec, model, scheduling)])
    cluster, turns = clusters[0], clusters if len(clusters) > 1 else ()
    if {one.tp(instance) for one in clusters for instance in one.instances} != {key.tp}:
        given = " and ".join(map(str, clusters))
        raise ParameterError("profile", f"is of instances with tp {key.tp}, but {given} given", spec.profile)
    partitions: PartitionTable | ModelledPartitions = PartitionTable()
    if (ttft_s := modelled_ttft(profile, model.attention)) is not None:
        found = partial(fractions_by, ttft_s, align=scheduling.block_size)
        partitions = ModelledPartitions(found)
    cost = FittedCost(profile, model.attention, block_size=scheduling.block_size, cluster=cluster)
    slow = _common_factor(faults, cluster, turns)
    facts = known_facts(
        key,
        model.attention,
        cluster,
        profile=profile.slowed(slow),
        partitions=partitions,
        turns=turns,
        turn_cost=measured_turns(cost, turns, scheduling.block_size, slow),
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
            dtype=key.dtype,
            details=f"{key.threads} threads per rank",
        ),
        scheduling=_with_step_tokens(scheduling, facts, key.device, whole_tokens),
        faults=faults,
    )


def _chain_pieces(line: Roofline, members: int, length: int) -> tuple[float, ...] | None:
    """Returns the fractions of a chain whose pieces are searched; None where policies cut even pieces."""
    return levelled_fractions(line, members, length) if 1 < members <= MAX_SEARCHED else None


def _common_factor(faults: Faults, cluster: Cluster, turns: Sequence[Cluster]) -> float:
    """Returns the factor by which the instances of all clusters are slow."""
    return faults.common_factor(max(one.num_instances for one in (cluster, *turns)))


def _with_step_tokens(
    scheduling: SchedulingArgs, facts: Facts, device: str, whole_tokens: Callable[[int], int]
) -> SchedulingArgs:
    """Return options with the size of steps, as the policy wants them."""
    assert facts.cluster is not None
    options, num_instances = scheduling.all_policy_options(), facts.cluster.num_instances
    policy = make_policy(scheduling.policy, num_instances=num_instances, options=options, facts=facts)
    return with_step_tokens(scheduling, policy, device, whole_tokens)


def _device_tokens(line: Roofline, scheduling: SchedulingArgs, least: int) -> int:
    """Counts the tokens of a step for which a device needs `_ACTIVATION_SHARE` of what weights leave."""

    def needed_bytes(tokens: int) -> float:
        full = full_step(line, tokens)
        return full.scores + full.activations

    idle = full_step(line, 0)
    room_bytes = _ACTIVATION_SHARE * (USED_MEMORY * idle.capacity - idle.used)
    longest = scheduling.max_model_len or _PROFILED_TOKENS
    return whole_prompt_tokens(needed_bytes, room_bytes, least=least, longest=longest)


def _measured_tokens(
    model: Architecture, key: ProfileKey, num_ranks: int, scheduling: SchedulingArgs, least: int
) -> int:
    """Counts the tokens of a step as an engine on such a CPU does; the memory of a measured GPU is not known."""
    return whole_prompt_tokens(
        lambda tokens: sum(activation_bytes(model, tokens, key.tp)),
        CPU_STEP_SHARE * (CPU_KV_BYTES // num_ranks) if key.device == "cpu" else math.inf,
        least=least,
        longest=scheduling.max_model_len or _PROFILED_TOKENS,
    )


def _with_pools(cluster: Cluster, lines: Sequence[Roofline], record: KvRecord, scheduling: SchedulingArgs) -> Cluster:
    """Return the cluster with device pools in the memory beside weights and a full step, shared by its stages."""
    assert scheduling.max_num_batched_tokens is not None, "the size of steps was found before"
    tokens = [-(-scheduling.max_num_batched_tokens // len(line.stages)) for line in lines]
    full = [full_step(*both) for both in zip(lines, tokens, strict=True)]
    tightest = min(range(len(full)), key=lambda role: full[role].kv_room)
    words = f"beside a step of {tokens[tightest]} tokens {USED_MEMORY:.0%} of a device hold {full[tightest].arithmetic}"
    advice = f"{words}: use a larger tp, or fewer max_num_batched_tokens"
    return with_pools(cluster, record, scheduling, lambda one, i: full[-1 if i in one.decode else 0].kv_room, advice)


def _clusters(spec: ClusterSpec, model: Architecture, scheduling: SchedulingArgs) -> tuple[Cluster, ...]:
    """Returns the clusters that a policy has take turns, or the only one, for a model."""
    found = spec.clusters(scheduling.policy)
    return tuple(one.with_layers(model.attention.num_layers, model.head_layers) for one in found)


def kv_record(model: Architecture, block_size: int) -> KvRecord:
    """Return the record of a KV block of a model of which all layers are alike."""
    shape = model.attention
    num_bytes = int(block_size * shape.head_dim * shape.bytes_per_element)
    heads = {"num_heads": shape.num_heads, "num_kv_heads": shape.num_kv_heads}
    layer = LayerRecord(**heads, key_bytes=num_bytes, value_bytes=num_bytes)
    return KvRecord(layers=(layer,) * shape.num_layers)
