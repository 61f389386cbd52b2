"""KV that lies in blocks, and attention of single queries over it, read in place: one kernel call for a whole batch.

Every block that a query sees is an item of its own in the batch of the kernel; the partial results of a query's blocks
are merged. The cost of Python and of launches does not depend on how many queries there are or how long their
requests. What is the same in all layers is worked out once, in a `PagedPlan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from longspan.attn import native
from longspan.attn.kernel import Partial, attend_batch
from longspan.attn.native import Numbers, PagedItems
from longspan.attn.spec import AttnSpec

_MOST_VIEWS = 8
"""Adjacent blocks are read as one view; a batch that would need more views than this is gathered, which is one copy."""


@dataclass(frozen=True, kw_only=True)
class PagedKv:
    """Keys and values of one layer, `[blocks, kv_heads, block_size, head_dim]`; all of it finite numbers."""

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        """Tokens per block."""
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
    """Which blocks a batch of queries reads. Query t sees `reads[t]`, which may be nothing.

    Attributes:
        items: one for each query and block that it sees.
    """

    def __init__(self, reads: Sequence[Reads], block_size: int, device: torch.device, dtype: torch.dtype) -> None:
        self.num_queries = len(reads)
        self.items = _items(reads, block_size)
        self._block_size, self._device, self._dtype = block_size, device, dtype

    @cached_property
    def batch(self) -> _Batch:
        """For PyTorch's kernels."""
        return _Batch(self.items, self._block_size, self._device, self._dtype)


class _Batch:
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


def attend_paged(q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
    """Attention of `q [heads, queries, head_dim]`, each query over what `plan` says it sees."""
    num_heads, num_queries, dim = q.shape
    assert num_queries == plan.num_queries, "the plan is for these queries"
    if native.applies_paged(q, spec):
        return native.attend_paged(q, kv.keys, kv.values, plan.items, spec)
    if not len(plan.items.blocks):
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    batch = plan.batch
    rows = q.transpose(0, 1).reshape(num_queries, spec.num_kv_heads, -1, dim)
    outs, lses = _attend_items(rows[batch.owner], kv, batch, spec)
    lses = torch.cat([lses, lses.new_full((1, *lses.shape[1:]), -torch.inf)])
    lse = torch.logsumexp(lses[batch.items_of], dim=1)
    weights = torch.exp(lses[:-1] - lse[batch.owner])
    out = torch.zeros(rows.shape, dtype=torch.float32, device=q.device)
    out.index_add_(0, batch.owner, outs * weights[..., None])
    out = out.view(num_queries, num_heads, dim).transpose(0, 1)
    return out.to(q.dtype), lse.view(num_queries, num_heads).transpose(0, 1)


def _attend_items(rows: Tensor, kv: PagedKv, batch: _Batch, spec: AttnSpec) -> Partial:
    """`out [items, kv_heads, queries per head, head_dim]` and `lse [items, kv_heads, queries per head]`."""
    found, start = [], 0
    for view in batch.views:
        k, v = kv.keys[view], kv.values[view]
        items = slice(start, start + len(k))
        mask = None if batch.mask is None else batch.mask[items]
        found.append(attend_batch(rows[items], k, v, spec, mask))
        start += len(k)
    if len(found) == 1:
        return found[0]
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


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
    """How many items before this one read the same block: requests that share a prefix do."""
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
    """How many of `blocks[index:end]` follow each other in the pool."""
    count = 0
    while index + count < end and blocks[index + count] == blocks[index] + count:
        count += 1
    return count
