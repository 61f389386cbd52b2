"""The profiler: starts groups of instances, times prompts and links on them, and stores each time immediately."""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cache, partial
from typing import Protocol

import msgspec
from tqdm import tqdm

from longspan.core.cluster import Cluster
from longspan.core.engine import Engine
from longspan.core.exchange import ALLTOALL, ALLTOALL_SPARSE, CHAIN, LOCAL, RING_KV
from longspan.core.group_links import link_of_group, links_by_size
from longspan.core.link_classes import LinkClass
from longspan.core.locations import Location
from longspan.core.sampling import SamplingParams
from longspan.cost.csa_price import PROFILED_CSA
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.partitions import Partition, cut, even, modelled_ttft, search
from longspan.cost.profile import Decode, Prefill, Profile, Transfer, profiled_prompts
from longspan.cost.profile_key import ProfileKey
from longspan.errors import ParameterError
from longspan.model.info import ModelInfo
from longspan.outputs import RequestOutput
from longspan.policy.facts import Facts
from longspan.policy.registry import make_policy
from longspan.profiling import links
from longspan.profiling.plan import (
    DECODE_STEPS,
    KvCapacity,
    all_missing,
    default_lengths,
    kinds_of_links,
    quick_lengths,
    work,
)
from longspan.profiling.store import load_partitions, load_profile, save_partitions, save_profile
from longspan.progress import MinuteLines, Say, duration


class Instances(Protocol):
    """The interface of running instances that the profiler uses. `longspan.LLM` implements it."""

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
"""Starts the given number of instances."""

TimeLinks = Callable[[Sequence[Location], str], list[Transfer]]
"""Returns timed transfers of every kind between ranks at these locations, on devices of this kind."""

Missing = Callable[[Profile, set[int], LinkClass], list[Prefill | Decode]]
"""Lists the missing measurements of groups of these sizes over a class of link, see `all_missing`."""

_ONE_TOKEN = SamplingParams(max_tokens=1)
_WARM_UP_TOKENS = 256


def measure(
    start: Start,
    max_members: int,
    lengths: Sequence[int] | None,
    repeats: int,
    *,
    quick: bool = False,
    say: Say = lambda _: None,
    say_progress: Say = lambda _: None,
) -> Profile:
    """Return the stored profile of this machine, after measuring missing times of groups of 1 to `max_members`.

    One instance is timed while the other instances are busy: with the same prompt, or with prefills while it decodes.
    Groups with fewer than `max_members` members are timed while nothing else runs. Each time is saved immediately, with
    the slowest class of link in the group.

    Args:
        quick: without `lengths`, leave out the longest prompts.
        say: prints the expected time before measurements.
        say_progress: prints a line a minute.

    Raises:
        ValueError: for lengths that the model does not support, or a stored profile that cannot be read.
        WorkerLostError: if a worker dies.
    """
    with start(max_members) as llm:
        config = llm.engine.config
        capacity = KvCapacity(
            max_model_len=llm.max_model_len, block_size=config.block_size, num_blocks=config.cluster.num_blocks[0]
        )
        profile = load_profile(llm.profile_key) or Profile(profile_key=llm.profile_key)
        profile, classes = profile.of_one_beside(_num_beside(config.cluster)), links_by_size(config.cluster)
        if lengths is None and quick:
            lengths = quick_lengths(capacity.max_model_len)
        prompts = _prompts(lengths, capacity)
        has_full_attention = all(spec.visibility.max_keys is None for spec in llm.info.specs)

        def missing(profile: Profile, sizes: set[int], link_class: LinkClass) -> list[Prefill | Decode]:
            return all_missing(profile, sizes, prompts, capacity, repeats, link_class, sparse=has_full_attention)

        measure_missing = partial(_measure_missing, missing=missing, say=say, say_progress=say_progress)
        profile = measure_missing(llm, profile, {1, max_members})
    for members in range(max_members - 1, 1, -1):
        if missing(profile, {members}, classes[members]):
            with start(members) as llm:
                profile = measure_missing(llm, profile, {members})
    return profile


