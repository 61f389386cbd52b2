"""Pass-Q: queries visit the keys, partial outputs come back and are merged (Context Parallelism §3.5.3, Algorithm 3).

Made for decode, where one query costs far less to move than the keys it meets. Each query goes to the members that hold
keys of its request at once instead of hop by hop: the same bytes as around the ring, but the latency of one hop, and no
padding of the batch. While queries travel, every member computes on its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message, Shape
from longspan.attn.kernel import Partial
from longspan.attn.member import MemberPart, attend_in_place, attend_runs, gather_needed, merge_partials, num_tokens
from longspan.attn.spec import AttnSpec


def ring_q(group: Group, parts: Sequence[MemberPart], spec: AttnSpec) -> list[Tensor]:
    """Attention of several requests at once; see `ring_kv` for arguments and result."""
    others = [member for member in range(group.size) if member != group.rank]
    questions = {m: _queries(group.rank, m, parts, spec) for m in others}
    asked = {m: _queries(m, group.rank, parts, spec, fill=False) for m in others}
    pending = group.start(sends=questions, receives=asked, hop=0)
    partials = [[_meet(group.rank, part, part.q, group.rank, spec)] if part.q.shape[1] else [] for part in parts]
    pending.wait()
    answers = {m: _answers(group.rank, m, parts, asked[m], spec) for m in others}
    answered = {m: _outputs(group.rank, m, parts, spec) for m in others}
    group.start(sends=answers, receives=answered, hop=1).wait()
    for member in others:
        visited = _visited(group.rank, member, parts, spec)
        lses, outs = answered[member].tensors[: len(visited)], answered[member].tensors[len(visited) :]
        for index, out, lse in zip(visited, outs, lses, strict=True):
            partials[index].append((out, lse))
    return [
        merge_partials(found, part.q) if found else torch.zeros_like(part.q)
        for part, found in zip(parts, partials, strict=True)
    ]


def _visited(asker: int, holder: int, parts: Sequence[MemberPart], spec: AttnSpec) -> list[int]:
    """Parts of which `asker` has queries and `holder` has keys that are still in sight."""
    return [index for index, part in enumerate(parts) if part.q_runs[asker] and part.needed(holder, spec.window)]


def _queries(asker: int, holder: int, parts: Sequence[MemberPart], spec: AttnSpec, *, fill: bool = True) -> Message:
    visited = _visited(asker, holder, parts, spec)
    shapes: list[Shape] = [
        ((spec.num_heads, num_tokens(parts[index].q_runs[asker]), spec.head_dim), parts[index].q.dtype)
        for index in visited
    ]
    message = Message(shapes, parts[0].q.device)
    if fill:
        for index, tensor in zip(visited, message.tensors, strict=True):
            tensor.copy_(parts[index].q)
    return message


def _outputs(asker: int, holder: int, parts: Sequence[MemberPart], spec: AttnSpec) -> Message:
    """Room for the log-sum-exps, then the outputs, that `holder` returns to `asker`."""
    visited = _visited(asker, holder, parts, spec)
    counts = [num_tokens(parts[index].q_runs[asker]) for index in visited]
    lses: list[Shape] = [((spec.num_heads, count), torch.float32) for count in counts]
    outs: list[Shape] = [((spec.num_heads, count, spec.head_dim), parts[0].q.dtype) for count in counts]
    return Message([*lses, *outs], parts[0].q.device)


def _answers(me: int, asker: int, parts: Sequence[MemberPart], asked: Message, spec: AttnSpec) -> Message:
    message = _outputs(asker, me, parts, spec)
    visited = _visited(asker, me, parts, spec)
    lses, outs = message.tensors[: len(visited)], message.tensors[len(visited) :]
    for index, q, lse, out in zip(visited, asked.tensors, lses, outs, strict=True):
        found_out, found_lse = _meet(me, parts[index], q, asker, spec)
        out.copy_(found_out)
        lse.copy_(found_lse)
    return message


def _meet(me: int, part: MemberPart, q: Tensor, asker: int, spec: AttnSpec) -> Partial:
    """The queries of `asker` over this member's keys."""
    runs = part.q_runs[asker]
    if num_tokens(runs) == 1:
        return attend_in_place(q, runs[0].start, part.kv, part.kv_runs[me], spec)
    needed = part.needed(me, spec.window)
    k = q.new_empty(spec.num_kv_heads, num_tokens(needed), spec.head_dim)
    v = k.new_empty(k.shape)
    gather_needed(part, me, spec.window, k, v)
    return attend_runs(q, runs, k, v, needed, spec)
