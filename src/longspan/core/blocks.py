"""KV blocks by their pools: what a request finds cached, where its KV goes; and which groups step together."""

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
        """The instance that owns the block: its number is that of its pool. Of blocks on a host there is none."""
        return self.pool


class Target(NamedTuple):
    """An instance that is to decode a request, and how many blocks of its table, the next ones in order, go there."""

    instance: int
    num_blocks: int


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full block by its tokens and all before them."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixHit:
    """KV found for the first `num_tokens` tokens of a request.

    Attributes:
        refs: the blocks, in order. Of the last perhaps only the tokens up to `num_tokens` are used.
        adopts_last: the last block is used in part, and by no other request. The request takes it over and writes on.
        copies_last: the last block is used in part, and is left as it is. The request writes on in a copy.
        num_loaded: how many of the blocks are on hosts or disks, and are loaded to devices.
        waits: some blocks are being filled, or will be. The request computes nothing before they are.
    """

    refs: tuple[BlockRef, ...] = ()
    num_tokens: int = 0
    adopts_last: bool = False
    copies_last: bool = False
    num_loaded: int = 0
    waits: bool = False

    @property
    def num_held(self) -> int:
        """The number of blocks that need no load: they are on devices, or on a host and read there."""
        return len(self.refs) - self.num_loaded

    @property
    def shared(self) -> tuple[BlockRef, ...]:
        return self.refs[:-1] if self.adopts_last or self.copies_last else self.refs


def coupled_instances(groups: Iterable[Collection[int]]) -> list[frozenset[int]]:
    """Joins groups that share an instance: returns the smallest sets such that no group reaches across two."""
    coupled_with: dict[int, set[int]] = {}
    for group in groups:
        met = {id(coupled_with[i]): coupled_with[i] for i in group if i in coupled_with}
        joined = set(group).union(*met.values())
        if any(len(coupled) == len(joined) for coupled in met.values()):
            continue  # one of them has all of it
        coupled_with.update(dict.fromkeys(joined, joined))
    return sorted(map(frozenset, {id(coupled): coupled for coupled in coupled_with.values()}.values()), key=min)
