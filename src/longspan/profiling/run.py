"""The profiler: starts groups of instances, times prompts and links on them, and stores every time at once."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import Protocol

import msgspec
from tqdm import tqdm

from longspan.core.engine import Engine
from longspan.core.exchange import ALLTOALL, CHAIN, LOCAL, RING_KV
from longspan.core.sampling import SamplingParams
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.partitions import Partition, cut, even, modelled_ttft, search
from longspan.cost.profile import Decode, Prefill, Profile, profiled_prompts
from longspan.cost.profile_key import ProfileKey
from longspan.errors import ParameterError
from longspan.model.info import ModelInfo
from longspan.outputs import RequestOutput
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.profiling import links
from longspan.profiling.plan import (
    DECODE_STEPS,
    KvRoom,
    all_missing,
    default_lengths,
    kinds_of_links,
)
from longspan.profiling.store import load_partitions, load_profile, save_partitions, save_profile


class Instances(Protocol):
    """Instances of a model as the profiler needs them: `longspan.LLM` is one."""

    info: ModelInfo

    @property
    def facts(self) -> Facts: ...

    @property
    def profile_key(self) -> ProfileKey: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def engine(self) -> Engine: ...

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None: ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...


Start = Callable[[int], AbstractContextManager[Instances]]
"""Starts a number of instances."""

_ONE_TOKEN = SamplingParams(max_tokens=1)
_WARM_UP_TOKENS = 256


def measure(start: Start, most_members: int, lengths: Sequence[int] | None, repeats: int) -> Profile:
    """Returns the stored profile of this machine, after measuring what it lacked of groups of 1 to `most_members`.

    One instance is timed while the others are busy, too: with the same prompt, or with prefills while it decodes.
    Smaller groups than `most_members` are timed while nothing else runs. Everything is saved once it is measured.

    Raises:
        ValueError: for lengths that are no prompts of the model, or a stored profile that cannot be read.
        WorkerLostError: when a worker dies.
    """
    with start(most_members) as llm:
        config = llm.engine.config
        room = KvRoom(
            max_model_len=llm.max_model_len, block_size=config.block_size, num_blocks=config.cluster.num_blocks[0]
        )
        profile = load_profile(llm.profile_key) or Profile(profile_key=llm.profile_key)
        profile = profile.of_one_beside(most_members - 1)
        prompts = _prompts(lengths, room)
        profile = _measure_missing(llm, profile, {1, most_members}, prompts, room, repeats)
    for members in range(most_members - 1, 1, -1):
        if all_missing(profile, {members}, prompts, room, repeats):
            with start(members) as llm:
                profile = _measure_missing(llm, profile, {members}, prompts, room, repeats)
    return profile


def _measure_missing(
    llm: Instances,
    profile: Profile,
    sizes: set[int],
    prompts: Sequence[tuple[int, int]],
    room: KvRoom,
    repeats: int,
) -> Profile:
    members, is_warm = max(sizes), False
    name = "one instance" if members == 1 else f"{members} instances"
    while left := all_missing(profile, sizes, prompts, room, repeats):
        if not is_warm:
            _warm_up(llm, members)
            is_warm = True
        for task in tqdm(left, desc=name, unit="time", dynamic_ncols=True, disable=None):
            profile = _measured(llm, profile, task)
            save_profile(profile)
    return profile


def measure_links(profile: Profile, num_ranks: int) -> Profile:
    """Adds the speeds of links between `num_ranks` ranks unless they were measured."""
    if kinds_of_links(num_ranks) <= set(profile.links):
        return profile
    for transfer in links.time_links(num_ranks, profile.profile_key.device):
        profile = profile.with_transfer(transfer)
    save_profile(profile)
    return profile


def _prompts(lengths: Sequence[int] | None, room: KvRoom) -> list[tuple[int, int]]:
    """Returns new and cached tokens of all prefills; by default all that the model takes."""
    longest = room.max_model_len - 1
    if lengths is None:
        return profiled_prompts(default_lengths(room.max_model_len), room.max_model_len)
    if not lengths or min(lengths) < 1 or max(lengths) > longest:
        given = ",".join(map(str, lengths))
        raise ParameterError("lengths", f"must be from 1 to {longest} tokens with this model, but {given} given")
    if not room.holds(1, max(lengths) + 1):
        problem = (
            f"{max(lengths)} is more than the {room.num_blocks} blocks of {room.block_size} tokens that one instance "
            "has for KV: give shorter ones, or more kv_cache_memory_bytes"
        )
        raise ParameterError("lengths", problem)
    return profiled_prompts(lengths, room.max_model_len)


def _measured(llm: Instances, profile: Profile, task: Prefill | Decode) -> Profile:
    """Measures something once more, and adds that time.

    On CUDA devices it is done once more before the first time: kernels are compiled and chosen by the first call of
    each shape.
    """
    time = profile.num_times(task)
    if profile.profile_key.device == "cuda" and not time:
        _seconds(llm, task, -1)
    seconds = _seconds(llm, task, time)
    return profile.with_measured(msgspec.structs.replace(task, seconds=(seconds,), beside=_beside(llm, task)))


def _seconds(llm: Instances, task: Prefill | Decode, time: int) -> float:
    return _timed_decode(llm, task, time) if isinstance(task, Decode) else _timed(llm, task, f"{task.key}, {time}")


def _beside(llm: Instances, task: Prefill | Decode) -> int:
    return llm.engine.config.cluster.num_instances - task.members


def _timed_decode(llm: Instances, task: Decode, time: int) -> float:
    """Returns median seconds between tokens of random prompts once all decode together.

    Their KV is computed before; a full last block would not be found again, so one token more follows. Sharded prompts
    still start one after the other. Larger batches have the prompts of smaller ones, too, whose KV is still there.
    Singles, shorter than a block, go to whom has the least to do. Of one instance, the others compute prompts of a full
    step meanwhile: all of a host share its memory, and where many requests wait, they do that most of the time.
    """
    vocabulary, config = range(llm.info.vocab_size), llm.engine.config
    draw = random.Random(f"decodes of {task.members} behind {task.context_tokens} tokens, time {time}")
    behind_block = task.context_tokens % config.block_size == 0
    prompts = [draw.choices(vocabulary, k=task.context_tokens + behind_block) for _ in range(task.batch)]
    singles = [draw.choices(vocabulary, k=-(-config.block_size // 2)) for _ in range(task.singles)]
    beside: list[list[int]] = []
    if task.members > 1:
        threshold = str(len(singles[0]) if singles else 0)
        llm.set_policy("context", {"exchange": RING_KV.kind, "decode": task.exchange, "threshold": threshold})
    else:
        room = config.cluster.num_blocks[0] * config.block_size
        full = min(config.max_num_batched_tokens, llm.max_model_len - 1, room - 1)
        draw = random.Random(f"beside {len(prompts)} behind {task.context_tokens} tokens, time {time}")
        beside = [draw.choices(vocabulary, k=full) for _ in range(_beside(llm, task))]
        llm.engine.set_policy(make_policy("chunked", num_instances=1, options={}))
    for prompt in prompts:  # one by one: sharded ones evenly, others all on the first instance
        llm.generate([prompt], _ONE_TOKEN, use_tqdm=False)
    if task.members == 1:
        llm.set_policy("chunked", {})
    decoding = [*prompts, *singles]
    steps = SamplingParams(temperature=0.0, max_tokens=len(decoding) + DECODE_STEPS, ignore_eos=True)
    params = [steps] * len(decoding) + [_ONE_TOKEN] * len(beside)
    outputs = llm.generate([*decoding, *beside], params, use_tqdm=False)[: len(decoding)]
    if task.members == 1 and len({tuple(map(bool, one.metrics.kv_tokens_per_instance)) for one in outputs}) > 1:
        raise ValueError(
            f"{task.batch} requests behind {task.context_tokens} tokens did not decode on one instance: allow more KV "
            "memory, or give shorter lengths"
        )
    latest = max(outputs, key=lambda output: output.metrics.arrival_s + (output.metrics.ttft_s or 0.0))
    return statistics.median(latest.metrics.tbt_s[1:DECODE_STEPS])


def _warm_up(llm: Instances, members: int) -> None:
    """Makes the first calls, which are slower: threads and connections start, memory is touched."""
    length = min(_WARM_UP_TOKENS, llm.max_model_len - 1)
    for exchange in (RING_KV, ALLTOALL) if members > 1 else (LOCAL,):
        task = Prefill(members=members, exchange=str(exchange), new_tokens=length, cached_tokens=0, seconds=())
        _timed(llm, task, "warm-up")


def _timed(llm: Instances, task: Prefill, seed: str) -> float:
    """Times one prefill; that of one instance while all others have such a prompt, too."""
    if task.members > 1:
        llm.set_policy("context", {"exchange": task.exchange, "threshold": "0"})
        return timed(llm, task.new_tokens, task.cached_tokens, seed=seed)
    llm.set_policy("chunked", {})
    return timed(llm, task.new_tokens, task.cached_tokens, seed=seed, num_prompts=1 + _beside(llm, task))


def timed(llm: Instances, new_tokens: int, cached_tokens: int, *, seed: int | str, num_prompts: int = 1) -> float:
    """Returns mean seconds to the first token of random prompts at once, behind `cached_tokens` computed before."""
    draw, vocabulary = random.Random(seed), range(llm.info.vocab_size)
    prompts = [draw.choices(vocabulary, k=cached_tokens + new_tokens) for _ in range(num_prompts)]
    if cached_tokens:
        llm.generate([prompt[:cached_tokens] for prompt in prompts], _ONE_TOKEN, use_tqdm=False)
    times = []
    for output in llm.generate(prompts, _ONE_TOKEN, use_tqdm=False):
        kept = output.metrics.num_cached_tokens
        if cached_tokens and kept < cached_tokens:
            raise ValueError(
                f"of {cached_tokens} tokens only {kept} stayed cached: allow more KV memory, or give shorter lengths"
            )
        assert output.metrics.ttft_s is not None, "a token was asked for"
        times.append(output.metrics.ttft_s)
    return statistics.fmean(times)


TimePartition = Callable[[Partition], float]
"""Seconds to the first token of a prompt that is cut like this."""


def search_partitions(
    start: Start, profile: Profile, most_members: int, lengths: Sequence[int] | None, repeats: int
) -> PartitionTable:
    """Adds partitions for chains of 2 to `most_members` to this machine's table, of these lengths as far as possible.

    Those of 2 members are searched by timing prompts, and kept once they are found; those of more by the model of a
    chain, which is quick, so they are always searched anew, from what other entries predict for their length.

    Every entry is of a prompt that is one chain. Pieces for which a step has no room are not timed, and so are no
    lengths whose even pieces are such.

    Args:
        start: starts instances whose steps are as large as memory allows.

    Raises:
        ValueError: when the profile does not tell what a prompt costs, or a stored table cannot be read.
        WorkerLostError: when a worker dies.
    """
    model = profile.profile_key.model
    with start(2) as llm:
        wanted = lengths or default_lengths(llm.max_model_len)
        size, most = llm.engine.config.block_size, llm.engine.config.max_num_batched_tokens
        table = load_partitions(profile.profile_key, size)
        plan = [(n, length) for n in range(2, most_members + 1) for length in sorted(set(wanted)) if length >= n * size]
        known = table.lengths(model, 2)
        plan = [(n, length) for n, length in plan if max(even(length, n, size)) <= most]
        plan = [(n, length) for n, length in plan if n > 2 or length not in known]
        modelled = _modelled_cuts(llm, profile)
        with closing(tqdm(plan, desc="partitions", unit="prompt", dynamic_ncols=True, disable=None)) as bar:
            for members, length in bar:
                if members == 2:
                    best = search(_timed_cuts(llm, repeats, bar), length, members, size, noisy=True)
                else:
                    predicted = table.predict(model, members, length)
                    seed = None if predicted is None else cut(predicted, length, size)
                    best = search(modelled, length, members, size, seed if seed and min(seed) else None)
                fractions = tuple(piece / length for piece in best)
                table = table.with_entry(Entry(model=model, members=members, length=length, fractions=fractions))
                save_partitions(profile.profile_key, size, table)
    return table


def _timed_cuts(llm: Instances, repeats: int, bar: tqdm[tuple[int, int]]) -> TimePartition:
    num_timed = 0

    def seconds(partition: Partition) -> float:
        nonlocal num_timed
        if max(partition) > llm.engine.config.max_num_batched_tokens:
            return math.inf
        length, times = sum(partition), []
        fractions = ",".join(repr(piece / length) for piece in partition)
        llm.set_policy("context", {"exchange": CHAIN.kind, "fractions": fractions, "threshold": "0"})
        for _ in range(repeats):
            num_timed += 1
            times.append(timed(llm, length, 0, seed=num_timed + length * 1000))
        bar.set_postfix_str(f"{length:,} as {', '.join(map(str, partition))}: {statistics.median(times):.3f} s")
        return statistics.median(times)

    return seconds


def _modelled_cuts(llm: Instances, profile: Profile) -> TimePartition:
    shape = llm.facts.shape
    found = None if shape is None else modelled_ttft(profile, shape)
    if found is None:
        problem = "must be at least two: partitions follow from the times of prompts on one instance"
        raise ParameterError("lengths", problem)
    return found
