"""The KV pool of one rank, `[block, kv_head, token, head_dim]` (HND) per layer, and the memory that it may take."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan import limits
from longspan.attn.backends import AttentionBackend, backend_of
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import Cluster
from longspan.cost.memory import CPU_KV_BYTES, CPU_STEP_SHARE

WINDOW_BYTES = 64 * 2**20
"""Messages that are under way from one rank to another at once, and so the memory for them at each end."""
PROCESS_BYTES = 320 * 2**20
"""Memory of a host for PyTorch and transformers in the process that workers are forked from, which they share."""
_RANK_BYTES = 64 * 2**20
"""Memory of each worker on a CPU for itself, without weights, KV and steps."""
_CPU_SHARE = 0.4
"""The part that KV on CPUs takes of what weights and processes leave: more of it leaves less for steps and others."""
_LEAST_CPU_SHARE = 0.1
"""The part that KV takes also where weights fill the memory: they are mapped, so that the kernel can drop them."""
_CUDA_SHARE = 0.85


class KvMemory:
    """The memory of one rank's KV pools, of which one follows the other.

    CPU pages take neither time nor memory until they are written.
    """

    @property
    def num_bytes(self) -> int:
        return len(self._bytes)

    def __init__(self, device: torch.device) -> None:
        self._device, self._bytes = device, torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """Returns `[num_bytes]` of it; who had it before is done with it."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # which frees what there was
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # which would keep it for smaller tensors
            self._bytes = _zeros(num_bytes, self._device)
        return self._bytes[:num_bytes]


class KvPool:
    """Keys and values of `num_blocks` blocks in some layers.

    Attributes:
        kv: of each of its layers, in order; the same object as long as the pool is.

    Args:
        specs: of all layers of the model.
        layers: those of this rank; None for all.
        memory: what it lies in; None for memory of its own.
        backend: writes new tokens; None for PyTorch's.
    """

    def __init__(
        self,
        specs: Sequence[AttnSpec],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int] | None = None,
        memory: KvMemory | None = None,
        backend: AttentionBackend | None = None,
    ) -> None:
        self._backend = backend_of(device, compiled=False) if backend is None else backend
        self.block_size = block_size
        self.layers = range(len(specs)) if layers is None else layers
        self._next: dict[int, int | None] = dict(zip(self.layers, (*self.layers[1:], None), strict=True))
        own = [specs[layer] for layer in self.layers]
        shapes = [(num_blocks, spec.num_kv_heads, block_size, spec.head_dim) for spec in own]
        sizes = [math.prod(shape) for shape in shapes for _ in range(2)]
        parts = (memory or KvMemory(device)).take(sum(sizes) * dtype.itemsize).view(dtype).split(sizes)
        self._layers = {
            layer: PagedKv(keys=keys.view(shape), values=values.view(shape))
            for layer, shape, keys, values in zip(self.layers, shapes, parts[::2], parts[1::2], strict=True)
        }
        self.kv = tuple(self._layers.values())

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores `k, v [kv_heads, tokens, head_dim]`: token t goes to slot `offsets[t]` of block `blocks[t]`."""
        self._backend.store(self._layers[layer], blocks, offsets, k, v)

    def read_blocks(self, layer: int, blocks: Tensor, heads: range, k: Tensor, v: Tensor) -> None:
        """Copies some heads of whole blocks to `k, v [blocks, heads, block_size, head_dim]`."""
        for own, copy in zip(self._heads(layer, heads), (k, v), strict=True):
            torch.index_select(own, 0, blocks, out=copy)

    def write_blocks(self, layer: int, blocks: Tensor, heads: range, k: Tensor, v: Tensor) -> None:
        """Copies `k, v [blocks, heads, block_size, head_dim]` to some heads of whole blocks."""
        for own, copy in zip(self._heads(layer, heads), (k, v), strict=True):
            own.index_copy_(0, blocks, copy)

    def clear(self, slots: Sequence[tuple[int, int]]) -> None:
        """Sets slots to zero in all layers: of each block, those from a first slot on; returns when that is done.

        Messages for other blocks may be written meanwhile, by other threads or streams.
        """
        for kv in self.kv:
            for block, first in slots:
                kv.keys[block, :, first:] = 0.0
                kv.values[block, :, first:] = 0.0
        if slots and kv.keys.device.type == "cuda":
            torch.cuda.current_stream(kv.keys.device).synchronize()

    def copy_block(self, source: int, target: int, num_slots: int) -> None:
        """Copies the first slots of a block. Its other slots may hold tokens of another request, finite or not."""
        for layer in self.kv:
            for own in (layer.keys, layer.values):
                own[target, :, :num_slots] = own[source, :, :num_slots]

    def layer(self, layer: int) -> PagedKv:
        return self._layers[layer]

    def after(self, layer: int) -> int | None:
        """Returns the pool's next layer; None after its last one."""
        return self._next[layer]

    def _heads(self, layer: int, heads: range) -> tuple[Tensor, Tensor]:
        kv = self._layers[layer]
        return kv.keys[:, heads.start : heads.stop], kv.values[:, heads.start : heads.stop]


def _zeros(num_bytes: int, device: torch.device) -> Tensor:
    """Makes zeros: on a CPU, in pages that take no memory until they are written."""
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{num_bytes} bytes for KV cannot be allocated ({error.strerror})") from error
    return torch.frombuffer(memory, dtype=torch.uint8)


def bytes_per_block(specs: Sequence[AttnSpec], block_size: int, dtype: torch.dtype) -> int:
    return sum(2 * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize for spec in specs)


def default_kv_bytes(cluster: Cluster, device: str, weight_bytes: int, available: int | None = None) -> int:
    """Return the KV memory per rank when the user names none, beside `weight_bytes` of weights on each.

    On CPU the ranks share 4 GiB, or 40 % of the memory that is left if that is less: `available`, by default what this
    process may still use, without the weights and what processes need. On CUDA this is an estimate for plans, since
    workers measure what they have: 85 % of the free device memory, less the weights and the KV that is on its way to or
    from other instances.
    """
    if device == "cpu":
        available = limits.memory().available if available is None else available
        left = available - PROCESS_BYTES - cluster.num_ranks * _RANK_BYTES
        weights = weight_bytes * cluster.spec.tp * cluster.spec.pp  # one copy for all instances
        total = max(_LEAST_CPU_SHARE * left, _CPU_SHARE * (left - weights))
        return min(CPU_KV_BYTES, max(0, int(total))) // cluster.num_ranks
    free, _ = torch.cuda.mem_get_info(0)
    per_device = -(-cluster.num_ranks // torch.cuda.device_count())
    return max(0, int(free * _CUDA_SHARE) // per_device - weight_bytes - move_bytes(cluster))


def default_step_bytes(cluster: Cluster, device: str) -> int:
    """Returns the memory per rank that a large step may take: on CPU a quarter of what KV takes when the user names
    none, on CUDA half of what that leaves.
    """
    if device == "cpu":
        return int(default_kv_bytes(cluster, device, 0) * CPU_STEP_SHARE)
    free, _ = torch.cuda.mem_get_info(0)
    return int(free * (1 - _CUDA_SHARE) / 2) // -(-cluster.num_ranks // torch.cuda.device_count())


def move_bytes(cluster: Cluster) -> int:
    """Counts the memory of a rank for KV that is on its way to or from other instances."""
    if cluster.num_instances == 1:
        return 0
    sources = min(cluster.backends, cluster.spec.instances) * cluster.spec.tp * cluster.spec.pp
    return max(sources, (cluster.decode_spec or cluster.spec).num_ranks) * WINDOW_BYTES
