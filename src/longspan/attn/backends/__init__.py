"""Attention of queries over keys at hand, computed by the kernels of a device, and the merge of such partial results.

Shapes: H query heads, K KV heads (H a multiple of K), T queries, S keys, D head dim.

With `lse = log sum exp(score)` over a set of keys, the attention over the union of disjoint sets is the mean of the
partial outputs weighted by `exp(lse_i - lse)`, where `lse = log sum_i exp(lse_i)` (Context Parallelism, Appendix B,
equation 4).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, Protocol

import torch
from torch import Tensor

from longspan.attn.paged import PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation
from longspan.native import is_loaded

_log = logging.getLogger("longspan")

CudaKernel = Literal["cudnn", "flash", "efficient", "eager"]
"""PyTorch's kernels on CUDA devices, and tiled products where none of them applies."""
Partial = tuple[Tensor, Tensor]
"""`out [H, T, D]` and `lse [H, T]` float32; a query that sees no key has output 0 and lse -inf."""
NOWHERE = -1
"""Stands for the block of a token that is not stored, for backends whose steps can be recorded."""


class AttentionBackend(Protocol):
    """The kernels of one kind of device."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Computes attention of one query run `q [H, T, D]` over one key run `k, v [K, S, D]`.

        With `dense` the scores that the relation hides are computed, too, and masked; every query then sees some key.
        """

    def store(self, kv: PagedKv, blocks: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes `k, v [K, T, D]` to a pool: token t to slot `offsets[t]` of block `blocks[t]`, both int64 `[T]`."""

    def gather(self, kv: PagedKv, blocks: Sequence[int], start: int, stop: int, rooms: tuple[Tensor, Tensor]) -> None:
        """Copies keys and values of tokens `[start, stop)` to `rooms`, see `PagedKv.gather`."""

    def plan(self, reads: Sequence[Reads], kv: PagedKv) -> PagedPlan:
        """Prepares `attend_paged` for queries that read these tokens of any layer laid out like `kv`."""

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Computes attention of single queries `q [H, T, D]`, each over the tokens that the plan says it reads."""

    def is_recordable(self, spec: AttnSpec) -> bool:
        """Tells whether `store` and `attend_paged`, of such attention, can be recorded and replayed.

        Then their launches follow from shapes, they read nothing of a plan but its `splits`, and no token is stored in
        block `NOWHERE`.
        """

    def attend_kept(self, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, spec: AttnSpec) -> Partial:
        """Computes attention of all queries `q [H, T, D]` over some keys only.

        Args:
            k, v: `[K, S, D]`.
            indices: `[K, n]` int32, for each KV head the keys among `S`; with none, nothing is seen.
        """

    def select(self, tokens: Sequence[Tensor], indices: Tensor, rooms: Sequence[Tensor]) -> None:
        """Copies some tokens of each head into the room for them, say in a message.

        Args:
            tokens: one tensor `[H, S, D]`, or keys and values.
            indices: `[K, n]` int32, for each H / K heads the tokens among `S`.
            rooms: for each of the tensors one `[H, n, D]`.
        """

    def merge_into(self, out: Tensor, partials: Sequence[Partial], order: Tensor | None = None) -> Tensor:
        """Merges partial results of the same queries into `out [H, T, D]`, and returns their lse `[H, T]`.

        Args:
            partials: the first is of all queries, in order of position; the others `[H, n, D]` and `[H, n]`.
            order: `[K, T]` int32, for each KV head the queries in the order of the others, none of them twice; None
                where they are all in order of position.
        """

    def rate(self, q: Tensor, lse: Tensor, seen: Tensor, k: Tensor, spec: AttnSpec) -> Tensor:
        """Sums, for each key, the attention of those queries of its KV head that see it: `[K, S]` float32.

        Args:
            q, lse: queries `[H, n, D]`, and the log-sum-exps `[H, n]` of all that they attend to, float32.
            seen: `[n]` int64, how many keys each of them sees, from the first on.
            k: `[K, S, D]`.
        """


def backend_of(
    device: torch.device, *, compiled: bool | None = None, kernel: CudaKernel | None = None
) -> AttentionBackend:
    """Returns the backend of a device. On CPUs it is our own `compiled` kernels, by default if they are loaded; on CUDA
    `kernel` is the one of PyTorch's that it keeps to, see `TorchCuda`.
    """
    from longspan.attn.backends.native import NativeCpu  # noqa: PLC0415 - backends import this module
    from longspan.attn.backends.pytorch import TorchCpu, TorchCuda  # noqa: PLC0415

    if device.type == "cuda":
        if find_spec("triton") is None:
            _log.warning("Triton is not installed: decodes and sparse attention use slower kernels of PyTorch")
            return TorchCuda(kernel)
        from longspan.attn.backends.triton import TritonCuda  # noqa: PLC0415 - not where there is no such device

        return TritonCuda(kernel)
    assert kernel is None, "CPUs have no kernels of CUDA devices"
    return NativeCpu() if (is_loaded() if compiled is None else compiled) else TorchCpu()


def nothing_seen(q: Tensor) -> Partial:
    return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)


def merge(outs: Tensor, lses: Tensor) -> Partial:
    """Merges `n` partial results.

    Args:
        outs: `[n, H, T, D]`, any float type.
        lses: `[n, H, T]` float32; -inf where a query saw no key of that set.

    Returns:
        `[H, T, D]` and `[H, T]`, both float32. A query that saw no key at all gets 0 and -inf.
    """
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse


def merge_each(partials: Sequence[Partial]) -> Partial:
    """Merges large results that lie apart, one after the other. A single one is returned as it is, in float32."""
    out, lse = partials[0]
    out = out.float()
    for other, other_lse in partials[1:]:
        weight = torch.sigmoid(other_lse - lse)
        weight = torch.where(lse == other_lse, 0.5, weight)  # also where neither saw a key
        out = torch.lerp(out, other.float(), weight[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return out, lse
