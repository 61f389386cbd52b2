"""What to measure for a profile, and what is left to measure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import msgspec

from longspan.core.steps import Exchange
from longspan.cost.profile import Profile, TransferKind


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One prefill to measure, once."""

    members: int
    exchange: Exchange
    new_tokens: int
    cached_tokens: int


SHARED: tuple[Exchange, ...] = ("ring_kv", "ring_q", "alltoall", "gather_kv", "chain")
"""The exchanges of groups that are measured."""

DECODE_BATCHES = (1, 2, 4, 8)
"""How many requests decode together."""

DECODE_STEPS = 8
"""Times between tokens that one measurement takes, once all requests have started."""

_PARTIAL_PARTS = (32, 4)
"""Of so many cached tokens, one part in so many is new."""


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """512, 1024, 2048 and so on up to the longest prompt, which leaves room for one token; fewer for small models."""
    doubled = (512 * 2**power for power in range(max_model_len.bit_length()))
    shorter = [length for length in doubled if length < max_model_len - 1]
    return tuple(sorted({*(shorter or [max(1, max_model_len // 2 - 1)]), max_model_len - 1}))


def prompts_of(lengths: Iterable[int], max_model_len: int) -> list[tuple[int, int]]:
    """New and cached tokens of the prefills to measure: every length, and as much cached with a part of it behind."""
    every = sorted(set(lengths))
    partial = ((max(1, cached // part), cached) for cached in every for part in _PARTIAL_PARTS)
    return [(n, p) for n, p in dict.fromkeys(chain(((n, 0) for n in every), partial)) if n + p < max_model_len]


def missing(profile: Profile, members: int, prompts: Iterable[tuple[int, int]], repeats: int) -> list[Task]:
    """What is left to measure for groups of so many, in an order in which exchanges take turns: machines drift."""
    exchanges: tuple[Exchange, ...] = SHARED if members > 1 else ("local",)
    tasks = []
    for new, cached in prompts:
        done = {exchange: profile.find(members, exchange, new, cached) for exchange in exchanges}
        counts = {exchange: len(found.seconds) if found else 0 for exchange, found in done.items()}
        tasks += [
            Task(members=members, exchange=exchange, new_tokens=new, cached_tokens=cached)
            for repeat in range(repeats)
            for exchange in exchanges
            if counts[exchange] <= repeat
        ]
    return tasks


def kinds_of_links(num_ranks: int) -> set[tuple[TransferKind, int]]:
    """The transfers to measure between so many ranks, and among how many of them each is."""
    kinds: set[tuple[TransferKind, int]] = {("host_copy", 1)}
    if num_ranks > 1:
        kinds |= {("point_to_point", 2), ("alltoall", num_ranks), ("all_gather", num_ranks)}
    return kinds


class DecodeTask(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that decode together, to measure once."""

    members: int
    exchange: Exchange
    batch: int
    context_tokens: int


def missing_decodes(
    profile: Profile, members: int, lengths: Iterable[int], max_model_len: int, repeats: int
) -> list[DecodeTask]:
    """What is left to measure of decodes in groups of so many: small and large batches behind the shortest, the middle
    and the longest of `lengths`, as far as all tokens of a batch are no more than one long request has.
    """
    every = sorted(set(lengths))
    contexts = sorted({every[0], every[len(every) // 2], every[-1]})
    exchange: Exchange = "ring_q" if members > 1 else "local"
    tasks = []
    for batch in DECODE_BATCHES:
        for context in contexts:
            found = profile.find_decode(members, exchange, batch, context)
            if batch * (context + batch + DECODE_STEPS) <= max_model_len:
                task = DecodeTask(members=members, exchange=exchange, batch=batch, context_tokens=context)
                tasks += [task] * max(0, repeats - (len(found.seconds) if found else 0))
    return tasks