def _measure_missing(
    llm: Instances, profile: Profile, sizes: set[int], *, missing: Missing, say: Say, say_progress: Say
) -> Profile:
    members, is_warm = max(sizes), False
    name = "one instance" if members == 1 else f"{members} instances"
    link_class = link_of_group(llm.engine.config.cluster, range(members))
    while tasks := missing(profile, sizes, link_class):
        left = [work(task, llm.info.hidden_size) for task in tasks]
        total, num_tasks = sum(left), len(tasks)
        if not is_warm:
            expected_s = total / _warm_up(llm, members)
            say(f"{name}: {num_tasks} measurements, about {duration(expected_s)} by the speed of a short prompt")
            is_warm = True
        lines = MinuteLines(name, say_progress)
        for number, task in enumerate(tqdm(tasks, desc=name, unit="time", dynamic_ncols=True, disable=None), 1):
            profile = _measured(llm, profile, task)
            save_profile(profile)
            lines.update(sum(left[:number]) / total, f"{number} of {num_tasks} measurements")
    return profile


def measure_links(profile: Profile, locations: Sequence[Location], time: TimeLinks | None = None) -> Profile:
    """Add the speeds of links between ranks at these locations, unless they were measured before.

    Args:
        time: times transfers between ranks. By default `links.time_links`, with ranks on this machine.
    """
    if kinds_of_links(locations) <= set(profile.links):
        return profile
    for transfer in (time or links.time_links)(locations, profile.profile_key.device):
        profile = profile.with_transfer(transfer)
    save_profile(profile)
    return profile


def _prompts(lengths: Sequence[int] | None, capacity: KvCapacity) -> list[tuple[int, int]]:
    """Return (new, cached) tokens of all prefills. Without `lengths`, up to the model's maximum length."""
    longest = capacity.max_model_len - 1
    if lengths is None:
        return profiled_prompts(default_lengths(capacity.max_model_len), capacity.max_model_len)
    if not lengths or min(lengths) < 1 or max(lengths) > longest:
        given = ",".join(map(str, lengths))
        raise ParameterError("lengths", f"must be from 1 to {longest} tokens with this model, but {given} given")
    if not capacity.fits(1, max(lengths) + 1):
        problem = (
            f"{max(lengths)} is more than the {capacity.num_blocks} blocks of {capacity.block_size} tokens that one "
            "instance has for KV: give shorter lengths, or more `kv_cache_memory_bytes`"
        )
        raise ParameterError("lengths", problem)
    return profiled_prompts(lengths, capacity.max_model_len)


def _measured(llm: Instances, profile: Profile, task: Prefill | Decode) -> Profile:
    """Measure a task once, and add the time to the profile.

    On CUDA devices, the first measurement follows a warm-up run. The first call of each shape compiles and selects
    kernels.
    """
    time = profile.num_times(task)
    if profile.profile_key.device == "cuda" and not time:
        _seconds(llm, task, -1)
    seconds = _seconds(llm, task, time)
    beside = _num_beside(llm.engine.config.cluster) if task.members == 1 else 0
    return profile.with_measured(msgspec.structs.replace(task, seconds=(seconds,), beside=beside))


def _seconds(llm: Instances, task: Prefill | Decode, time: int) -> float:
    return _timed_decode(llm, task, time) if isinstance(task, Decode) else _timed(llm, task, f"{task.key}, {time}")


def _num_others(llm: Instances, task: Prefill | Decode) -> int:
    return llm.engine.config.cluster.num_instances - task.members


def _num_beside(cluster: Cluster) -> int:
    """Return the number of instances next to one on the host with most instances."""
    return max(Counter(cluster.hosts[cluster.rank(instance)] for instance in cluster.instances).values()) - 1


