"""Measure the time that KV on hosts and their disks saves: the same requests with and without it, in one run.

    python benchmarks/tiers.py [--parallel 1] [--rounds 3]

Requests without common prefixes are submitted together. The device pool has blocks for a quarter of them, so requests
are preempted. Three engines alternate. The first recomputes released KV. The second loads it from the host. The third
has host blocks for a quarter of the requests and stores further KV on disk. Then each request has a second turn. Each
round has new random prompts, and nothing is cached at its start. The table has ratios of times. The exit code is 1 if
outputs differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from longspan import LLM, RequestOutput, SamplingParams

_BLOCK = 64
_TURN_TOKENS, _ANSWER_TOKENS = 32, 8
_RECOMPUTED = "recomputed"


def main() -> int:
    """Serve with each engine, print ratios, and return 1 if outputs differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--parallel", default="1")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    taken_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    facts: dict[str, str] = {}
    same = True
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="longspan-kv-"))
        llms = {
            name: stack.enter_context(_start(args, name, folder)) for name in (_RECOMPUTED, "host", "host and disk")
        }
        rng = np.random.default_rng(args.seed)
        for _ in track(range(args.rounds), "measuring", console=Console(stderr=True)):
            drawn = rng.integers(5, 40_000, size=(args.num_requests, args.input_len + _TURN_TOKENS)).tolist()
            prompts = [tokens[: args.input_len] for tokens in drawn]
            answers = set()
            for name, llm in llms.items():
                llm.reset_prefix_cache()
                first = _timed(llm, prompts, args.output_len, taken_s[name, "with preemption"])
                replies = [tuple(output.outputs[0].token_ids) for output in first]
                turns = [
                    [*prompt, *reply, *tokens[args.input_len :]]
                    for prompt, reply, tokens in zip(prompts, replies, drawn, strict=True)
                ]
                second = _timed(llm, turns, _ANSWER_TOKENS, taken_s[name, "another turn"])
                answers.add((tuple(replies), tuple(tuple(output.outputs[0].token_ids) for output in second)))
                facts[name] = _facts([*first, *second])
            same = same and len(answers) == 1
    Console().print(_report(taken_s, facts))
    print(f"outputs are {'the same' if same else 'NOT the same'}")
    return 0 if same else 1


def _start(args: argparse.Namespace, name: str, folder: str) -> LLM:
    """Start an engine with a quarter of the blocks that all requests need."""
    longest = args.input_len + args.output_len
    num_blocks = -(-longest // _BLOCK) * args.num_requests // 4
    arguments = {"block_size": _BLOCK, "num_gpu_blocks_override": num_blocks, "max_num_seqs": args.num_requests}
    llm_arguments = {"parallel": args.parallel, "dtype": args.dtype, "skip_tokenizer_init": True, **arguments}
    if name == _RECOMPUTED:
        return LLM(args.model, **llm_arguments)
    with LLM(args.model, **llm_arguments, host_kv_gib=1.0) as llm:
        block_gib = llm.service.block_bytes / 2**30
    if name == "host":
        return LLM(args.model, **llm_arguments, host_kv_gib=8 * num_blocks * block_gib)
    return LLM(
        args.model,
        **llm_arguments,
        host_kv_gib=num_blocks * block_gib,
        disk_kv_gib=8 * num_blocks * block_gib,
        disk_kv_dir=folder,
    )


def _timed(llm: LLM, prompts: Sequence[list[int]], num_tokens: int, taken_s: list[float]) -> list[RequestOutput]:
    """Time the prompts. Transfers to other tiers that are still in flight are completed first, untimed."""
    while llm.engine.has_unfinished:
        llm.engine.step()
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    begin_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    taken_s.append(time.perf_counter() - begin_s)
    return outputs


def _facts(outputs: Sequence[RequestOutput]) -> str:
    metrics = [output.metrics for output in outputs]
    num_computed = sum(request.num_computed_tokens for request in metrics)
    needed = sum(len(output.prompt_token_ids or ()) + len(output.outputs[0].token_ids) - 1 for output in outputs)
    num_preemptions = sum(request.num_preemptions for request in metrics)
    return f"{num_preemptions} preemptions, {num_computed:,} of {needed:,} tokens computed"


def _report(taken_s: dict[tuple[str, str], list[float]], facts: dict[str, str]) -> Table:
    table = Table("", "KV of preempted requests", "s", "ratio", "lowest to highest", "last round, both turns")
    for (name, phase), seconds in sorted(taken_s.items(), key=lambda item: item[0][1], reverse=True):
        ratios = [tier_s / base_s for tier_s, base_s in zip(seconds, taken_s[_RECOMPUTED, phase], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.add_row(
            phase, name, f"{statistics.median(seconds):.1f}", f"{statistics.median(ratios):.2f}", spread, facts[name]
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
