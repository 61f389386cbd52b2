"""Ring pass-KV: keys and values travel around the ring, queries stay (Context Parallelism §3.5.2, Algorithm 2).

In hop h a member computes with the keys of the member h places before it, while the keys of the next hop are already
on their way. Members may hold different numbers of keys; each message has just its sender's size, nothing is padded.
Keys that no query of the group can see any more (sliding windows) are not sent.
"""

from __future__ import annotations

from longspan.attn.backends import Partial, merge_each
from longspan.attn.exchanges import Call, register_attention
from longspan.attn.member import attend_runs, empty_kv_message, pack_kv
from longspan.core.exchange import RING_KV


def ring_kv(call: Call) -> None:
    group, parts, q, spec = call.group, call.parts, call.q, call.spec
    me, size = group.rank, group.size
    found: dict[int, Partial] = {}
    needed = [[part.needed(source, spec.window) for part in parts] for source in range(size)]
    message = pack_kv(parts, needed[me], me, call.kv)
    for hop in range(size):
        source = (me - hop) % size
        if hop + 1 < size:
            incoming = empty_kv_message(needed[(source - 1) % size], spec.num_kv_heads, q)
            pending = group.start(sends={(me + 1) % size: message}, receives={(me - 1) % size: incoming}, hop=hop)
        visitors = zip(parts, needed[source], message.tensors[::2], message.tensors[1::2], strict=True)
        for index, (part, runs, k, v) in enumerate(visitors):
            if part.q_runs[me] and k.shape[1]:
                partial = attend_runs(parts.backend, q[:, part.rows], part.q_runs[me], k, v, runs, spec)
                found[index] = merge_each([found[index], partial]) if index in found else partial
        if hop + 1 < size:
            pending.wait()
            message = incoming
    for index, (out, _) in found.items():
        call.out[:, parts[index].rows] = out


register_attention(RING_KV, ring_kv)
