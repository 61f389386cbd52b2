"""The record of a KV block: the bytes that each layer stores per block, and their offsets.

The record has the layers in order, each with keys, values and state, each `[kv_head, byte]`. Tiers, moves and
messages copy ranges of heads as opaque bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from longspan.core.splits import split_heads

Field = Literal["keys", "values", "state"]


@dataclass(frozen=True, kw_only=True)
class LayerRecord:
    """Bytes that one layer stores per block.

    A latent that all query heads read is one KV head with keys only. A linear layer only has a state.

    Attributes:
        num_heads, num_kv_heads: split over tensor-parallel shards by `split_heads`.
        key_bytes, value_bytes, state_bytes: per block and KV head; 0 if the layer has no such field.
    """

    num_heads: int
    num_kv_heads: int
    key_bytes: int = 0
    value_bytes: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        assert self.fields, "a layer stores something"

    @cached_property
    def fields(self) -> dict[Field, int]:
        """The fields that this layer has, in order, with their bytes per block and KV head."""
        sizes: dict[Field, int] = {"keys": self.key_bytes, "values": self.value_bytes, "state": self.state_bytes}
        return {field: size for field, size in sizes.items() if size}

    @property
    def head_bytes(self) -> int:
        return sum(self.fields.values())

    @property
    def block_bytes(self) -> int:
        return self.num_kv_heads * self.head_bytes

    def kv_heads(self, tp: int) -> list[range]:
        """Return the KV heads of each of `tp` shards. Shards may share a head."""
        return [share.kv_heads for share in split_heads(self.num_heads, self.num_kv_heads, tp)]

    def of_shard(self, shard: int, tp: int) -> LayerRecord:
        share = split_heads(self.num_heads, self.num_kv_heads, tp)[shard]
        return replace(self, num_heads=len(share.heads), num_kv_heads=len(share.kv_heads))


@dataclass(frozen=True, kw_only=True)
class KvRecord:
    """The record of a block in some layers of a model, in order. Layers may differ.

    Attributes:
        word_bytes: the largest power of two up to 8 that divides the size of each field. Copies of words are fastest.
            All shards and stages use the word size of the whole model, so that they can exchange fields.
    """

    layers: tuple[LayerRecord, ...]
    word_bytes: int = 0

    def __post_init__(self) -> None:
        if not self.word_bytes:
            sizes = [size for layer in self.layers for size in layer.fields.values()]
            object.__setattr__(self, "word_bytes", math.gcd(8, *sizes))

    @property
    def block_bytes(self) -> int:
        return sum(layer.block_bytes for layer in self.layers)

    @cached_property
    def places(self) -> tuple[dict[Field, range], ...]:
        """The bytes of each field of each layer in the record."""
        sizes = [layer.num_kv_heads * size for layer in self.layers for size in layer.fields.values()]
        ranges = map(range, itertools.accumulate(sizes, initial=0), itertools.accumulate(sizes))
        return tuple({field: next(ranges) for field in layer.fields} for layer in self.layers)

    def of_shard(self, shard: int, tp: int) -> KvRecord:
        """Return the record of one of `tp` tensor-parallel shards."""
        return replace(self, layers=tuple(layer.of_shard(shard, tp) for layer in self.layers))

    def of_layers(self, layers: Sequence[int]) -> KvRecord:
        """Return the record of a pipeline stage."""
        return replace(self, layers=tuple(self.layers[layer] for layer in layers))