def _timed_decode(llm: Instances, task: Decode, time: int) -> float:
    """Return the median seconds between tokens of random prompts while all decode together.

    The KV of the prompts is computed before. The prefix cache returns no last full block, so such prompts get one more
    token. Sharded prompts still start one after another. Larger batches contain the prompts of smaller batches, whose
    KV is still cached. Singles are shorter than a block and run on the least loaded instance.

    With one member, the other instances prefill full steps meanwhile. Instances of a host share its memory bandwidth,
    and under load the other instances mostly prefill.
    """
    vocabulary, config = range(llm.info.vocab_size), llm.engine.config
    draw = random.Random(f"decodes of {task.members} behind {task.context_tokens} tokens, time {time}")
    ends_block = task.context_tokens % config.block_size == 0
    prompts = [draw.choices(vocabulary, k=task.context_tokens + ends_block) for _ in range(task.batch)]
    singles = [draw.choices(vocabulary, k=-(-config.block_size // 2)) for _ in range(task.singles)]
    concurrent_prompts: list[list[int]] = []
    if task.members > 1:
        threshold = str(len(singles[0]) if singles else 0)
        llm.set_policy("context", {"exchange": RING_KV.kind, "decode": task.exchange, "threshold": threshold})
    else:
        kv_tokens = config.cluster.num_blocks[0] * config.block_size
        full = min(config.max_num_batched_tokens, llm.max_model_len - 1, kv_tokens - 1)
        draw = random.Random(f"beside {len(prompts)} behind {task.context_tokens} tokens, time {time}")
        concurrent_prompts = [draw.choices(vocabulary, k=full) for _ in range(_num_others(llm, task))]
        llm.engine.set_policy(make_policy("chunked", num_instances=1, options={}))
    for prompt in prompts:  # one by one: sharded prompts evenly, unsharded prompts on the first instance
        llm.generate([prompt], _ONE_TOKEN, use_tqdm=False)
    if task.members == 1:
        llm.set_policy("chunked", {})
    decoding = [*prompts, *singles]
    steps = SamplingParams(temperature=0.0, max_tokens=len(decoding) + DECODE_STEPS, ignore_eos=True)
    params = [steps] * len(decoding) + [_ONE_TOKEN] * len(concurrent_prompts)
    outputs = llm.generate([*decoding, *concurrent_prompts], params, use_tqdm=False)[: len(decoding)]
    if task.members == 1 and len({tuple(map(bool, out.metrics.kv_tokens_per_instance)) for out in outputs}) > 1:
        problem = f"{task.batch} requests with contexts of {task.context_tokens} tokens did not decode on one instance"
        raise ValueError(f"{problem}: allow more KV memory, or give shorter lengths")
    latest = max(outputs, key=lambda output: output.metrics.arrival_s + (output.metrics.ttft_s or 0.0))
    return statistics.median(latest.metrics.tbt_s[1:DECODE_STEPS])


def _warm_up(llm: Instances, members: int) -> float:
    """Make the first calls, which are slower: threads and connections start, and pages are first touched.

    Return the tokens per second of one member.
    """
    length = min(_WARM_UP_TOKENS, llm.max_model_len - 1)
    for exchange in (RING_KV, ALLTOALL) if members > 1 else (LOCAL,):
        task = Prefill(members=members, exchange=str(exchange), new_tokens=length, cached_tokens=0, seconds=())
        seconds = _timed(llm, task, "warm-up")
    return length / members / max(seconds, 1e-9)


def _timed(llm: Instances, task: Prefill, seed: str) -> float:
    """Time one prefill. With one member, all other instances prefill such a prompt concurrently."""
    if task.exchange == ALLTOALL_SPARSE.kind:
        llm.set_policy("csps", {"csa": PROFILED_CSA, "threshold": "0"})
        return timed(llm, task.new_tokens, 0, seed=seed)
    if task.members > 1:
        llm.set_policy("context", {"exchange": task.exchange, "threshold": "0"})
        return timed(llm, task.new_tokens, task.cached_tokens, seed=seed)
    llm.set_policy("chunked", {})
    return timed(llm, task.new_tokens, task.cached_tokens, seed=seed, num_prompts=1 + _num_others(llm, task))


def timed(llm: Instances, new_tokens: int, cached_tokens: int, *, seed: int | str, num_prompts: int = 1) -> float:
    """Return the mean TTFT in seconds of simultaneous random prompts, whose first `cached_tokens` are cached."""
    draw, vocabulary = random.Random(seed), range(llm.info.vocab_size)
    prompts = [draw.choices(vocabulary, k=cached_tokens + new_tokens) for _ in range(num_prompts)]
    if cached_tokens:
        llm.generate([prompt[:cached_tokens] for prompt in prompts], _ONE_TOKEN, use_tqdm=False)
    times = []
    for output in llm.generate(prompts, _ONE_TOKEN, use_tqdm=False):
        num_cached = output.metrics.num_cached_tokens
        if cached_tokens and num_cached < cached_tokens:
            problem = f"of {cached_tokens} tokens only {num_cached} stayed cached"
            raise ValueError(f"{problem}: allow more KV memory, or give shorter lengths")
        assert output.metrics.ttft_s is not None, "the request has output"
        times.append(output.metrics.ttft_s)
    return statistics.fmean(times)


TimePartition = Callable[[Partition], float]
"""Returns the TTFT in seconds of a prompt with this partition."""


def search_partitions(
    start: Start,
    profile: Profile,
    classes: Mapping[int, LinkClass],
    lengths: Sequence[int] | None,
    repeats: int,
) -> PartitionTable:
    """Add partitions for chains of 2 members and more to this machine's table, for these prompt lengths.

    Partitions for 2 members are searched by timing prompts, and kept. Partitions for more members are searched with the
    chain model. That is quick, so they are always recomputed, starting from the prediction of the table.

    In every entry, one chain computes the whole prompt. Pieces larger than a step are not timed. Lengths whose even
    pieces are larger than a step are left out.

    Args:
        start: starts instances with the largest steps that memory allows.
        classes: the slowest class of link in the group of each size, up to the largest chain.

    Raises:
        ValueError: if the profile does not determine the cost of a prompt, or a stored table cannot be read.
        WorkerLostError: if a worker dies.
    """
    model = profile.profile_key.model
    with start(2) as llm:
        lengths = sorted(set(lengths or default_lengths(llm.max_model_len)))
        size, max_piece = llm.engine.config.block_size, llm.engine.config.max_num_batched_tokens
        stored = load_partitions(profile.profile_key, size)
        table = stored.of_sizes(classes)
        plan = [(n, length) for n in range(2, max(classes) + 1) for length in lengths if length >= n * size]
        timed_before = table.lengths(model, 2)
        plan = [(n, length) for n, length in plan if max(even(length, n, size)) <= max_piece]
        plan = [(n, length) for n, length in plan if n > 2 or length not in timed_before]
        modelled = cache(partial(_modelled_cuts, llm, profile))
        modelled("same_host")  # before measurements: times of one instance may be missing
        with closing(tqdm(plan, desc="partitions", unit="prompt", dynamic_ncols=True, disable=None)) as bar:
            for members, length in bar:
                if members == 2:
                    best = search(_timed_cuts(llm, repeats, bar), length, members, size, noisy=True)
                else:
                    predicted = table.predict(model, members, length)
                    seed = None if predicted is None else cut(predicted, length, size)
                    modelled_s = modelled(classes[members])
                    best = search(modelled_s, length, members, size, seed if seed and min(seed) else None)
                fractions = tuple(piece / length for piece in best)
                sizes = {"members": members, "length": length, "link_class": classes[members]}
                entry = Entry(model=model, fractions=fractions, **sizes)
                table, stored = table.with_entry(entry), stored.with_entry(entry)
                save_partitions(profile.profile_key, size, stored)
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


def _modelled_cuts(llm: Instances, profile: Profile, link_class: LinkClass) -> TimePartition:
    shape = llm.facts.shape
    ttft_s = None if shape is None else modelled_ttft(profile, shape, link_class)
    if ttft_s is None:
        problem = "must be at least two: partitions follow from the times of prompts on one instance"
        raise ParameterError("lengths", problem)
    return ttft_s
