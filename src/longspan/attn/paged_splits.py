"""The reads of single queries for kernels that compute splits in parallel, and numbers on a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.attn.paged import Numbers, PagedItems

_SPLIT_TOKENS, _MOST_SPLITS = 256, 128
"""Slots of a split, unless a block has more, and splits of a query. If a query needs more splits, they are larger.

A context of 8K tokens and 8 KV heads gives 256 programs, and large GPUs have 132 to 148 multiprocessors. Smaller splits
read and write more partial results: with 256 slots, 3 % of the bytes of the 8B shape's KV.
"""


class PagedSplits(NamedTuple):
    """The items in splits of adjacent items of one query, for kernels that compute splits in parallel.

    The splits of a query depend only on the query. All arrays are int64. There may be additional splits without items.

    Attributes:
        blocks, low, high: of each item, as in `PagedItems`.
        owner: the query of each split.
        first, last: the items `[first, last)` of each split.
        of_query: query t has the splits `[of_query[t], of_query[t + 1])`.
    """

    blocks: Tensor
    low: Tensor
    high: Tensor
    owner: Tensor
    first: Tensor
    last: Tensor
    of_query: Tensor


class NumberBuffer:
    """Arrays of int64 with fixed addresses on a device, which one asynchronous copy fills.

    Attributes:
        arrays: the arrays. Each begins at a multiple of 16 bytes, since Triton compiles for the alignment of arguments.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        *starts, total = itertools.accumulate((size + size % 2 for size in sizes), initial=0)
        self._numbers = torch.empty(total, dtype=torch.int64, device=device)
        self._places = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        self.arrays = tuple(self._numbers[place] for place in self._places)

    def fill(self, arrays: Iterable[Numbers], padding: Iterable[int] = itertools.repeat(0)) -> None:
        """Fill each array from its start, and the rest of it with padding.

        The copy reads a buffer of its own, which no later call reuses.
        """
        staged = torch.empty(len(self._numbers), dtype=torch.int64, pin_memory=self._numbers.is_cuda)
        numbers = staged.numpy()
        for place, array, number in zip(self._places, arrays, padding, strict=False):
            end = place.start + len(array)
            assert end <= place.stop, "the array is large enough"
            numbers[place.start : end], numbers[end : place.stop] = array, number
        self._numbers.copy_(staged, non_blocking=True)


def copied(numbers: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy numbers of the host to a device. `torch.tensor(..., device)` would wait for all work of a CUDA device."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


copied_once = lru_cache(maxsize=256)(copied)
"""`copied`, once for all layers of a step. The numbers are a tuple."""


def max_splits(num_items: int, num_queries: int, block_size: int) -> int:
    """Return the maximum number of splits of `num_items` items, for any division among the queries."""
    return min(num_items // max(1, _SPLIT_TOKENS // block_size), (_MOST_SPLITS - 1) * num_queries) + num_queries


def split(items: PagedItems, block_size: int) -> tuple[Numbers, ...]:
    """Split the items of each query. Return the arrays of `PagedSplits`."""
    num_items = np.diff(items.first)
    per_split = np.maximum(max(1, _SPLIT_TOKENS // block_size), -(-num_items // _MOST_SPLITS))
    counts = -(-num_items // per_split)
    of_query = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(np.arange(len(counts)), counts)
    first = items.first[owner] + (np.arange(len(owner)) - of_query[owner]) * per_split[owner]
    last = np.minimum(first + per_split[owner], items.first[owner + 1])
    return items.blocks, items.low, items.high, owner, first, last, of_query
