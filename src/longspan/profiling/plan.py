"""The plan of a profile: the prompts, decodes and links to measure, and the missing ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import msgspec

from longspan.core.exchange import ALLTOALL_SPARSE, CHAIN, LOCAL, RING_Q, Exchange, of_any_layout
from longspan.core.link_classes import SAME_HOST, LinkClass, slowest_link
from longspan.core.locations import Location
from longspan.cost.profile import Decode, Prefill, Profile, TransferKind

SHARED: tuple[Exchange, ...] = (*of_any_layout(), CHAIN)
"""The measured exchanges of groups."""
MIN_SPARSE_TOKENS = 1024
"""Tokens of the shortest prompt that is measured with sparse attention, which pays for long prompts."""
DECODE_STEPS = 8
"""Times between tokens per measurement, after all requests have started."""
_BATCHES = (1, 2, 4, 8)
_BATCHES_WITH_SINGLES = (1, 2, 4)
_MAX_OF_LONGEST, _MIN_QUICK = 4, 2


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """Return 512, 1024, 2048, ... up to the longest prompt: `max_model_len` minus one output token."""
    doubled = (512 * 2**power for power in range(max_model_len.bit_length()))
    shorter = [length for length in doubled if length < max_model_len - 1]
    return tuple(sorted({*(shorter or [max(1, max_model_len // 2 - 1)]), max_model_len - 1}))


def quick_lengths(max_model_len: int) -> tuple[int, ...]:
    """Return the default lengths without the longest, whose prompts take about half of all time."""
    lengths = default_lengths(max_model_len)
    return lengths[:-1] if len(lengths) > _MIN_QUICK else lengths


def work(task: Prefill | Decode, hidden_size: int) -> float:
    """Return the work of a measurement in tokens without context, for an estimate of its time.

    A layer's products take about 24 * hidden_size² operations per token, its attention 4 * hidden_size per token of
    context. Of the prompts of a decode, half were computed for a smaller batch.
    """

    def prefill(new_tokens: int, cached_tokens: int = 0) -> float:
        return new_tokens * (1 + (cached_tokens + new_tokens / 2) / (6 * hidden_size))

    if isinstance(task, Decode):
        return -(-task.batch // 2) * prefill(task.context_tokens) / task.members
    return (prefill(task.new_tokens, task.cached_tokens) + prefill(task.cached_tokens)) / task.members


def peers_of_first(locations: Sequence[Location]) -> dict[LinkClass, int]:
    """Return the first rank over each class of link from rank 0."""
    peers: dict[LinkClass, int] = {}
    for rank in range(1, len(locations)):
        peers.setdefault(slowest_link((locations[0], locations[rank])), rank)
    return peers


def kinds_of_links(locations: Sequence[Location]) -> set[tuple[TransferKind, int, LinkClass]]:
    """Return the kind of each transfer to measure between ranks, its number of ranks, and its class of link."""
    kinds: set[tuple[TransferKind, int, LinkClass]] = {("host_copy", 1, SAME_HOST)}
    if (num_ranks := len(locations)) > 1:
        slowest = slowest_link(locations)
        kinds |= {("point_to_point", 2, link_class) for link_class in peers_of_first(locations)}
        kinds |= {("alltoall", num_ranks, slowest), ("all_gather", num_ranks, slowest)}
    return kinds


class KvCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """The KV blocks of each instance, and the model's maximum request length in tokens."""

    max_model_len: int
    block_size: int
    num_blocks: int

    def fits(self, members: int, num_tokens: int) -> bool:
        return -(-num_tokens // self.block_size) <= members * self.num_blocks


def all_missing(
    profile: Profile,
    sizes: Collection[int],
    prompts: Sequence[tuple[int, int]],
    capacity: KvCapacity,
    repeats: int,
    link_class: LinkClass = SAME_HOST,
    *,
    sparse: bool = True,
) -> list[Prefill | Decode]:
    """Return the missing measurements of groups of these sizes. Call it again after measuring them.

    Every task is measured once before any task is measured twice, so that a busy phase of the machine affects one time
    of each. Then the quickest exchange of each prompt is measured `repeats` times more, since the minimum of several
    exchanges is biased. Tasks that exceed the KV memory of a group are left out.

    Args:
        link_class: the slowest class of link in the groups of several instances.
        sparse: also measure whole long prompts with sparse attention, see `csa_price.PROFILED_CSA`.
    """
    whole = [new for new, cached in prompts if not cached]
    sizes = sorted(sizes)
    tasks: list[Prefill | Decode] = []
    for size in sizes:
        link = SAME_HOST if size == 1 else link_class
        tasks += [*_prefills(size, prompts, capacity, link), *_decodes(size, whole, capacity, link)]
        long = [new for new in whole if sparse and size > 1 and new >= MIN_SPARSE_TOKENS]
        tasks += [_prefill(size, ALLTOALL_SPARSE, new, 0, link) for new in long if capacity.fits(size, new + 1)]
    missing = [task for times in range(1, repeats + 1) for task in tasks if profile.num_times(task) < times]
    quickest = (_missing_quickest(profile, size, prompts, capacity, repeats, link_class) for size in sizes)
    return missing or list(chain.from_iterable(quickest))


def _prefill(members: int, exchange: Exchange, new_tokens: int, cached_tokens: int, link_class: LinkClass) -> Prefill:
    return Prefill(
        members=members,
        exchange=str(exchange),
        new_tokens=new_tokens,
        cached_tokens=cached_tokens,
        seconds=(),
        link_class=link_class,
    )


def _prefills(
    members: int, prompts: Iterable[tuple[int, int]], capacity: KvCapacity, link_class: LinkClass
) -> list[Prefill]:
    return [
        _prefill(members, exchange, new, cached, link_class)
        for new, cached in prompts
        for exchange in (SHARED if members > 1 else (LOCAL,))
        if capacity.fits(members, new + cached + 1)
    ]


def _missing_quickest(
    profile: Profile,
    members: int,
    prompts: Iterable[tuple[int, int]],
    capacity: KvCapacity,
    repeats: int,
    link_class: LinkClass,
) -> list[Prefill | Decode]:
    """List the quickest exchange of each prompt, once per missing measurement of twice `repeats`."""
    quickest = []
    for new, cached in prompts if members > 1 else ():
        if capacity.fits(members, new + cached + 1):
            tasks = (profile.find(_prefill(members, exchange, new, cached, link_class)) for exchange in SHARED)
            quickest.append(min((task for task in tasks if task is not None), key=lambda task: task.median_s))
    missing = [task for times in range(repeats, 2 * repeats) for task in quickest if len(task.seconds) <= times]
    return [msgspec.structs.replace(task, seconds=(), beside=0) for task in missing]


def _decodes(members: int, lengths: Sequence[int], capacity: KvCapacity, link_class: LinkClass) -> list[Decode]:
    """List the decodes that were timed fewer than `times` times in groups of `members`.

    These are small and large batches with contexts of the shortest, middle and longest of `lengths`. Each member has
    at least one block of a context. A batch has at most the tokens of four longest contexts, and fits the KV memory of
    an instance. With the middle context, groups are also timed while each member decodes its own request.
    """
    longest = max(1, capacity.max_model_len - _BATCHES[-1] - DECODE_STEPS)
    shortest = members * capacity.block_size if members > 1 else 1
    contexts = sorted({min(longest, max(shortest, length)) for length in lengths})
    exchange = str(RING_Q if members > 1 else LOCAL)
    middle, decodes = contexts[len(contexts) // 2], []
    kinds = [(batch, context, 0) for batch in _BATCHES for context in sorted({contexts[0], middle, contexts[-1]})]
    if members > 1:
        kinds += [(batch, middle, members) for batch in _BATCHES_WITH_SINGLES]
    for batch, context, singles in kinds:
        num_blocks = (batch + singles) * -(-(context + batch + DECODE_STEPS) // capacity.block_size)
        if num_blocks <= capacity.num_blocks and batch * context <= _MAX_OF_LONGEST * contexts[-1]:
            sizes = {"batch": batch, "context_tokens": context, "singles": singles}
            decodes.append(Decode(members=members, exchange=exchange, seconds=(), link_class=link_class, **sizes))
    return decodes
