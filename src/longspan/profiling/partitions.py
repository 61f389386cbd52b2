"""The search for partitions: how prompts are best cut for chains, by timing them or by the model of a chain."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import closing

from tqdm import tqdm

from longspan.core.exchange import CHAIN, LOCAL
from longspan.cost.partitions import Entry, Partition, PartitionTable, chain_ttft_s, cut, search
from longspan.cost.profile import Profile
from longspan.errors import ParameterError
from longspan.profiling.plan import default_lengths
from longspan.profiling.run import Instances, Start, timed
from longspan.profiling.store import load_partitions, save_partitions

Clock = Callable[[Partition], float]
"""Seconds to the first token of a prompt that is cut like this."""


def search_partitions(
    start: Start, profile: Profile, most_members: int, lengths: Sequence[int] | None, repeats: int
) -> PartitionTable:
    """Adds partitions for chains of 2 to `most_members` to this machine's table, of these lengths as far as possible.

    Those of 2 members are searched by timing prompts, and kept once they are found; those of more by the model of a
    chain, which is quick, so they are always searched anew, from what other entries predict for their length.

    Raises:
        ValueError: when the profile does not tell what a prompt costs, or a stored table cannot be read.
        WorkerLostError: when a worker dies.
    """
    table = load_partitions(profile.profile_key)
    with start(2) as llm:
        wanted = lengths or default_lengths(llm.max_model_len)
        size = llm.engine.config.block_size
        plan = [(n, length) for n in range(2, most_members + 1) for length in sorted(set(wanted)) if length >= n * size]
        known = table.lengths(profile.profile_key.model, 2)
        plan = [(n, length) for n, length in plan if n > 2 or length not in known]
        modelled = _modelled(llm, profile)
        with closing(tqdm(plan, desc="partitions", unit="prompt", dynamic_ncols=True, disable=None)) as bar:
            for members, length in bar:
                if members == 2:
                    best = search(_measured(llm, repeats, bar), length, members, size, noisy=True)
                else:
                    seed = _seed(table.predict(profile.profile_key.model, members, length), length, size)
                    best = search(modelled, length, members, size, seed)
                table = table.with_entry(_entry(profile.profile_key.model, best))
                save_partitions(profile.profile_key, table)
    return table


def _entry(model: str, partition: Partition) -> Entry:
    length = sum(partition)
    fractions = tuple(piece / length for piece in partition)
    return Entry(model=model, members=len(partition), length=length, fractions=fractions)


def _seed(predicted: tuple[float, ...] | None, length: int, size: int) -> Partition | None:
    """Returns what was predicted, in blocks, if it leaves nobody without any."""
    if predicted is None:
        return None
    seed = cut(predicted, length, size)
    return seed if min(seed) else None


def _measured(llm: Instances, repeats: int, bar: tqdm[tuple[int, int]]) -> Clock:
    num_timed = 0

    def seconds(partition: Partition) -> float:
        nonlocal num_timed
        length, times = sum(partition), []
        fractions = ",".join(repr(piece / length) for piece in partition)
        llm.set_policy("context", {"exchange": CHAIN.kind, "fractions": fractions, "threshold": "0"})
        for _ in range(repeats):
            num_timed += 1
            times.append(timed(llm, length, 0, seed=num_timed + length * 1000))
        bar.set_postfix_str(f"{length:,} as {', '.join(map(str, partition))}: {statistics.median(times):.3f} s")
        return statistics.median(times)

    return seconds


def _modelled(llm: Instances, profile: Profile) -> Clock:
    alone, link = profile.fits().get((1, LOCAL)), profile.link("point_to_point", 2)
    shape = llm.facts.shape
    if alone is None or link is None or shape is None:
        problem = "must be at least two: partitions follow from the times of prompts on one instance"
        raise ParameterError("lengths", problem)
    kv_bytes = shape.kv_bytes / profile.profile_key.tp
    return lambda partition: chain_ttft_s(partition, alone, link, num_layers=shape.num_layers, kv_bytes=kv_bytes)
