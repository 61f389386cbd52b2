"""A KV pool whose slots are NaN wherever no query reads."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from longspan.attn.paged import PagedKv, Reads


def with_nan_in_unseen_slots(kv: PagedKv, reads: Iterable[Reads]) -> PagedKv:
    """Copies a pool, with NaN in every slot that none of these reads sees."""
    num_blocks, _, block_size, _ = kv.keys.shape
    seen = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for read in reads:
        for token in range(read.start, read.stop):
            seen[read.blocks[token // block_size], token % block_size] = True
    hidden = ~seen[:, None, :, None].to(kv.keys.device)
    keys, values = (pool.masked_fill(hidden, torch.nan) for pool in (kv.keys, kv.values))
    return PagedKv(keys=keys, values=values)
