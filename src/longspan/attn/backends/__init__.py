"""Attention of queries over local keys, computed by the kernels of a device, and the merge of partial results.

Shapes: H query heads, K KV heads (H a multiple of K), T queries, S keys, D head dim.

`lse = log sum exp(score)` over a set of keys. Attention over a union of disjoint sets is the mean of partial outputs
weighted by `exp(lse_i - lse)`, with `lse = log sum_i exp(lse_i)` (Context Parallelism, Appendix B, equation 4).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from longspan.attn.paged import KeysAndValues, PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation

_log = logging.getLogger("longspan")

CudaKernel = Literal["cudnn", "flash", "efficient", "eager"]
"""PyTorch's kernels on CUDA devices, and tiled products for cases without a kernel."""
Partial = tuple[Tensor, Tensor]
"""`out [H, T, D]` and `lse [H, T]` float32. A query that sees no key has output 0 and lse -inf."""
NOWHERE = -1
"""The block of a token that is not stored, for backends whose steps can be recorded."""


class AttentionBackend(Protocol):
    """The kernels of one kind of device."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Compute attention of one query run `q [H, T, D]` over one key run `k, v [K, S, D]`.

        With `dense` the scores that the relation hides are computed and masked, and every query must see some key.
        """

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write `k, v [K, T, D]` to a pool: token t to slot `offsets[t]` of block `blocks[t]`, both int64 `[T]`."""

    def gather(self, kv: PagedKv, blocks: Sequence[int], start: int, stop: int, out: KeysAndValues) -> None:
        """Copy keys and values of tokens `[start, stop)` to `out`, see `PagedKv.gather`."""

    def plan(self, reads: Sequence[Reads], kv: PagedKv) -> PagedPlan:
        """Prepare `attend_paged` for queries that read these tokens, in any layer laid out like `kv`."""

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Compute attention of single queries `q [H, T, D]`, each over the tokens that it reads in the plan."""

    def is_recordable(self, spec: AttnSpec) -> bool:
        """Return True if `store` and `attend_paged` of such attention can be recorded and replayed.

        Then their launches depend only on shapes, they read only the `splits` of a plan, and tokens of block `NOWHERE`
        are not stored.
        """

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        """Compute attention of all queries `q [H, T, D]` over selected keys.

        Args:
            k, v: `[K, S, D]`.
            indices: `[K, n]` int32, for each KV head the selected keys among `S`. Without any, queries see nothing.
        """

    def select(self, tokens: Sequence[Tensor], indices: Tensor, out: Sequence[Tensor]) -> None:
        """Copy selected tokens of each head.

        Args:
            tokens: one tensor `[H, S, D]`, or keys and values.
            indices: `[K, n]` int32, for each H / K heads the selected tokens among `S`.
            out: for each tensor one `[H, n, D]`, such as a tensor of a message.
        """

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        """Merge partial results of the same queries into `out [H, T, D]`. Return their lse `[H, T]`.

        Args:
            partials: the first has all queries in order of position. Each further one has n: `[H, n, D]` and `[H, n]`.
            order: `[K, T]` int32, for each KV head the queries of the further results, each once. None if they are in
                order of position, too.
        """

    def rate(self, q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
        """Sum, for each key, the attention of the queries of its KV head that see it: `[K, S]` float32.

        Args:
            q, lse: queries `[H, n, D]`, and their log-sum-exps `[H, n]` over all keys, float32.
            seen: `[n]` int64, the number of keys that each query sees, counted from the first key.
            k: `[K, S, D]`.
        """


def backend_of(
    device: torch.device, *, compiled: bool | None = None, kernel: CudaKernel | None = None
) -> AttentionBackend:
    """Return the backend of a device. On CPUs `compiled` selects our own kernels, by default if they are loaded.

    On CUDA devices `kernel` is the only kernel of PyTorch to use, see `TorchCuda`.
    """
    if device.type == "cuda":
        if find_spec("triton") is None:
            from longspan.attn.backends.pytorch_cuda import TorchCuda  # noqa: PLC0415 - backends import this module

            _log.warning("Triton is not installed: decodes and sparse attention use slower kernels of PyTorch")
            return TorchCuda(kernel)
        from longspan.attn.backends.triton import TritonCuda  # noqa: PLC0415 - needs Triton

        return TritonCuda(kernel)
    assert kernel is None, "CPUs have no CUDA kernels"
    if compiled is None:
        from longspan.native import is_loaded  # noqa: PLC0415 - workers know which kernels they use

        compiled = is_loaded()
    if compiled:
        from longspan.attn.backends.native import NativeCpu  # noqa: PLC0415 - needs our own kernels

        return NativeCpu()
    from longspan.attn.backends.pytorch import TorchCpu  # noqa: PLC0415 - backends import this module

    return TorchCpu()


def nothing_seen(q: Tensor) -> Partial:
    return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)


def merge(outs: Tensor, lses: Tensor) -> Partial:
    """Merge `n` partial results.

    Args:
        outs: `[n, H, T, D]`, any float type.
        lses: `[n, H, T]` float32, -inf where a query saw no key of that set.

    Returns:
        `[H, T, D]` and `[H, T]`, both float32. A query that saw no key at all gets 0 and -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse


def merge_each(partials: Sequence[Partial]) -> Partial:
    """Merge large results in separate tensors, one after the other, in float32."""
    out, lse = partials[0]
    out = out.float()
    for other, other_lse in partials[1:]:
        weight = torch.sigmoid(other_lse - lse)
        weight = torch.where(lse == other_lse, 0.5, weight)  # also where neither saw a key
        out = torch.lerp(out, other.float(), weight[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return out, lse
