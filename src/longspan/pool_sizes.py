"""Sizes of KV pools: given by the user, measured by workers, or by a rule over the memory that this process may use."""

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
from longspan.runtime.pool import default_kv_bytes

_log = logging.getLogger("longspan")
KvBytes = Callable[[Cluster, int, int], int]
"""`(cluster, instance, bytes of weights per rank) -> bytes of KV per rank`"""


def measures_memory(given: EngineArgs) -> bool:
    """Return True if workers measure the memory for KV: on CUDA, unless the user gives it."""
    return given.device == "cuda" and given.kv_cache_memory_bytes is None and given.num_gpu_blocks_override is None


def by_rule(given: EngineArgs) -> KvBytes:
    """Return a rule that sizes pools by the memory available now, which later pools reuse."""
    available = limits.memory().available

    def kv_bytes(cluster: Cluster, _instance: int, weight_bytes: int) -> int:
        num_pools = 1 if given.executor == "ray" else max(cluster.hosts) + 1  # of the machine
        num_free = available - int(given.host_kv_gib * 2**30) * num_pools
        weights = weight_bytes * cluster.spec.tp * cluster.spec.pp
        if given.device == "cpu" and weights > num_free:
            _warn_once(
                f"the weights take {weights / 2**30:.1f} GiB, but {max(0, num_free) / 2**30:.1f} are available: "
                "they are read from the disk repeatedly"
            )
        return default_kv_bytes(cluster, given.device, weight_bytes, num_free)

    return kv_bytes


@cache
def _warn_once(words: str) -> None:
    _log.warning(words)


def unbounded(_cluster: Cluster, _instance: int, _weight_bytes: int) -> int:
    """Return a bound beyond any pool, used until workers have measured device memory."""
    return 2**62


def with_pools(
    cluster: Cluster, record: KvRecord, info: ModelInfo, given: EngineArgs, kv_bytes: KvBytes, *, dtype: torch.dtype
) -> Cluster:
    """Return the cluster with pools on devices, hosts and disks. Raise ValueError if memory for them is missing."""
    check_hosts(given.host_kv_gib, cluster)

    def memory(cluster: Cluster, instance: int) -> int:
        of_rank = given.kv_cache_memory_bytes
        return kv_bytes(cluster, instance, weight_bytes(info, cluster, instance, dtype)) if of_rank is None else of_rank

    remedy = memory_remedy(given) if given.kv_cache_memory_bytes is None else "allow more"
    cluster = memory_pools(cluster, record, given, memory, remedy)
    needed = (
        n * rank_block_bytes(record, cluster, i) * len(cluster.ranks(i)) for i, n in enumerate(cluster.num_blocks)
    )
    _check_given(given, sum(needed))
    return cluster


def memory_remedy(given: EngineArgs) -> str:
    """Return the remedy for too little memory. A container may have less memory than its host."""
    remedy = "use a larger `tp` or `pp`, or fewer `max_num_batched_tokens`"
    if given.device != "cpu":
        return remedy
    if given.kv_cache_memory_bytes is None:
        remedy += ", give `kv_cache_memory_bytes`"
    memory = limits.memory()
    available, total = memory.available / 2**30, memory.total / 2**30
    less = ", allow less `host_kv_gib`" if given.host_kv_gib else ""
    limit = f"{available:.1f} of the {total:.1f} GiB of memory that this process may use are available"
    more = "raise the memory limit of its container" if memory.is_limited else "free memory"
    return f"{remedy}{less}, or {more}: {limit}"


def weight_bytes(info: ModelInfo, cluster: Cluster, instance: int, dtype: torch.dtype) -> int:
    """Estimate the bytes of weights on the rank with most layers, with an embedding, an output head or both.

    The last stage has both if layers read tokens.
    """
    pp = cluster.pp(instance)
    layers = max(len(cluster.layers(instance, stage)) for stage in range(pp))
    ends = info.vocab_size * info.hidden_size * (2 if pp == 1 or info.reads_tokens else 1)
    return int(layers * info.layer_weights / cluster.tp(instance) + ends) * dtype.itemsize


def check_hosts(gib: float, cluster: Cluster) -> None:
    """Raise ParameterError if an instance spans several hosts, or if a host has no pool."""
    if gib:
        from longspan.runtime.host_tiers import check_hosts  # noqa: PLC0415 - needed with a host tier only

        check_hosts(gib, cluster)


def _check_given(given: EngineArgs, needed: int) -> None:
    """Raise ParameterError for given pools on CPUs beyond all memory, since workers would be killed as pools fill."""
    names = [name for name in ("num_gpu_blocks_override", "kv_cache_memory_bytes") if getattr(given, name) is not None]
    if given.device != "cpu" or not names:
        return
    value, total = getattr(given, names[0]), limits.memory().total
    if needed > total:
        problem = f"{value} needs {needed / 2**30:.1f} GiB for KV, but this process may use {total / 2**30:.1f} GiB"
        raise ParameterError(names[0], f"{problem} of memory: allow less", value)
