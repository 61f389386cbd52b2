"""llama.cpp through llama-cpp-python, with 4-bit weights: one prompt at a time, and one token after another."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp

from contestants.serving import Started, Submission, Timeline, serve


def start(options: dict[str, Any]) -> Started:
    """Loads the default model's own file as Q4_0, for which llama.cpp has its quickest kernels, on all cores."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "q4_0.gguf"
        _quantize(Path(options["gguf"]), file)
        llama = llama_cpp.Llama(
            str(file),
            n_ctx=options["max_model_len"],
            n_threads=options["cores"],
            n_threads_batch=options["cores"],
            verbose=False,
        )

    def generate(submissions: Sequence[Submission]) -> list[Timeline]:
        [submission] = submissions
        submitted_s, times = time.perf_counter(), []
        tokens = llama.generate(submission.prompt, temp=0.0)  # it goes on past any end-of-sequence token
        for _ in range(submission.new_tokens):
            next(tokens)
            times.append(time.perf_counter())
        return [Timeline(submitted_s=submitted_s, arrivals_s=times)]

    return Started(versions={"llama-cpp-python": llama_cpp.__version__}, generate=generate)


def _quantize(source: Path, target: Path) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantize {source.name}")


if __name__ == "__main__":
    serve(start)
