"""The keys of a request that remain for its decodes after a prompt with drops.

A decode counts as a query of the prompt's last partition. It reads all keys from that partition on. Of an earlier
partition it reads the tokens that were kept for the last queries of the prompt, by KV head and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.core.runs import Run, clip, num_tokens
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import Heads, SparsePlan, decode_counts


@dataclass(frozen=True, kw_only=True)
class KeptKeys:
    """The kept keys of one request on one member, in one layer that drops tokens.

    Attributes:
        boundary: the first position of the last partition of the prompt.
        heads: of the layer on this rank.
        by_heads: KV heads that keep equally many keys, with the indices `[heads, kept]` of their keys among those of
            this member, in order of position.
    """

    setting: SparseSetting
    layer: int
    boundary: int
    heads: Heads
    by_heads: Sequence[tuple[range, Tensor]]

    def num_far(self, runs: Sequence[Run]) -> int:
        """Count the keys of a member before the boundary."""
        return num_tokens(clip(runs, 0, self.boundary))

    def read_heads(self, runs: Sequence[Run]) -> tuple[int, ...]:
        """Return the KV heads of which a member with these keys has something to read."""
        if num_tokens(runs) > self.num_far(runs):
            return tuple(range(self.heads.num_kv_heads))
        counts = decode_counts(self.setting, tuple(runs), self.boundary, self.layer, self.heads)
        return tuple(head for head, count in enumerate(counts) if count)


def record_kept(  # noqa: PLR0917 - a plan on a member, and a layer
    kept: dict[int, KeptKeys],
    plan: SparsePlan,
    setting: SparseSetting,
    layer: int,
    rank: int,
    heads: Heads,
    order: Callable[[int, int], Tensor | None] | None,
) -> None:
    """Record the keys that member `rank` keeps for decodes in a layer.

    Args:
        order: returns the indices `[KV heads, tokens]` of own keys from one index to another, the most important first.
            None if the layer drops nothing. Decodes then read all keys.
    """
    if order is None:
        kept.pop(layer, None)
        return
    last = max(piece.partition for pieces in plan.queries for piece in pieces)
    far = [piece for piece in plan.keys[rank] if piece.partition < last]
    counts = [
        [setting.kept(piece.size, layer, heads.first + head, setting.level(last, piece.partition)) for piece in far]
        for head in range(heads.num_kv_heads)
    ]
    by_heads, start = [], 0
    for stop in range(1, heads.num_kv_heads + 1):
        if far and (stop == heads.num_kv_heads or counts[stop] != counts[start]):
            indices = []
            for piece, count in zip(far, counts[start], strict=True):
                ordered = order(piece.offset, piece.offset + piece.size)
                assert ordered is not None, "keys with ratings have an order"
                indices.append(ordered[start:stop, :count] + piece.offset)
            by_heads.append((range(start, stop), torch.cat(indices, dim=1).sort(dim=1).values))
            start = stop
    boundary = last * setting.partition
    kept[layer] = KeptKeys(setting=setting, layer=layer, boundary=boundary, heads=heads, by_heads=by_heads)
