"""Every member gathers all keys and values: the tensor/sequence parallelism that KV-Runahead is measured
against (KV-Runahead §4.1, Fig. 4).
"""

from __future__ import annotations

import torch

from longspan.attn.collectives import all_gather
from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import attend_runs, by_position, empty_kv_message, pack_kv, split_runs
from longspan.core.exchange import GATHER_KV
from longspan.core.runs import relate, stretch


def gather_kv(call: Call) -> None:
    """Masks the scores that causality hides with `dense`, as in the paper; otherwise skips them."""
    group, parts, spec, me = call.group, call.parts, call.spec, call.group.rank
    needed = [[part.needed(holder, spec.window) for part in parts] for holder in range(group.size)]
    blocks = [
        pack_kv(parts, runs, me, call.kv) if holder == me else empty_kv_message(runs, spec.num_kv_heads, call.q)
        for holder, runs in enumerate(needed)
    ]
    all_gather(group, blocks)
    for index, part in enumerate(parts):
        q_runs = part.q_runs[me]
        if not q_runs:
            continue
        held = [runs[index] for runs in needed]
        k, v = (by_position(held, [block.tensors[2 * index + kind] for block in blocks]) for kind in (0, 1))
        keys = stretch(run for runs in held for run in runs)
        q, out = call.q[:, part.rows], call.out[:, part.rows]
        if call.exchange.dense:
            outs = [
                parts.backend.attend(rows, k, v, relate(q_run, keys, spec.window), spec, dense=True)[0]
                for q_run, rows in split_runs(q, q_runs)
            ]
            out.copy_(torch.cat(outs, dim=1))
        else:
            out.copy_(attend_runs(parts.backend, q, q_runs, k, v, (keys,), spec)[0])


register_attention(GATHER_KV, gather_kv)
