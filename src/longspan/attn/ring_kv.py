"""Ring pass-KV: keys and values travel around the ring, queries stay (Context Parallelism §3.5.2, Algorithm 2).

In hop h a member computes with the keys of the member h places before it, while the keys of the next hop are already
on their way. Members may hold different numbers of keys; each message has just its sender's size, nothing is padded.
Keys that no query of the group can see any more (sliding windows) are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longspan.attn.comm import Group, Message, Shape
from longspan.attn.kernel import Partial
from longspan.attn.member import MemberPart, MemberParts, attend_runs, gather_needed, merge_partials, num_tokens
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec


def ring_kv(group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec, out: Tensor) -> None:
    """Attention of several requests at once over the keys of all members.

    Every member of the group calls it with the same parts in the same order, those without queries too.

    Args:
        q: `[heads, tokens, head_dim]`, this member's queries; `rows` of a part are its own.
        kv: this layer of this member's pool, the keys and values of this step included.
        out: of q's shape; the rows of the parts are written.
    """
    partials: list[list[Partial]] = [[] for _ in parts]
    message = _own_message(group, parts, q, kv, spec)
    for hop in range(group.size):
        source = (group.rank - hop) % group.size
        if hop + 1 < group.size:
            incoming = _empty_message((source - 1) % group.size, parts, q, spec)
            pending = group.start(
                sends={(group.rank + 1) % group.size: message},
                receives={(group.rank - 1) % group.size: incoming},
                hop=hop,
            )
        for part, k, v, found in zip(parts, message.tensors[::2], message.tensors[1::2], partials, strict=True):
            if part.q_runs[group.rank] and k.shape[1]:
                runs = part.needed(source, spec.window)
                found.append(attend_runs(q[:, part.rows], part.q_runs[group.rank], k, v, runs, spec))
        if hop + 1 < group.size:
            pending.wait()
            message = incoming
    for part, found in zip(parts, partials, strict=True):
        if found:
            out[:, part.rows] = merge_partials(found, q.dtype)


def _own_message(group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec) -> Message:
    message = _empty_message(group.rank, parts, q, spec)
    for part, k, v in zip(parts, message.tensors[::2], message.tensors[1::2], strict=True):
        gather_needed(part, group.rank, kv, spec.window, k, v)
    return message


def _empty_message(source: int, parts: Sequence[MemberPart], q: Tensor, spec: AttnSpec) -> Message:
    """Keys, then values, of each part that `source` holds."""
    shapes: list[Shape] = []
    for part in parts:
        tokens = num_tokens(part.needed(source, spec.window))
        shapes += [((spec.num_kv_heads, tokens, spec.head_dim), q.dtype)] * 2
    return Message(shapes, q.device)
