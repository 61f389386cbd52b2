"""Bounds the memory of the KV pools."""

from __future__ import annotations

import psutil
import torch

from longspan.core.cluster import Cluster
from longspan.runtime.kv.moves import WINDOW_BYTES

_CPU_SHARE = 0.3
_CPU_DEFAULT_BYTES = 4 * 2**30
_CUDA_SHARE = 0.85


def move_bytes(cluster: Cluster) -> int:
    """Returns the memory that a rank may take for KV on its way to or from other instances."""
    if cluster.decode_spec is None:
        return 0
    sources = min(cluster.backends, cluster.spec.instances) * cluster.spec.tp
    return max(sources, cluster.decode_spec.num_ranks) * WINDOW_BYTES


def default_kv_bytes(*, device: str, num_ranks: int, weight_bytes: int, move_bytes: int = 0) -> int:
    """Returns the KV memory per rank when the user names none.

    Each rank has `weight_bytes` of weights, and `move_bytes` of KV under way.

    On CPU the ranks share 4 GiB, or 30 % of the memory that is available if that is less. On CUDA each takes its
    part of 85 % of the free device memory, less the weights and what moves.
    """
    if device == "cpu":
        total = min(_CPU_DEFAULT_BYTES, int(psutil.virtual_memory().available * _CPU_SHARE))
        return total // num_ranks
    free, _ = torch.cuda.mem_get_info(0)
    per_device = -(-num_ranks // torch.cuda.device_count())
    return max(0, int(free * _CUDA_SHARE) // per_device - weight_bytes - move_bytes)
