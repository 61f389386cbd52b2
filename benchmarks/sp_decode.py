"""Decode a long request together with short ones. Its KV is on several instances (CSPS's SP decode), or on one.

    python benchmarks/sp_decode.py [--parallel 2] [--prefill 2] [--long 6000] [--num-short 16] [--output-len 64]

Policy `csps` keeps the KV of the long prompt on the instances that computed it, and sends queries. With roles, the KV
moves from `--prefill` instances to `--parallel` decode instances, where all requests decode. `chunked` has each request
on one of `--parallel` instances. All systems alternate and serve the same requests, exactly. Each first computes the
prompts and a second token. The timed call then recomputes or moves only the last blocks before all requests decode.

The unmodified Hugging Face model in float32 verifies the outputs. It computes prompt and output in one pass. Each token
must have the largest logit, or a logit within 0.002 of it. The exit code is 1 otherwise.
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
    """Serve with all systems, print ratios, and return 1 if a token is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parallel", default="2")
    parser.add_argument("--prefill", default="2")
    parser.add_argument("--long", type=int, default=6000)
    parser.add_argument("--num-short", type=int, default=16)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {system: [] for system in _SYSTEMS}
    rng = np.random.default_rng(0)
    lengths = [args.long, *rng.integers(*_SHORT, size=args.num_short).tolist()]
    prompts: list[list[int]] = []
    answers: dict[str, list[list[int]]] = {}
    with ExitStack() as stack:
        llms = {system: stack.enter_context(_start(system, args)) for system in rates}
        for number in track(range(args.rounds + 1), "measuring", console=Console(stderr=True)):
            prompts = [rng.integers(5, 40_000, size=length).tolist() for length in lengths]
            for system, llm in llms.items():
                llm.reset_prefix_cache()
                answers[system], rate = _decode(llm, prompts, args.output_len)
                if number:  # the first round warms up
                    rates[system].append(rate)
    print(f"{args.long} tokens and {args.num_short} short prompts, {args.output_len} tokens each")
    print(f"decode on {args.parallel} instances; with roles, prefill on {args.prefill} other instances")
    for system in _SYSTEMS[1:]:
        ratios = [rate / chunked for rate, chunked in zip(rates[system], rates["chunked"], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"decode tokens/s of {system} by those of chunked: {statistics.median(ratios):.2f} ({spread})")
    wrong = _num_wrong(args.model, prompts, answers)
    for system, number in wrong.items():
        print(f"{system}: {number} of {len(prompts) * args.output_len} tokens differ from Hugging Face")
    return 1 if any(wrong.values()) else 0


def _start(system: str, args: argparse.Namespace) -> LLM:
    where = {"parallel": args.parallel}
    if system == "csps, roles":
        where = {"prefill_parallel": args.prefill, "decode_parallel": args.parallel}
    policy = system.partition(",")[0]
    return LLM(args.model, dtype=args.dtype, policy=policy, threads_per_rank=1, **where)


def _decode(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[list[list[int]], float]:
    """Return the outputs, and the tokens per second of a second call, for which the prompts are cached."""
    for max_tokens in (2, output_len):
        begun_s = time.monotonic()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - begun_s
    return [list(output.outputs[0].token_ids) for output in outputs], len(prompts) * output_len / seconds


@torch.no_grad()
def _num_wrong(model: str, prompts: Sequence[list[int]], answers: dict[str, list[list[int]]]) -> dict[str, int]:
    """Count the tokens of each system whose logit is below Hugging Face's largest logit by more than the tolerance."""
    oracle = AutoModelForCausalLM.from_pretrained(
        smollm2_folder() if model == "smollm2-135m" else model, dtype=torch.float32
    ).eval()
    wrong = dict.fromkeys(answers, 0)
    checked: dict[tuple[int, tuple[int, ...]], int] = {}
    for system, of_system in answers.items():
        for index, (prompt, answer) in enumerate(zip(prompts, of_system, strict=True)):
            key = index, tuple(answer)
            if key not in checked:
                ids = torch.tensor([[*prompt, *answer[:-1]]])
                logits = oracle(input_ids=ids, use_cache=False, logits_to_keep=len(answer)).logits[0]
                chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
                checked[key] = int((logits.max(dim=1).values - chosen > _TOLERANCE).sum())
            wrong[system] += checked[key]
    return wrong


if __name__ == "__main__":
    sys.exit(main())
