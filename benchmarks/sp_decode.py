"""Decodes one long request beside short ones: its KV over all instances (CSPS's SP decode), or on one of them.

    python benchmarks/sp_decode.py [--parallel 2] [--long 6000] [--num-short 16] [--output-len 64] [--rounds 3]

Policy `csps` leaves the KV of the long prompt where it was computed, and moves queries; `chunked` has each request on
one instance. Both serve the same requests in turns, exactly. Each computes the prompts first, so that only what their
last blocks have is computed again before they decode together. Exits with 1 if outputs are not the same.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import ExitStack

import numpy as np
from rich.console import Console
from rich.progress import track

from longspan import LLM, SamplingParams

_SHORT = (64, 256)


def main() -> int:
    """Serves, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parallel", default="2")
    parser.add_argument("--long", type=int, default=6000)
    parser.add_argument("--num-short", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {"csps": [], "chunked": []}
    same = True
    with ExitStack() as stack:
        llms = {
            policy: stack.enter_context(
                LLM(asked.model, dtype=asked.dtype, parallel=asked.parallel, policy=policy, threads_per_rank=1)
            )
            for policy in rates
        }
        rng = np.random.default_rng(0)
        for number in track(range(asked.rounds + 1), "measuring", console=Console(stderr=True)):
            lengths = [asked.long, *rng.integers(*_SHORT, size=asked.num_short).tolist()]
            prompts = [rng.integers(5, 40_000, size=length).tolist() for length in lengths]
            answers = []
            for policy, llm in llms.items():
                llm.reset_prefix_cache()
                tokens, rate = _decode(llm, prompts, asked.output_len)
                answers.append(tokens)
                if number:  # the first round warms up
                    rates[policy].append(rate)
            same = same and answers[0] == answers[1]
    csps, chunked = (statistics.median(found) for found in rates.values())
    print(
        f"{asked.long} tokens and {asked.num_short} short prompts on {asked.parallel}, {asked.output_len} tokens each"
    )
    print(f"decode tokens/s of csps by those of chunked: {csps / chunked:.2f} (median of {asked.rounds})")
    print(f"outputs {'are the same' if same else 'DIFFER'}")
    return 0 if same else 1


def _decode(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[list[list[int]], float]:
    """Returns the outputs, and the tokens per second of a second call, which finds the prompts cached."""
    for max_tokens in (1, output_len):
        begun_s = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], len(prompts) * output_len / (
        time.monotonic() - begun_s
    )


if __name__ == "__main__":
    sys.exit(main())
