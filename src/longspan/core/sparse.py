"""Sparse attention in levels (CSPS §3.2.4): a setting as a value.

The sequence is cut into partitions of equal size. At level 1, queries attend to all keys of their own partition.
At each further level a segment joins several segments of the level before, up to the whole sequence at the last level.
Two partitions meet at the first level with both in one segment. So regions are disjoint, and without drops they add up
to full attention. Distant keys lie in earlier partitions, so no mask is needed above level 1.

Levels depend on positions only, for chunks of a prompt and cached blocks alike (see `sparse_plan.py`).
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

RateBy = Literal["layer", "head"]
"""The attention that rates a token for a KV head: of all heads of the previous layer, or of this KV head only."""
DropMode = Literal["qkv", "kv"]
"""Parts of unimportant tokens that are dropped: queries, keys and values, or only keys and values."""

MAX_LEVELS, MAX_PIECES = 4, 16
"""Maximum number of levels, and of micro-partitions per level. Every piece has its own message tag."""
TOKENS_HOP, RESULTS_HOP, SAMPLES_HOP = 0, MAX_PIECES, MAX_LEVELS * MAX_PIECES
SPARSE_HOPS = SAMPLES_HOP + 1
"""The hop numbers of one layer: pieces of tokens, then pieces of results by level, then sampled queries."""


class SparseSetting(NamedTuple):
    """The setting by which one request drops tokens.

    Attributes:
        partition: tokens of a partition.
        segments: number of partitions per segment at each level except the last. The first is 1.
        drop: the drop ratio by layer, KV head and level, from level 2 on. A single entry is for all layers, or heads.
        mode: the part of a token that is dropped.
        micro_partitions: by level from 2 on, the number of pieces of sent tokens and results. Empty: one piece each.
        samples: number of queries of each member that rate keys.
        rate_by: the attention that rates keys.
        drop_in_decode: the output reads the same keys as the last partition of the prompt.
    """

    partition: int
    segments: tuple[int, ...]
    drop: tuple[tuple[tuple[float, ...], ...], ...]
    mode: DropMode = "qkv"
    micro_partitions: tuple[int, ...] = ()
    samples: int = 64
    rate_by: RateBy = "layer"
    drop_in_decode: bool = False

    @property
    def num_levels(self) -> int:
        return len(self.segments) + 1

    @property
    def exact(self) -> SparseSetting:
        """The same setting without drops."""
        return self._replace(drop=(((0.0,) * len(self.segments),),))

    @property
    def key(self) -> bytes:
        """The setting in prefix keys. KV is not shared across settings."""
        return hashlib.blake2b(repr(tuple(self)).encode(), digest_size=16).digest()

    def level(self, partition: int, other: int) -> int:
        """Return the level at which two partitions meet."""
        for level, size in enumerate(self.segments, 1):
            if partition // size == other // size:
                return level
        return self.num_levels

    def segment(self, level: int, partition: int) -> int:
        """Return the number of the segment that contains a partition at a level."""
        return partition // self.segments[level - 1] if level <= len(self.segments) else 0

    def ratio(self, layer: int, kv_head: int, level: int) -> float:
        """Return the fraction of tokens that are dropped."""
        if level == 1:
            return 0.0
        by_head = self.drop[min(layer, len(self.drop) - 1)]
        return by_head[min(kv_head, len(by_head) - 1)][level - 2]

    def num_pieces(self, level: int) -> int:
        """Return the number of micro-partitions of a level."""
        return self.micro_partitions[level - 2] if self.micro_partitions and level > 1 else 1

    def kept(self, size: int, layer: int, kv_head: int, level: int) -> int:
        """Return the number of tokens of a piece that are kept."""
        return size - int(self.ratio(layer, kv_head, level) * size + 1e-9)


def is_tuned(csa: str) -> bool:
    """Return True if a value of option `csa` is the text of a tuned file, which alone has the key `tuned_for`."""
    return csa.lstrip().startswith("{") and '"tuned_for"' in csa
