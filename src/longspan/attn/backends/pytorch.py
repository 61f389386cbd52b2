"""PyTorch's kernels on CPUs, and the cuts of attention into kernel calls. `pytorch_cuda` has the kernels on CUDA.

Visibility is a band in index space (`core.runs.relate`): query i sees key j iff `i + lower <= j <= i + upper`. Bands
are cut into rectangles and squares that a fused kernel computes. Edges of sliding windows use masks of at most `_TILE`
queries, unless a kernel supports windows. A batch of single queries over a paged pool is one kernel call. Every block
that a query sees is an item of this call, and the partial results of a query's items are merged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge, merge_each, nothing_seen
from longspan.attn.paged import KeysAndValues, PagedBatch, PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation

_TILE = 256
"""Queries per tile where a mask is needed."""
_EAGER_KEYS = 8192
"""Keys per tile without a fused kernel (softcap). This bounds the memory of the scores."""
_RATED = 4096
"""Keys that are rated at a time, which bounds the memory of the scores."""
_FEW_QUERIES = 16
"""On CPUs, up to this number of queries, long keys are split into pieces that are computed in parallel and merged."""
_PIECE = 512
"""Keys per such piece."""


class AttentionBackend(ABC):
    """The kernels of one kind of device: attention as calls of a fused kernel, which subclasses choose."""

    @abstractmethod
    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        """Compute attention of `q [n, heads, T, D]` over `k, v [n, K, S, D]` without a softcap."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Compute attention of one query run `q [H, T, D]` over one key run `k, v [K, S, D]`.

        With `dense` the scores that the relation hides are computed and masked, and every query must see some key.
        """
        if dense:
            return self._band(q, k, v, relation.lower, relation.upper, spec, dense=True)
        if relation.kind == "full":
            return self._full(q, k, v, spec)
        out, lse = nothing_seen(q)
        if relation.kind == "skip":
            return out, lse
        # Rows below `first` and rows from `last` on see no key. Kernels leave such rows undefined.
        first = max(0, -relation.upper)
        last = min(q.shape[1], k.shape[1] - relation.lower)
        rows, upper = q[:, first:last], relation.upper + first
        if relation.kind == "diagonal":
            partial = self._diagonal(rows, k, v, upper, spec)
        else:
            partial = self._band(rows, k, v, relation.lower + first, upper, spec)
        out[:, first:last], lse[:, first:last] = partial
        return out, lse

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write `k, v [K, T, D]` to a pool: token t to slot `offsets[t]` of block `blocks[t]`, both int64 `[T]`."""
        kv.keys[blocks, :, offsets] = k.transpose(0, 1)
        kv.values[blocks, :, offsets] = v.transpose(0, 1)

    def gather(self, kv: PagedKv, blocks: Sequence[int], start: int, stop: int, out: KeysAndValues) -> None:
        """Copy keys and values of tokens `[start, stop)` to `out`, see `PagedKv.gather`."""
        kv.gather(blocks, start, stop, *out)

    def plan(self, reads: Sequence[Reads], kv: PagedKv) -> PagedPlan:
        """Prepare `attend_paged` for queries that read these tokens, in any layer laid out like `kv`."""
        return PagedPlan(reads, kv)

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Compute attention of single queries `q [H, T, D]`, each over the tokens that it reads in the plan."""
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

    def prepare(  # noqa: B027 - most devices need no preparation
        self, kv: PagedKv, specs: Collection[AttnSpec], max_queries: int, max_keys: int
    ) -> None:
        """Prepare kernels for up to `max_queries` queries of a prompt that see up to `max_keys` keys.

        Args:
            kv: a layer of the pool, with the type and the device of all keys.
        """

    def is_recordable(self, spec: AttnSpec) -> bool:  # noqa: ARG002 - False for any
        """Return True if `store` and `attend_paged` of such attention can be recorded and replayed.

        Then their launches depend only on shapes, they read only the `splits` of a plan, and tokens of block `NOWHERE`
        are not stored.
        """
        return False

    def max_grouped(self, q: Tensor, spec: AttnSpec) -> int:  # noqa: ARG002 - the same for any
        """Return the largest number of queries of a prompt that `attend_prompts` is for. 0 without such a kernel."""
        return 0

    def attend_prompts(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: tuple[tuple[int, int], ...], spec: AttnSpec
    ) -> Partial:
        """Compute causal attention of several prompts in one call.

        Args:
            q, k, v: `[H, queries, D]` and `[K, keys, D]` of all prompts, one after the other.
            lengths: queries and keys of each prompt. Its last query is at its last key.
        """
        raise NotImplementedError

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        """Compute attention of all queries `q [H, T, D]` over selected keys.

        Args:
            k, v: `[K, S, D]`.
            indices: `[K, n]` int32, for each KV head the selected keys among `S`. Without any, queries see nothing.
        """
        num_kept = indices.shape[1]
        if not q.shape[1] or not num_kept:
            return nothing_seen(q)
        kept_k, kept_v = k.new_empty(2, len(k), num_kept, k.shape[2])
        self.select((k, v), indices, (kept_k, kept_v))
        return self.attend(q, kept_k, kept_v, Relation("full", -q.shape[1], num_kept), spec)

    def select(self, tokens: Sequence[Tensor], indices: Tensor, out: Sequence[Tensor]) -> None:
        """Copy selected tokens of each head.

        Args:
            tokens: one tensor `[H, S, D]`, or keys and values.
            indices: `[K, n]` int32, for each H / K heads the selected tokens among `S`.
            out: for each tensor one `[H, n, D]`, such as a tensor of a message.
        """
        by_head = indices.repeat_interleave(len(out[0]) // len(indices), dim=0)
        for all_tokens, selected in zip(tokens, out, strict=True):
            for head, kept, target in zip(all_tokens, by_head, selected, strict=True):  # faster than `torch.gather`
                torch.index_select(head, 0, kept, out=target)

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        """Merge partial results of the same queries into `out [H, T, D]`. Return their lse `[H, T]`.

        Args:
            partials: the first has all queries in order of position. Each further one has n: `[H, n, D]` and `[H, n]`.
            order: `[K, T]` int32, for each KV head the queries of the further results, each once. None if they are in
                order of position, too.
        """
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
        """Sum, for each key, the attention of the queries of its KV head that see it: `[K, S]` float32.

        Args:
            q, lse: queries `[H, n, D]`, and their log-sum-exps `[H, n]` over all keys, float32.
            seen: `[n]` int64, the number of keys that each query sees, counted from the first key.
            k: `[K, S, D]`.
        """
        num_kv_heads, num_keys, dim = k.shape
        rows, lses = q.reshape(num_kv_heads, -1, dim), lse.reshape(num_kv_heads, -1, 1)
        seen = seen.repeat(len(q) // num_kv_heads)[:, None]
        ratings = k.new_empty(num_kv_heads, num_keys, dtype=torch.float32)
        for start in range(0, num_keys, _RATED):
            stop = min(start + _RATED, num_keys)
            scores = _scores(rows, k[:, start:stop], spec).sub_(lses).exp_()
            hidden = torch.arange(start, stop, device=k.device) >= seen
            torch.sum(scores.masked_fill_(hidden, 0.0), dim=1, out=ratings[:, start:stop])
        return ratings

    def _attend_items(self, rows: Tensor, kv: PagedKv, batch: PagedBatch, spec: AttnSpec) -> Partial:
        """Return `out [items, kv_heads, queries per head, head_dim]` and `lse [items, kv_heads, queries per head]`."""
        partials, start = [], 0
        for view in batch.views:
            k, v = kv.keys[view], kv.values[view]
            partials.append(self._fused(rows[start : start + len(k)], k, v, spec))
            start += len(k)
        if (edges := batch.edges) is not None:
            k, v = edges.copy(kv.keys), edges.copy(kv.values)
            partials.append(self._fused(rows[start:], k, v, spec, mask=edges.mask(rows.dtype)))
        if len(partials) == 1:
            return partials[0]
        return torch.cat([out for out, _ in partials]), torch.cat([lse for _, lse in partials])

    def _full(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        """Compute rows that see all keys. Heads that share keys become rows, so keys are read once."""
        folded = q.reshape(1, spec.num_kv_heads, -1, q.shape[-1])
        out, lse = self._fused(folded, k[None], v[None], spec)
        return out.reshape(q.shape), lse.reshape(q.shape[:2])

    def _diagonal(self, q: Tensor, k: Tensor, v: Tensor, upper: int, spec: AttnSpec) -> Partial:
        """Compute causal runs: keys before `upper` that all rows see, then a square, then rows that see all keys."""
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
        """Compute a sliding window with masks: tiles of queries over the keys that any of them sees, or over all."""
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
        """Make one kernel call on `q [n, heads, T, D]`, `k, v [n, K, S, D]`, with T, S > 0. Every query sees some key.

        The mask is 0 or -inf and is added to the scores. It has q's type and four dimensions, and the first three may
        be 1. Causal calls are square, because kernels align the diagonal of other shapes differently.
        """
        assert q.shape[2] > 0 and k.shape[2] > 0, "an empty kernel call kills the process on CPUs"
        assert not causal or q.shape[2] == k.shape[2], "causal calls are square"
        if spec.softcap is not None:
            return eager(q, k, v, spec, causal=causal, mask=mask)
        return self._kernel(q, k, v, spec, causal=causal, mask=mask)


class TorchCpu(AttentionBackend):
    """Attention by PyTorch's FlashAttention kernel for CPUs."""

    def _kernel(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - public ones hide the lse
            q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale
        )
        return out, lse

    def _full(self, q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec) -> Partial:
        """Split long keys of few queries into pieces, which cores compute in parallel."""
        if q.shape[1] > _FEW_QUERIES or k.shape[1] < 2 * _PIECE:
            return super()._full(q, k, v, spec)
        folded = q.reshape(1, spec.num_kv_heads, -1, q.shape[-1])
        each = [self._fused(folded.expand(len(keys), -1, -1, -1), keys, values, spec) for keys, values in _split(k, v)]
        outs = torch.cat([out for out, _ in each]).view(-1, *q.shape)
        out, lse = merge(outs, torch.cat([lse for _, lse in each]).view(-1, *q.shape[:2]))
        return out.to(q.dtype), lse


