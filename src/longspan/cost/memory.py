"""The memory of engines and simulations: shares and bounds, and the sizes of KV pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from longspan.core.cluster import Cluster, split_heads
from longspan.core.options import SchedulingArgs

CPU_KV_BYTES = 4 * 2**30
"""Memory that the ranks on a CPU share for KV when the user names none, if so much is available."""
CPU_STEP_SHARE = 0.25
"""The part of that which a rank's activations may take beside it, so that a prompt is one step."""
USED_MEMORY = 0.9
"""The part of a device's memory that is used, as vLLM's gpu_memory_utilization."""


class KvShape(NamedTuple):
    """The keys and values of a model, as KV pools hold them.

    Attributes:
        layers: the query heads, the KV heads, and the elements of a head, of each layer.
        block_size: tokens of a block.
    """

    layers: tuple[tuple[int, int, int], ...]
    element_bytes: float
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block with all layers and heads, as hosts and disks hold it."""
        return int(2 * self.block_size * self.element_bytes * sum(heads * size for _, heads, size in self.layers))

    def rank_block_bytes(self, cluster: Cluster, instance: int) -> int:
        """Count what the fullest rank of an instance has of a block."""
        tp = cluster.tp(instance)
        sizes = {one: len(split_heads(*one[:2], tp)[0].kv_heads) * one[2] for one in set(self.layers)}
        stages = (cluster.layers(instance, stage) for stage in range(cluster.pp(instance)))
        return max(
            int(2 * self.block_size * self.element_bytes * sum(sizes[self.layers[i]] for i in s)) for s in stages
        )


def with_pools(
    cluster: Cluster, kv: KvShape, options: SchedulingArgs, memory: Callable[[Cluster, int], float], advice: str
) -> Cluster:
    """Return the cluster with pools on devices, hosts and disks; raise ValueError with advice if memory is missing.

    Each rank of an instance may have so many bytes of KV as `memory` returns.
    """
    cluster = cluster.with_tiers(kv.block_bytes, host_kv_gib=options.host_kv_gib, disk_kv_gib=options.disk_kv_gib)
    if (given := options.num_gpu_blocks_override) is not None:
        return cluster.with_blocks([given] * cluster.num_instances)
    found = []
    for instance in cluster.instances:
        block_bytes, rank_bytes = kv.rank_block_bytes(cluster, instance), max(0, int(memory(cluster, instance)))
        if rank_bytes < block_bytes:
            problem = f"{rank_bytes} bytes of KV memory per rank hold no block of {block_bytes} bytes"
            raise ValueError(f"{problem}: {advice}")
        found.append(rank_bytes // block_bytes)
    return cluster.with_blocks(found)
