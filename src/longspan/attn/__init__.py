"""Exact attention over sequences that are split between processes, for any model and without the engine.

Every process holds the queries, keys and values of some tokens. All processes call the same exchange with the same
runs. Each gets the attention of its own queries over the keys of all processes:

    with longspan.attn.join() as group:  # the process group of torch.distributed, for example under torchrun
        runs = longspan.attn.shard_span("zigzag", 0, num_tokens, group.size)
        mine = longspan.attn.positions(runs[group.rank])
        out = longspan.attn.ring_kv(group, q[:, mine], k[:, mine], v[:, mine], [runs])

| | tensors that are sent |
|---|---|
| `ring_kv` | keys and values, around a ring, while the previous ones are used |
| `ring_q` | queries to the members that hold keys, and partial outputs back: for few queries and many cached keys |
| `alltoall` | queries, keys and values, so that each member has some heads for all tokens, and outputs back |
| `gather_kv` | all keys and values, to every member |
| `chain` | keys and values, from each member to the next, for contiguous runs |

`register` and `Split` apply exchanges to an unmodified Hugging Face model. docs/exchanges.md counts the bytes. Names
are loaded on first use, and `import longspan.attn` needs no torch.
"""

from typing import TYPE_CHECKING

from longspan.core.exports import lazy_exports
from longspan.core.runs import Run, SpanShards, positions

if TYPE_CHECKING:
    from longspan.attn.comm import CommError
    from longspan.attn.huggingface import Split, register
    from longspan.attn.library import Members, alltoall, chain, gather_kv, join, ring_kv, ring_q
    from longspan.core.layouts import shard_span

__all__ = [
    "CommError",
    "Members",
    "Run",
    "SpanShards",
    "Split",
    "alltoall",
    "chain",
    "gather_kv",
    "join",
    "positions",
    "register",
    "ring_kv",
    "ring_q",
    "shard_span",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "CommError": "longspan.attn.comm",
        "shard_span": "longspan.core.layouts",
        **dict.fromkeys(("Split", "register"), "longspan.attn.huggingface"),
        **dict.fromkeys(
            ("Members", "alltoall", "chain", "gather_kv", "join", "ring_kv", "ring_q"), "longspan.attn.library"
        ),
    },
)
