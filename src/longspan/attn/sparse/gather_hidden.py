"""The sparse form of `gather_hidden`: each member has all tokens of its heads, and attends to the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from longspan.attn.comm import ALONE, Group
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.alltoall_sparse import attend_levels
from longspan.attn.gather_hidden import GatherHidden
from longspan.attn.member import GatheredPart, MemberPart, MemberParts, by_position, split_by_position
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import HeadShare
from longspan.core.exchange import ALLTOALL_SPARSE
from longspan.core.runs import coalesce, num_tokens
from longspan.core.sparse import SparseSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLayer:
    """The setting and the layer of a member that has all tokens of its heads (SP-TP). See `Call`."""

    setting: SparseSetting
    layer: int
    num_layers: int
    layers: Sequence[int]
    first_kv_head: int

    def of_share(self, share: HeadShare) -> SparseLayer:
        return replace(self, first_kv_head=self.first_kv_head + share.kv_heads.start)


class SparseGatherHidden(GatherHidden):
    """The exchange of one layer on one member, without attention to dropped tokens.

    Args:
        parts: `memory` keeps the ratings of keys from layer to layer.
        layer: how attention drops tokens.
    """

    def __init__(self, group: Group, parts: MemberParts, kv: PagedKv, spec: AttnSpec, *, layer: SparseLayer) -> None:
        super().__init__(group, parts, kv, spec)
        self._layer = layer.of_share(self.share)

    def _attend_gathered(self, gathered: Sequence[GatheredPart], spec: AttnSpec) -> None:
        """Compute attention as `alltoall_sparse` in a group of one. Only kept tokens are attended."""
        parts, stored, queries, row = [], [], [], 0
        for part in gathered:
            q_runs = coalesce(run for member_runs in part.q_runs for run in member_runs)
            kv_runs = coalesce(run for member_runs in part.kv_runs for run in member_runs)
            rows = slice(row, row + num_tokens(q_runs))
            parts.append(MemberPart(rows=rows, q_runs=(q_runs,), kv_runs=(kv_runs,), blocks=()))
            stored.append((by_position(part.kv_runs, part.k), by_position(part.kv_runs, part.v)))
            queries.append(by_position(part.q_runs, part.q))
            row = rows.stop
        q = torch.cat(queries, dim=1)
        alone = MemberParts(parts, self._parts.backend)
        alone.memory = self._parts.memory
        call = Call(
            exchange=ALLTOALL_SPARSE._replace(sparse=self._layer.setting),
            group=ALONE,
            parts=alone,
            q=q,
            k=q,
            v=q,
            kv=PagedKv(keys=q[None], values=q[None]),  # not read
            spec=spec,
            out=torch.empty_like(q),
            layer=self._layer.layer,
            num_layers=self._layer.num_layers,
            layers=self._layer.layers,
            first_kv_head=self._layer.first_kv_head,
        )
        attend_levels(call, stored)
        for part, alone_part in zip(gathered, parts, strict=True):
            split_by_position(call.out[:, alone_part.rows], part.q_runs, part.out)
