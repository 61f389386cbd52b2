"""Attention of queries over local keys, computed by the kernels of a device, and the merge of partial results.

Shapes: H query heads, K KV heads (H a multiple of K), T queries, S keys, D head dim.

`lse = log sum exp(score)` over a set of keys. Attention over a union of disjoint sets is the mean of partial outputs
weighted by `exp(lse_i - lse)`, with `lse = log sum_i exp(lse_i)` (Context Parallelism, Appendix B, equation 4).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

_log = logging.getLogger("longspan")

CudaKernel = Literal["cudnn", "flash", "efficient", "eager"]
"""PyTorch's kernels on CUDA devices, and tiled products for cases without a kernel."""
Partial = tuple[Tensor, Tensor]
"""`out [H, T, D]` and `lse [H, T]` float32. A query that sees no key has output 0 and lse -inf."""
NOWHERE = -1
"""The block of a token that is not stored, for backends whose steps can be recorded."""


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


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Add a sink to the softmax of each head, after the last merge.

    A sink is a score without a value. So it scales the output by `exp(lse) / (exp(lse) + exp(sink))`.

    Args:
        out: `[H, T, D]`, any float type.
        lse: `[H, T]` float32.
        sinks: `[H]` float32.

    Returns:
        `[H, T, D]` float32. A query that saw no key gets 0.
    """
    return out * torch.sigmoid(lse - sinks[:, None])[..., None]


def lse_with_sinks(lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the log-sum-exps `[H, T]` of the scores and the sink of each head, if there are sinks."""
    return lse if sinks is None else torch.logaddexp(lse, sinks[:, None])


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale `out` in place, see `with_sinks`, if there are sinks. Return the log-sum-exps with the sinks."""
    if sinks is not None:
        out.copy_(with_sinks(out, lse, sinks))
    return lse_with_sinks(lse, sinks)


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
