"""Sizes of KV pools: as the user says, as workers measured, or by a rule over the memory that this process may use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from longspan import limits
from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.cost.memory import rank_block_bytes
from longspan.cost.memory import with_pools as memory_pools
from longspan.errors import ParameterError
from longspan.model.info import ModelInfo
from longspan.runtime.pool import PROCESS_BYTES, default_kv_bytes

_log = logging.getLogger("longspan")
KvBytes = Callable[[Cluster, int, int], int]
"""`(cluster, instance, bytes of weights on each of its ranks) -> bytes of KV that each of them may have`"""


def measures_memory(given: EngineArgs) -> bool:
    """Tell whether workers measure what memory KV may take: on CUDA, unless the user says that."""
    return given.device == "cuda" and given.kv_cache_memory_bytes is None and given.num_gpu_blocks_override is None


def by_rule(given: EngineArgs) -> KvBytes:
    """Return a rule that sizes pools by the memory that is available now: pools that are made anew lie in it later."""
    available = limits.memory().available

    def kv_bytes(cluster: Cluster, _instance: int, weight_bytes: int) -> int:
        left = available - int(given.host_kv_gib * 2**30) * (max(cluster.hosts) + 1)
        weights = weight_bytes * cluster.spec.tp * cluster.spec.pp
        if given.device == "cpu" and weights > left:
            _warn_once(
                f"the weights take {weights / 2**30:.1f} GiB, but {max(0, left) / 2**30:.1f} are available: "
                "they are read from the disk again and again"
            )
        return default_kv_bytes(cluster, given.device, weight_bytes, left)

    return kv_bytes


@cache
def _warn_once(words: str) -> None:
    _log.warning(words)


def unbounded(_cluster: Cluster, _instance: int, _weight_bytes: int) -> int:
    """Return a bound that no pool reaches, used until workers have measured device memory."""
    return 2**62


def with_pools(
    cluster: Cluster, record: KvRecord, info: ModelInfo, given: EngineArgs, kv_bytes: KvBytes, *, dtype: torch.dtype
) -> Cluster:
    """Return the cluster with pools on devices, hosts and disks; raise ValueError when memory for them is missing."""
    _check_hosts(given.host_kv_gib, cluster)

    def memory(cluster: Cluster, instance: int) -> int:
        of_rank = given.kv_cache_memory_bytes
        return kv_bytes(cluster, instance, weight_bytes(info, cluster, instance, dtype)) if of_rank is None else of_rank

    advice = memory_remedy(given) if given.kv_cache_memory_bytes is None else "allow more"
    cluster = memory_pools(cluster, record, given, memory, advice)
    needed = (
        n * rank_block_bytes(record, cluster, i) * len(cluster.ranks(i)) for i, n in enumerate(cluster.num_blocks)
    )
    _check_given(given, sum(needed))
    return cluster


def memory_remedy(given: EngineArgs) -> str:
    """Say how an engine gets more memory. A container may have less of it than its host."""
    remedy = "use a larger tp or pp, or fewer max_num_batched_tokens"
    if given.device != "cpu":
        return remedy
    if given.kv_cache_memory_bytes is None:
        remedy += ", give kv_cache_memory_bytes"
    memory = limits.memory()
    available, total = memory.available / 2**30, memory.total / 2**30
    less = ", allow less host_kv_gib" if given.host_kv_gib else ""
    limit = f"{available:.1f} of the {total:.1f} GiB of memory that this process may use are available"
    more = "raise the memory limit of its container" if memory.is_limited else "free memory"
    return f"{remedy}{less}, or {more}: {limit}"


def check_host_memory(gib: float, cluster: Cluster) -> None:
    """Raise ParameterError when host pools of this size exceed the available memory. They are not allocated yet."""
    needed, available = gib * (max(cluster.hosts) + 1), (limits.memory().available - PROCESS_BYTES) / 2**30
    if needed > available:
        problem = f"{gib:g} needs {needed:.1f} GiB, but {max(0.0, available):.1f} are available for it: allow less"
        raise ParameterError("host_kv_gib", problem, gib)


def weight_bytes(info: ModelInfo, cluster: Cluster, instance: int, dtype: torch.dtype) -> int:
    """Estimate the weights of the fullest rank: its share of the layers, and an embedding, an output head or both.

    Of a model whose layers read tokens, the last stage has both.
    """
    pp = cluster.pp(instance)
    layers = max(len(cluster.layers(instance, stage)) for stage in range(pp))
    ends = info.vocab_size * info.hidden_size * (2 if pp == 1 or info.reads_tokens else 1)
    return int(layers * info.layer_weights / cluster.tp(instance) + ends) * dtype.itemsize


def _check_hosts(gib: float, cluster: Cluster) -> None:
    """Raise ParameterError when instances have no host each."""
    for instance in cluster.instances if gib else ():
        if len({cluster.hosts[rank] for rank in cluster.ranks(instance)}) > 1:
            problem = f"is for instances on one host each, but instance {instance} has ranks on several: leave it out"
            raise ParameterError("host_kv_gib", problem, gib)


def _check_given(given: EngineArgs, needed: int) -> None:
    """Raise ParameterError for pools on CPUs that take more than all memory: workers would be killed as they fill."""
    names = [name for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if getattr(given, name) is not None]
    if given.device != "cpu" or not names:
        return
    value, total = getattr(given, names[0]), limits.memory().total
    if needed > total:
        problem = f"{value} needs {needed / 2**30:.1f} GiB for KV, but this process may use {total / 2**30:.1f} GiB"
        raise ParameterError(names[0], f"{problem} of memory: allow less", value)
