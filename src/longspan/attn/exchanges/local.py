"""No exchange: one member holds all keys of the request, some of them perhaps on its host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.attn.backends import Partial
from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import attend_held, attend_runs
from longspan.core.exchange import LOCAL
from longspan.core.runs import num_tokens


def local(call: Call) -> None:
    """Computes attention of parts whose group is this member alone, and merges what it finds on the host."""
    host, q, out, spec = call.host, call.q, call.out, call.spec
    if host is None:
        for rows, (found, _) in _attend_own(call):
            out[:, rows] = found
        return
    everyone = tuple(range(len(call.parts)))
    rows = call.parts.rows(everyone, q.device)
    assert isinstance(rows, slice), "the tokens of an exchange follow each other"
    visits, lse = [host.visit(0, everyone, q[:, rows])], torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    asked = host.ask(visits, spec)
    for own, partial in _attend_own(call):
        out[:, own], lse[:, own] = partial
    host.merge(call.parts.backend, visits, asked, [(out[:, rows], lse[:, rows])], spec)


def _attend_own(call: Call) -> Iterator[tuple[slice | Tensor, Partial]]:
    """Yields partial results over the keys in the member's own pool, and their rows.

    Single queries read their keys where they lie, all in one call; more queries of a request read the new keys, if
    there are no others, or a contiguous copy, which costs little beside them.
    """
    parts, q, kv, spec = call.parts, call.q, call.kv, call.spec
    single = tuple(index for index, part in enumerate(parts) if num_tokens(part.q_runs[0]) == 1)
    if single:
        rows = parts.rows(single, q.device)
        plan = parts.plan(single, 0, 0, kv, spec.window)
        yield rows, parts.backend.attend_paged(q[:, rows], kv, plan, spec)
    for part in parts:
        runs = part.q_runs[0]
        if num_tokens(runs) == 1 or part.span_start is None:
            continue
        if part.span_start == 0:
            k, v = call.k[:, part.rows], call.v[:, part.rows]
            yield part.rows, attend_runs(parts.backend, q[:, part.rows], runs, k, v, runs, spec)
        else:
            yield part.rows, attend_held(parts.backend, part, q[:, part.rows], 0, 0, kv, spec)


register_attention(LOCAL, local)
