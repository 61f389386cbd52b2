"""Time to first token of every exchange on two instances of one thread each, in one run with the machine's own scaling.

All settings share the same two workers; they take turns on every single measurement, so that a machine that gets slower
or faster meanwhile does so for all of them. A prompt is computed in one step. Random prompts, no prefix is reused.

First chains are searched, then every exchange is timed for a profile, as `longspan profile --partitions` would; `auto`
goes by both. What is printed is measured after that.

Efficiency is T1 / (2 T2), and what two instances could reach is measured beside it: two prompts at once, one on each
instance, against one alone. Sharing caches and memory costs time that no exchange can win back.
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
"""The grid on which the search cuts a prompt: finer differences drown in noise."""
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
        """Times prompts until the last of `num_prompts` has its first token, when all are asked at once."""
        self._llm.set_policy("context", options)
        prompts = [[self._random.randrange(10, 49_000) for _ in range(length)] for _ in range(num_prompts)]
        outputs = self._llm.generate(prompts, _TOKEN, use_tqdm=False)
        self.taken = outputs[-1].metrics.exchanges
        return max(output.metrics.ttft_s or 0.0 for output in outputs)

    def searched(self, length: int) -> Partition:
        """Finds KVR-S, the partition that is measured to be the fastest, each the median of three."""

        def ttft_s(partition: Partition) -> float:
            options = _chain([tokens / length for tokens in partition])
            return statistics.median(self.ttft_s(length, options) for _ in range(3))

        return search(ttft_s, length, 2, BLOCK * -(-length // (BLOCK * _MAX_CUTS)), noisy=True)

    def learn(self, lengths: Sequence[int], table: PartitionTable, repeats: int) -> None:
        """Times every exchange that `auto` may take, and lets it know."""
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
        service.setup = replace(service.setup, facts=replace(service.facts, profile=profile, partitions=table))


def main() -> None:
    """Measures and prints; with `--json` writes every sample."""
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
    """Returns policy options of everything that is measured at a length; KVR-P knows the other lengths only."""
    others = PartitionTable(tuple(entry for entry in table.partitions if entry.length != length))
    found: dict[str, dict[str, str]] = {**_EXCHANGES, _SEARCHED: _chain(table.predict(model, 2, length) or ())}
    if (predicted := others.predict(model, 2, length)) is not None:
        found[_PREDICTED] = _chain(predicted)
    return {**found, _AUTO: {}}


def _chain(fractions: Sequence[float]) -> dict[str, str]:
    return {**_SHARED, "exchange": "chain", "fractions": ",".join(f"{fraction:.6f}" for fraction in fractions)}


def _report(samples: Samples) -> Table:
    """Tabulates medians, and beside each how far apart its samples are."""
    table = Table(title="Time to first token in seconds, and efficiency T1 / (2 T2)")
    table.add_column("")
    for length in samples:
        table.add_column(f"{length} tokens", justify="right")
    for name in samples[min(samples)]:
        cells = []
        for named in samples.values():
            times, one = named.get(name, []), statistics.median(named[ONE])
            cells.append("" if not times else _cell(times, one, halved=name not in {ONE, BOTH}))
        table.add_row(name, *cells)
    own = [statistics.median(named[ONE]) / statistics.median(named[BOTH]) for named in samples.values()]
    table.add_row("the machine's own scaling", *(f"{scaling:.2f}" for scaling in own), style="bold")
    return table


def _cell(times: list[float], one: float, *, halved: bool) -> str:
    median = statistics.median(times)
    spread = (max(times) - min(times)) / median
    efficiency = f" {one / median / 2:.2f}" if halved else ""
    return f"{median:.3f} ±{spread / 2:.0%}{efficiency}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8000], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write every sample there")
    options = parser.parse_args()
    if options.repeats < 1 or min(options.lengths) < 2 * BLOCK:
        sys.exit(f"--repeats must be at least 1, and --lengths at least {2 * BLOCK}")
    return options


if __name__ == "__main__":
    main()
