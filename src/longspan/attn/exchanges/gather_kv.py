"""All keys and values are gathered by every member: the tensor/sequence parallelism that KV-Runahead is measured
against (KV-Runahead §4.1, Fig. 4).
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.attn.collectives import all_gather
from longspan.attn.comm import Group
from longspan.attn.exchanges import Call, register
from longspan.attn.member import MemberParts, attend_runs, by_position, kv_message, kv_room, split_queries
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import GATHER_KV
from longspan.core.runs import relate, stretch


def gather_kv(
    group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec, out: Tensor, *, dense: bool = False
) -> None:
    """Computes attention of several requests at once; `ring_kv` says what the arguments are.

    With `dense` all scores of a member's queries with all gathered keys are computed and those that causality hides
    are masked, as in the paper; else what is hidden is skipped.
    """
    needed = [[part.needed(holder, spec.window) for part in parts] for holder in range(group.size)]
    blocks = [
        kv_message(parts, runs, holder, kv) if holder == group.rank else kv_room(runs, spec.num_kv_heads, q)
        for holder, runs in enumerate(needed)
    ]
    all_gather(group, blocks)
    for index, part in enumerate(parts):
        q_runs = part.q_runs[group.rank]
        if not q_runs:
            continue
        held = [runs[index] for runs in needed]
        k, v = (by_position(held, [block.tensors[2 * index + kind] for block in blocks]) for kind in (0, 1))
        keys = stretch(run for runs in held for run in runs)
        queries = q[:, part.rows]
        if dense:
            outs = [
                parts.backend.attend(rows, k, v, relate(q_run, keys, spec.window), spec, dense=True)[0]
                for q_run, rows in split_queries(queries, q_runs)
            ]
            out[:, part.rows] = torch.cat(outs, dim=1)
        else:
            out[:, part.rows] = attend_runs(parts.backend, queries, q_runs, k, v, (keys,), spec)[0]


def _attend(call: Call) -> tuple[()]:
    gather_kv(call.group, call.parts, call.q, call.kv, call.spec, call.out, dense=call.exchange.dense)
    return ()


register(GATHER_KV, _attend)
