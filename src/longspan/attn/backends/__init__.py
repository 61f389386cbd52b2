"""Attention of queries over keys at hand, computed by the kernels of a device.

Shapes: H query heads, K KV heads (H a multiple of K), T queries, S keys, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from longspan.attn.paged import PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation

Partial = tuple[Tensor, Tensor]
"""`out [H, T, D]` and `lse [H, T]` float32; a query that sees no key has output 0 and lse -inf."""


class AttentionBackend(Protocol):
    """The kernels of one kind of device."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, relation: Relation, spec: AttnSpec, *, dense: bool = False
    ) -> Partial:
        """Computes attention of one query run `q [H, T, D]` over one key run `k, v [K, S, D]`.

        With `dense` the scores that the relation hides are computed, too, and masked; every query then sees some key.
        """

    def plan(self, reads: Sequence[Reads], kv: PagedKv) -> PagedPlan:
        """Prepares `attend_paged` for queries that read these tokens of any layer laid out like `kv`."""

    def attend_paged(self, q: Tensor, kv: PagedKv, plan: PagedPlan, spec: AttnSpec) -> Partial:
        """Computes attention of single queries `q [H, T, D]`, each over the tokens that the plan says it reads."""


def backend_of(device: torch.device) -> AttentionBackend:
    """Returns the fastest backend for a device: our own CPU kernels where they are loaded, else PyTorch's."""
    from longspan.attn import native  # noqa: PLC0415 - backends import this module
    from longspan.attn.backends.native_cpu import NativeCpu  # noqa: PLC0415
    from longspan.attn.backends.pytorch import TorchCpu, TorchCuda  # noqa: PLC0415

    if device.type == "cuda":
        return TorchCuda()
    return NativeCpu() if native.is_loaded() else TorchCpu()
