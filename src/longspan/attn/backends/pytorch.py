"""PyTorch's kernels on CPUs and on CUDA devices.

Visibility is a band in index space (`core.runs.relate`): query i sees key j iff `i + lower <= j <= i + upper`. Bands
are cut into rectangles and squares that a fused kernel computes. The ragged edges of sliding windows go through masks
of at most `_TILE` queries, where no kernel knows windows. Single queries over a paged pool are one kernel call for a
whole batch: every block that a query sees is an item of its own, and the partial results of a query's items are merged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attn.backends import CudaKernel, Partial, merge, merge_each, nothing_seen
from longspan.attn.paged import PagedBatch, PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation

_TILE = 256
"""Queries per tile where a mask is needed."""
_EAGER_KEYS = 8192
"""Keys per tile where no fused kernel applies (softcap): bounds the memory of the scores."""
_RATED = 4096
"""Keys that are rated at a time."""
_FEW_QUERIES = 16
"""The most queries for which long keys are split into pieces that are computed in parallel and merged."""
_AMPERE, _HOPPER = (8, 0), (9, 0)
"""Compute capabilities."""
_MAX_FLASH_DIM, _MAX_CUDNN_DIM = 256, 128
_CUDNN_TOKENS, _CUDNN_LENGTHS, _MAX_PADDING = 1024, 32, 1 / 8
"""cuDNN makes a plan for every shape, which takes longer than many a call. So it is given multiples of this, and of
longer contexts 32 lengths between a power of two and the next. At most this share of the rows is added for that."""
_PIECE = 512
"""Keys per such piece."""


class TorchBackend(ABC):
    """Cuts attention into calls of a fused kernel, which the device decides."""

    @abstractmethod
    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        """Computes `q [n, heads, T, D]` over `k, v [n, K, S, D]` without a softcap."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        if dense:
            return self._band(q, k, v, relation.lower, relation.upper, spec, dense=True)
        if relation.kind == "full":
            return self._full(q, k, v, spec)
        out, lse = nothing_seen(q)
        if relation.kind == "skip":
            return out, lse
        # Rows below `first` see no key yet, rows from `last` on see none any more: both are undefined in the kernels.
        first = max(0, -relation.upper)
        last = min(q.shape[1], k.shape[1] - relation.lower)
        rows, upper = q[:, first:last], relation.upper + first
        if relation.kind == "diagonal":
            found = self._diagonal(rows, k, v, upper, spec)
        else:
            found = self._band(rows, k, v, relation.lower + first, upper, spec)
        out[:, first:last], lse[:, first:last] = found
        return out, lse

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        kv.keys[blocks, :, offsets] = k.transpose(0, 1)
        kv.values[blocks, :, offsets] = v.transpose(0, 1)

    def gather(self, kv: PagedKv, blocks: Sequence[int], start: int, stop: int, rooms: tuple[Tensor, Tensor]) -> None:
        kv.gather(blocks, start, stop, *rooms)

    def plan(self, reads: Sequence[Reads], kv: PagedKv) -> PagedPlan:
        return PagedPlan(reads, kv)

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Makes one kernel call for all items, and merges the items of a query."""
        num_heads, num_queries, dim = q.shape
        assert num_queries == plan.num_queries, "the plan is for these queries"
        if not len(plan.items.blocks):
            return nothing_seen(q)
        batch = plan.batch
        rows = q.transpose(0, 1).reshape(num_queries, spec.num_kv_heads, -1, dim)
        outs, lses = self._attend_items(rows[batch.owner], kv, batch, spec)
        lses = torch.cat([lses, lses.new_full((1, *lses.shape[1:]), -torch.inf)])
        lse = torch.logsumexp(lses[batch.items_of], dim=1)
        weights = torch.exp(lses[:-1] - lse[batch.owner])
        out = torch.zeros(rows.shape, dtype=torch.float32, device=q.device)
        out.index_add_(0, batch.owner, outs * weights[..., None])
        out = out.view(num_queries, num_heads, dim).transpose(0, 1)
        return out.to(q.dtype), lse.view(num_queries, num_heads).transpose(0, 1)

    def is_recordable(self, spec: AttnSpec) -> bool:  # noqa: ARG002 - of none
        """Tells that it is not: how keys are read is up to where blocks lie."""
        return False

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        """Copies the keys, and attends to all of the copy."""
        num_kept = indices.shape[1]
        if not q.shape[1] or not num_kept:
            return nothing_seen(q)
        kept_k, kept_v = k.new_empty(2, len(k), num_kept, k.shape[2])
        self.select((k, v), indices, (kept_k, kept_v))
        return self.attend(q, kept_k, kept_v, Relation("full", -q.shape[1], num_kept), spec)

    def select(self, tokens: Sequence[Tensor], indices: Tensor, rooms: Sequence[Tensor]) -> None:
        by_head = indices.repeat_interleave(len(rooms[0]) // len(indices), dim=0)
        for all_tokens, room in zip(tokens, rooms, strict=True):
            for head, kept, place in zip(all_tokens, by_head, room, strict=True):  # much quicker than `torch.gather`
                torch.index_select(head, 0, kept, out=place)

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        if order is None:
            merged, lse = merge_each(partials)
            out.copy_(merged)
            return lse
        merged, lse = partials[0][0].to(torch.float32, copy=True), partials[0][1].clone()
        for some, some_lse in partials[1:]:
            by_head = order[:, : some.shape[1]].repeat_interleave(len(out) // len(order), dim=0)
            for head, rows in enumerate(by_head):
                pair = [(merged[head, rows], lse[head, rows]), (some[head], some_lse[head])]
                merged[head, rows], lse[head, rows] = merge_each(pair)
        out.copy_(merged)
        return lse

    def rate(self, q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
        """Keeps the scores of all queries and some keys at a time."""
        num_kv_heads, num_keys, dim = k.shape
        rows, lses = q.reshape(num_kv_heads, -1, dim), lse.reshape(num_kv_heads, -1, 1)
        seen = seen.repeat(len(q) // num_kv_heads)[:, None]
        found = k.new_empty(num_kv_heads, num_keys, dtype=torch.float32)
        for start in range(0, num_keys, _RATED):
            stop = min(start + _RATED, num_keys)
            scores = _scores(rows, k[:, start:stop], spec).sub_(lses).exp_()
            hidden = torch.arange(start, stop, device=k.device) >= seen
            torch.sum(scores.masked_fill_(hidden, 0.0), dim=1, out=found[:, start:stop])
        return found

    def _attend_items(self, rows: Tensor, kv: PagedKv, batch: PagedBatch, spec: AttnSpec) -> Partial:
        """Returns `out [items, kv_heads, queries per head, head_dim]` and `lse [items, kv_heads, queries per head]`."""
        found, start = [], 0
        for view in batch.views:
            k, v = kv.keys[view], kv.values[view]
            found.append(self._fused(rows[start : start + len(k)], k, v, spec))
            start += len(k)
        if (edges := batch.edges) is not None:
            k, v = edges.copy(kv.keys), edges.copy(kv.values)
            found.append(self._fused(rows[start:], k, v, spec, mask=edges.mask(rows.dtype)))
        if len(found) == 1:
            return found[0]
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def _full(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        folded = q.reshape(1, spec.num_kv_heads, -1, q.shape[-1])  # heads that share keys become rows: read once
        if q.shape[1] > _FEW_QUERIES or k.shape[1] < 2 * _PIECE:
            out, lse = self._fused(folded, k[None], v[None], spec)
            return out.reshape(q.shape), lse.reshape(q.shape[:2])
        found = [self._fused(folded.expand(len(keys), -1, -1, -1), keys, values, spec) for keys, values in _split(k, v)]
        outs = torch.cat([out for out, _ in found]).view(-1, *q.shape)
        out, lse = merge(outs, torch.cat([lse for _, lse in found]).view(-1, *q.shape[:2]))
        return out.to(q.dtype), lse

    def _diagonal(self, q: Tensor, k: Tensor, v: Tensor, upper: int, spec: AttnSpec) -> Partial:
        """Computes causal runs: all rows see the keys before `upper`, then comes a square, then rows that see all."""
        num_queries, num_keys = q.shape[1], k.shape[1]
        square = min(num_queries, num_keys - upper)
        corner = slice(upper, upper + square)
        out, lse = self._fused(q[None, :, :square], k[None, :, corner], v[None, :, corner], spec, causal=True)
        out, lse = out[0], lse[0]
        if square < num_queries:
            rest_out, rest_lse = self._full(q[:, square:], k[:, corner], v[:, corner], spec)
            out, lse = torch.cat([out, rest_out], dim=1), torch.cat([lse, rest_lse], dim=1)
        if upper > 0:
            before_out, before_lse = self._full(q, k[:, :upper], v[:, :upper], spec)
            merged, lse = merge_each([(out, lse), (before_out, before_lse)])
            out = merged.to(q.dtype)
        return out, lse

    def _band(
        self, q: Tensor, k: Tensor, v: Tensor, lower: int, upper: int, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Computes a sliding window: tiles of queries over the keys that any of them sees, or over all, with masks."""
        num_queries, num_keys = q.shape[1], k.shape[1]
        outs, lses = [], []
        for start in range(0, num_queries, _TILE):
            stop = min(start + _TILE, num_queries)
            keys = slice(0, num_keys) if dense else slice(max(0, start + lower), min(num_keys, stop + upper))
            row = torch.arange(start, stop, device=q.device)[:, None]
            key = torch.arange(keys.start, keys.stop, device=q.device)[None]
            hidden = (key < row + lower) | (key > row + upper)
            mask = torch.zeros((1, 1, *hidden.shape), dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
            out, lse = self._fused(q[None, :, start:stop], k[None, :, keys], v[None, :, keys], spec, mask=mask)
            outs.append(out[0])
            lses.append(lse[0])
        return torch.cat(outs, dim=1), torch.cat(lses, dim=1)

    def _fused(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool = False, mask: Tensor | None = None
    ) -> Partial:
        """Makes one kernel call on `q [n, heads, T, D]`, `k, v [n, K, S, D]`; T, S > 0, and every query sees some key.

        The mask has q's type and four dimensions, of which the first three may be 1: 0 or -inf, added to the scores.
        Causal calls are square, so that kernels that align the diagonal differently agree.
        """
        assert q.shape[2] > 0 and k.shape[2] > 0, "an empty kernel call kills the process on CPUs"
        assert not causal or q.shape[2] == k.shape[2], "causal calls are square"
        if spec.softcap is not None:
            return _eager(q, k, v, spec, causal=causal, mask=mask)
        return self._kernel(q, k, v, spec, causal=causal, mask=mask)


class TorchCpu(TorchBackend):
    """Calls the FlashAttention kernel that PyTorch has for CPUs."""

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - public ones hide the lse
            q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale
        )
        return out, lse


