"""transformers: one forward pass over the prompts, then one token after another with its own KV cache."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from contestants.serving import Prompts, Started, serve


def start(options: dict[str, Any]) -> Started:
    """Runs the unmodified model on all cores; prompts of one call must be equally long, so that nothing is padded."""
    torch.set_num_threads(options["cores"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        times = []
        tokens, cache = torch.tensor(prompts), None
        for _ in range(new_tokens):
            output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            times.append(time.perf_counter())
        return [times] * len(prompts)

    return Started(
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        generate=generate,
    )


if __name__ == "__main__":
    serve(start)
