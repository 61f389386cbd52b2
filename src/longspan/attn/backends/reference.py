"""Attention in float64 by its definition, for comparison: every score is computed, and nothing is fast."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.backends import Partial
from longspan.attn.paged import PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation


class Reference:
    """Returns float64 outputs and log-sum-exps."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Implements `AttentionBackend`, and always computes all scores."""
        del dense
        age = torch.arange(q.shape[1])[:, None] - torch.arange(k.shape[1])[None]
        match relation.kind:
            case "full":
                visible = torch.ones_like(age, dtype=torch.bool)
            case "skip":
                visible = torch.zeros_like(age, dtype=torch.bool)
            case "diagonal":
                visible = age >= -relation.upper
            case "band":
                visible = (age >= -relation.upper) & (age <= -relation.lower)
        return _attend(q, k, v, visible, spec)

    def plan(self, reads: Sequence[Reads], kv: PagedKv) -> PagedPlan:
        """Implements `AttentionBackend`: nothing but the reads is used."""
        return PagedPlan(reads, kv)

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Implements `AttentionBackend`, query by query."""
        found = []
        for row, read in enumerate(plan.reads):
            k = kv.keys.new_empty(spec.num_kv_heads, read.stop - read.start, spec.head_dim)
            v = torch.empty_like(k)
            kv.gather(read.blocks, read.start, read.stop, k, v)
            found.append(_attend(q[:, row : row + 1], k, v, torch.ones(1, k.shape[1], dtype=torch.bool), spec))
        return torch.cat([out for out, _ in found], dim=1), torch.cat([lse for _, lse in found], dim=1)


def reference(
    q: Tensor, q_positions: Sequence[int], k: Tensor, v: Tensor, k_positions: Sequence[int], spec: AttnSpec
) -> Partial:
    """Computes attention of `q [H, T, D]` over `k, v [K, S, D]`, each token at its position, in float64."""
    age = torch.tensor(list(q_positions))[:, None] - torch.tensor(list(k_positions))[None]
    visible = age >= 0
    if spec.window is not None:
        visible &= age < spec.window
    return _attend(q, k, v, visible, spec)


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, spec: AttnSpec) -> Partial:
    groups = q.shape[0] // k.shape[0]
    keys, values = (x.double().repeat_interleave(groups, dim=0) for x in (k, v))
    scores = q.double() @ keys.transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(visible.any(-1), lse, 0.0)[..., None])
    return weights @ values, lse
