"""Attention as the definition has it: float64, every score, masks by positions. All fast paths are held against it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.spec import AttnSpec


def reference(
    q: Tensor, q_positions: Sequence[int], k: Tensor, v: Tensor, k_positions: Sequence[int], spec: AttnSpec
) -> tuple[Tensor, Tensor]:
    """`(out [H, T, D], lse [H, T])` in float64 of `q [H, T, D]` over `k, v [K, S, D]`, each token at its position.

    A query that sees no key gets output 0 and lse -inf.
    """
    groups = q.shape[0] // k.shape[0]
    keys, values = (x.double().repeat_interleave(groups, dim=0) for x in (k, v))
    scores = q.double() @ keys.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    age = torch.tensor(list(q_positions))[:, None] - torch.tensor(list(k_positions))[None]
    visible = age >= 0
    if spec.window is not None:
        visible &= age < spec.window
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(visible.any(-1), lse, 0.0)[..., None])
    return weights @ values, lse


def random_qkv(spec: AttnSpec, num_queries: int, num_keys: int, dtype: torch.dtype, seed: int) -> list[Tensor]:
    """Normal `q, k, v`, laid out `[tokens, heads, dim]` in memory as a model's projections are."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_queries, spec.num_heads), (num_keys, spec.num_kv_heads), (num_keys, spec.num_kv_heads)]
    return [torch.randn(*shape, spec.head_dim, generator=generator).to(dtype).transpose(0, 1) for shape in shapes]