def cuda_kernel(
    dtype: torch.dtype,
    head_dim: int,
    capability: tuple[int, int],
    *,
    masked: bool = False,
    windowed: bool = False,
) -> CudaKernel:
    """Chooses the quickest of PyTorch's kernels on CUDA devices that computes such attention.

    cuDNN is the quickest from Hopper (9.0) on, for heads of up to 128 numbers. Of sliding windows only FlashAttention
    knows both edges.

    Args:
        capability: of the device.
    """
    is_half = dtype in {torch.bfloat16, torch.float16}
    if masked:
        return "eager"
    if is_half and head_dim % 8 == 0 and head_dim <= _MAX_FLASH_DIM and capability >= _AMPERE:
        has_cudnn = capability >= _HOPPER and head_dim <= _MAX_CUDNN_DIM
        return "cudnn" if has_cudnn and not windowed else "flash"
    return "efficient" if head_dim % (8 if is_half else 4) == 0 and not windowed else "eager"


class TorchCuda(TorchBackend):
    """Calls what `cuda_kernel` chooses, or always one `kernel`, but under a mask: to compare them."""

    def __init__(self, kernel: CudaKernel | None = None) -> None:
        self._forced = kernel

    def _band(
        self, q: Tensor, k: Tensor, v: Tensor, lower: int, upper: int, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Computes a sliding window in one call, where FlashAttention knows such; every query sees some key."""
        if dense or not self._flash_knows(q, spec):
            return super()._band(q, k, v, lower, upper, spec, dense=dense)
        keys = slice(max(0, lower), min(k.shape[1], q.shape[1] + upper))
        k, v = k[:, keys], v[:, keys]
        # A window counts from the diagonal through the last query and the last key. As some query sees each end of the
        # keys, neither side of it is negative, which would mean that it has no end.
        diagonal = keys.start + k.shape[1] - q.shape[1]
        out, lse, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001 - public ones have no windows
            *(tensor.transpose(0, 1)[None] for tensor in (q, k, v)),
            *(None, None, q.shape[1], k.shape[1], 0.0, False, False),
            scale=spec.scale,
            window_size_left=diagonal - lower,
            window_size_right=upper - diagonal,
        )
        return out[0].transpose(0, 1), lse[0]

    def _flash_knows(self, q: Tensor, spec: AttnSpec) -> bool:
        """Tells whether FlashAttention computes windows of such queries and keys."""
        kernel = cuda_kernel(q.dtype, q.shape[2], torch.cuda.get_device_capability(q.device), windowed=True)
        return spec.softcap is None and kernel == "flash"

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        if self._forced is not None and mask is None:
            return _call(self._forced, q, k, v, spec, causal=causal)
        capability = torch.cuda.get_device_capability(q.device)
        kernel = cuda_kernel(q.dtype, q.shape[3], capability, masked=mask is not None)
        if kernel == "cudnn":
            return _by_cudnn(q, k, v, spec, causal=causal)
        return _call(kernel, q, k, v, spec, causal=causal, mask=mask)


def _by_cudnn(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool) -> Partial:
    """Gives cuDNN what comes in lengths that it has plans for, and FlashAttention the keys behind them.

    Rows are added up to such a length, and to causal squares keys, too, which no other query sees.
    """
    num_queries, num_keys = q.shape[2], k.shape[2]
    added = -num_queries % _CUDNN_TOKENS
    cut = num_keys - num_keys % max(_CUDNN_TOKENS, (1 << num_keys.bit_length() - 1) // _CUDNN_LENGTHS)
    if added > _MAX_PADDING * num_queries or not (cut or causal):
        return _call("flash", q, k, v, spec, causal=causal)
    rows, keys, values = (pad(one, (0, 0, 0, added)) if added and (causal or one is q) else one for one in (q, k, v))
    if not causal:
        keys, values = keys[:, :, :cut], values[:, :, :cut]
    out, lse = (one[:, :, :num_queries] for one in _call("cudnn", rows, keys, values, spec, causal=causal))
    if causal or cut == num_keys:
        return out, lse
    merged, lse = merge_each([(out, lse), _call("flash", q, k[:, :, cut:], v[:, :, cut:], spec, causal=False)])
    return merged.to(q.dtype), lse


def _call(
    kernel: CudaKernel, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None = None
) -> Partial:
    """Makes one call of a kernel; only `eager` takes a mask."""
    operators = torch.ops.aten
    match kernel:
        case "cudnn":
            options = (None, True, 0.0, causal, False)
            out, lse, *_ = operators._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - public ones hide the lse
                q.contiguous(), k, v, *options, scale=spec.scale
            )
            return out, lse.reshape(q.shape[:3])
        case "flash":
            out, lse, *_ = operators._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=spec.scale)  # noqa: SLF001
            return out, lse
        case "efficient":
            of_all = (q, *_for_each_reader(q, k, v), None, True, 0.0, causal)
            out, lse, *_ = operators._scaled_dot_product_efficient_attention(*of_all, scale=spec.scale)  # noqa: SLF001
            return out, lse[:, :, : q.shape[2]]  # padded to a multiple of 32
        case "eager":
            return _eager(q, k, v, spec, causal=causal, mask=mask)


def _for_each_reader(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats KV heads, for kernels that want as many as query heads."""
    groups = q.shape[1] // k.shape[1]
    return (k, v) if groups == 1 else (k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1))


