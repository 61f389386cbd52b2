"""Ring pass-KV: keys and values travel around the ring, queries stay (Context Parallelism §3.5.2, Algorithm 2).

In hop h a member computes with the keys of the member h places before it, while the keys of the next hop are already
on their way. Members may hold different numbers of keys; each message has just its sender's size, nothing is padded.
Keys that no query of the group can see any more (sliding windows) are not sent.
"""

from __future__ import annotations

from torch import Tensor

from longspan.attn.backends import Partial
from longspan.attn.comm import Group
from longspan.attn.exchanges import from_pool, register
from longspan.attn.member import MemberParts, attend_runs, kv_message, kv_room
from longspan.attn.merge import merge_each
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import RING_KV


def ring_kv(group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec, out: Tensor) -> None:
    """Computes attention of several requests at once over the keys of all members.

    Every member of the group calls it with the same parts in the same order, those without queries too.

    Args:
        q: `[heads, tokens, head_dim]`, this member's queries; `rows` of a part are its own.
        kv: this layer of this member's pool, the keys and values of this step included.
        out: of q's shape; the rows of the parts are written.
    """
    found: list[Partial | None] = [None] * len(parts)
    needed = [[part.needed(source, spec.window) for part in parts] for source in range(group.size)]
    message = kv_message(parts, needed[group.rank], group.rank, kv)
    for hop in range(group.size):
        source = (group.rank - hop) % group.size
        if hop + 1 < group.size:
            incoming = kv_room(needed[(source - 1) % group.size], spec.num_kv_heads, q)
            pending = group.start(
                sends={(group.rank + 1) % group.size: message},
                receives={(group.rank - 1) % group.size: incoming},
                hop=hop,
            )
        visitors = zip(parts, needed[source], message.tensors[::2], message.tensors[1::2], strict=True)
        for index, (part, runs, k, v) in enumerate(visitors):
            if part.q_runs[group.rank] and k.shape[1]:
                partial = attend_runs(parts.backend, q[:, part.rows], part.q_runs[group.rank], k, v, runs, spec)
                before = found[index]
                found[index] = partial if before is None else merge_each([before, partial])
        if hop + 1 < group.size:
            pending.wait()
            message = incoming
    for part, result in zip(parts, found, strict=True):
        if result is not None:
            out[:, part.rows] = result[0]


register(RING_KV, from_pool(ring_kv))
