"""longspan through its Python face."""

from __future__ import annotations

import itertools
from typing import Any

import torch

import longspan
from contestants.serving import Prompts, Started, serve
from longspan import LLM, SamplingParams
from longspan.outputs import RequestOutput


def start(options: dict[str, Any]) -> Started:
    """Starts `instances` copies on all cores together; with `record_times`, the workers say what they spend time on."""
    llm = LLM(
        options["model"],
        instances=options["instances"],
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        kv_cache_memory_bytes=options["kv_cache_memory_bytes"],
        record_times=options["record_times"],
    )

    def generate(prompts: Prompts, new_tokens: int) -> list[list[float]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [_arrivals(output) for output in llm.generate(prompts, params)]

    def worker_times() -> list[dict[str, float]]:
        # They are as of each rank's latest step: steps that compute next to nothing bring them up to date.
        generate([[1]] * (2 * options["instances"]), 1)
        return llm.worker_times()

    return Started(
        versions={"longspan": longspan.__version__, "torch": torch.__version__},
        generate=generate,
        worker_times=worker_times if options["record_times"] else None,
        close=llm.shutdown,
    )


def _arrivals(output: RequestOutput) -> list[float]:
    metrics = output.metrics
    assert metrics.ttft_s is not None, "a finished request has a first token"
    return list(itertools.accumulate([metrics.arrival_s + metrics.ttft_s, *metrics.tbt_s]))


if __name__ == "__main__":
    serve(start)
