"""Sparse attention in levels (CSPS §3.2.4): a setting as a value.

The sequence is cut into partitions of so many tokens. A query meets the keys of its own partition at level 1, exactly.
At each further level a segment joins several segments of the level before, up to the whole sequence at the last; a pair
of partitions meets at the first level that has both in one segment. So regions are disjoint, and with nothing dropped
all of them together are full attention. Keys far away lie in earlier partitions: above level 1 nothing is masked.

Levels go by positions, whoever holds the tokens: chunks of a prompt and cached blocks fall into the same partitions.
Who computes what is in `sparse_plan.py`.
"""

from __future__ import annotations

import hashlib
from typing import Literal, NamedTuple

RateBy = Literal["layer", "head"]
"""The attention by which a token is rated for a KV head: of all heads of the layer before, or of that KV head alone."""
DropMode = Literal["qkv", "kv"]
"""Drops of unimportant tokens: of all that they have, or of keys and values only."""

MOST_LEVELS, MOST_PIECES = 4, 16
"""The most levels, and the most micro-partitions of each: every piece has a tag of its own."""
TOKENS_HOP, RESULTS_HOP, SAMPLES_HOP = 0, MOST_PIECES, MOST_LEVELS * MOST_PIECES
SPARSE_HOPS = SAMPLES_HOP + 1
"""The hops that one layer numbers: pieces of tokens; then, by level, pieces of results; then sampled queries."""


class SparseSetting(NamedTuple):
    """The way one request drops tokens.

    Attributes:
        partition: tokens of a partition.
        segments: how many partitions a segment has at each level but the last; the first is 1.
        drop: the drop ratio by layer, KV head and level, from level 2 on. A single entry is for all layers, or heads.
        mode: what is dropped of a token.
        micro_partitions: into how many pieces is cut what members send that meet at a level, from level 2 on, and so
            are the results of that level; empty for one each.
        samples, rate_by: queries of each member by which keys are rated, and whose attention counts.
    """

    partition: int
    segments: tuple[int, ...]
    drop: tuple[tuple[tuple[float, ...], ...], ...]
    mode: DropMode = "qkv"
    micro_partitions: tuple[int, ...] = ()
    samples: int = 64
    rate_by: RateBy = "layer"

    @property
    def num_levels(self) -> int:
        return len(self.segments) + 1

    @property
    def exact(self) -> SparseSetting:
        """The same without drops."""
        return self._replace(drop=(((0.0,) * len(self.segments),),))

    @property
    def key(self) -> bytes:
        """Names the setting in prefix keys: what is computed by one is never found by another."""
        return hashlib.blake2b(repr(tuple(self)).encode(), digest_size=16).digest()

    def level(self, partition: int, other: int) -> int:
        """Returns the level at which two partitions meet."""
        for level, size in enumerate(self.segments, 1):
            if partition // size == other // size:
                return level
        return self.num_levels

    def segment(self, level: int, partition: int) -> int:
        """Numbers the segment of a level that a partition lies in."""
        return partition // self.segments[level - 1] if level <= len(self.segments) else 0

    def ratio(self, layer: int, kv_head: int, level: int) -> float:
        """Returns the share of tokens that are dropped."""
        if level == 1:
            return 0.0
        by_head = self.drop[min(layer, len(self.drop) - 1)]
        return by_head[min(kv_head, len(by_head) - 1)][level - 2]

    def num_pieces(self, level: int) -> int:
        """Counts the micro-partitions of a level."""
        return self.micro_partitions[level - 2] if self.micro_partitions and level > 1 else 1

    def kept(self, size: int, layer: int, kv_head: int, level: int) -> int:
        """Counts the tokens of a piece that are kept."""
        return size - int(self.ratio(layer, kv_head, level) * size + 1e-9)


def is_tuned(csa: str) -> bool:
    """Returns True if a value of option `csa` is the text of a tuned file: no other JSON of ours has that name."""
    return csa.lstrip().startswith("{") and '"tuned_for"' in csa
