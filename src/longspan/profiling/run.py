"""The profiler: starts groups of instances, times prompts and links on them, and stores every time at once."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import msgspec
from tqdm import tqdm

from longspan.core.engine import Engine
from longspan.core.exchange import ALLTOALL, LOCAL, RING_KV
from longspan.core.sampling import SamplingParams
from longspan.cost.profile import Decode, Prefill, Profile, ProfileKey, profiled_prompts
from longspan.model.info import ModelInfo
from longspan.outputs import RequestOutput
from longspan.policy.choosing import Facts
from longspan.profiling import links
from longspan.profiling.plan import (
    DECODE_STEPS,
    DecodeTask,
    Room,
    Task,
    all_missing,
    default_lengths,
    kinds_of_links,
    num_times,
)
from longspan.profiling.store import load_profile, save_profile


class Instances(Protocol):
    """Instances of a model as the profiler needs them: `longspan.LLM` is one."""

    info: ModelInfo
    facts: Facts
    engine: Engine
    profile_key: ProfileKey
    max_model_len: int

    def set_policy(self, policy: str, options: Mapping[str, str]) -> None:
        """Has this policy decide from here on."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes all prompts together."""


Start = Callable[[int], AbstractContextManager[Instances]]
"""Starts so many instances."""

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
    profile: Profile | None = None
    prompts: list[tuple[int, int]] = []
    room: Room | None = None
    for members in [most_members, *range(most_members - 1, 1, -1)]:
        sizes = {1, members} if members == most_members else {members}
        if profile is not None and room is not None and not all_missing(profile, sizes, prompts, room, repeats):
            continue
        with start(members) as llm:
            if profile is None or room is None:
                room = _room(llm)
                profile = load_profile(llm.profile_key) or Profile(profile_key=llm.profile_key)
                profile = profile.of_one_beside(llm.engine.config.cluster.num_instances - 1)
                prompts = _prompts(lengths, room)
            is_warm = False
            while left := all_missing(profile, sizes, prompts, room, repeats):
                if not is_warm:
                    _warm_up(llm, members)
                    is_warm = True
                for task in _shown(left, members):
                    profile = _measured(llm, profile, task)
                    save_profile(profile)
    assert profile is not None, "there is at least one instance"
    return profile


def _room(llm: Instances) -> Room:
    config = llm.engine.config
    return Room(
        max_model_len=llm.max_model_len,
        block_size=config.block_size,
        num_blocks=config.cluster.num_blocks[0],
    )


def measure_links(profile: Profile, num_ranks: int) -> Profile:
    """Adds the speeds of links between so many ranks, measured unless they were."""
    if kinds_of_links(num_ranks) <= set(profile.links):
        return profile
    for transfer in links.time_links(num_ranks, profile.profile_key.device):
        profile = profile.with_transfer(transfer)
    save_profile(profile)
    return profile


def _prompts(lengths: Sequence[int] | None, room: Room) -> list[tuple[int, int]]:
    """Returns new and cached tokens of all prefills; by default of all that the model takes."""
    longest = room.max_model_len - 1
    if lengths is None:
        return profiled_prompts(default_lengths(room.max_model_len), room.max_model_len)
    if not lengths or min(lengths) < 1 or max(lengths) > longest:
        given = ",".join(map(str, lengths))
        raise ValueError(f"--lengths are from 1 to {longest} tokens with this model, but {given} given")
    if not room.holds(1, max(lengths) + 1):
        raise ValueError(
            f"--lengths {max(lengths)} is more than the {room.num_blocks} blocks of {room.block_size} tokens that one "
            "instance has for KV: give shorter ones, or more memory with --kv-cache-memory-bytes"
        )
    return profiled_prompts(lengths, room.max_model_len)


def _shown(tasks: Sequence[Task | DecodeTask], members: int) -> Iterator[Task | DecodeTask]:
    name = "one instance" if members == 1 else f"{members} instances"
    yield from tqdm(tasks, desc=name, unit="time", dynamic_ncols=True, disable=None)


def _measured(llm: Instances, profile: Profile, task: Task | DecodeTask) -> Profile:
    """Adds one more time to the profile."""
    if isinstance(task, DecodeTask):
        decode = Decode(
            members=task.members,
            exchange=str(task.exchange),
            batch=task.batch,
            context_tokens=task.context_tokens,
            singles=task.singles,
            seconds=(_timed_decode(llm, profile, task),),
            beside=_beside(llm, task),
        )
        return profile.with_decode(decode)
    time = num_times(profile.find(*msgspec.structs.astuple(task)))
    prefill = Prefill(
        members=task.members,
        exchange=str(task.exchange),
        new_tokens=task.new_tokens,
        cached_tokens=task.cached_tokens,
        seconds=(_timed(llm, task, seed=f"{task}, time {time}"),),
        beside=_beside(llm, task),
    )
    return profile.with_prefill(prefill)


def _beside(llm: Instances, task: Task | DecodeTask) -> int:
    """Counts the instances that are busy with something else."""
    return llm.engine.config.cluster.num_instances - task.members


