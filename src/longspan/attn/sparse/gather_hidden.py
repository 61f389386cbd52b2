"""The sparse form of `gather_hidden`: each member has all tokens of its heads, and attends to the kept ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from longspan.attn.comm import ALONE, Group
from longspan.attn.exchanges import Call
from longspan.attn.exchanges.alltoall_sparse import attend_levels, rate_later, rated_keys
from longspan.attn.gather_hidden import GatherHidden, pieces_of
from longspan.attn.gathered import GatheredPart, by_position, split_by_position
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.sparse.part import SparsePart
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import Exchange
from longspan.core.runs import SpanShards, coalesce, num_tokens


class SparseGatherHidden(GatherHidden):
    """The exchange of one layer on one member, without attention to dropped tokens. See `Call` for the arguments.

    `parts.memory` keeps the ratings of keys from layer to layer. Attention is `alltoall_sparse` in a group of one.
    """

    def __init__(
        self,
        group: Group,
        parts: MemberParts,
        kv: PagedKv,
        spec: AttnSpec,
        *,
        sinks: Tensor | None,
        exchange: Exchange,
        layer: int,
        num_layers: int,
        layers: Sequence[int],
        first_kv_head: int,
    ) -> None:
        super().__init__(group, parts, kv, spec, sinks=sinks, num_pieces=pieces_of(exchange))
        assert exchange.sparse is not None, "a sparse form has a setting"
        self._setting = exchange.sparse._replace(micro_partitions=())  # attention sends nothing
        exchange = exchange._replace(sparse=self._setting)
        first_kv_head += self.share.kv_heads.start
        at_layer = partial(Call, layer=layer, num_layers=num_layers, layers=layers, first_kv_head=first_kv_head)
        self._call = partial(at_layer, exchange=exchange, group=ALONE)
        self._ratings: Sequence[Tensor] | None = None
        self._done: list[list[tuple[GatheredPart, Tensor, Tensor]]] = []
        """Each micro-partition's parts, their queries in order of position, and their log-sum-exps."""

    def _attend_gathered(self, gathered: Sequence[GatheredPart], spec: AttnSpec) -> None:
        queries = [by_position(part.q_runs, part.q) if any(part.q_runs) else part.q[0][:, :0] for part in gathered]
        call = self._alone([part.q_runs for part in gathered], gathered, queries, spec)
        if not self._done:
            self._ratings = rated_keys(call)
        ratings = self._ratings
        if ratings is not None:
            ratings = [rated[:, : part.k[0].shape[1]] for rated, part in zip(ratings, gathered, strict=True)]
        _, lses = attend_levels(call, _stored(gathered), ratings)
        for part, alone_part in zip(gathered, call.parts, strict=True):
            if any(part.q_runs):
                split_by_position(call.out[:, alone_part.rows], part.q_runs, part.out)
        self._done.append(list(zip(gathered, queries, lses, strict=True)))

    def _finish(self) -> None:
        """Rate the keys of all micro-partitions by a sample of all queries."""
        if not self._done:
            return
        by_part = [*zip(*self._done, strict=True)]
        last = [pieces[-1][0] for pieces in by_part]
        queries, lses = ([torch.cat([piece[kind] for piece in pieces], dim=1) for pieces in by_part] for kind in (1, 2))
        spec = self._spec.of_heads(self.share)
        call = self._alone([part.q_runs for part in self._parts], last, queries, spec)
        each = zip(call.parts, _stored(last), strict=True)
        rate_later(call, [SparsePart(call, self._setting, part, kv, None) for part, kv in each], lses)

    def _alone(
        self,
        all_q_runs: Sequence[SpanShards],
        gathered: Sequence[GatheredPart],
        queries: Sequence[Tensor],
        spec: AttnSpec,
    ) -> Call:
        """Return the call of a group of one with these queries and all gathered keys."""
        parts, row = [], 0
        for q_runs, part, q in zip(all_q_runs, gathered, queries, strict=True):
            own = coalesce(run for member_runs in q_runs for run in member_runs)
            keys = coalesce(run for member_runs in part.kv_runs for run in member_runs)
            parts.append(MemberPart(rows=slice(row, row + num_tokens(own)), q_runs=(own,), kv_runs=(keys,), blocks=()))
            row += q.shape[1]
        q = torch.cat(list(queries), dim=1)
        alone = MemberParts(parts, self._parts.backend)
        alone.memory = self._parts.memory
        kv = PagedKv(keys=q[None], values=q[None])  # not read
        return self._call(parts=alone, q=q, k=q, v=q, kv=kv, spec=spec, sinks=self._sinks, out=torch.empty_like(q))


def _stored(gathered: Sequence[GatheredPart]) -> list[tuple[Tensor, Tensor]]:
    return [(part.k[0], part.v[0]) for part in gathered]
