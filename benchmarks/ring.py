"""Time to first token and time between tokens: longspan on one and two instances beside transformers, in one run.

All use the same cores, model, token ids and precision. Prints medians, and ratios to transformers (above 1: faster).
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

from longspan import LLM, SamplingParams
from longspan.model.smollm2 import smollm2_folder

Measure = Callable[[list[int], int], tuple[float, float]]
"""`(prompt, new tokens) -> (TTFT, median TBT)` in seconds."""


def main() -> None:
    """Measures every contestant on every length and prints one table."""
    options = _options()
    cores = len(os.sched_getaffinity(0))
    console = Console()
    console.print(f"SmolLM2-135M {options.dtype}, {cores} CPU cores, {options.repeats} repeats, batch 1")
    contestants: dict[str, Callable[[], tuple[Measure, Callable[[], None]]]] = {
        "transformers": lambda: _transformers(options.dtype, cores),
        "longspan, 1 instance": lambda: _longspan(1, options.dtype),
        "longspan, 2 instances": lambda: _longspan(2, options.dtype),
    }
    results: dict[tuple[str, int], tuple[float, float]] = {}
    for name, start in contestants.items():
        measure, close = start()
        measure(_prompt(64, 0), 2)
        for length in track(options.lengths, description=name, console=console):
            runs = [measure(_prompt(length, seed), options.new_tokens) for seed in range(1, options.repeats + 1)]
            results[name, length] = tuple(statistics.median(column) for column in zip(*runs, strict=True))
        close()
    console.print(_table(list(contestants), options.lengths, results))


def _table(names: list[str], lengths: list[int], results: dict[tuple[str, int], tuple[float, float]]) -> Table:
    table = Table("prompt", "", "TTFT", "ratio", "TBT", "ratio")
    for length in lengths:
        base_ttft, base_tbt = results[names[0], length]
        for name in names:
            ttft, tbt = results[name, length]
            table.add_row(
                str(length),
                name,
                f"{ttft:.2f} s",
                f"{base_ttft / ttft:.2f}",
                f"{tbt * 1e3:.1f} ms",
                f"{base_tbt / tbt:.2f}",
            )
    return table


def _prompt(length: int, seed: int) -> list[int]:
    """Random ids: no two prompts share a prefix."""
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    ids: list[int] = torch.randint(100, 49_000, (length,), generator=generator).tolist()
    return ids


def _longspan(instances: int, dtype: str) -> tuple[Measure, Callable[[], None]]:
    llm = LLM(instances=instances, dtype=dtype)

    def measure(prompt: list[int], new_tokens: int) -> tuple[float, float]:
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
        assert output.metrics.ttft_s is not None, "a finished request has a first token"
        return output.metrics.ttft_s, statistics.median(output.metrics.tbt_s)

    return measure, llm.shutdown


def _transformers(dtype: str, cores: int) -> tuple[Measure, Callable[[], None]]:
    torch.set_num_threads(cores)
    model = AutoModelForCausalLM.from_pretrained(smollm2_folder(), dtype=getattr(torch, dtype)).eval()

    @torch.no_grad()
    def measure(prompt: list[int], new_tokens: int) -> tuple[float, float]:
        start = time.perf_counter()
        output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
        token = output.logits[:, -1:].argmax(-1)
        times = [time.perf_counter()]
        for _ in range(new_tokens - 1):
            output = model(token, past_key_values=output.past_key_values, use_cache=True)
            token = output.logits[:, -1:].argmax(-1)
            times.append(time.perf_counter())
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return times[0] - start, statistics.median(gaps)

    return measure, lambda: None


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 8000], help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    return parser.parse_args()


if __name__ == "__main__":
    main()
