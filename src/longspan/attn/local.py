"""No exchange: one member holds all keys of the request."""

from __future__ import annotations

from torch import Tensor

from longspan.attn.member import MemberPart, attend_in_place, attend_runs, gather_needed, num_tokens
from longspan.attn.spec import AttnSpec


def local(part: MemberPart, spec: AttnSpec) -> Tensor:
    """Attention of a part whose group is this member alone: `[heads, tokens, head_dim]`.

    A single query reads its keys where they lie; more queries read a contiguous copy, which costs little beside them.
    """
    runs = part.q_runs[0]
    if num_tokens(runs) == 1:
        return attend_in_place(part.q, runs[0].start, part.kv, part.kv_runs[0], spec)[0]
    needed = part.needed(0, spec.window)
    k = part.q.new_empty(spec.num_kv_heads, num_tokens(needed), spec.head_dim)
    v = k.new_empty(k.shape)
    gather_needed(part, 0, spec.window, k, v)
    return attend_runs(part.q, runs, k, v, needed, spec)[0]
