"""The bytes that a prompt's exchange sends in one layer, by the formulas of docs/exchanges.md."""

from __future__ import annotations

from longspan import LLM, RequestOutput
from longspan.core.layouts import shard_span
from longspan.core.splits import split_heads, spread_heads


def tokens_of_members(output: RequestOutput, exchange: str, num_tokens: int, members: int, block: int) -> list[int]:
    """Return the tokens of a prompt that each member computes, in one step."""
    layout = "contiguous" if exchange == "chain" else "zigzag"
    tokens = [sum(map(len, runs)) for runs in shard_span(layout, 0, num_tokens, members, align=block)]
    if exchange == "chain":
        return tokens
    first = (output.request_id + output.request_id // members) % members  # it rotates with the request
    return [tokens[(member - first) % members] for member in range(members)]


def bytes_of_layer(llm: LLM, exchange: str, tokens: list[int]) -> int:
    """Return the bytes that all members send in one layer in float32, without sliding windows or cached tokens."""
    spec, shape = llm.info.specs[0], llm.facts.shape
    assert shape is not None
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    members, num_tokens, of_a_key = len(tokens), sum(tokens), 2 * kv_heads * dim * 4
    shares = split_heads(heads, kv_heads, members)
    others = [(i, j) for i in range(members) for j in range(members) if i != j]
    match exchange:
        case "ring_kv" | "gather_kv":
            return (members - 1) * of_a_key * num_tokens
        case "ring_q":
            return (members - 1) * heads * (2 * dim * 4 + 4) * num_tokens
        case "alltoall":
            spread = spread_heads(heads, kv_heads, members)
            return dim * 4 * sum(2 * tokens[i] * (len(spread[j].heads) + len(spread[j].kv_heads)) for i, j in others)
        case "chain":
            return of_a_key * sum((members - 1 - i) * count for i, count in enumerate(tokens))
        case _:
            makers = [min(m for m, share in enumerate(shares) if head in share.kv_heads) for head in range(kv_heads)]
            travelling = sum(tokens[i] * sum(maker != i for maker in makers) for i in range(members))
            return 2 * (members - 1) * num_tokens * shape.hidden_size * 4 + 2 * dim * 4 * travelling
