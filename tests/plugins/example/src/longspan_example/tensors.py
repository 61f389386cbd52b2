"""The tensors of `broadcast`. Workers import this module."""

from __future__ import annotations

from longspan.attn.collectives import all_gather
from longspan.attn.exchanges import Call
from longspan.attn.member import attend_runs, by_position, empty_kv_message, pack_kv
from longspan.core.runs import stretch


def broadcast(call: Call) -> None:
    """Send the keys and values of this member to all others, and attend to all of them."""
    group, parts, q, spec = call.group, call.parts, call.q, call.spec
    needed = [[part.needed(holder, spec.window) for part in parts] for holder in range(group.size)]
    blocks = [
        pack_kv(parts, runs, holder, call.kv) if holder == group.rank else empty_kv_message(runs, spec.num_kv_heads, q)
        for holder, runs in enumerate(needed)
    ]
    all_gather(group, blocks)
    for index, part in enumerate(parts):
        if q_runs := part.q_runs[group.rank]:
            held = [runs[index] for runs in needed]
            k, v = (by_position(held, [block.tensors[2 * index + kind] for block in blocks]) for kind in (0, 1))
            keys = stretch(run for runs in held for run in runs)
            call.out[:, part.rows] = attend_runs(parts.backend, q[:, part.rows], q_runs, k, v, (keys,), spec)[0]
