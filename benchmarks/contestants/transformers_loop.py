"""transformers: one forward pass over the prompts, then one token after another with its own KV cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from contestants.serving import Started, Submission, Timeline, serve


def start(options: dict[str, Any]) -> Started:
    """Run the unmodified model on all cores. Prompts of a job must have one length, so that no padding is needed."""
    torch.set_num_threads(options["cores"])
    model = AutoModelForCausalLM.from_pretrained(options["model"], dtype=torch.bfloat16).eval()

    return Started(
        versions={"transformers": transformers.__version__, "torch": torch.__version__},
        generate=partial(complete, model),
    )


@torch.inference_mode()
def complete(model: PreTrainedModel, submissions: Sequence[Submission]) -> list[Timeline]:
    """Complete submissions of one shape. A token's time is taken when the host has its id, on any device."""
    submitted_s, times = time.perf_counter(), []
    tokens, cache = torch.tensor([submission.prompt for submission in submissions], device=model.device), None
    for _ in range(submissions[0].new_tokens):
        output = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
        tokens.tolist()
        times.append(time.perf_counter())
    return [Timeline(submitted_s=submitted_s, arrivals_s=times)] * len(submissions)


if __name__ == "__main__":
    serve(start)
