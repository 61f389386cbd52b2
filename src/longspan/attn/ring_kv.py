"""Ring pass-KV: keys and values travel around the ring, queries stay (Context Parallelism §3.5.2, Algorithm 2).

In hop h a member computes with the keys of the member h places before it, while the keys of the next hop are already
on their way. Members may hold different numbers of keys; each message has just its sender's size, nothing is padded.
Keys that no query of the group can see any more (sliding windows) are not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message, Shape
from longspan.attn.kernel import Partial
from longspan.attn.member import MemberPart, attend_runs, gather_needed, merge_partials, num_tokens
from longspan.attn.spec import AttnSpec


def ring_kv(group: Group, parts: Sequence[MemberPart], spec: AttnSpec) -> list[Tensor]:
    """Attention of several requests at once over the keys of all members.

    Every member of the group calls it with the same parts in the same order, those without queries too. Returns this
    member's outputs, `[heads, tokens, head_dim]` per part.
    """
    partials: list[list[Partial]] = [[] for _ in parts]
    message = _own_message(group, parts, spec)
    for hop in range(group.size):
        source = (group.rank - hop) % group.size
        if hop + 1 < group.size:
            incoming = _empty_message((source - 1) % group.size, parts, spec)
            pending = group.start(
                sends={(group.rank + 1) % group.size: message},
                receives={(group.rank - 1) % group.size: incoming},
                hop=hop,
            )
        for part, k, v, found in zip(parts, message.tensors[::2], message.tensors[1::2], partials, strict=True):
            if part.q.shape[1] and k.shape[1]:
                runs = part.needed(source, spec.window)
                found.append(attend_runs(part.q, part.q_runs[group.rank], k, v, runs, spec))
        if hop + 1 < group.size:
            pending.wait()
            message = incoming
    return [
        merge_partials(found, part.q) if found else torch.zeros_like(part.q)
        for part, found in zip(parts, partials, strict=True)
    ]


def _own_message(group: Group, parts: Sequence[MemberPart], spec: AttnSpec) -> Message:
    message = _empty_message(group.rank, parts, spec)
    for part, k, v in zip(parts, message.tensors[::2], message.tensors[1::2], strict=True):
        gather_needed(part, group.rank, spec.window, k, v)
    return message


def _empty_message(source: int, parts: Sequence[MemberPart], spec: AttnSpec) -> Message:
    """Keys, then values, of each part that `source` holds."""
    shapes: list[Shape] = []
    for part in parts:
        tokens = num_tokens(part.needed(source, spec.window))
        shapes += [((spec.num_kv_heads, tokens, spec.head_dim), part.q.dtype)] * 2
    return Message(shapes, parts[0].q.device)
