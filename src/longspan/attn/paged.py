"""KV in blocks, and plans for the reads of a batch of single queries, made once for all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from longspan.attn.paged_splits import PagedSplits

KeysAndValues = tuple[Tensor, Tensor]
"""Two tensors `[kv_heads, tokens, head_dim]`."""
Numbers = npt.NDArray[np.int64]
_MAX_VIEWS = 8
"""Adjacent blocks are read as one view. If a batch needs more views than this, it is gathered by one copy."""


@dataclass(frozen=True, kw_only=True)
class PagedKv:
    """Keys and values of one layer, `[blocks, kv_heads, block_size, head_dim]`, whose head_dim may differ.

    Slots that no query of a call sees may contain any bits, NaN included. No result depends on them.
    """

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    def heads(self, kv_heads: range) -> PagedKv:
        chosen = slice(kv_heads.start, kv_heads.stop)
        return PagedKv(keys=self.keys[:, chosen], values=self.values[:, chosen])

    def gather(self, blocks: Sequence[int], start: int, stop: int, k_out: Tensor, v_out: Tensor) -> None:
        """Copy tokens `[start, stop)` of a request into tensors `[kv_heads, stop - start, head_dim]`.

        Token t is in slot `t % block_size` of `blocks[t // block_size]`.
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


class PagedItems(NamedTuple):
    """The blocks that queries read: query t slots `[low, high)` of `blocks` of items `[first[t], first[t + 1])`."""

    first: Numbers
    blocks: Numbers
    low: Numbers
    high: Numbers


class PagedPlan:
    """The items of a batch of queries. Query t sees `reads[t]`, which may be empty."""

    def __init__(self, reads: Sequence[Reads], kv: PagedKv) -> None:
        self.num_queries, self.items, self._kv = len(reads), _items(reads, kv.block_size), kv

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the arrays of `items`. The plan keeps the arrays alive."""
        return tuple(array.ctypes.data for array in self.items)

    @cached_property
    def splits(self) -> PagedSplits:
        """The items for Triton kernels, computed on first use."""
        from longspan.attn.paged_splits import PagedSplits  # noqa: PLC0415 - only for Triton kernels

        return PagedSplits(*on_device([torch.from_numpy(array) for array in self.split_items()], self._kv.keys.device))

    def split_items(self) -> tuple[Numbers, ...]:
        """Split the items of each query. Return the arrays of `PagedSplits`."""
        from longspan.attn.paged_splits import split  # noqa: PLC0415 - only for Triton kernels

        return split(self.items, self._kv.block_size)

    @cached_property
    def batch(self) -> PagedBatch:
        return PagedBatch(self.items, self._kv)


class PagedBatch:
    """The items as a batch of kernel calls. Whole blocks come first and are read in place. Blocks that a query sees in
    part are copied.

    A kernel that masks a slot still multiplies its value by a weight of 0. Hidden slots may contain any bits, and 0
    times NaN is NaN. So the copies have zeros there.

    Attributes:
        owner: `[items]`, the query of each block that is read. Items are in the order of `views`, then of `edges`.
        views: slices of the pool, or one index of it, that give the whole blocks in order. Adjacent blocks are one
            view.
        edges: the blocks seen in part. None if there are none.
        items_of: `[queries, most items of a query]`, the items of each query, padded with the number of items.
    """

    def __init__(self, items: PagedItems, kv: PagedKv) -> None:
        num_queries, device = len(items.first) - 1, kv.keys.device
        owner = np.repeat(np.arange(num_queries, dtype=np.int64), np.diff(items.first))
        is_edge = (items.low > 0) | (items.high < kv.block_size)
        order = np.lexsort((items.blocks, _nth_use(items.blocks), is_edge))
        owner, blocks = owner[order], items.blocks[order]
        num_whole = len(blocks) - int(is_edge.sum())
        self.owner = torch.from_numpy(owner).to(device)
        self.views = _views(blocks[:num_whole], device)
        self.edges = None
        if num_whole < len(blocks):
            slots, (low, high) = np.arange(kv.block_size), (ends[order][num_whole:, None] for ends in items[2:])
            hidden = torch.from_numpy((slots < low) | (slots >= high))
            self.edges = PagedEdges(blocks=torch.from_numpy(blocks[num_whole:]).to(device), hidden=hidden.to(device))
        nth = _nth_use(owner)
        items_of = np.full((num_queries, nth.max(initial=0) + 1), len(owner), dtype=np.int64)
        items_of[owner, nth] = np.arange(len(owner))
        self.items_of = torch.from_numpy(items_of).to(device)


@dataclass(frozen=True, kw_only=True)
class PagedEdges:
    """Blocks of which a query sees some slots: `blocks [items]` and `hidden [items, block_size]`, where the pool is."""

    blocks: Tensor
    hidden: Tensor

    def copy(self, pool: Tensor) -> Tensor:
        """Copy the blocks of a pool to `[items, kv_heads, block_size, head_dim]`, with zeros in hidden slots."""
        return pool[self.blocks].masked_fill_(self.hidden[:, None, :, None], 0.0)

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Return `[items, 1, 1, block_size]`: 0 where a slot is seen, -inf where it is hidden."""
        zeros = torch.zeros(self.hidden.shape, dtype=dtype, device=self.hidden.device)
        return zeros.masked_fill_(self.hidden, -torch.inf)[:, None, None]


def on_device(arrays: Sequence[Tensor], device: torch.device) -> Sequence[Tensor]:
    """Copy arrays of int64 to a device by one asynchronous copy. Return them unchanged if they are there already."""
    if all(array.device.type == device.type for array in arrays):
        return arrays
    from longspan.attn.paged_splits import NumberBuffer  # noqa: PLC0415 - not on CPUs

    buffer = NumberBuffer([len(array) for array in arrays], device)
    buffer.fill([array.numpy() for array in arrays])
    return buffer.arrays


def _items(reads: Sequence[Reads], size: int) -> PagedItems:
    starts, stops = np.array([(read.start, read.stop) for read in reads], dtype=np.int64).reshape(-1, 2).T
    begins, ends = starts // size, -(-stops // size)
    counts = np.where(stops > starts, ends - begins, 0)
    first = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(np.arange(len(reads)), counts)
    offsets = (np.arange(first[-1]) - first[owner] + begins[owner]) * size  # of each block in its request
    lists = [read.blocks[begin : begin + count] for read, begin, count in zip(reads, begins, counts, strict=True)]
    return PagedItems(
        first,
        np.fromiter(itertools.chain.from_iterable(lists), dtype=np.int64, count=len(owner)),
        np.maximum(starts[owner] - offsets, 0),
        np.minimum(stops[owner] - offsets, size),
    )


def _nth_use(numbers: Numbers) -> Numbers:
    """Count, for each number, its earlier occurrences. Requests with a common prefix read the same blocks."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    nth = np.empty_like(numbers)
    nth[order] = np.arange(len(numbers)) - np.searchsorted(ordered, ordered, side="left")
    return nth


def _views(blocks: Numbers, device: torch.device) -> list[slice] | list[Tensor]:
    cuts = np.flatnonzero(np.diff(blocks) != 1) + 1
    if len(cuts) >= _MAX_VIEWS:
        return [torch.from_numpy(blocks).to(device)]
    return [slice(int(part[0]), int(part[-1]) + 1) for part in np.split(blocks, cuts) if len(part)]


def _adjacent(blocks: Sequence[int], index: int, end: int) -> int:
    """Count how many of `blocks[index:end]` are adjacent in the pool."""
    count = 0
    while index + count < end and blocks[index + count] == blocks[index] + count:
        count += 1
    return count
