"""Joins attention over disjoint sets of keys (Context Parallelism, Appendix B, equation 4).

With `lse = log sum exp(score)` over a set of keys, the attention over the union of the sets is the mean of the partial
outputs weighted by `exp(lse_i - lse)`, where `lse = log sum_i exp(lse_i)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merges `n` partial results.

    Args:
        outs: `[n, heads, tokens, head_dim]`, any float type.
        lses: `[n, heads, tokens]` float32; -inf where a query saw no key of that set.

    Returns:
        `(out, lse)`: `[heads, tokens, head_dim]` float32 and `[heads, tokens]` float32. A query that saw no key at all
        gets 0 and -inf.
    """
    if len(outs) <= 2:
        return merge_each([*zip(outs, lses, strict=True)])
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse


def merge_each(partials: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merges large results that lie apart, one after the other. A single one is returned as it is, in float32."""
    out, lse = partials[0]
    out = out.float()
    for other, other_lse in partials[1:]:
        weight = torch.sigmoid(other_lse - lse)
        weight = torch.where(lse == other_lse, 0.5, weight)  # also where neither saw a key
        out = torch.lerp(out, other.float(), weight[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return out, lse