def _split(k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views `[K, S, D]` as pieces `[n, K, _PIECE, D]`, and what is left over as another."""
    even = k.shape[1] // _PIECE * _PIECE
    pieces = (-1, _PIECE)
    yield k[:, :even].unflatten(1, pieces).transpose(0, 1), v[:, :even].unflatten(1, pieces).transpose(0, 1)
    if even < k.shape[1]:
        yield k[None, :, even:], v[None, :, even:]


def _eager(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
    """Computes scores tile by tile: for softcap, which no fused kernel has, and masks on CUDA."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    rows = []
    for start in range(0, num_queries, _TILE):
        stop = min(start + _TILE, num_queries)
        tiles = []
        for first in range(0, stop if causal else num_keys, _EAGER_KEYS):
            last = min(first + _EAGER_KEYS, stop if causal else num_keys)
            keys, hidden = slice(first, last), None
            if mask is not None:
                hidden = mask[..., start:stop, keys] if mask.shape[2] > 1 else mask[..., keys]
            elif causal:
                shape = (1, 1, stop - start, last - first)
                hidden = torch.full(shape, -torch.inf, device=q.device).triu_(start - first + 1)
            tiles.append(_scores_and_values(q[:, :, start:stop], k[:, :, keys], v[:, :, keys], spec, hidden))
        rows.append(merge_each(tiles))
    out = torch.cat([out for out, _ in rows], dim=2)
    return out.to(q.dtype), torch.cat([lse for _, lse in rows], dim=2)


def _scores_and_values(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, mask: Tensor | None) -> Partial:
    batch, num_heads, num_queries, dim = q.shape
    folded = q.reshape(batch, k.shape[1], -1, dim)
    scores = _scores(folded, k, spec).view(batch, num_heads, num_queries, -1)
    if mask is not None:
        scores.masked_fill_(mask == -torch.inf, -torch.inf)  # a sum would let hidden keys that are not numbers through
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_().to(v.dtype)
    out = torch.matmul(weights.view(batch, k.shape[1], -1, k.shape[2]), v)
    return out.view(batch, num_heads, num_queries, dim), lse


def _scores(rows: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
    """Computes scores in float32: those of half precision would be rounded before the softmax, fused ones are not."""
    scores = torch.matmul(rows.float(), k.float().transpose(-1, -2))
    if spec.softcap is None:
        return scores.mul_(spec.scale)
    return scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
