"""longspan through its Python class `LLM`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import longspan
from contestants.serving import Started, Submission, Timeline, serve
from longspan import LLM, SamplingParams
from longspan.core.request import RequestMetrics
from longspan.text.input_processor import EngineRequest
from longspan.text.output_processor import Choice


def start(options: dict[str, Any]) -> Started:
    """Start `instances` instances that share all cores. With `record_times`, workers record seconds per category."""
    llm = LLM(
        options["model"],
        instances=options["instances"],
        dtype="bfloat16",
        quantization=options.get("quantization"),
        skip_tokenizer_init=True,
        max_model_len=options["max_model_len"],
        kv_cache_memory_bytes=options["kv_cache_memory_bytes"],
        record_times=options["record_times"],
    )

    def worker_times() -> list[dict[str, float]]:
        # They are as of each rank's latest step. Two short prompts per instance bring them up to date.
        llm.generate([[1]] * (2 * options["instances"]), SamplingParams(max_tokens=1))
        return llm.worker_times()

    return Started(
        versions={"longspan": longspan.__version__, "torch": torch.__version__},
        generate=lambda submissions: _generate(llm, submissions),
        worker_times=worker_times if options["record_times"] else None,
        close=llm.shutdown,
    )


def _generate(llm: LLM, submissions: Sequence[Submission]) -> list[Timeline]:
    requests = [_request(llm, submission) for submission in submissions]
    min_tokens = 0.0

    def stepped(choices: Sequence[Choice]) -> None:
        nonlocal min_tokens
        min_tokens = min((choice.num_taken for choice in choices if not choice.finished), default=math.inf)

    def groups() -> Iterator[tuple[int, list[EngineRequest]] | None]:
        for index, (submission, request) in enumerate(zip(submissions, requests, strict=True)):
            while min_tokens < submission.after_tokens:
                yield None
            yield index, [request]

    finished = llm.finish_each(groups(), max_groups=len(requests), stepped=stepped)
    metrics = {index: state.output().metrics for index, [state] in finished}
    return [_timeline(metrics[index]) for index in range(len(requests))]


def _request(llm: LLM, submission: Submission) -> EngineRequest:
    params = SamplingParams(temperature=0, max_tokens=submission.new_tokens, ignore_eos=True)
    return llm.input_processor.process(submission.prompt, params)


def _timeline(metrics: RequestMetrics) -> Timeline:
    assert metrics.ttft_s is not None, "a finished request has a first token"
    first_s = metrics.arrival_s + metrics.ttft_s
    return Timeline(submitted_s=metrics.arrival_s, arrivals_s=list(itertools.accumulate([first_s, *metrics.tbt_s])))


if __name__ == "__main__":
    serve(start)
