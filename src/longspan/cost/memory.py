"""The memory of engines and simulations: shares and bounds, and the sizes of KV pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from longspan.core.cluster import MAX_GROWN_RANKS, Cluster
from longspan.core.kv_record import KvRecord
from longspan.core.options import SchedulingArgs
from longspan.errors import ParameterError

CPU_KV_BYTES = 4 * 2**30
"""Default KV memory that the ranks on a CPU share, in bytes. Less if less memory is available."""
CPU_STEP_SHARE = 0.25
"""Memory for a rank's activations on a CPU, as a fraction of its KV memory. A prompt should fit in one step."""
MAX_TIER_BLOCKS = 2**25
"""Upper bound for the blocks of a pool on a host or a disk. The account takes about 50 bytes per block."""
USED_MEMORY = 0.9
"""The fraction of a device's memory that is used, like vLLM's gpu_memory_utilization."""


def rank_block_bytes(record: KvRecord, cluster: Cluster, instance: int) -> int:
    """Return the largest number of bytes of a block on a rank of an instance. The first shard has the most heads."""
    stages = {cluster.layers(instance, stage) for stage in range(cluster.pp(instance))}
    return max(_shard_bytes(record, cluster.tp(instance), layers) for layers in stages)


@lru_cache(maxsize=256)
def _shard_bytes(record: KvRecord, tp: int, layers: range) -> int:
    return record.of_layers(layers).of_shard(0, tp).block_bytes


def with_pools(
    cluster: Cluster, record: KvRecord, options: SchedulingArgs, memory: Callable[[Cluster, int], float], advice: str
) -> Cluster:
    """Return the cluster with pools on devices, hosts and disks. Raise ValueError with `advice` if no block fits.

    Args:
        memory: returns the bytes of KV that each rank of an instance may have.
    """
    host_kv_gib, disk_kv_gib = options.host_kv_gib, options.disk_kv_gib
    cluster = with_tiers(cluster, record.block_bytes, host_kv_gib=host_kv_gib, disk_kv_gib=disk_kv_gib)
    if (given := options.num_gpu_blocks_override) is not None:
        return cluster.with_blocks([given] * cluster.num_instances)
    num_blocks = []
    for instance in cluster.instances:
        block_bytes, rank_bytes = rank_block_bytes(record, cluster, instance), max(0, int(memory(cluster, instance)))
        if rank_bytes < block_bytes:
            problem = f"{rank_bytes} bytes of KV memory per rank hold no block of {block_bytes} bytes"
            remedy = f"{advice}, or use a smaller `block_size`" if advice else "use a smaller `block_size`"
            raise ValueError(f"{problem}: {remedy}")
        num_blocks.append(rank_bytes // block_bytes)
    return cluster.with_blocks(num_blocks)


def with_tiers(cluster: Cluster, block_bytes: float, *, host_kv_gib: float, disk_kv_gib: float) -> Cluster:
    """Return the cluster with pools in the memory and on the disk of each host. 0 GiB: no pool.

    Raises:
        ParameterError: no block fits, or there is a disk pool but no host pool, through which disk blocks are loaded.
    """
    blocks = []
    for name, gib in (("host_kv_gib", host_kv_gib), ("disk_kv_gib", disk_kv_gib)):
        if not gib >= 0:
            raise ParameterError(name, f"must be at least 0, but {gib:g} given", gib)
        if gib and not gib * 2**30 >= block_bytes:
            raise ParameterError(name, f"{gib:g} holds no block of {block_bytes:,.0f} bytes: allow more", gib)
        if gib > (max_gib := MAX_TIER_BLOCKS * block_bytes / 2**30):
            problem = f"{gib:g} is more than {MAX_TIER_BLOCKS:,} blocks: allow at most {max_gib:g}"
            raise ParameterError(name, problem, gib)
        blocks.append((int(gib * 2**30 // block_bytes),) * len(cluster.hosts_of_pools) if gib else ())
    if disk_kv_gib and not host_kv_gib:
        problem = f"{disk_kv_gib:g} needs `host_kv_gib`, too, since disk blocks are loaded through host memory"
        raise ParameterError("disk_kv_gib", problem, disk_kv_gib)
    # Host pools keep their numbers when the number of instances changes.
    num_device_pools = max(cluster.num_device_pools, cluster.num_ranks, MAX_GROWN_RANKS) if host_kv_gib else 0
    return replace(cluster, host_blocks=blocks[0], disk_blocks=blocks[1], num_device_pools=num_device_pools)
