"""Ring pass-KV: keys and values travel around the ring, queries stay (Context Parallelism §3.5.2, Algorithm 2).

In hop h a member computes with the keys of the member h places before it, while the keys of the next hop arrive.
Members may hold different numbers of keys. Messages have the size of their source and are not padded. Keys that no
query of the group can see any more (sliding windows, chunks) are not sent.
"""

from __future__ import annotations

from longspan.attn.exchanges import Call, exchange
from longspan.core.exchange import RING_KV


@exchange(RING_KV)
def ring_kv(call: Call) -> None:
    """Pass KV around the ring. Queries stay."""
    message = call.own_kv()
    for source in call.ring():
        incoming = call.pass_on(message, source)
        call.attend(source, message)
        message = incoming.wait()
