"""Measure the overhead of KV transfers (Tetris §7.4), on workers of one thread each: ratios of medians from one run.

    python benchmarks/overheads.py [--length 4096] [--repeats 5]

Balancing: a prompt has two chunks, the first on one instance, the second, of half of `--length`, on both. Its TTFT with
the KV of the first chunk resharded to both instances is compared with its TTFT without.
Streaming: a prompt runs on a prefill instance, and its KV is sent to a decode instance. Its TTFT is compared with that
of a prompt that ends with its first token.
Backends: several prompts run concurrently, in two chunks each on two prefill instances, and end on a decode instance.
Their time with one transfer backend, half of the number that the sources could use, is compared with two.

Both settings alternate, so that a machine that becomes slower meanwhile affects both. Prompts are random.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from longspan import LLM, SamplingParams
from longspan.core.policy import Policy
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts
from longspan.policy.sharing import SharingOptions
from longspan.policy.tetris.execution import Cdsp
from longspan.policy.tetris.planner import Chunk, ChunkPlan, Prompt

_NUM_AT_ONCE = 6
_HISTORIES = (0.25, 0.5, 1.0, 2.0)
"""The first chunk is this many times as long as the second, as in the paper."""
_BLOCK = 64


@dataclass(frozen=True)
class InTwoChunks:
    """Plans the first chunk of a prompt on instance 0, and a second, 1 / `history` times as long, on 0 and 1."""

    history: float = 1.0
    largest = 2

    def plan(self, prompt: Prompt, queue_s: Sequence[float], _used: Sequence[int] = ()) -> ChunkPlan:
        first = round(prompt.new_tokens * self.history / (1 + self.history))
        chunks = Chunk(num_tokens=first, group=(0,)), Chunk(num_tokens=prompt.new_tokens - first, group=(0, 1))
        return ChunkPlan(chunks=chunks, ttft_s=max(queue_s) + 1.0)

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:  # noqa: ARG002 - of the protocol
        return 1.0


def growing(*, balance: bool, decode: Sequence[int] = (), history: float = 1.0) -> Policy:
    """Return a policy that runs plans of two chunks, and decodes on the instances `decode`, by default on the group."""
    options = SharingOptions(exchange="ring_kv")
    parts = GroupParts(2, options, Facts(), balance=balance)
    return Cdsp((0, 1), options, InTwoChunks(history), parts, decode=decode)


@dataclass(frozen=True)
class Comparison:
    """Two functions that measure seconds with a feature and without it."""

    with_it: Callable[[], float]
    without: Callable[[], float]


class Runner:
    """A pair of workers, and random prompts for them."""

    def __init__(self, llm: LLM, length: int) -> None:
        self.llm, self._length, self._random = llm, length, random.Random(0)

    def ttft_s(self, num_tokens: int = 1, *, length: int | None = None) -> float:
        """Time one prompt with `num_tokens` new tokens."""
        [output] = self.llm.generate([self._prompt(length or self._length)], _tokens(num_tokens), use_tqdm=False)
        assert output.metrics.ttft_s is not None, "it has ended"
        return output.metrics.ttft_s

    def growing_ttft_s(self, history: float, *, balance: bool) -> float:
        """Time one prompt in two chunks. The second chunk is half as long as other prompts."""
        self.llm.engine.set_policy(growing(balance=balance, history=history))
        return self.ttft_s(length=_grown(self._length, history))

    def all_s(self) -> float:
        """Time shorter prompts on instances 0 and 1, until the last of them has its tokens from instance 2."""
        self.llm.engine.set_policy(growing(balance=True, decode=(2,)))
        prompts = [self._prompt(self._length // 4) for _ in range(_NUM_AT_ONCE)]
        outputs = self.llm.generate(prompts, _tokens(4), use_tqdm=False)
        return max((output.metrics.ttft_s or 0.0) + sum(output.metrics.tbt_s) for output in outputs)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(10, 49_000) for _ in range(length)]


def main() -> None:
    """Measure and print medians. Write every sample with `--json`."""
    options = _options()
    arguments = {"dtype": "float32", "threads_per_rank": 1, "block_size": _BLOCK, "enable_prefix_caching": False}
    roles = {"prefill_parallel": "1", "decode_parallel": "1"}
    samples: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:

        def runner(**more: object) -> Runner:
            return Runner(stack.enter_context(LLM(**arguments, **more)), options.length)  # type: ignore[arg-type]  # its own

        uniform = runner(instances=2)
        if (longest := _grown(options.length, max(_HISTORIES))) >= uniform.llm.max_model_len:
            sys.exit(f"--length {options.length} needs prompts of {longest} tokens: give less")
        streaming = runner(**roles)
        roles["prefill_parallel"] = "2"
        two, one = (runner(**roles, transfer_backends=backends) for backends in (2, 1))
        comparisons: Mapping[str, Comparison] = {
            **{
                f"balancing a group that grows, behind {history:g} times as much": Comparison(
                    partial(uniform.growing_ttft_s, history, balance=True),
                    partial(uniform.growing_ttft_s, history, balance=False),
                )
                for history in _HISTORIES
            },
            "streaming to a decode instance": Comparison(lambda: streaming.ttft_s(2), streaming.ttft_s),
            "one backend instead of two": Comparison(one.all_s, two.all_s),
        }
        for comparison in comparisons.values():  # first times are slower
            comparison.with_it()
            comparison.without()
        for _ in track(range(options.repeats), "measuring"):
            for name, comparison in comparisons.items():
                times = samples.setdefault(name, defaultdict(list))
                times["with"].append(comparison.with_it())
                times["without"].append(comparison.without())
        pairs = ("kv_balance", uniform.llm), ("kv_transfer", streaming.llm)
        moved = [llm.bytes_exchanged[name] / 2**20 for name, llm in pairs]
    Console().print(_report(samples, options.length))
    machine = f"{os.cpu_count()} x {platform.processor() or platform.machine()}, 1 thread per worker"
    print(f"in all {moved[0]:.0f} MiB were balanced and {moved[1]:.0f} MiB streamed; {machine}")
    if options.json:
        options.json.write_text(json.dumps(samples, indent=1) + "\n")


def _report(samples: Mapping[str, Mapping[str, Sequence[float]]], length: int) -> Table:
    table = Table(
        title=f"Seconds for prompts of {length} tokens. Backends: a quarter. Balancing: half, behind a first chunk"
    )
    for column in ("", "with", "without", "ratio", "lowest to highest"):
        table.add_column(column, justify="left" if not column else "right")
    for name, times in samples.items():
        with_it, without = (statistics.median(times[key]) for key in ("with", "without"))
        ratios = [first / second for first, second in zip(times["with"], times["without"], strict=True)]
        spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
        table.add_row(name, f"{with_it:.3f}", f"{without:.3f}", f"{with_it / without:.3f}", spread)
    return table


def _grown(length: int, history: float) -> int:
    """Return the number of tokens of a prompt in two chunks, if the second has half of `length`."""
    return round(length / 2 * (1 + history))


def _tokens(number: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=number, ignore_eos=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    if options.repeats < 1 or options.length < 8 * _BLOCK:
        sys.exit(f"--repeats must be at least 1, and --length at least {8 * _BLOCK}")
    return options


if __name__ == "__main__":
    main()
