"""The memory of engines and simulations: shares and bounds, and the sizes of KV pools."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.core.options import SchedulingArgs
from longspan.errors import ParameterError

CPU_KV_BYTES = 4 * 2**30
"""Memory that the ranks on a CPU share for KV when the user names none, if so much is available."""
CPU_STEP_SHARE = 0.25
"""The part of that which a rank's activations may take beside it, so that a prompt is one step."""
MAX_TIER_BLOCKS = 2**25
"""Upper bound for the blocks of a pool on a host or a disk: its account takes some 50 bytes of memory for each."""
USED_MEMORY = 0.9
"""The part of a device's memory that is used, as vLLM's gpu_memory_utilization."""


def rank_block_bytes(record: KvRecord, cluster: Cluster, instance: int) -> int:
    """Count the bytes that the fullest rank of an instance has of a block; the first shard has the most heads."""
    stages = {cluster.layers(instance, stage) for stage in range(cluster.pp(instance))}
    return max(_shard_bytes(record, cluster.tp(instance), layers) for layers in stages)


@lru_cache(maxsize=256)
def _shard_bytes(record: KvRecord, tp: int, layers: range) -> int:
    return record.of_layers(layers).of_shard(0, tp).block_bytes


def with_pools(
    cluster: Cluster, record: KvRecord, options: SchedulingArgs, memory: Callable[[Cluster, int], float], advice: str
) -> Cluster:
    """Return the cluster with pools on devices, hosts and disks; raise ValueError with advice if memory is missing.

    Each rank of an instance may have so many bytes of KV as `memory` returns.
    """
    for name, gib in (("host_kv_gib", options.host_kv_gib), ("disk_kv_gib", options.disk_kv_gib)):
        if gib * 2**30 > MAX_TIER_BLOCKS * record.block_bytes:
            most = MAX_TIER_BLOCKS * record.block_bytes / 2**30
            raise ParameterError(name, f"{gib:g} is more than {MAX_TIER_BLOCKS:,} blocks: allow at most {most:g}", gib)
    cluster = cluster.with_tiers(record.block_bytes, host_kv_gib=options.host_kv_gib, disk_kv_gib=options.disk_kv_gib)
    if (given := options.num_gpu_blocks_override) is not None:
        return cluster.with_blocks([given] * cluster.num_instances)
    found = []
    for instance in cluster.instances:
        block_bytes, rank_bytes = rank_block_bytes(record, cluster, instance), max(0, int(memory(cluster, instance)))
        if rank_bytes < block_bytes:
            problem = f"{rank_bytes} bytes of KV memory per rank hold no block of {block_bytes} bytes"
            raise ValueError(f"{problem}: {advice}")
        found.append(rank_bytes // block_bytes)
    return cluster.with_blocks(found)
