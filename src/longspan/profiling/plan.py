"""The plan of a profile: which prompts, decodes and links are measured, and which are left."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from longspan.core.exchange import CHAIN, LOCAL, RING_Q, Exchange, of_any_layout
from longspan.cost.profile import Decode, Prefill, Profile, TransferKind

SHARED: tuple[Exchange, ...] = (*of_any_layout(), CHAIN)
"""The exchanges of groups that are measured."""
DECODE_STEPS = 8
"""Times between tokens that one measurement takes, once all requests have started."""
_BATCHES = (1, 2, 4, 8)
_BATCHES_WITH_SINGLES = (1, 2, 4)
_MAX_OF_LONGEST = 4


def default_lengths(max_model_len: int) -> tuple[int, ...]:
    """Returns 512, 1024, 2048, ... up to the longest prompt, which leaves room for one token."""
    doubled = (512 * 2**power for power in range(max_model_len.bit_length()))
    shorter = [length for length in doubled if length < max_model_len - 1]
    return tuple(sorted({*(shorter or [max(1, max_model_len // 2 - 1)]), max_model_len - 1}))


def kinds_of_links(num_ranks: int) -> set[tuple[TransferKind, int]]:
    """Returns pairs of a kind of transfer to measure and the number of ranks that take part."""
    kinds: set[tuple[TransferKind, int]] = {("host_copy", 1)}
    if num_ranks > 1:
        kinds |= {("point_to_point", 2), ("alltoall", num_ranks), ("all_gather", num_ranks)}
    return kinds


class KvRoom(msgspec.Struct, frozen=True, kw_only=True):
    """The KV memory of each instance, in blocks, and the longest request that the model takes."""

    max_model_len: int
    block_size: int
    num_blocks: int

    def holds(self, members: int, num_tokens: int) -> bool:
        return -(-num_tokens // self.block_size) <= members * self.num_blocks


def all_missing(
    profile: Profile, sizes: Collection[int], prompts: Sequence[tuple[int, int]], room: KvRoom, repeats: int
) -> list[Prefill | Decode]:
    """Returns what is left to measure in groups of these sizes; ask again once that is measured.

    All of it once before anything a second time: what else the machine does for a while spoils one time of each. Then
    the quickest exchange of each prompt as often again, since the quickest of several is in part the luckiest. What
    does not fit into the KV memory of a group is left out.
    """
    whole = [new for new, cached in prompts if not cached]
    left: list[Prefill | Decode] = []
    for times in range(1, repeats + 1):
        for size in sorted(sizes):
            left += _missing_prefills(profile, size, prompts, room, times)
            left += _missing_decodes(profile, size, whole, room, times)
    return left or [task for size in sorted(sizes) for task in _missing_quickest(profile, size, prompts, room, repeats)]


def _prefill(members: int, exchange: Exchange, new_tokens: int, cached_tokens: int) -> Prefill:
    return Prefill(
        members=members, exchange=str(exchange), new_tokens=new_tokens, cached_tokens=cached_tokens, seconds=()
    )


def _missing_prefills(
    profile: Profile, members: int, prompts: Iterable[tuple[int, int]], room: KvRoom, times: int
) -> list[Prefill | Decode]:
    every = [
        _prefill(members, exchange, new, cached)
        for new, cached in prompts
        for exchange in (SHARED if members > 1 else (LOCAL,))
        if room.holds(members, new + cached + 1)
    ]
    return [one for one in every if profile.num_times(one) < times]


def _missing_quickest(
    profile: Profile, members: int, prompts: Iterable[tuple[int, int]], room: KvRoom, repeats: int
) -> list[Prefill | Decode]:
    """Lists the quickest exchange of each prompt, once for each measurement that it lacks of twice `repeats`."""
    quickest = []
    for new, cached in prompts if members > 1 else ():
        if room.holds(members, new + cached + 1):
            found = (profile.find(_prefill(members, exchange, new, cached)) for exchange in SHARED)
            quickest.append(min((one for one in found if one is not None), key=lambda one: one.median_s))
    lacking = [one for times in range(repeats, 2 * repeats) for one in quickest if len(one.seconds) <= times]
    return [msgspec.structs.replace(one, seconds=(), beside=0) for one in lacking]


def _missing_decodes(
    profile: Profile, members: int, lengths: Sequence[int], room: KvRoom, times: int
) -> list[Prefill | Decode]:
    """Lists the decodes that such groups timed fewer than `times` times.

    These are small and large batches behind the shortest, the middle and the longest of `lengths`, of which each
    member has a block at least. Batches have no more tokens than four of the longest, nor than an instance can hold.
    Groups are timed behind the middle one also while each member decodes a request of its own.
    """
    longest = max(1, room.max_model_len - _BATCHES[-1] - DECODE_STEPS)
    shortest = members * room.block_size if members > 1 else 1
    every = sorted({min(longest, max(shortest, length)) for length in lengths})
    exchange = str(RING_Q if members > 1 else LOCAL)
    middle, found = every[len(every) // 2], []
    kinds = [(batch, context, 0) for batch in _BATCHES for context in sorted({every[0], middle, every[-1]})]
    if members > 1:
        kinds += [(batch, middle, members) for batch in _BATCHES_WITH_SINGLES]
    for batch, context, singles in kinds:
        num_blocks = (batch + singles) * -(-(context + batch + DECODE_STEPS) // room.block_size)
        if num_blocks <= room.num_blocks and batch * context <= _MAX_OF_LONGEST * every[-1]:
            sizes = {"batch": batch, "context_tokens": context, "singles": singles}
            found.append(Decode(members=members, exchange=exchange, seconds=(), **sizes))
    return [one for one in found if profile.num_times(one) < times]
