"""Views of the KV block records in the memory of a device pool or a host pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.kv_record import Field, KvRecord, LayerRecord

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def kv_record(specs: Sequence[AttnSpec], block_size: int, dtype: torch.dtype) -> KvRecord:
    """Build the record of a block for layers that store keys and values of each token."""
    sizes = [(spec.num_heads, spec.num_kv_heads, block_size * spec.head_dim * dtype.itemsize) for spec in specs]
    layers = [LayerRecord(num_heads=q, num_kv_heads=kv, key_bytes=size, value_bytes=size) for q, kv, size in sizes]
    return KvRecord(layers=tuple(layers))


class BlockRecords:
    """The records of `num_blocks` blocks: one array per layer and field, in the order of the record.

    Args:
        memory: uint8 `[num_blocks * record.block_bytes]`.
        record: of the stored layers.
        layers: the numbers of these layers in the model.
        dtype: of keys and values.

    Attributes:
        layers: by layer and field, a view `[block, kv_head, word]` for copies, of type `word`.
        slots: by layer, the keys and the values as `[block, kv_head, token, dim]`. State fields are left out.
        kv: by layer, the views for attention. Only layers with both keys and values.
    """

    def __init__(
        self,
        memory: Tensor,
        record: KvRecord,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        layers: Sequence[int],
    ) -> None:
        assert len(memory) == num_blocks * record.block_bytes, "the memory has the size of these records"
        assert dtype.itemsize <= record.word_bytes, "each field is a whole number of elements"
        self.word = _WORDS[record.word_bytes]
        self.layers: dict[int, dict[Field, Tensor]] = {}
        self.slots: dict[int, list[Tensor]] = {}
        self.kv: dict[int, PagedKv] = {}
        for number, layer, places in zip(layers, record.layers, record.places, strict=True):
            parts = {field: memory[num_blocks * at.start : num_blocks * at.stop] for field, at in places.items()}
            shape, sizes = (num_blocks, layer.num_kv_heads), layer.fields
            self.layers[number] = {
                field: part.view(self.word).view(*shape, sizes[field] // self.word.itemsize)
                for field, part in parts.items()
            }
            self.slots[number] = [
                part.view(dtype).view(*shape, block_size, sizes[field] // block_size // dtype.itemsize)
                for field, part in parts.items()
                if field != "state"
            ]
            if len(self.slots[number]) == 2:
                keys, values = self.slots[number]
                self.kv[number] = PagedKv(keys=keys, values=values)