def _timed_decode(llm: Instances, profile: Profile, task: DecodeTask) -> float:
    """Returns median seconds between tokens of random prompts once all decode together.

    Their KV is computed before; a full last block would not be found again, so one token more follows. Sharded prompts
    still start one after the other. Larger batches have the prompts of smaller ones, too, whose KV is still there.
    Singles, shorter than a block, go to whom has the least to do. Of one instance, the others compute prompts of a
    full step meanwhile: all of a host share its memory, and where many requests wait, they do that most of the time.

    Raises:
        ValueError: when those of one instance did not stay there.
        WorkerLostError: when a worker dies.
    """
    vocabulary, config = range(llm.info.vocab_size), llm.engine.config
    time = num_times(profile.find_decode(*msgspec.structs.astuple(task)))
    draw = random.Random(f"decodes of {task.members} behind {task.context_tokens} tokens, time {time}")
    behind_block = task.context_tokens % config.block_size == 0
    prompts = [draw.choices(vocabulary, k=task.context_tokens + behind_block) for _ in range(task.batch)]
    singles = [draw.choices(vocabulary, k=-(-config.block_size // 2)) for _ in range(task.singles)]
    beside: list[list[int]] = []
    if task.members > 1:
        threshold = str(len(singles[0]) if singles else 0)
        llm.set_policy("context", {"exchange": RING_KV.kind, "decode": str(task.exchange), "threshold": threshold})
    else:
        llm.set_policy("chunked", {})
        room = config.cluster.num_blocks[0] * config.block_size
        full = min(config.max_num_batched_tokens, llm.max_model_len - 1, room - 1)
        draw = random.Random(f"beside {len(prompts)} behind {task.context_tokens} tokens, time {time}")
        beside = [draw.choices(vocabulary, k=full) for _ in range(_beside(llm, task))]
    for prompt in prompts:  # one by one, so that all are on one instance
        llm.generate([prompt], _ONE_TOKEN, use_tqdm=False)
    decoding = [*prompts, *singles]
    steps = SamplingParams(temperature=0.0, max_tokens=len(decoding) + DECODE_STEPS, ignore_eos=True)
    params = [steps] * len(decoding) + [_ONE_TOKEN] * len(beside)
    outputs = llm.generate([*decoding, *beside], params, use_tqdm=False)[: len(decoding)]
    if task.members == 1 and len({_where(output) for output in outputs}) > 1:
        raise ValueError(
            f"{task.batch} requests behind {task.context_tokens} tokens did not decode on one instance: allow more KV "
            "memory, or give shorter --lengths"
        )
    latest = max(outputs, key=lambda output: output.metrics.arrival_s + (output.metrics.ttft_s or 0.0))
    return statistics.median(latest.metrics.tbt_s[1:DECODE_STEPS])


def _where(output: RequestOutput) -> tuple[bool, ...]:
    """Tells for each instance if it has KV of it."""
    return tuple(map(bool, output.metrics.kv_tokens_per_instance))


def _warm_up(llm: Instances, members: int) -> None:
    """Makes the first calls, which are slower: threads and connections start, memory is touched."""
    length = min(_WARM_UP_TOKENS, llm.max_model_len - 1)
    for exchange in (RING_KV, ALLTOALL) if members > 1 else (LOCAL,):
        task = Task(members=members, exchange=exchange, new_tokens=length, cached_tokens=0)
        _timed(llm, task, seed="warm-up")


def _timed(llm: Instances, task: Task, *, seed: str) -> float:
    """Times one prefill; that of one instance while all others have such a prompt, too."""
    if task.members > 1:
        llm.set_policy("context", {"exchange": str(task.exchange), "threshold": "0"})
        return timed(llm, task.new_tokens, task.cached_tokens, seed=seed)
    llm.set_policy("chunked", {})
    return timed(llm, task.new_tokens, task.cached_tokens, seed=seed, num_prompts=1 + _beside(llm, task))


def timed(llm: Instances, new_tokens: int, cached_tokens: int, *, seed: int | str, num_prompts: int = 1) -> float:
    """Returns mean seconds to the first token of random prompts at once, behind `cached_tokens` computed before.

    Raises:
        ValueError: when those did not stay.
        WorkerLostError: when a worker dies.
    """
    draw, vocabulary = random.Random(seed), range(llm.info.vocab_size)
    prompts = [draw.choices(vocabulary, k=cached_tokens + new_tokens) for _ in range(num_prompts)]
    if cached_tokens:
        llm.generate([prompt[:cached_tokens] for prompt in prompts], _ONE_TOKEN, use_tqdm=False)
    times = []
    for output in llm.generate(prompts, _ONE_TOKEN, use_tqdm=False):
        kept = output.metrics.num_cached_tokens
        if cached_tokens and kept < cached_tokens:
            raise ValueError(
                f"of {cached_tokens} tokens only {kept} stayed cached: allow more KV memory, or give shorter --lengths"
            )
        assert output.metrics.ttft_s is not None, "a token was asked for"
        times.append(output.metrics.ttft_s)
    return statistics.fmean(times)
