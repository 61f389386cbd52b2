"""All-gather, reduce-scatter and sums over the members of a group; each byte goes from one host to another once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message
from longspan.core.cluster import cut_evenly


def gather_hops(size: int) -> int:
    """Counts the hops of one `all_gather`; a `reduce_scatter` has two."""
    return 1 + size


def hidden_hops(size: int) -> int:
    """Counts the hops of a layer of `gather_hidden` in a group of `size` members; no exchange has more."""
    return gather_hops(size) + 3


def all_gather(group: Group, blocks: Sequence[Message], *, hop: int = 0) -> None:
    """Gives every member every block.

    Args:
        blocks: a message per member, all of the shapes that its owner has; this member's own is filled, the others are
            when the call returns. Empty ones are not sent.
        hop: the first of `gather_hops` hops.
    """
    Gathering(group, blocks, hop=hop).wait()


class Gathering:
    """An `all_gather` under way, until `wait`. Meanwhile this member's own block must not change."""

    def __init__(self, group: Group, blocks: Sequence[Message], *, hop: int = 0) -> None:
        self._group, self._blocks, self._hop = group, blocks, hop
        self._first = group.start(
            sends=dict.fromkeys(_receivers(group, group.rank), blocks[group.rank]),
            receives={owner: blocks[owner] for owner in group.peers if group.rank in _receivers(group, owner)},
            hop=hop,
        )

    def wait(self) -> None:
        """Waits until all blocks are there, some of which are only now spread on this host."""
        self._first.wait()
        group, blocks, me = self._group, self._blocks, self._group.rank
        here = group.hosts[me]
        neighbours = [member for member in group.peers if group.hosts[member] == here]
        pending = []
        for owner in group.peers:
            if group.hosts[owner] != here and neighbours:
                carrier = _partner(group, owner, here)
                sends = dict.fromkeys(neighbours, blocks[owner]) if carrier == me else {}
                receives = {} if carrier == me else {carrier: blocks[owner]}
                pending.append(group.start(sends=sends, receives=receives, hop=self._hop + 1 + owner))
        for one in pending:
            one.wait()


def gather_rows(group: Group, mine: Tensor, counts: Sequence[int], *, hop: int = 0) -> Tensor:
    """Gathers the rows `[all rows, width]` of all members; `counts` has their numbers, `hop` is the first of
    `gather_hops`.
    """
    blocks = [Message.empty([(count, mine.shape[1])], mine) for count in counts]
    blocks[group.rank].tensors[0].copy_(mine)
    all_gather(group, blocks, hop=hop)
    return torch.cat([block.tensors[0] for block in blocks])


def reduce_scatter(group: Group, blocks: Sequence[Tensor], *, hop: int = 0) -> Tensor:
    """Returns the sum of all members' blocks for this member, in the blocks' type.

    Sums are float32. What goes from one host to another is the sum over the members of the one, rounded to the blocks'
    type.

    Args:
        blocks: for each member what this one adds to its sum. All members have the same shapes and type.
        hop: the first of two hops.
    """
    me, here = group.rank, group.hosts[group.rank]
    neighbours = [member for member in group.peers if group.hosts[member] == here]
    collected = {member: _collects(group, member) for member in (me, *neighbours)}
    leaving = {member: Message.of([blocks[owner] for owner in collected[member]]) for member in neighbours}
    coming = {member: _room([blocks[owner] for owner in collected[me]]) for member in neighbours}
    group.start(sends=leaving, receives=coming, hop=hop).wait()
    sums = {owner: blocks[owner].float() for owner in collected[me]}
    for message in coming.values():
        for owner, block in zip(collected[me], message.tensors, strict=True):
            sums[owner] = sums[owner] + block
    dtype = blocks[me].dtype
    leaving = {owner: Message.of([total.to(dtype)]) for owner, total in sums.items() if owner != me}
    coming = {_partner(group, me, host): _room([blocks[me]]) for host in sorted(set(group.hosts) - {here})}
    group.start(sends=leaving, receives=coming, hop=hop + 1).wait()
    return sum((message.tensors[0] for message in coming.values()), sums[me]).to(dtype)


def _receivers(group: Group, owner: int) -> set[int]:
    """Returns who gets a block from `owner` itself: its neighbours, and one member of every other host."""
    host = group.hosts[owner]
    neighbours = {member for member in range(group.size) if group.hosts[member] == host and member != owner}
    return neighbours | {_partner(group, owner, other) for other in set(group.hosts) - {host}}


def _collects(group: Group, member: int) -> list[int]:
    """Lists the members that `member` sums for over its host: itself, and its partners on other hosts."""
    host = group.hosts[member]
    return [
        owner
        for owner in range(group.size)
        if (owner == member if group.hosts[owner] == host else _partner(group, owner, host) == member)
    ]


def _partner(group: Group, member: int, host: int) -> int:
    """Returns the member on `host` that exchanges with `member`, which lies elsewhere."""
    neighbours = [other for other in range(group.size) if group.hosts[other] == group.hosts[member]]
    there = [other for other in range(group.size) if group.hosts[other] == host]
    return there[neighbours.index(member) % len(there)]


def _room(blocks: Sequence[Tensor]) -> Message:
    return Message.empty([block.shape for block in blocks], blocks[0])


def all_reduce(group: Group, tensor: Tensor) -> Tensor:
    """Lets the transport make the sum if it can, see `Sums`; else reduce-scatters, then all-gathers.

    Either way each member sends `2 (n - 1) / n` of the tensor, and all have the same bits. By messages every member
    sums its piece in float32, in the order of the members, and rounds once.
    """
    start, stop = cut_evenly(tensor.numel(), group.size)[group.rank]
    # In a ring each member sends on all pieces but its own, and later all but another one.
    if (total := group.sum(tensor, 2 * (tensor.numel() - (stop - start)) * tensor.itemsize)) is not None:
        return total
    me, others = group.rank, group.peers
    if group.size == 2:  # all that each has: no more bytes, and one hop instead of two
        heard = {other: _room([tensor]) for other in others}
        group.start(sends=dict.fromkeys(others, Message.of([tensor])), receives=heard, hop=0).wait()
        return (tensor.float() + heard[1 - me].tensors[0].float()).to(tensor.dtype)
    flat = tensor.reshape(-1)
    pieces = [flat[start:stop] for start, stop in cut_evenly(flat.numel(), group.size)]
    heard = {member: _room([pieces[me]]) for member in others}
    group.start(sends={member: Message.of([pieces[member]]) for member in others}, receives=heard, hop=0).wait()
    terms = [pieces[me] if member == me else heard[member].tensors[0] for member in range(group.size)]
    total = torch.stack([term.float() for term in terms]).sum(dim=0).to(tensor.dtype)
    heard = {member: _room([pieces[member]]) for member in others}
    group.start(sends=dict.fromkeys(others, Message.of([total])), receives=heard, hop=1).wait()
    sums = [total if member == me else heard[member].tensors[0] for member in range(group.size)]
    return torch.cat(sums).view(tensor.shape)
