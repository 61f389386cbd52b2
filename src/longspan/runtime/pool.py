"""The KV pool of one rank, and the size of its memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan import limits
from longspan.attn.backends import backend_of
from longspan.attn.paged import PagedKv
from longspan.core.cluster import Cluster
from longspan.core.kv_record import KvRecord
from longspan.cost.memory import CPU_KV_BYTES, CPU_STEP_SHARE
from longspan.runtime.block_records import BlockRecords

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

WINDOW_BYTES = 64 * 2**20
"""Maximum bytes in flight from one rank to another, and so the memory for messages at each end."""
PROCESS_BYTES = 320 * 2**20
"""Host memory of PyTorch and transformers in the process that workers are forked from. Workers share it."""
_RANK_BYTES = 64 * 2**20
"""Host memory of each CPU worker, without weights, KV and steps."""
_CPU_SHARE = 0.4
"""KV's share of the CPU memory that weights and processes leave. A larger share leaves less memory for steps."""
_MIN_CPU_SHARE = 0.1
"""KV's minimum share, ignoring weights. They are mapped files, so the kernel can drop their pages."""
_CUDA_SHARE = 0.85


class KvMemory:
    """The memory of one rank's KV pool, reused by the pools of later clusters.

    CPU pages take neither time nor memory until they are written.
    """

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def __init__(self, device: torch.device) -> None:
        self._device, self._bytes = device, torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Return `[num_bytes]` of the memory. The pool that used it before must be closed."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # frees the old memory
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # otherwise the cache keeps the old memory for smaller tensors
            self._bytes = _zeros(num_bytes, self._device)
        return self._bytes[:num_bytes]


class KvPool:
    """The KV of one rank: records of `num_blocks` blocks with its layers and heads.

    Attributes:
        kv: keys and values of each layer that has both, in order. The object is the same during the pool's lifetime.

    Args:
        record: of a block of the whole model.
        dtype: of keys and values.
        shard, tp: the rank stores the KV heads of shard `shard` of `tp`.
        layers: the layers of this rank. None for all.
        memory: storage of the records. None to allocate new memory.
        backend: writes the KV of new tokens. None for PyTorch's.
    """

    def __init__(
        self,
        record: KvRecord,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: int = 0,
        tp: int = 1,
        layers: Sequence[int] | None = None,
        memory: KvMemory | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        self._backend = backend_of(device, compiled=False) if backend is None else backend
        self.record, self.block_size, self.dtype, self.device = record, block_size, dtype, device
        self.layers = range(len(record.layers)) if layers is None else layers
        self._next: dict[int, int | None] = dict(zip(self.layers, (*self.layers[1:], None), strict=True))
        own = record.of_layers(self.layers).of_shard(shard, tp)
        self.records = BlockRecords(
            (memory or KvMemory(device)).take(num_blocks * own.block_bytes),
            own,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            layers=self.layers,
        )
        self.kv = tuple(self.records.kv.values())

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Store `k, v [kv_heads, tokens, head_dim]`: token t in slot `offsets[t]` of block `blocks[t]`."""
        self._backend.store(self.records.kv[layer], blocks, offsets, k, v)

    def read_blocks(self, layer: int, blocks: Tensor, heads: range, copies: Sequence[Tensor]) -> None:
        """Copy `heads` of whole blocks to one tensor `[blocks, heads, words]` per field of the layer."""
        for field, copy in zip(self.records.layers[layer].values(), copies, strict=True):
            torch.index_select(field[:, heads.start : heads.stop], 0, blocks, out=copy)

    def write_blocks(self, layer: int, blocks: Tensor, heads: range, copies: Sequence[Tensor]) -> None:
        """Copy one tensor `[blocks, heads, words]` per field of the layer to `heads` of whole blocks."""
        for field, copy in zip(self.records.layers[layer].values(), copies, strict=True):
            field[:, heads.start : heads.stop].index_copy_(0, blocks, copy)

    def clear(self, slots: Sequence[tuple[int, int]]) -> None:
        """Set the slots of each (block, first slot) to zero from the first slot on, in all layers, and synchronize.

        Also clears the state after the block, which depends on these slots. Other threads or streams may write
        messages to other blocks concurrently.
        """
        for layer, fields in self.records.layers.items():
            for block, first in slots:
                for own in self.records.slots[layer]:
                    own[block, :, first:] = 0.0
                if (states := fields.get("state")) is not None:
                    states[block] = 0
        if slots and self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def copy_block(self, source: int, target: int, num_slots: int) -> None:
        """Copy the first slots of a block. Other slots may hold another request's KV, which may be non-finite.

        The state is not copied: it is the state after the whole source block.
        """
        for slots in self.records.slots.values():
            for own in slots:
                own[target, :, :num_slots] = own[source, :, :num_slots]

    def layer(self, layer: int) -> PagedKv:
        return self.records.kv[layer]

    def after(self, layer: int) -> int | None:
        """Return the pool's next layer, or None after its last layer."""
        return self._next[layer]


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Allocate a tensor of zeros. CPU pages take no memory until they are written."""
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for KV cannot be allocated ({error.strerror})") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def default_kv_bytes(cluster: Cluster, device: str, weight_bytes: int, available: int | None = None) -> int:
    """Return the default KV memory per rank, in addition to `weight_bytes` of weights on each.

    On CPU the ranks share at most 4 GiB. It is 40 % of `available` minus processes and weights, but at least 10 % of
    it minus processes. `available` is by default the memory that this process may still use. On CUDA this is an
    estimate for planning, since workers measure theirs: 85 % of the free memory, minus weights and KV in flight.
    """
    if device == "cpu":
        available = limits.memory().available if available is None else available
        usable = available - PROCESS_BYTES - cluster.num_ranks * _RANK_BYTES
        weights = weight_bytes * cluster.spec.tp * cluster.spec.pp  # one copy for all instances
        total = max(_MIN_CPU_SHARE * usable, _CPU_SHARE * (usable - weights))
        return min(CPU_KV_BYTES, max(0, int(total))) // cluster.num_ranks
    free, _ = torch.cuda.mem_get_info(0)
    per_device = -(-cluster.num_ranks // torch.cuda.device_count())
    return max(0, int(free * _CUDA_SHARE) // per_device - weight_bytes - move_bytes(cluster))


def default_step_bytes(cluster: Cluster, device: str) -> int:
    """Return the step memory per rank. CPU: `CPU_STEP_SHARE` of default KV. CUDA: half of the rest after KV."""
    if device == "cpu":
        return int(default_kv_bytes(cluster, device, 0) * CPU_STEP_SHARE)
    free, _ = torch.cuda.mem_get_info(0)
    return int(free * (1 - _CUDA_SHARE) / 2) // -(-cluster.num_ranks // torch.cuda.device_count())


def move_bytes(cluster: Cluster) -> int:
    """Return the bytes per rank reserved for KV messages in flight to or from other instances."""
    if cluster.num_instances == 1:
        return 0
    sources = min(cluster.backends, cluster.spec.instances) * cluster.spec.tp * cluster.spec.pp
    return max(sources, (cluster.decode_spec or cluster.spec).num_ranks) * WINDOW_BYTES
