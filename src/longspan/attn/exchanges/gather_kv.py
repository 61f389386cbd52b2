"""Every member gathers all keys and values. This is the tensor/sequence parallelism that KV-Runahead is compared with
(KV-Runahead §4.1, Fig. 4).
"""

from __future__ import annotations

from longspan.attn.collectives import all_gather
from longspan.attn.exchanges import Call, exchange
from longspan.attn.gathered import attend_joined
from longspan.core.exchange import GATHER_KV


@exchange(GATHER_KV)
def gather_kv(call: Call) -> None:
    """Gather all keys. With `dense`, as in the paper, hidden scores are computed and masked instead of skipped."""
    messages = call.all_kv()
    all_gather(call.group, messages)
    attend_joined(call, [call.needed(member) for member in range(call.group.size)], messages)
