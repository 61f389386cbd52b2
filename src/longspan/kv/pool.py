"""The KV pool of one rank: `[block, kv_head, token, head_dim]` (HND) per layer, read in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.spec import AttnSpec


class KvPool:
    """Keys and values of `num_blocks` blocks in every layer."""

    def __init__(
        self, specs: Sequence[AttnSpec], *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.block_size = block_size
        shapes = [(num_blocks, spec.num_kv_heads, block_size, spec.head_dim) for spec in specs]
        self._keys = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self._values = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Stores `k, v [kv_heads, tokens, head_dim]`: token t goes to slot `offsets[t]` of block `blocks[t]`."""
        self._keys[layer][blocks, :, offsets] = k.transpose(0, 1)
        self._values[layer][blocks, :, offsets] = v.transpose(0, 1)

    def held(self, layer: int, blocks: Sequence[int]) -> HeldKv:
        """The tokens of one request in these blocks, in order."""
        return HeldKv(keys=self._keys[layer], values=self._values[layer], blocks=blocks, block_size=self.block_size)


def bytes_per_block(specs: Sequence[AttnSpec], block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block in all layers."""
    return sum(2 * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize for spec in specs)


@dataclass(frozen=True, kw_only=True)
class HeldKv:
    """The `attn.member.KvSource` of a pool: held token t lies in slot `t % block_size` of `blocks[t // block_size]`."""

    keys: Tensor
    values: Tensor
    blocks: Sequence[int]
    block_size: int

    def gather(self, start: int, stop: int, k_out: Tensor, v_out: Tensor) -> None:
        """Copies held tokens `[start, stop)` into contiguous tensors, one copy per stretch of adjacent blocks."""
        offset = 0
        for k, v in self.pieces(start, stop):
            num, heads, tokens, dim = k.shape
            end = offset + num * tokens
            for piece, out in ((k, k_out), (v, v_out)):
                out[:, offset:end].view(heads, num, tokens, dim).copy_(piece.transpose(0, 1))
            offset = end

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of held tokens `[start, stop)`: whole adjacent blocks together, broken blocks alone."""
        size = self.block_size
        while start < stop:
            index, inside = divmod(start, size)
            whole = 0 if inside else self._adjacent(index, stop // size)
            if whole:
                block = self.blocks[index]
                yield self.keys[block : block + whole], self.values[block : block + whole]
                start += whole * size
            else:
                end = min(stop, (index + 1) * size)
                block, slots = self.blocks[index], slice(inside, inside + end - start)
                yield self.keys[block : block + 1, :, slots], self.values[block : block + 1, :, slots]
                start = end

    def _adjacent(self, index: int, end: int) -> int:
        """How many of `blocks[index:end]` follow each other in the pool."""
        count = 0
        while index + count < end and self.blocks[index + count] == self.blocks[index] + count:
            count += 1
        return count
