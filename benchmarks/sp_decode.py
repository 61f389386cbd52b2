"""Decodes one long request beside short ones: its KV on several instances (CSPS's SP decode), or on one of them.

    python benchmarks/sp_decode.py [--parallel 2] [--prefill 2] [--long 6000] [--num-short 16] [--output-len 64]

Policy `csps` leaves the KV of the long prompt where it was computed, and moves queries; with roles, the KV goes from
`--prefill` instances to `--parallel` others, where all requests decode. `chunked` has each request on one of
`--parallel` instances. All serve the same requests in turns, exactly. Each computes the prompts and a second token
first, so that only what the last blocks have is computed or moved again before all decode together.

Outputs must be what the unmodified Hugging Face model puts out in float32, greedily: it is given prompts and outputs at
once, and each token must have its largest logit, or one within 0.002 of that. Exits with 1 otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM

from longspan import LLM, SamplingParams
from longspan.model.source import smollm2_folder

_SHORT = (64, 256)
_TOLERANCE = 2e-3
_SYSTEMS = ("chunked", "csps", "csps, roles")


def main() -> int:
    """Serves, compares, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parallel", default="2")
    parser.add_argument("--prefill", default="2")
    parser.add_argument("--long", type=int, default=6000)
    parser.add_argument("--num-short", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rates: dict[str, list[float]] = {system: [] for system in _SYSTEMS}
    rng = np.random.default_rng(0)
    lengths = [asked.long, *rng.integers(*_SHORT, size=asked.num_short).tolist()]
    prompts: list[list[int]] = []
    answers: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        llms = {system: stack.enter_context(_start(system, asked)) for system in rates}
        for number in track(range(asked.rounds + 1), "measuring", console=Console(stderr=True)):
            prompts = [rng.integers(5, 40_000, size=length).tolist() for length in lengths]
            for system, llm in llms.items():
                llm.reset_prefix_cache()
                answers[system], rate = _decode(llm, prompts, asked.output_len)
                if number:  # the first round warms up
                    rates[system].append(rate)
    print(f"{asked.long} tokens and {asked.num_short} short prompts, {asked.output_len} tokens each")
    print(f"decode on {asked.parallel} instances; with roles, prefill on {asked.prefill} others")
    for system in _SYSTEMS[1:]:
        ratios = [one / other for one, other in zip(rates[system], rates["chunked"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"decode tokens/s of {system} by those of chunked: {statistics.median(ratios):.2f} ({spread})")
    wrong = _num_wrong(asked.model, prompts, answers)
    for system, number in wrong.items():
        print(f"{system}: {number} of {len(prompts) * asked.output_len} tokens are not those of Hugging Face")
    return 1 if any(wrong.values()) else 0


def _start(system: str, asked: argparse.Namespace) -> LLM:
    where = {"parallel": asked.parallel}
    if system == "csps, roles":
        where = {"prefill_parallel": asked.prefill, "decode_parallel": asked.parallel}
    policy = system.partition(",")[0]
    return LLM(asked.model, dtype=asked.dtype, policy=policy, threads_per_rank=1, **where)


def _decode(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[list[list[int]], float]:
    """Returns the outputs, and the tokens per second of a second call, which finds the prompts cached."""
    for max_tokens in (2, output_len):
        begun_s = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - begun_s
    return [list(output.outputs[0].token_ids) for output in outputs], len(prompts) * output_len / seconds


@torch.no_grad()
def _num_wrong(model: str, prompts: Sequence[list[int]], answers: dict[str, list[list[int]]]) -> dict[str, int]:
    """Counts the tokens of each system whose logit falls short of the largest that Hugging Face's model has."""
    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2_folder() if model == "smollm2-135m" else model, dtype=torch.float32
    ).eval()
    found = dict.fromkeys(answers, 0)
    checked: dict[tuple[int, tuple[int, ...]], int] = {}
    for system, of_system in answers.items():
        for index, (prompt, answer) in enumerate(zip(prompts, of_system, strict=True)):
            key = index, tuple(answer)
            if key not in checked:
                ids = torch.tensor([[*prompt, *answer[:-1]]])
                logits = oracle(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
                chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
                checked[key] = int((logits.max(dim=1).values - chosen > _TOLERANCE).sum())
            found[system] += checked[key]
    return found


if __name__ == "__main__":
    sys.exit(main())
