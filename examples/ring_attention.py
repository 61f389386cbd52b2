"""Compare attention over a sequence that is split between processes with attention in a single process.

Run it as: torchrun --nproc-per-node 2 examples/ring_attention.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from longspan import attn

NUM_TOKENS, HEADS, KV_HEADS, HEAD_DIM = 2_000, 8, 2, 64
EXCHANGES = (attn.ring_kv, attn.ring_q, attn.alltoall, attn.gather_kv, attn.chain)


def main() -> None:
    """Print the largest difference for every exchange."""
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(0)  # every process draws the whole sequence, to compare
    q = torch.randn(HEADS, NUM_TOKENS, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, KV_HEADS, NUM_TOKENS, HEAD_DIM, generator=generator)
    expected = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
    with attn.join() as group:
        for exchange in EXCHANGES:
            runs = attn.shard_span("contiguous" if exchange is attn.chain else "zigzag", 0, NUM_TOKENS, group.size)
            mine = attn.positions(runs[group.rank])
            out = exchange(group, q[:, mine], k[:, mine], v[:, mine], [runs])
            difference = (out - expected[:, mine]).abs().max()
            dist.all_reduce(difference, dist.ReduceOp.MAX)
            if group.rank == 0:
                print(f"{exchange.__name__:10} largest difference {difference:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