def _split(k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """View `[K, S, D]` as pieces `[n, K, _PIECE, D]`, and the remaining keys as another piece."""
    even = k.shape[1] // _PIECE * _PIECE
    pieces = (-1, _PIECE)
    yield k[:, :even].unflatten(1, pieces).transpose(0, 1), v[:, :even].unflatten(1, pieces).transpose(0, 1)
    if even < k.shape[1]:
        yield k[None, :, even:], v[None, :, even:]


def eager(q: Tensor, k: Tensor, v: Tensor, spec: AttnSpec, *, causal: bool, mask: Tensor | None) -> Partial:
    """Compute scores tile by tile, for softcaps, which no fused kernel supports, and for masks on CUDA."""
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
        scores.masked_fill_(mask == -torch.inf, -torch.inf)  # adding the mask would pass on NaN of hidden keys
    lse = torch.logsumexp(scores, dim=-1)
    weights = scores.sub_(lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp_().to(v.dtype)
    out = torch.matmul(weights.view(batch, k.shape[1], -1, k.shape[2]), v)
    return out.view(batch, num_heads, num_queries, dim), lse


def _scores(rows: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
    """Compute scores in float32, as fused kernels do. Half precision would round them before the softmax."""
    scores = torch.matmul(rows.float(), k.float().transpose(-1, -2))
    if spec.softcap is None:
        return scores.mul_(spec.scale)
    return scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
