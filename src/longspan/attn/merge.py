"""Joins attention over disjoint sets of keys (Context Parallelism, Appendix B, equation 4).

With `lse = log sum exp(score)` over a set of keys, the attention over the union of the sets is the mean of the partial
outputs weighted by `exp(lse_i - lse)`, where `lse = log sum_i exp(lse_i)`.
"""

from __future__ import annotations

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
    if len(outs) == 1:
        return outs[0].float(), lses[0]
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse.masked_fill(lse == -torch.inf, 0.0))
    return (outs * weights[..., None]).sum(dim=0), lse
