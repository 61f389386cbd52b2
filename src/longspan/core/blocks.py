"""KV blocks by their pools, prefix hits, transfer targets, and sets of coupled instances."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class BlockRef(NamedTuple):
    """One KV block: a pool of the cluster by its id, and the number of a block in it."""

    pool: int
    block: int

    @property
    def instance(self) -> int:
        """The instance with this pool number. Only for device blocks."""
        return self.pool


class Target(NamedTuple):
    """A decode instance of a request, and the number of blocks of its table that go there, in order of targets."""

    instance: int
    num_blocks: int


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the prefix key of a full block, which depends on its tokens and all tokens before it."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixHit:
    """KV found for the first `num_tokens` tokens of a request.

    Attributes:
        refs: the blocks, in order. Only tokens up to `num_tokens` are used of the last block.
        adopts_last: the last block is partly used and unreferenced. The request overwrites its tail.
        copies_last: the last block is partly used and stays as it is. The request writes to a copy.
        num_loaded: number of blocks that are loaded from hosts or disks to devices.
        waits: some blocks are not filled yet. The request computes nothing before they are.
    """

    refs: tuple[BlockRef, ...] = ()
    num_tokens: int = 0
    adopts_last: bool = False
    copies_last: bool = False
    num_loaded: int = 0
    waits: bool = False

    @property
    def num_held(self) -> int:
        """The number of blocks that need no load: device blocks, and host blocks that are read in place."""
        return len(self.refs) - self.num_loaded

    @property
    def shared(self) -> tuple[BlockRef, ...]:
        return self.refs[:-1] if self.adopts_last or self.copies_last else self.refs


def coupled_instances(groups: Iterable[Collection[int]]) -> list[frozenset[int]]:
    """Join groups that share an instance. Return the smallest disjoint sets that contain whole groups."""
    coupled_with: dict[int, set[int]] = {}
    for group in groups:
        met = {id(coupled_with[i]): coupled_with[i] for i in group if i in coupled_with}
        joined = set(group).union(*met.values())
        if any(len(coupled) == len(joined) for coupled in met.values()):
            continue  # one set contains the group
        coupled_with.update(dict.fromkeys(joined, joined))
    return sorted(map(frozenset, {id(coupled): coupled for coupled in coupled_with.values()}.values()), key=min)
