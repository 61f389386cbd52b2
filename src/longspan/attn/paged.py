"""KV that lies in blocks, and plans of which blocks a batch of single queries reads, made once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longspan.attn.native import Numbers, PagedItems

_MOST_VIEWS = 8
"""Adjacent blocks are read as one view; a batch that would need more views than this is gathered, which is one copy."""


@dataclass(frozen=True, kw_only=True)
class PagedKv:
    """Keys and values of one layer, `[blocks, kv_heads, block_size, head_dim]`; all of it finite numbers."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        """Returns the tokens per block."""
        return self.keys.shape[2]

    def gather(self, blocks: Sequence[int], start: int, stop: int, k_out: Tensor, v_out: Tensor) -> None:
        """Copies tokens `[start, stop)` of a request, whose token t lies in slot `t % block_size` of
        `blocks[t // block_size]`, into tensors `[kv_heads, stop - start, head_dim]`.
        """
        size, offset = self.block_size, 0
        while start < stop:
            index, inside = divmod(start, size)
            whole = 0 if inside else _adjacent(blocks, index, stop // size)
            num = whole * size or min(stop - start, size - inside)
            chosen, slots = slice(blocks[index], blocks[index] + max(1, whole)), slice(inside, inside + min(num, size))
            for pool, out in ((self.keys, k_out), (self.values, v_out)):
                piece = pool[chosen, :, slots]
                into = out[:, offset : offset + num].view(out.shape[0], -1, piece.shape[2], out.shape[2])
                into.copy_(piece.transpose(0, 1))
            start, offset = start + num, offset + num


@dataclass(frozen=True, kw_only=True)
class Reads:
    """The tokens `[start, stop)` that one query sees, counted as in `PagedKv.gather`."""

    blocks: Sequence[int]
    start: int
    stop: int


class PagedPlan:
    """Lists the blocks that a batch of queries reads. Query t sees `reads[t]`, which may be nothing.

    Attributes:
        items: one for each query and block that it sees.
    """

    def __init__(self, reads: Sequence[Reads], kv: PagedKv) -> None:
        self.reads = tuple(reads)
        self.items = _items(reads, kv.block_size)
        self._block_size, self._device, self._dtype = kv.block_size, kv.keys.device, kv.keys.dtype

    @property
    def num_queries(self) -> int:
        """Returns how many queries the plan is for."""
        return len(self.reads)

    @cached_property
    def batch(self) -> PagedBatch:
        """Returns the items as PyTorch's kernels take them, made when a kernel first asks."""
        return PagedBatch(self.items, self._block_size, self._device, self._dtype)


class PagedBatch:
    """The items as a batch of kernel calls, in an order that reads adjacent blocks as one view.

    Attributes:
        owner: `[items]`, the query of each block that is read.
        views: slices of the pool, or one index of it, that give the items in order.
        mask: `[items, 1, 1, block_size]`, 0 where a slot is seen and -inf elsewhere; None when all are.
        items_of: `[queries, most items of a query]`, the items of each query, padded with the number of items.
    """

    def __init__(self, items: PagedItems, block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        num_queries = len(items.first) - 1
        owner = np.repeat(np.arange(num_queries, dtype=np.int64), np.diff(items.first))
        order = np.lexsort((items.blocks, _nth_use(items.blocks)))
        owner, blocks, low, high = owner[order], items.blocks[order], items.low[order], items.high[order]
        self.owner = torch.from_numpy(owner).to(device)
        self.views = _views(blocks, device)
        self.mask = None
        if (low > 0).any() or (high < block_size).any():
            slots = np.arange(block_size)
            seen = (slots >= low[:, None]) & (slots < high[:, None])
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
            self.mask = mask[:, None, None].to(device)
        self.items_of = torch.from_numpy(_items_of(owner, num_queries)).to(device)


def _items(reads: Sequence[Reads], size: int) -> PagedItems:
    counts, blocks, lows, highs = [], [], [], []
    for read in reads:
        begin, end = read.start // size, -(-read.stop // size) if read.stop > read.start else read.start // size
        begins = np.arange(begin, end, dtype=np.int64) * size
        counts.append(end - begin)
        blocks.append(np.asarray(read.blocks[begin:end], dtype=np.int64))
        lows.append(np.maximum(read.start - begins, 0))
        highs.append(np.minimum(read.stop - begins, size))
    first = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
    return PagedItems(first, np.concatenate(blocks), np.concatenate(lows), np.concatenate(highs))


def _nth_use(blocks: Numbers) -> Numbers:
    """Counts the items before each one that read the same block, as requests with a common prefix do."""
    order = np.argsort(blocks, kind="stable")
    ordered = blocks[order]
    first = np.searchsorted(ordered, ordered, side="left")
    nth = np.empty_like(blocks)
    nth[order] = np.arange(len(blocks)) - first
    return nth


def _views(blocks: Numbers, device: torch.device) -> list[slice] | list[Tensor]:
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    if len(cuts) >= _MOST_VIEWS:
        return [torch.from_numpy(blocks).to(device)]
    return [slice(int(part[0]), int(part[-1]) + 1) for part in np.split(blocks, cuts) if len(part)]


def _items_of(owner: Numbers, num_queries: int) -> Numbers:
    counts = np.bincount(owner, minlength=num_queries)
    table = np.full((num_queries, max(1, int(counts.max(initial=0)))), len(owner), dtype=np.int64)
    order = np.argsort(owner, kind="stable")
    column = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    table[owner[order], column] = order
    return table


def _adjacent(blocks: Sequence[int], index: int, end: int) -> int:
    """Counts how many of `blocks[index:end]` follow each other in the pool."""
    count = 0
    while index + count < end and blocks[index + count] == blocks[index] + count:
        count += 1
    return count
