"""Triton kernels for KV in blocks: attention of single queries over long contexts, and copies of tokens.

The context of a query is split, and one program computes each split (flash-decoding). Another kernel merges the splits
of a query in two levels: tiles of splits at once, and one tile after the other. Splits depend only on the reads of the
query, so other queries of the batch do not change a bit of a result.

Numbers that change from step to step are not specialized: Triton would compile again if they are 1 or multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attn.backends import Partial, nothing_seen
from longspan.attn.paged import KeysAndValues, PagedKv, PagedPlan
from longspan.attn.paged_splits import copied_once
from longspan.attn.spec import AttnSpec

MAX_DIM = 256
"""The largest head dimension whose sums fit into the registers of a program."""
NUM_WARPS, NUM_STAGES = 4, 3
"""Tiles of keys and values are copied up to two tiles ahead."""
TILE_ROWS = 16
"""Query heads of a tile, the minimum of a product."""
_TILE_BYTES = 16 * 1024
COPIED_TOKENS = 16
MERGED_SPLITS = 32
"""Splits of a query that are merged at once."""


def attend_paged(q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
    """Compute `AttentionBackend.attend_paged` for head dimensions up to `MAX_DIM`."""
    num_heads, num_queries, dim = q.shape
    assert num_queries == plan.num_queries, "the plan is for these queries"
    splits, readers = plan.splits, num_heads // spec.num_kv_heads
    num_splits = len(splits.owner)
    if not num_splits:
        return nothing_seen(q)
    assert kv.keys.stride() == kv.values.stride() and kv.keys.stride(3) == 1, "keys and values have the same layout"
    q = q if q.stride(2) == 1 else q.contiguous()
    outs = torch.empty(num_splits, num_heads, dim, dtype=torch.float32, device=q.device)
    lses = torch.empty(num_splits, num_heads, dtype=torch.float32, device=q.device)
    out = torch.empty(num_queries, num_heads, dim, dtype=q.dtype, device=q.device).transpose(0, 1)
    lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        split_kernel[num_splits, spec.num_kv_heads, triton.cdiv(readers, TILE_ROWS)](
            *(q, kv.keys, kv.values, splits.blocks, splits.low, splits.high),
            *(splits.owner, splits.first, splits.last, outs, lses),
            *(q.stride(0), q.stride(1), *kv.keys.stride()[:3], readers, num_heads),
            **of_scores(q, spec),
            tile_rows=TILE_ROWS,
            block_size=kv.block_size,
            tile_keys=min(tile_keys(dim, q.dtype), padded(kv.block_size)),
            num_warps=NUM_WARPS,
            num_stages=NUM_STAGES,
        )
        merge_kernel[num_queries, num_heads](
            *(outs, lses, splits.of_query, out, lse, out.stride(0), out.stride(1), num_heads, num_queries),
            dim=dim,
            width=padded(dim),
            tile_splits=MERGED_SPLITS,
        )
    return out, lse


def store(kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
    assert blocks.is_contiguous() and offsets.is_contiguous(), "the kernel reads them as arrays"
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    _copy(kv, k, v, blocks, offsets)


def gather(kv: PagedKv, blocks: Sequence[int], start: int, stop: int, out: KeysAndValues) -> None:
    k_out, v_out = out
    assert k_out.shape[1] == stop - start and k_out.stride(2) == v_out.stride(2) == 1, (
        "contiguous rows for these tokens"
    )
    _copy(kv, k_out, v_out, copied_once(tuple(blocks), torch.int64, k_out.device), None, begin=start)


def _copy(kv: PagedKv, k: Tensor, v: Tensor, blocks: Tensor, offsets: Tensor | None, *, begin: int = 0) -> None:
    num_heads, num_tokens, dim = k.shape
    assert kv.keys.stride() == kv.values.stride() and kv.keys.stride(3) == 1, "keys and values have the same layout"
    if not num_tokens:
        return
    with torch.cuda.device_of(k):
        copy_kernel[triton.cdiv(num_tokens, COPIED_TOKENS), num_heads](
            *(kv.keys, kv.values, k, v, blocks, offsets),
            *(*kv.keys.stride()[:3], *k.stride()[:2], *v.stride()[:2], begin, num_tokens, kv.block_size),
            dim=dim,
            width=padded(dim),
            tile=COPIED_TOKENS,
        )


def tile_keys(dim: int, dtype: torch.dtype) -> int:
    """Return the keys of a tile. `NUM_STAGES` tiles each of keys and values fit into 99 KB of shared memory."""
    return max(16, min(64, _TILE_BYTES // (padded(dim) * dtype.itemsize)))


def padded(dim: int) -> int:
    """Return the row length of a tile for `dim` elements: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def of_scores(q: Tensor, spec: AttnSpec) -> dict[str, Any]:
    """Return the arguments of all kernels that compute scores of queries `[H, T, D]`."""
    return {
        "scale": spec.scale,
        "softcap": spec.softcap or 1.0,
        "has_softcap": spec.softcap is not None,
        "widen": must_widen(q),
        "dim": q.shape[2],
        "width": padded(q.shape[2]),
    }


