"""No exchange: one member holds all keys of the request."""

from __future__ import annotations

from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import attend_held, attend_runs
from longspan.core.exchange import LOCAL
from longspan.core.runs import num_tokens


def local(call: Call) -> None:
    """Computes attention of parts whose group is this member alone.

    Single queries read their keys where they lie, all in one call; more queries of a request read the new keys, if
    there are no others, or a contiguous copy, which costs little beside them.
    """
    parts, q, kv, spec, out = call.parts, call.q, call.kv, call.spec, call.out
    single = tuple(index for index, part in enumerate(parts) if num_tokens(part.q_runs[0]) == 1)
    if single:
        rows = parts.rows(single, q.device)
        plan = parts.plan(single, 0, 0, kv, spec.window)
        out[:, rows] = parts.backend.attend_paged(q[:, rows], kv, plan, spec)[0]
    for part in parts:
        rows, runs = part.rows, part.q_runs[0]
        if num_tokens(runs) == 1 or part.span_start is None:
            continue
        if part.span_start == 0:
            k, v = call.k[:, rows], call.v[:, rows]
            out[:, rows] = attend_runs(parts.backend, q[:, rows], runs, k, v, runs, spec)[0]
        else:
            out[:, rows] = attend_held(parts.backend, part, q[:, rows], 0, 0, kv, spec)[0]


register_attention(LOCAL, local)
