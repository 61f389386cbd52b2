"""Time to first token of every exchange on two instances of one thread each, in one run with the machine's own scaling.

All settings share the same two workers and alternate after every measurement. A machine that becomes slower or faster
in between affects all of them. A prompt is computed in one step. Prompts are random, so no prefix is reused.

The script first searches chain partitions and then profiles every exchange, as `longspan profile --partitions` does.
`auto` uses both. The printed times are measured after that.

Efficiency is T1 / (2 T2). The machine's own scaling is its upper bound: one prompt alone against two concurrent
prompts, one on each instance. Instances share caches and memory, and no exchange can win back that time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from longspan import LLM, SamplingParams
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.partitions import Partition, search
from longspan.cost.profile import Prefill, Profile

ONE, BOTH = "one instance", "two prompts at once"
BLOCK = 64
_MAX_CUTS = 32
"""Cuts of a prompt on the search grid. Differences on a finer grid are below the noise."""
_SINGLE = {"threshold": "1000000"}
_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_SHARED = {"threshold": "0"}
_EXCHANGES = {
    "ring_kv": {**_SHARED, "exchange": "ring_kv"},
    "ring_q": {**_SHARED, "exchange": "ring_q"},
    "alltoall": {**_SHARED, "exchange": "alltoall"},
    "gather_kv (TSP, skipping)": {**_SHARED, "exchange": "gather_kv"},
    "gather_kv (TSP, dense)": {**_SHARED, "exchange": "gather_kv", "dense": "true", "layout": "contiguous"},
    "gather_hidden": {**_SHARED, "exchange": "gather_hidden"},
    "chain, even (KVR-E)": {**_SHARED, "exchange": "chain"},
}
_PROFILED = ("ring_kv", "ring_q", "alltoall", "gather_kv")
_SEARCHED, _PREDICTED, _AUTO = "chain, searched (KVR-S)", "chain, predicted (KVR-P)", "auto"
Samples = dict[int, dict[str, list[float]]]


class Runner:
    """Two workers, and random prompts for them."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._random = llm, random.Random(0)
        self.taken: dict[str, dict[str, int]] = {}
        """The exchanges of the latest prompt."""

    def ttft_s(self, length: int, options: dict[str, str], *, num_prompts: int = 1) -> float:
        """Time `num_prompts` prompts, submitted together, until the last of them has its first token."""
        self._llm.set_policy("context", options)
        prompts = [[self._random.randrange(10, 49_000) for _ in range(length)] for _ in range(num_prompts)]
        outputs = self._llm.generate(prompts, _TOKEN, use_tqdm=False)
        self.taken = outputs[-1].metrics.exchanges
        return max(output.metrics.ttft_s or 0.0 for output in outputs)

    def searched(self, length: int) -> Partition:
        """Return KVR-S, the partition with the lowest measured time. Each time is a median of three."""

        def ttft_s(partition: Partition) -> float:
            options = _chain([tokens / length for tokens in partition])
            return statistics.median(self.ttft_s(length, options) for _ in range(3))

        return search(ttft_s, length, 2, BLOCK * -(-length // (BLOCK * _MAX_CUTS)), noisy=True)

    def learn(self, lengths: Sequence[int], table: PartitionTable, repeats: int) -> None:
        """Time every exchange that `auto` may choose, and store the times in the service's profile."""
        model, profile = self._llm.facts.model, Profile(profile_key=self._llm.profile_key)
        for _ in track(range(repeats), "profiling"):
            for length in lengths:
                settings = {(2, name): {**_SHARED, "exchange": name} for name in _PROFILED}
                chain = _chain(table.predict(model, 2, length) or ())
                for (members, exchange), options in {(1, "local"): _SINGLE, **settings, (2, "chain"): chain}.items():
                    seconds = (self.ttft_s(length, options),)
                    profile = profile.with_measured(
                        Prefill(members=members, exchange=exchange, new_tokens=length, cached_tokens=0, seconds=seconds)
                    )
        service = self._llm.service
        service.setup = replace(service.setup, facts=replace(service.setup.facts, profile=profile, partitions=table))


def main() -> None:
    """Measure and print medians. Write every sample with `--json`."""
    options = _options()
    console = Console()
    settings: dict[int, dict[str, dict[str, str]]] = {}
    taken: dict[int, str] = {}
    samples: Samples = {length: defaultdict(list) for length in options.lengths}
    with LLM(
        instances=2,
        threads_per_rank=1,
        dtype="bfloat16",
        block_size=BLOCK,
        max_num_batched_tokens=max(options.lengths),
        enable_prefix_caching=False,
    ) as llm:
        runner = Runner(llm)
        for setting in (_SINGLE, *_EXCHANGES.values()):  # first times are slower
            runner.ttft_s(min(options.lengths), setting)
        lengths = track(options.lengths, "searching", console=console)
        partitions = {length: runner.searched(length) for length in lengths}
        table = _table_of(partitions, llm.facts.model)
        runner.learn(options.lengths, table, options.repeats)
        for length in options.lengths:
            settings[length] = _settings(length, table, llm.facts.model)
        for _ in track(range(options.repeats), "measuring", console=console):
            for length, named in settings.items():
                samples[length][ONE].append(runner.ttft_s(length, _SINGLE))
                samples[length][BOTH].append(runner.ttft_s(length, _SINGLE, num_prompts=2))
                for name, setting in named.items():
                    samples[length][name].append(runner.ttft_s(length, setting))
                taken[length] = ", ".join(runner.taken["prefill"])  # auto comes last
    console.print(_report(samples))
    for length, partition in partitions.items():
        cut = f"{partition[0]} + {partition[1]}"
        console.print(f"{length} tokens: searched partition {cut}; auto took {taken[length]}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"partitions": partitions, "samples": samples}, indent=1) + "\n")


def _table_of(partitions: dict[int, Partition], model: str) -> PartitionTable:
    entries = (
        Entry(model=model, members=2, length=length, fractions=tuple(tokens / length for tokens in partition))
        for length, partition in partitions.items()
    )
    return PartitionTable(tuple(entries))


def _settings(length: int, table: PartitionTable, model: str) -> dict[str, dict[str, str]]:
    """Return the policy options of each setting for a length. KVR-P predicts from the partitions of other lengths."""
    other_lengths = PartitionTable(tuple(entry for entry in table.partitions if entry.length != length))
    options: dict[str, dict[str, str]] = {**_EXCHANGES, _SEARCHED: _chain(table.predict(model, 2, length) or ())}
    if (predicted := other_lengths.predict(model, 2, length)) is not None:
        options[_PREDICTED] = _chain(predicted)
    return {**options, _AUTO: {}}


def _chain(fractions: Sequence[float]) -> dict[str, str]:
    return {**_SHARED, "exchange": "chain", "fractions": ",".join(f"{fraction:.6f}" for fraction in fractions)}


def _report(samples: Samples) -> Table:
    """Return a table of medians, with half the spread of each one's samples."""
    table = Table(title="Time to first token in seconds, and efficiency T1 / (2 T2)")
    table.add_column("")
    for length in samples:
        table.add_column(f"{length} tokens", justify="right")
    for name in samples[min(samples)]:
        cells = []
        for named in samples.values():
            times, single_s = named.get(name, []), statistics.median(named[ONE])
            cells.append("" if not times else _cell(times, single_s, is_shared=name not in {ONE, BOTH}))
        table.add_row(name, *cells)
    own = [statistics.median(named[ONE]) / statistics.median(named[BOTH]) for named in samples.values()]
    table.add_row("the machine's own scaling", *(f"{scaling:.2f}" for scaling in own), style="bold")
    return table


def _cell(times: list[float], single_s: float, *, is_shared: bool) -> str:
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median
    efficiency = f" {single_s / median / 2:.2f}" if is_shared else ""
    return f"{median:.3f} ±{spread / 2:.0%}{efficiency}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8000], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    options = parser.parse_args()
    if options.repeats < 1 or min(options.lengths) < 2 * BLOCK:
        sys.exit(f"--repeats must be at least 1, and --lengths at least {2 * BLOCK}")
    return options


if __name__ == "__main__":
    main()
