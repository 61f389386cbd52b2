"""Sparse attention on one member that has all tokens of some heads, as where hidden states are gathered (SP-TP)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attn.comm import ALONE
from longspan.attn.exchanges import Call
from longspan.attn.member import MemberPart, MemberParts, by_position, row_slices, split_runs
from longspan.attn.paged import PagedKv
from longspan.attn.sparse.exchange import sparse_alltoall
from longspan.attn.spec import AttnSpec
from longspan.core.cluster import HeadShare
from longspan.core.exchange import ALLTOALL
from longspan.core.runs import Run, SpanShards, coalesce, num_tokens
from longspan.core.sparse import SparseSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseLayer:
    """The setting and the layer of a member that has all tokens of its heads (SP-TP), see `Call`."""

    setting: SparseSetting
    layer: int
    num_layers: int
    layers: Sequence[int]
    first_kv_head: int

    def of_share(self, share: HeadShare) -> SparseLayer:
        return replace(self, first_kv_head=self.first_kv_head + share.kv_heads.start)


class AlonePart(NamedTuple):
    """One request: the queries of every member, keys and values of all, and where results go, as of `attend_all`."""

    q_runs: SpanShards
    q: Sequence[Tensor]
    held: Sequence[Sequence[Run]]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    results: Sequence[Tensor]


def attend_alone(parts: MemberParts, each: Sequence[AlonePart], at: SparseLayer, spec: AttnSpec) -> None:
    """Attends sparsely where all tokens have been gathered: nothing travels, and only what is kept is computed.

    Args:
        parts: remembers, from layer to layer, how keys are rated.
    """
    own, stored, queries, row = [], [], [], 0
    for one in each:
        runs = coalesce(run for member_runs in one.q_runs for run in member_runs)
        seen = coalesce(run for member_runs in one.held for run in member_runs)
        rows = slice(row, row + num_tokens(runs))
        own.append(MemberPart(rows=rows, q_runs=(runs,), kv_runs=(seen,), blocks=()))
        stored.append((by_position(one.held, one.k), by_position(one.held, one.v)))
        queries.append(by_position(one.q_runs, one.q))
        row = rows.stop
    q = torch.cat(queries, dim=1)
    alone = MemberParts(own, parts.backend)
    alone.memory = parts.memory
    call = Call(
        exchange=ALLTOALL._replace(sparse=at.setting),
        group=ALONE,
        parts=alone,
        q=q,
        k=q,
        v=q,
        kv=PagedKv(keys=q[None], values=q[None]),  # not read
        spec=spec,
        out=torch.empty_like(q),
        layer=at.layer,
        num_layers=at.num_layers,
        layers=at.layers,
        first_kv_head=at.first_kv_head,
    )
    sparse_alltoall(call, stored)
    for one, part in zip(each, own, strict=True):
        of_part = call.out[:, part.rows]
        for result, runs, places in zip(one.results, one.q_runs, row_slices(one.q_runs), strict=True):
            for (_, room), place in zip(split_runs(result, runs), places, strict=True):
                room.copy_(of_part[:, place])
