"""Shards of the next chunk of a request over the members of a group, within their tokens and free blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from longspan.core.layouts import shard_span
from longspan.core.runs import Layout, Run, SpanShards


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layout of chunks, and for a contiguous layout the fractions of the members. Empty fractions are even.

    If `chained`, the first member may begin inside a block of another one. If `in_order`, pieces are in member order.
    """

    layout: Layout = "zigzag"
    fractions: tuple[float, ...] = ()
    chained: bool = False
    in_order: bool = False


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Tokens that each member may compute in this step, and free KV blocks that it may allocate."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    block_size: int

    def fits(self, shards: SpanShards) -> bool:
        for runs, tokens, blocks in zip(shards, self.tokens, self.blocks, strict=True):
            if sum([len(run) for run in runs]) > tokens:
                return False
            if sum([len(_begun(run, self.block_size)) for run in runs]) > blocks:
                return False
        return True


ZIGZAG = Shape()


def shard_chunk(
    start: int, stop: int, owners: Sequence[int], capacity: Capacity, shape: Shape = ZIGZAG, first: int = 0
) -> SpanShards | None:
    """Shard the next chunk of the tokens `[start, stop)`.

    All tokens are sharded in the given shape if they fit. Otherwise the chunk has the whole blocks that fit in that
    shape. Otherwise it is part of one block, for its owner, or for the next member if the block is new. Return None
    if no member can compute a token. If no block is free, the shards ask for one, so that a request is preempted.

    Members begin the blocks of the request in cyclic order, from `first` on. A member is passed over if it has two
    blocks more than the smallest share. For a difference of one it is not, because all requests with a common cached
    prefix would then continue on the same member. If no block is free, the member with the fewest blocks is next.

    Args:
        owners: the member that holds each earlier block, -1 for a block on a host.
    """
    num_members, size = len(capacity.tokens), capacity.block_size
    members, held, next_member = range(num_members), Counter(owners), first + len(owners)
    enough = min(held[m] for m in members) + any(number > 0 for number in capacity.blocks)
    by_turn = sorted(members, key=lambda m: (max(held[m], enough), (m - next_member) % num_members))
    head = None
    if start % size:
        head = 0 if shape.chained else owners[start // size]
    # A chain has its own order, and fractions belong to members.
    order = members if shape.chained or shape.fractions or shape.in_order else by_turn
    turns = {member: turn for turn, member in enumerate(order)}
    for end in chain((stop,), _ends(start, capacity, shape)):
        if start < end <= stop:
            in_order = shard_span(
                shape.layout,
                *(start, end, num_members),
                align=size,
                head=None if head is None else turns[head],
                fractions=shape.fractions,
            )
            shards = tuple([in_order[turns[member]] for member in members])
            if capacity.fits(shards):
                return shards
    return _shard_one_block(start, stop, head, by_turn, capacity)


def shard_to_last(start: int, stop: int, owners: Sequence[int], capacity: Capacity, shape: Shape) -> SpanShards | None:
    """Shard a chunk over a chain whose last member stores all KV. Return None without tokens or blocks there."""
    shards = shard_chunk(start, stop, owners, replace(capacity, blocks=(stop,) * len(capacity.tokens)), shape)
    if shards is None:
        return None
    num_blocks = -(-max(run.stop for runs in shards for run in runs) // capacity.block_size) - len(owners)
    return shards if num_blocks <= capacity.blocks[-1] else None


def _ends(start: int, capacity: Capacity, shape: Shape) -> Iterator[int]:
    """Yield ends of chunks, longest first. Even shards have equally many blocks. Uneven ends are rounded to blocks."""
    num_members, size = len(capacity.tokens), capacity.block_size
    if shape.fractions:
        limits = (tokens / part for tokens, part in zip(capacity.tokens, shape.fractions, strict=True) if part)
        last = start + int(min(limits))
        yield from ((last // size - less) * size for less in range(2 * num_members))
    else:
        last = start + min(capacity.tokens) * num_members
        yield from (last // quantum * quantum for quantum in (2 * num_members * size, num_members * size))


def _shard_one_block(
    start: int, stop: int, head: int | None, order: Sequence[int], capacity: Capacity
) -> SpanShards | None:
    if head is None:
        able = [m for m in order if capacity.tokens[m] > 0]
        if any(number > 0 for number in capacity.blocks):  # a member with a block has tokens in a later step
            able = [m for m in able if capacity.blocks[m] > 0]
        head = next(iter(able), None)
    if head is None or capacity.tokens[head] <= 0:
        return None
    end = min(stop, start + capacity.tokens[head], (start // capacity.block_size + 1) * capacity.block_size)
    return shard_span("single", start, end, len(order), head=head)


def block_owners(shards: SpanShards, first: int, last: int, block_size: int) -> tuple[int, ...]:
    """Return the member that begins, and therefore holds, each block `first <= b < last`."""
    begins = {block: member for member, runs in enumerate(shards) for run in runs for block in _begun(run, block_size)}
    return tuple([begins[block] for block in range(first, last)])


def _begun(run: Run, block_size: int) -> range:
    """Return the blocks whose first token is in a run."""
    return range(-(-run.start // block_size), -(-run.stop // block_size))
