"""llama.cpp through llama-cpp-python, with 4-bit weights: one prompt at a time, and one token after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import llama_cpp

from contestants.serving import Started, Submission, Timeline, serve


def start(options: dict[str, Any]) -> Started:
    """Loads the GGUF file that the default model comes from, and computes on all cores."""
    llama = llama_cpp.Llama(
        options["gguf"],
        n_ctx=options["max_model_len"],
        n_threads=options["cores"],
        n_threads_batch=options["cores"],
        flash_attn=options["flash_attention"],
        verbose=False,
    )

    def generate(submissions: Sequence[Submission]) -> list[Timeline]:
        [submission] = submissions
        submitted_s, times = time.perf_counter(), []
        tokens = llama.generate(submission.prompt, temp=0.0)  # it has no end, and knows no end-of-sequence token
        for _ in range(submission.new_tokens):
            next(tokens)
            times.append(time.perf_counter())
        return [Timeline(submitted_s=submitted_s, arrivals_s=times)]

    return Started(versions={"llama-cpp-python": llama_cpp.__version__}, generate=generate)


if __name__ == "__main__":
    serve(start)
