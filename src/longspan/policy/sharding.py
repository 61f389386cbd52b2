"""The sharding of the next chunk of a prompt over a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from longspan.core.runs import Layout, Run, SpanShards, shard_span
from longspan.cost.partitions import PartitionTable

_REMEDY = "measure it with longspan profile --partitions, or choose partition=even"


@dataclass(frozen=True, kw_only=True)
class Partitions:
    """The paper's KVR-E (`even`), KVR-S (`searched`) and KVR-P (`predicted` from the two nearest lengths).

    Attributes:
        model: whose entries of the table count.
        members: of the longest chain.

    Raises:
        ValueError: when pieces are to be searched or predicted ones, and the table has none for this model and group.
    """

    kind: Literal["even", "searched", "predicted"]
    table: PartitionTable
    model: str
    members: int

    def __post_init__(self) -> None:
        if self.kind != "even" and self.members > 1 and not self.table.lengths(self.model, self.members):
            raise ValueError(
                f"partition={self.kind} needs a table of partitions, but there is none for {self.members} instances "
                f"with this model, precision and number of threads: {_REMEDY}"
            )

    @classmethod
    def best(cls, table: PartitionTable | None, model: str, members: int) -> Partitions:
        """Takes predicted pieces if anything was searched for such chains, else even ones."""
        table = table or PartitionTable()
        kind: Literal["even", "predicted"] = "predicted" if table.lengths(model, members) else "even"
        return cls(kind=kind, table=table, model=model, members=members)

    def check(self, length: int, members: int) -> None:
        """Raises ValueError when a prompt of this length was to be searched for so many members, and was not."""
        known = self.table.lengths(self.model, members)
        if self.kind == "searched" and members > 1 and length not in known:
            lengths = ", ".join(f"{length:,}" for length in known) or "none"
            raise ValueError(
                f"partition=searched has none for {length:,} tokens on {members} instances, only for {lengths}: "
                f"{_REMEDY} or predicted"
            )

    def fractions(self, length: int, members: int) -> tuple[float, ...]:
        """Returns the fractions of a prompt of this length for so many members; empty for even pieces.

        A request that gave its KV up and comes back longer than its prompt was has no entry of its own: a searched
        partition is then a predicted one.
        """
        if self.kind == "even":
            return ()
        return self.table.predict(self.model, members, length) or ()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A layout of chunks, and for a contiguous one the fractions of the members, if they are not even.

    For a chain, `chained`, the first member begins even inside a block that another one holds.
    """

    layout: Layout = "zigzag"
    fractions: tuple[float, ...] = ()
    chained: bool = False

    @property
    def in_order(self) -> bool:
        """Tells whether members keep their places; else places are given so that what members hold evens out."""
        return self.layout == "contiguous"


@dataclass(frozen=True, kw_only=True)
class Room:
    """The tokens to compute and free KV blocks that each member of a group can still take in this step."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    block_size: int

    def fits(self, sharded: SpanShards) -> bool:
        """Tells whether every member can take its runs."""
        for runs, tokens, blocks in zip(sharded, self.tokens, self.blocks, strict=True):
            if sum([len(run) for run in runs]) > tokens:
                return False
            if sum([len(_begun(run, self.block_size)) for run in runs]) > blocks:
                return False
        return True


_ZIGZAG = Shape()


def shard_chunk(start: int, stop: int, owners: Sequence[int], room: Room, shape: Shape = _ZIGZAG) -> SpanShards | None:
    """Shards the next chunk of the tokens `[start, stop)`; `owners` names the member that holds each block so far.

    The rest in the wanted shape, if it fits; else as many blocks as can be sharded in that shape; else, with little
    room, part of one block to the member that holds it, or for a new one to the member with the fewest of the request's
    blocks. None when there is room for no token. Shards may ask for a block that is not free when none is: then
    somebody must give way.
    """
    num_members, size = len(room.tokens), room.block_size
    held = Counter(owners)
    order = sorted(range(num_members), key=lambda m: held.get(m, 0))
    head = None
    if start % size:
        head = 0 if shape.chained else owners[start // size]
    places = list(range(num_members)) if shape.in_order else order
    for end in chain((stop,), _ends(start, room, shape)):
        if start < end <= stop:
            sharded = _shard_in_order(start, end, places, size, head, shape)
            if room.fits(sharded):
                return sharded
    return _shard_one_block(start, stop, head, order, room)


def shard_to_last(
    start: int, stop: int, owners: Sequence[int], room: Room, shape: Shape
) -> tuple[SpanShards | None, tuple[int, ...]]:
    """Shards a chunk for a chain whose last member holds all KV; returns None when it has no room for that.

    Returns the shards, and the member that holds each new block.
    """
    last, size = len(room.tokens) - 1, room.block_size
    sharded = shard_chunk(start, stop, owners, replace(room, blocks=(stop,) * len(room.tokens)), shape)
    if sharded is None:
        return None, ()
    num_blocks = -(-max(run.stop for runs in sharded for run in runs) // size) - len(owners)
    return (sharded, (last,) * num_blocks) if num_blocks <= room.blocks[last] else (None, ())


def _ends(start: int, room: Room, shape: Shape) -> Iterator[int]:
    """Yields ends of a chunk that fills the room: even shards have whole rounds of blocks, others are rounded."""
    num_members, size = len(room.tokens), room.block_size
    if shape.fractions:
        most = start + int(
            min(tokens / scheduled for tokens, scheduled in zip(room.tokens, shape.fractions, strict=True))
        )
        yield from ((most // size - less) * size for less in range(2 * num_members))
    else:
        most = start + min(room.tokens) * num_members
        yield from (most // quantum * quantum for quantum in (2 * num_members * size, num_members * size))


def block_owners(sharded: SpanShards, first: int, last: int, block_size: int) -> tuple[int, ...]:
    """Returns the member that begins, and so holds, each block `first <= b < last`."""
    begins = {block: member for member, runs in enumerate(sharded) for run in runs for block in _begun(run, block_size)}
    return tuple(begins[block] for block in range(first, last))


def _shard_in_order(
    start: int, end: int, order: Sequence[int], block_size: int, head: int | None, shape: Shape
) -> SpanShards:
    """Shards with the places of the pattern given to members in `order`."""
    place = {member: index for index, member in enumerate(order)}
    sharded = shard_span(
        shape.layout,
        *(start, end, len(order)),
        align=block_size,
        head=None if head is None else place[head],
        fractions=shape.fractions,
    )
    return tuple(sharded[place[member]] for member in range(len(order)))


def _shard_one_block(start: int, stop: int, head: int | None, order: Sequence[int], room: Room) -> SpanShards | None:
    if head is None:
        able = [m for m in order if room.tokens[m] > 0]
        if any(number > 0 for number in room.blocks):  # whoever has a block but no token left has them in a later step
            able = [m for m in able if room.blocks[m] > 0]
        head = next(iter(able), None)
    if head is None or room.tokens[head] <= 0:
        return None
    end = min(stop, start + room.tokens[head], (start // room.block_size + 1) * room.block_size)
    return shard_span("single", start, end, len(order), head=head)


def _begun(run: Run, block_size: int) -> range:
    """Returns the blocks whose first token lies in the run."""
    return range(-(-run.start // block_size), -(-run.stop // block_size))
