"""How the next chunk of a request is dealt to a group whose members have different room left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from longspan.core.runs import Deal, Run, deal


@dataclass(frozen=True, kw_only=True)
class Room:
    """What each member of a group can still take in this step: tokens to compute, and free KV blocks."""

    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    block_size: int

    def fits(self, dealt: Deal) -> bool:
        """Whether every member can take its runs."""
        return all(
            sum(len(run) for run in runs) <= tokens and sum(len(_begun(run, self.block_size)) for run in runs) <= blocks
            for runs, tokens, blocks in zip(dealt, self.tokens, self.blocks, strict=True)
        )


def deal_chunk(start: int, stop: int, owners: Sequence[int], room: Room) -> Deal | None:
    """Deals the next chunk of the tokens `[start, stop)`; `owners` names the member that holds each block so far.

    The whole rest zigzag, if it fits; else as many blocks as can be dealt evenly; else, with little room, part of one
    block to the member that holds it, or for a new one to the member with the fewest of the request's blocks. None when
    there is room for no token. A deal may ask for a block that is not free when none is: then somebody must give way.
    """
    num_members, size = len(room.tokens), room.block_size
    held = Counter(owners)
    order = sorted(range(num_members), key=lambda m: (held[m], m))
    head = owners[start // size] if start % size else None
    most = start + min(room.tokens) * num_members
    for end in (stop, *(most // quantum * quantum for quantum in (2 * num_members * size, num_members * size))):
        if start < end <= min(stop, most):
            dealt = _deal_in_order(start, end, order, size, head)
            if room.fits(dealt):
                return dealt
    return _deal_one_block(start, stop, head, order, room)


def holders(dealt: Deal, first: int, last: int, block_size: int) -> tuple[int, ...]:
    """The member that begins, and so holds, each block `first <= b < last`."""
    begins = {block: member for member, runs in enumerate(dealt) for run in runs for block in _begun(run, block_size)}
    return tuple(begins[block] for block in range(first, last))


def _deal_in_order(start: int, end: int, order: Sequence[int], block_size: int, head: int | None) -> Deal:
    """Zigzag, with the places of the pattern given to members in `order`, which evens out what they hold."""
    place = {member: index for index, member in enumerate(order)}
    dealt = deal("zigzag", start, end, len(order), align=block_size, head=None if head is None else place[head])
    return tuple(dealt[place[member]] for member in range(len(order)))


def _deal_one_block(start: int, stop: int, head: int | None, order: Sequence[int], room: Room) -> Deal | None:
    if head is None:
        able = [m for m in order if room.tokens[m] > 0]
        if any(number > 0 for number in room.blocks):  # whoever has a block but no token left has them in a later step
            able = [m for m in able if room.blocks[m] > 0]
        head = next(iter(able), None)
    if head is None or room.tokens[head] <= 0:
        return None
    end = min(stop, start + room.tokens[head], (start // room.block_size + 1) * room.block_size)
    return deal("single", start, end, len(order), head=head)


def _begun(run: Run, block_size: int) -> range:
    """The blocks whose first token lies in the run."""
    return range(-(-run.start // block_size), -(-run.stop // block_size))