def must_widen(tensor: Tensor) -> bool:
    """Return True if products need float32. Triton's interpreter multiplies the bits of bfloat16 as integers."""
    return bool(triton.knobs.runtime.interpret) and tensor.dtype == torch.bfloat16


@triton.jit
def product(left: tl.tensor, right: tl.tensor, widen: tl.constexpr) -> tl.tensor:
    """Multiply matrices with sums in float32. Inputs of float32 are not rounded to TF32."""
    if widen:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def scores_of(
    queries: tl.tensor,
    keys: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,
) -> tl.tensor:
    scores = product(queries, keys, widen) * scale
    if has_softcap:
        scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))  # softcap * tanh(scores / softcap)
    return scores


@triton.jit
def add_tile(
    queries: tl.tensor,
    k_at: tl.tensor,
    v_at: tl.tensor,
    seen: tl.tensor,
    in_dim: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    acc: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,
    hidden: tl.tensor | None,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Add a tile of keys, at `[width, keys]`, and of values to the softmax.

    Every row sees the `seen` keys, of which there is at least one, except keys that are `hidden` from the row.
    """
    tile = tl.load(k_at, mask=in_dim[:, None] & seen[None, :], other=0.0)
    scores = scores_of(queries, tile, scale, softcap, has_softcap, widen)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    if hidden is not None:
        scores = tl.where(hidden, float("-inf"), scores)
    higher = tl.maximum(highest, tl.max(scores, 1))
    base = higher
    if hidden is not None:  # a row may not have seen a key yet
        base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    shrink = tl.exp(highest - base)
    tile = tl.load(v_at, mask=seen[:, None] & in_dim[None, :], other=0.0)
    total = total * shrink + tl.sum(weights, 1)
    return higher, total, acc * shrink[:, None] + product(weights.to(tile.dtype), tile, widen)


@triton.jit
def split_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    owner: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    outs: tl.tensor,
    lses: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    kv_block: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    readers: tl.tensor,
    num_heads: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Attend the heads that read one KV head to the blocks of one split, tile by tile. Empty splits are skipped.

    Only the first block of a split may be read from a later slot, and only the last one up to an earlier slot. The
    block of the next tile is loaded one tile ahead, so that addresses never wait for it.
    """
    split = tl.program_id(0).to(tl.int64)
    first_item, last_item = tl.load(first + split), tl.load(last + split)
    if first_item == last_item:
        return
    group = tl.program_id(1).to(tl.int64)
    reader = tl.program_id(2) * tile_rows + tl.arange(0, tile_rows)
    in_rows = reader < readers
    head = group * readers + reader
    column = tl.arange(0, width)
    in_dim = column < dim
    whole_rows = in_rows[:, None] & in_dim[None, :]
    query_at = head * q_head + tl.load(owner + split) * q_row
    queries = tl.load(q + query_at[:, None] + column[None, :], mask=whole_rows, other=0.0)
    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    acc = tl.zeros((tile_rows, width), tl.float32)
    tiles = tl.cdiv(block_size, tile_keys)
    last_block = last_item - 1 - first_item
    stop = tl.load(high + last_item - 1)
    begin, end = tl.load(low + first_item), last_block * block_size + stop
    block = tl.load(blocks + first_item)
    for tile in range(begin // tile_keys, last_block * tiles + tl.cdiv(stop, tile_keys)):
        next_block = tl.load(blocks + first_item + tl.minimum((tile + 1) // tiles, last_block))
        slot = tile % tiles * tile_keys + tl.arange(0, tile_keys)
        place = tile // tiles * block_size + slot
        seen = (slot < block_size) & (place >= begin) & (place < end)
        at = block * kv_block + group * kv_head + slot * kv_row
        k_at, v_at = keys + at[None, :] + column[:, None], values + at[:, None] + column[None, :]
        highest, total, acc = add_tile(
            queries, k_at, v_at, seen, in_dim, highest, total, acc, scale, softcap, has_softcap, widen, None
        )
        block = next_block
    out_at = (split * num_heads + head)[:, None] * dim + column[None, :]
    tl.store(outs + out_at, acc / total[:, None], mask=whole_rows)
    tl.store(lses + split * num_heads + head, highest + tl.log(total), mask=in_rows)


@triton.jit(do_not_specialize=["num_queries"])
def merge_kernel(
    outs: tl.tensor,
    lses: tl.tensor,
    of_query: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    num_heads: tl.tensor,
    num_queries: tl.tensor,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile_splits: tl.constexpr,
) -> None:
    """Merge the splits of one query and head, in order. Without any, the query has seen nothing."""
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, width)
    in_dim = column < dim
    first, last = tl.load(of_query + query), tl.load(of_query + query + 1)
    highest = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((width,), tl.float32)
    for start in range(first, last, tile_splits):
        split = start + tl.arange(0, tile_splits)
        there = split < last
        at = split * num_heads + head
        new = tl.load(lses + at, mask=there, other=float("-inf"))
        parts = tl.load(outs + at[:, None] * dim + column[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
        higher = tl.maximum(highest, tl.max(new, 0))
        shrink, weights = tl.exp(highest - higher), tl.exp(new - higher)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        highest = higher
    share = tl.where(total > 0.0, 1.0 / tl.where(total > 0.0, total, 1.0), 0.0)
    tl.store(out + head * out_head + query * out_row + column, (acc * share).to(out.dtype.element_ty), mask=in_dim)
    tl.store(lse + head * num_queries + query, tl.where(total > 0.0, highest + tl.log(total), float("-inf")))


@triton.jit(do_not_specialize=["begin", "num_tokens"])
def copy_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    blocks: tl.tensor,
    offsets: tl.tensor | None,
    kv_block: tl.tensor,
    kv_head: tl.tensor,
    kv_row: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    begin: tl.tensor,
    num_tokens: tl.tensor,
    block_size: tl.tensor,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy keys and values of one head: to the slots at `offsets`, or without offsets from the slots of a block table.

    Tokens of blocks below 0 are not stored.
    """
    token = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    head = tl.program_id(1).to(tl.int64)
    inside = token < num_tokens
    column = tl.arange(0, width)
    whole = inside[:, None] & (column < dim)[None, :]
    k_at = k + (head * k_head + token * k_row)[:, None] + column[None, :]
    v_at = v + (head * v_head + token * v_row)[:, None] + column[None, :]
    if offsets is not None:
        block, offset = tl.load(blocks + token, mask=inside, other=-1), tl.load(offsets + token, mask=inside, other=0)
        whole = whole & (block >= 0)[:, None]
        slot = (block * kv_block + head * kv_head + offset * kv_row)[:, None] + column[None, :]
        tl.store(keys + slot, tl.load(k_at, mask=whole), mask=whole)
        tl.store(values + slot, tl.load(v_at, mask=whole), mask=whole)
    else:
        place = token + begin
        block = tl.load(blocks + place // block_size, mask=inside, other=0)
        slot = (block * kv_block + head * kv_head + place % block_size * kv_row)[:, None] + column[None, :]
        tl.store(k_at, tl.load(keys + slot, mask=whole), mask=whole)
        tl.store(v_at, tl.load(values + slot, mask=whole), mask=whole)
