"""Triton kernels for prompts on CUDA: sliding windows, and sparse attention (select, attend, combine, rate).

The last dimension of all tensors is contiguous, and the strides of other dimensions are arguments. Offsets are 64-bit,
since keys of a long prompt have more than 2^32 elements. Only this module and `triton_paged` import triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspan.attn.backends import Partial, nothing_seen, triton_paged
from longspan.attn.backends.pytorch_cuda import TorchCuda
from longspan.attn.backends.triton_paged import MAX_DIM, add_tile, of_scores, padded, scores_of
from longspan.attn.paged import KeysAndValues, PagedKv, PagedPlan
from longspan.attn.spec import AttnSpec

OPTIONS = {"num_warps": 8, "num_stages": 2, "maxnreg": 255}
"""Options of kernels that compute scores. Without `maxnreg`, some registers are in local memory."""
COPIED = 64
"""Rows that a program copies or merges."""


class TritonCuda(TorchCuda):
    """Our kernels for blocks, sparse attention and windows that FlashAttention does not support, else PyTorch's."""

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Read the blocks in place, with two launches for all queries, except for very large heads."""
        if q.shape[2] > MAX_DIM:
            return super().attend_paged(q, kv, plan, spec)
        return triton_paged.attend_paged(q, kv, plan, spec)

    def is_recordable(self, spec: AttnSpec) -> bool:
        return spec.head_dim <= MAX_DIM

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        triton_paged.store(kv, blocks, offsets, k, v)

    def gather(self, kv: PagedKv, blocks: Sequence[int], start: int, stop: int, out: KeysAndValues) -> None:
        triton_paged.gather(kv, blocks, start, stop, out)

    def _band(
        self, q: Tensor, k: Tensor, v: Tensor, lower: int, upper: int, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Compute windows that FlashAttention does not support tile by tile, except for very large heads."""
        (num_heads, num_queries, dim), (num_kv_heads, num_keys, _) = q.shape, k.shape
        if dense or dim > MAX_DIM or self._flash_supports(q, spec):
            return super()._band(q, k, v, lower, upper, spec, dense=dense)
        q, k, v = (_dense_rows(tensor) for tensor in (q, k, v))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=q.device)
        grid = (triton.cdiv(num_queries, attention_tile(dim, q.dtype)[0]), num_heads)
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
        sizes = (num_queries, num_keys, lower, upper, num_heads // num_kv_heads)
        _launch(band_kernel, grid, (q, k, v, out, lse, *strides, *sizes), q, spec)
        return out, lse

    def _full(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        """Compute softcaps by the kernel for windows, without edges. Heads that share keys become rows."""
        if spec.softcap is None or q.shape[2] > MAX_DIM:
            return super()._full(q, k, v, spec)
        rows = q.reshape(len(k), -1, q.shape[2])
        out, lse = self._band(rows, k, v, -rows.shape[1], k.shape[1], spec)
        return out.reshape(q.shape), lse.reshape(q.shape[:2])

    def _diagonal(self, q: Tensor, k: Tensor, v: Tensor, upper: int, spec: AttnSpec) -> Partial:
        if spec.softcap is None or q.shape[2] > MAX_DIM:
            return super()._diagonal(q, k, v, upper, spec)
        return self._band(q, k, v, -q.shape[1], upper, spec)

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        """Read the keys in place. For very large heads, PyTorch's kernels attend to a copy."""
        num_heads, num_queries, dim = q.shape
        num_kv_heads, num_kept = indices.shape
        if not num_queries or not num_kept:
            return nothing_seen(q)
        if dim > MAX_DIM:
            return super().attend_kept(q, k, v, indices, spec)
        q, k, v, indices = (_dense_rows(tensor) for tensor in (q, k, v, indices))
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(num_heads, num_queries, dtype=torch.float32, device=q.device)
        readers = num_heads // num_kv_heads
        grid = (triton.cdiv(readers * num_queries, attention_tile(dim, q.dtype)[0]), num_kv_heads)
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), indices.stride(0))
        _launch(attend_kernel, grid, (q, k, v, indices, out, lse, *strides, num_queries, num_kept, readers), q, spec)
        return out, lse

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        """Merge one after the other, in float32."""
        (first, first_lse), *further = partials
        merged = first.new_empty(out.shape, dtype=torch.float32).copy_(first)
        lse = first_lse.clone(memory_format=torch.contiguous_format)
        for partial in further:
            combine(merged, lse, partial, order)
        out.copy_(merged)
        return lse

    def select(self, tokens: Sequence[Tensor], indices: Tensor, out: Sequence[Tensor]) -> None:
        num_heads, num_kept, dim = out[0].shape
        assert len(tokens) == len(out) <= 2, "keys and values, or queries"
        assert all(tensor.stride(2) == 1 for tensor in out), "rows are contiguous"
        if not num_kept or not num_heads:
            return
        dense, indices = [_dense_rows(tensor) for tensor in tokens], _dense_rows(indices)
        first, second, first_out, second_out = dense[0], dense[-1], out[0], out[-1]
        grid = (triton.cdiv(num_kept, COPIED), num_heads, len(out))
        with torch.cuda.device_of(first):
            select_kernel[grid](
                *(first, second, indices, first_out, second_out),
                *(first.stride(0), first.stride(1), second.stride(0), second.stride(1), indices.stride(0)),
                *(first_out.stride(0), first_out.stride(1), second_out.stride(0), second_out.stride(1)),
                *(num_heads // len(indices), num_kept),
                dim=dim,
                width=padded(dim),
                tile=COPIED,
            )

    def rate(self, q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
        """Rate tile by tile. For very large heads, PyTorch's products rate."""
        (num_kv_heads, num_keys, dim), num_queries = k.shape, q.shape[1]
        if dim > MAX_DIM:
            return super().rate(q, lse, seen, k, spec)
        ratings = torch.zeros(num_kv_heads, num_keys, dtype=torch.float32, device=k.device)
        if not num_keys or not num_queries:
            return ratings
        q, lse, seen, k = (_dense_rows(tensor) for tensor in (q, lse, seen, k))
        grid = (triton.cdiv(num_keys, attention_tile(dim, q.dtype)[1]), num_kv_heads)
        strides = (q.stride(0), q.stride(1), lse.stride(0), k.stride(0), k.stride(1))
        sizes = (num_queries, num_keys, len(q) // num_kv_heads)
        _launch(rate_kernel, grid, (q, lse, seen, k, ratings, *strides, *sizes), q, spec)
        return ratings


def _launch(
    kernel: triton.JITFunction, grid: tuple[int, int], arguments: tuple[object, ...], q: Tensor, spec: AttnSpec
) -> None:
    """Launch a kernel that computes scores of queries `[H, T, D]`."""
    tile_rows, tile_keys = attention_tile(q.shape[2], q.dtype)
    tile = {"tile_rows": tile_rows, "tile_keys": tile_keys}
    with torch.cuda.device_of(q):
        kernel[grid](*arguments, **of_scores(q, spec), **tile, **OPTIONS)


def combine(out: Tensor, lse: Tensor, partial: Partial, rows: Tensor | None) -> None:
    """Merge a partial result `[H, n, D]` in place into `out [H, T, D]` and `lse [H, T]`, both float32."""
    some, some_lse = (_dense_rows(tensor) for tensor in partial)
    num_heads, num_queries, dim = some.shape
    assert out.stride(2) == 1 and lse.stride(1) == 1, "rows of `out` and `lse` are contiguous"
    if not num_queries:
        return
    rows = None if rows is None else _dense_rows(rows)
    grid = (triton.cdiv(num_queries, COPIED), num_heads)
    with torch.cuda.device_of(out):
        combine_kernel[grid](
            *(out, lse, some, some_lse, rows),
            *(out.stride(0), out.stride(1), lse.stride(0), some.stride(0), some.stride(1), some_lse.stride(0)),
            0 if rows is None else rows.stride(0),
            1 if rows is None else num_heads // len(rows),
            num_queries,
            dim=dim,
            width=padded(dim),
            tile=COPIED,
        )


def attention_tile(dim: int, dtype: torch.dtype) -> tuple[int, int]:
    """Return the rows and keys of a tile. They fit into 99 KB of shared memory and the registers of 8 warps."""
    width = padded(dim)
    if dtype == torch.float32:
        return (64, 32) if width <= 64 else (32, 16) if width <= 128 else (16, 16)
    return (128, 64) if width <= 64 else (64, 64) if width <= 128 else (64, 32)


def _dense_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


@triton.jit(do_not_specialize=["indices_head", "num_queries", "num_kept"])
def attend_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    indices: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    indices_head: tl.tensor,
    num_queries: tl.tensor,
    num_kept: tl.tensor,
    readers: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Attend the queries of all readers of one KV head to its kept keys, tile by tile."""
    kv_head = tl.program_id(1).to(tl.int64)
    folded = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    in_rows = folded < readers * num_queries
    head, row = kv_head * readers + folded // num_queries, folded % num_queries
    column = tl.arange(0, width)
    in_dim = column < dim
    whole_rows = in_rows[:, None] & in_dim[None, :]
    queries = tl.load(q + (head * q_head + row * q_row)[:, None] + column[None, :], mask=whole_rows, other=0.0)
    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    acc = tl.zeros((tile_rows, width), tl.float32)
    for start in range(0, num_kept, tile_keys):
        place = start + tl.arange(0, tile_keys)
        kept = place < num_kept
        token = tl.load(indices + kv_head * indices_head + place, mask=kept, other=0).to(tl.int64)
        k_at = k + (kv_head * k_head + token * k_row)[None, :] + column[:, None]
        v_at = v + (kv_head * v_head + token * v_row)[:, None] + column[None, :]
        highest, total, acc = add_tile(
            queries, k_at, v_at, kept, in_dim, highest, total, acc, scale, softcap, has_softcap, widen, None
        )
    out_at = (head * num_queries + row)[:, None] * dim + column[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=whole_rows)
    tl.store(lse + head * num_queries + row, highest + tl.log(total), mask=in_rows)


@triton.jit(do_not_specialize=["num_queries", "num_keys", "lower", "upper", "readers"])
def band_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    v_head: tl.tensor,
    v_row: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    readers: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Attend a tile of queries of one head to the keys of their band, tile by tile."""
    head = tl.program_id(1).to(tl.int64)
    kv_head = head // readers
    first = tl.program_id(0).to(tl.int64) * tile_rows
    row = first + tl.arange(0, tile_rows)
    in_rows = row < num_queries
    column = tl.arange(0, width)
    in_dim = column < dim
    whole_rows = in_rows[:, None] & in_dim[None, :]
    queries = tl.load(q + (head * q_head + row * q_row)[:, None] + column[None, :], mask=whole_rows, other=0.0)
    highest = tl.full((tile_rows,), float("-inf"), tl.float32)
    total = tl.zeros((tile_rows,), tl.float32)
    acc = tl.zeros((tile_rows, width), tl.float32)
    begin = tl.maximum(first + lower, 0)
    end = tl.minimum(tl.minimum(first + tile_rows, num_queries) + upper, num_keys)
    for start in range(begin, end, tile_keys):
        key = start + tl.arange(0, tile_keys)
        behind = row[:, None] - key[None, :]
        hidden = (behind > -lower) | (behind < -upper)
        k_at = k + (kv_head * k_head + key * k_row)[None, :] + column[:, None]
        v_at = v + (kv_head * v_head + key * v_row)[:, None] + column[None, :]
        there = key < num_keys
        highest, total, acc = add_tile(
            queries, k_at, v_at, there, in_dim, highest, total, acc, scale, softcap, has_softcap, widen, hidden
        )
    total = tl.where(in_rows, total, 1.0)  # padding rows may have seen no key
    out_at = (head * num_queries + row)[:, None] * dim + column[None, :]
    tl.store(out + out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=whole_rows)
    tl.store(lse + head * num_queries + row, highest + tl.log(total), mask=in_rows)


@triton.jit(do_not_specialize=["lse_head", "num_queries", "num_keys"])
def rate_kernel(
    q: tl.tensor,
    lse: tl.tensor,
    seen: tl.tensor,
    k: tl.tensor,
    ratings: tl.tensor,
    q_head: tl.tensor,
    q_row: tl.tensor,
    lse_head: tl.tensor,
    k_head: tl.tensor,
    k_row: tl.tensor,
    num_queries: tl.tensor,
    num_keys: tl.tensor,
    readers: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    has_softcap: tl.constexpr,
    widen: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
) -> None:
    """Sum the attention that keys of one KV head get from the queries of all its readers, tile by tile."""
    kv_head = tl.program_id(1).to(tl.int64)
    key = tl.program_id(0).to(tl.int64) * tile_keys + tl.arange(0, tile_keys)
    in_keys = key < num_keys
    column = tl.arange(0, width)
    in_dim = column < dim
    key_at = kv_head * k_head + key * k_row
    keys = tl.load(k + key_at[None, :] + column[:, None], mask=in_dim[:, None] & in_keys[None, :], other=0.0)
    total = tl.zeros((tile_keys,), tl.float32)
    for start in range(0, readers * num_queries, tile_rows):
        folded = start + tl.arange(0, tile_rows)
        in_rows = folded < readers * num_queries
        head, row = kv_head * readers + folded // num_queries, folded % num_queries
        row_at = head * q_head + row * q_row
        queries = tl.load(q + row_at[:, None] + column[None, :], mask=in_rows[:, None] & in_dim[None, :], other=0.0)
        limit = tl.load(seen + row, mask=in_rows, other=0)  # padding rows see nothing
        sums = tl.load(lse + head * lse_head + row, mask=in_rows, other=0.0)
        scores = scores_of(queries, keys, scale, softcap, has_softcap, widen)
        sees = limit[:, None] > key[None, :]
        total += tl.sum(tl.where(sees, tl.exp(scores - sums[:, None]), 0.0), 0)
    tl.store(ratings + kv_head * num_keys + key, total, mask=in_keys)


@triton.jit(do_not_specialize=["lse_head", "partial_lse_head", "rows_head", "num_queries"])
def combine_kernel(
    out: tl.tensor,
    lse: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    rows: tl.tensor | None,
    out_head: tl.tensor,
    out_row: tl.tensor,
    lse_head: tl.tensor,
    partial_head: tl.tensor,
    partial_row: tl.tensor,
    partial_lse_head: tl.tensor,
    rows_head: tl.tensor,
    readers: tl.tensor,
    num_queries: tl.tensor,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Merge results of some queries of one head in place, weighted by log-sum-exps (CSPS Eq. 5)."""
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    in_rows = place < num_queries
    row = place
    if rows is not None:
        row = tl.load(rows + head // readers * rows_head + place, mask=in_rows, other=0).to(tl.int64)
    lse_at = lse + head * lse_head + row
    before = tl.load(lse_at, mask=in_rows, other=0.0)
    new = tl.load(partial_lse + head * partial_lse_head + place, mask=in_rows, other=0.0)
    weight = tl.where(before == new, 0.5, 1.0 / (1.0 + tl.exp(before - new)))  # also if neither saw a key
    higher = tl.maximum(before, new, propagate_nan=tl.PropagateNan.ALL)
    finite = tl.where(higher == float("-inf"), 0.0, higher)
    tl.store(lse_at, finite + tl.log(tl.exp(before - finite) + tl.exp(new - finite)), mask=in_rows)
    column = tl.arange(0, width)
    whole = in_rows[:, None] & (column < dim)[None, :]
    out_at = out + (head * out_head + row * out_row)[:, None] + column[None, :]
    old = tl.load(out_at, mask=whole, other=0.0)
    other = tl.load(
        partial + (head * partial_head + place * partial_row)[:, None] + column[None, :], mask=whole, other=0.0
    )
    tl.store(out_at, old + (other.to(tl.float32) - old) * weight[:, None], mask=whole)


@triton.jit(do_not_specialize=["indices_head", "num_kept"])
def select_kernel(
    first: tl.tensor,
    second: tl.tensor,
    indices: tl.tensor,
    first_out: tl.tensor,
    second_out: tl.tensor,
    first_head: tl.tensor,
    first_row: tl.tensor,
    second_head: tl.tensor,
    second_row: tl.tensor,
    indices_head: tl.tensor,
    first_out_head: tl.tensor,
    first_out_row: tl.tensor,
    second_out_head: tl.tensor,
    second_out_row: tl.tensor,
    readers: tl.tensor,
    num_kept: tl.tensor,
    dim: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Copy kept tokens of one head from the first or the second of two tensors."""
    head = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    kept = place < num_kept
    token = tl.load(indices + head // readers * indices_head + place, mask=kept, other=0).to(tl.int64)
    column = tl.arange(0, width)
    whole = kept[:, None] & (column < dim)[None, :]
    if tl.program_id(2) == 0:
        tokens = tl.load(first + (head * first_head + token * first_row)[:, None] + column[None, :], mask=whole)
        tl.store(
            first_out + (head * first_out_head + place * first_out_row)[:, None] + column[None, :], tokens, mask=whole
        )
    else:
        tokens = tl.load(second + (head * second_head + token * second_row)[:, None] + column[None, :], mask=whole)
        out_at = second_out + (head * second_out_head + place * second_out_row)[:, None] + column[None, :]
        tl.store(out_at, tokens, mask=whole)
