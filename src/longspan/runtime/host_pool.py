"""The KV pool of a host: blocks of all layers and heads, in memory shared by all processes of the host.

The blocks do not depend on how instances are split. A rank reads and writes its own layers and heads.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.hosted import DeviceStaging, HostStaging, Staging
from longspan.attn.paged import PagedKv
from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.core.steps import MoveKV
from longspan.runtime.block_records import BlockRecords
from longspan.runtime.pool import KvPool

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend


def map_blocks(
    memory: Path,
    record: KvRecord,
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    cuda: ModuleType | None = None,
) -> BlockRecords:
    """Map the pool of a host, with all layers and heads of the model.

    Args:
        cuda: the CUDA runtime, `torch.cuda.cudart()`, which page-locks the memory until the records are freed. So
            devices copy blocks to and from it without the host. None for ranks on CPUs.
    """
    with memory.open("r+b") as file:
        try:
            mapped = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        except OSError as error:
            raise MemoryError(f"the KV pool of the host cannot be mapped ({error.strerror})") from error
    layers = range(len(record.layers))
    records = BlockRecords(mapped, record, num_blocks=num_blocks, block_size=block_size, dtype=dtype, layers=layers)
    if cuda is not None:
        if (code := int(cuda.cudaHostRegister(mapped.data_ptr(), len(mapped), 0))) != 0:
            problem = f"cannot be page-locked (CUDA error {code}): allow less with --host-kv-gib"
            raise MemoryError(f"the KV pool of the host of {len(mapped) / 2**30:.1f} GiB {problem}")
        weakref.finalize(records, _unregister, cuda, mapped)
    return records


def _unregister(cuda: ModuleType, mapped: Tensor) -> None:
    cuda.cudaHostUnregister(mapped.data_ptr())


class HostPool:
    """The pool of its host as one rank sees it, whose own pool is `pool`.

    Args:
        records: of the host, see `map_blocks`.
        backend: attention on the host's processor.

    Attributes:
        pool_of: maps an instance to the pool number of its host.
        staging: buffers between the rank's device and the host, for attention over host-resident keys.
    """

    def __init__(
        self,
        records: BlockRecords,
        pool: KvPool,
        cluster: Cluster,
        rank: int,
        backend: AttentionBackend,
    ) -> None:
        self.backend = backend
        self._shared, self._own = records, pool
        self._instance, _, self._shard = cluster.at(rank)
        self._tp = cluster.tp(self._instance)
        self.pool_of = cluster.host_pool
        self.staging: Staging = HostStaging() if pool.device.type == "cpu" else DeviceStaging(pool.device)

    def layer(self, layer: int) -> PagedKv:
        """Return a layer of the host with the KV heads of this rank."""
        return self._shared.kv[layer].heads(self._heads_of_shards(layer)[self._shard])

    def _heads_of_shards(self, layer: int) -> list[range]:
        return self._own.record.layers[layer].kv_heads(self._tp)

    def copies(self, move: MoveKV, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (target, source) views `[kv_heads, words]` of this rank's copies of a layer.

        If several ranks have the same heads, only the first one offloads them.
        """
        shares, is_out = self._heads_of_shards(layer), move.way == "out"
        heads = shares[self._shard]
        if is_out and heads in shares[: self._shard]:
            return
        fields = [
            (own, self._shared.layers[layer][field][:, heads.start : heads.stop])
            for field, own in self._own.records.layers[layer].items()
        ]
        for source, target in move.copies:
            own_ref, host_ref = (source, target) if is_out else (target, source)
            if own_ref.instance == self._instance:
                for own, shared in fields:
                    ends = own[own_ref.block], shared[host_ref.block]
                    yield ends[::-1] if is_out else ends
