"""The roles of matrices in their layer, which decide how tensor parallelism cuts them. `model.trace` finds them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from longspan.attn.spec import AttnSpec
from longspan.core.splits import HeadShare

Sums = Literal["", "heads", "inner"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """The part of one matrix in its layer.

    Attributes:
        heads: the head of each block of `head_dim` outputs. Query heads are counted first, then keys, then values.
        parts: the outputs are this many times the inner dimension of a feed-forward part. 0: something else.
        sums: the inputs are the outputs of all query heads, or an inner dimension, so shares of products are summed.
        is_transposed: the weight is `[inputs, outputs]`.
    """

    heads: tuple[int, ...] = ()
    parts: int = 0
    sums: Sums = ""
    is_transposed: bool = False

    def blocks(self, spec: AttnSpec, share: HeadShare) -> list[range]:
        """Return the ranges of the blocks of a share. There is a range per kind of head if kinds are not mixed."""
        kinds = [self._kind(head, spec) for head in self.heads]
        changes = sum(kind != before for kind, before in zip(kinds[1:], kinds, strict=False))
        is_mixed = changes >= len({*kinds})
        ranges: list[range] = []
        for block in self._own(spec, share):
            if block and ranges and ranges[-1].stop == block and (is_mixed or kinds[block] == kinds[block - 1]):
                ranges[-1] = range(ranges[-1].start, block + 1)
            else:
                ranges.append(range(block, block + 1))
        return ranges

    def of_share(self, spec: AttnSpec, share: HeadShare) -> Role:
        """Return the role of this matrix's slice in the layer that has only the heads of a share."""
        firsts = (share.heads.start, share.kv_heads.start, share.kv_heads.start)
        sizes = (len(share.heads), len(share.kv_heads), len(share.kv_heads))
        heads = []
        for block in self._own(spec, share):
            kind = self._kind(self.heads[block], spec)
            heads.append(self.heads[block] - _first(spec, kind) - firsts[kind] + sum(sizes[:kind]))
        return replace(self, heads=tuple(heads))

    def _own(self, spec: AttnSpec, share: HeadShare) -> Iterator[int]:
        for block, head in enumerate(self.heads):
            kind = self._kind(head, spec)
            if head - _first(spec, kind) in (share.kv_heads if kind else share.heads):
                yield block

    def _kind(self, head: int, spec: AttnSpec) -> int:
        """Return 0 for a query head, 1 for a key head and 2 for a value head."""
        return (head >= spec.num_heads) + (head >= spec.num_heads + spec.num_kv_heads)


def _first(spec: AttnSpec, kind: int) -> int:
    return spec.num_heads * (kind > 0) + spec.num_kv_heads * (kind > 1)


@dataclass(frozen=True, kw_only=True)
class LayerRoles:
    """The roles in one layer. Paths are relative to the layer.

    Attributes:
        attention: the path of the module that calls the attention function. Empty if the layer was not run.
        matrices: by path, the matrices whose role is known.
    """

    attention: str = ""
    matrices: dict[str, Role] = field(default_factory=dict, hash=False)
