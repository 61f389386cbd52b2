"""The sparse form of `gather_hidden`: each member has all tokens of its heads, and attends to the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from longspan.attn.comm import ALONE, Group
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.alltoall_sparse import attend_levels
from longspan.attn.gather_hidden import GatherHidden
from longspan.attn.gathered import GatheredPart, by_position, split_by_position
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import ALLTOALL_SPARSE
from longspan.core.runs import coalesce, num_tokens
from longspan.core.sparse import SparseSetting


class SparseGatherHidden(GatherHidden):
    """The exchange of one layer on one member, without attention to dropped tokens. See `Call` for the arguments.

    `parts.memory` keeps the ratings of keys from layer to layer.
    """

    def __init__(
        self,
        group: Group,
        parts: MemberParts,
        kv: PagedKv,
        spec: AttnSpec,
        *,
        setting: SparseSetting | None,
        layer: int,
        num_layers: int,
        layers: Sequence[int],
        first_kv_head: int,
    ) -> None:
        super().__init__(group, parts, kv, spec)
        first_kv_head += self.share.kv_heads.start
        exchange = ALLTOALL_SPARSE._replace(sparse=setting)
        at_layer = partial(Call, layer=layer, num_layers=num_layers, layers=layers, first_kv_head=first_kv_head)
        self._call = partial(at_layer, exchange=exchange, group=ALONE)

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
        kv = PagedKv(keys=q[None], values=q[None])  # not read
        call = self._call(parts=alone, q=q, k=q, v=q, kv=kv, spec=spec, out=torch.empty_like(q))
        attend_levels(call, stored)
        for part, alone_part in zip(gathered, parts, strict=True):
            split_by_position(call.out[:, alone_part.rows], part.q_runs, part.out)
