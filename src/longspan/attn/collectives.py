"""All-gather, reduce-scatter and sums over the members of a group. Each byte is sent from one host to another once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.comm import Group, Message, Pending
from longspan.core.splits import cut_evenly


def all_gather(group: Group, blocks: Sequence[Message], *, hop: int = 0) -> None:
    """Send the block of every member to every member.

    Args:
        blocks: a message per member, with the same shapes on all members. This member's own is filled, and all are
            filled when the call returns. Empty messages are not sent.
        hop: the first of `gather_hops` hops.
    """
    Gathering(group, blocks, hop=hop).wait()


class Gathering:
    """An `all_gather` that runs until `wait`. This member's own block must not change meanwhile."""

    def __init__(self, group: Group, blocks: Sequence[Message], *, hop: int = 0) -> None:
        self._group, self._blocks, self._hop = group, blocks, hop
        self._spread: list[Pending] = []
        self._first: Pending | None = group.start(
            sends=dict.fromkeys(_receivers(group, group.rank), blocks[group.rank]),
            receives={owner: blocks[owner] for owner in group.peers if group.rank in _receivers(group, owner)},
            hop=hop,
        )

    def pass_on(self) -> None:
        """Wait for the blocks of other hosts, and start to spread them on this host. Without such blocks, return.

        `wait` does it if it was not called.
        """
        group, blocks = self._group, self._blocks
        here, neighbours = group.hosts[group.rank], _neighbours(group)
        if self._first is None or not neighbours or len(set(group.hosts)) == 1:
            return
        self._first.wait()
        self._first = None
        for owner in group.peers:
            if group.hosts[owner] != here:
                carrier = _partner(group, owner, here)
                sends = dict.fromkeys(neighbours, blocks[owner]) if carrier == group.rank else {}
                receives = {} if carrier == group.rank else {carrier: blocks[owner]}
                self._spread.append(group.start(sends=sends, receives=receives, hop=self._hop + 1 + owner))

    def wait(self) -> None:
        """Wait until all blocks have arrived."""
        self.pass_on()
        for transfer in (self._first, *self._spread):
            if transfer is not None:
                transfer.wait()


def gather_rows(group: Group, rows: Tensor, counts: Sequence[int], *, hop: int = 0) -> Tensor:
    """Gather the rows `[all rows, width]` of all members, which have `counts` rows. See `all_gather` for `hop`."""
    blocks = [Message.empty([(count, rows.shape[1])], rows) for count in counts]
    blocks[group.rank].tensors[0].copy_(rows)
    all_gather(group, blocks, hop=hop)
    return torch.cat([block.tensors[0] for block in blocks])


def reduce_scatter(group: Group, blocks: Sequence[Tensor], *, hop: int = 0) -> Tensor:
    """Return the sum of all members' blocks for this member, see `ReduceScatter`."""
    return ReduceScatter(group, blocks, hop=hop).wait()


class ReduceScatter:
    """The sum of all members' blocks for each member, in the type of the blocks. It runs until `wait`.

    Sums are float32. The members of a host add up their blocks, and send the sum, rounded to the type of the blocks.

    Args:
        blocks: this member's term of each member's sum. All members have the same shapes and type.
        hop: the first of two hops.
    """

    def __init__(self, group: Group, blocks: Sequence[Tensor], *, hop: int = 0) -> None:
        self._group, self._blocks, self._hop = group, blocks, hop
        neighbours = _neighbours(group)
        collected = {member: _collects(group, member) for member in (group.rank, *neighbours)}
        self._owners = collected[group.rank]
        sends = {member: Message.of([blocks[owner] for owner in collected[member]]) for member in neighbours}
        self._near = {member: _empty([blocks[owner] for owner in self._owners]) for member in neighbours}
        self._near_pending = group.start(sends=sends, receives=self._near, hop=hop)
        self._far: dict[int, Message] = {}
        self._sum: Tensor | None = None
        if len(set(group.hosts)) == group.size:  # on all members, so that all make their calls in the same order
            self.pass_on()

    def pass_on(self) -> None:
        """Wait for the blocks of this host's members, add them up, and start to send the sums to other hosts."""
        if self._sum is not None:
            return
        group, blocks, rank = self._group, self._blocks, self._group.rank
        self._near_pending.wait()
        sums = {owner: blocks[owner].float() for owner in self._owners}
        for message in self._near.values():
            for owner, block in zip(self._owners, message.tensors, strict=True):
                sums[owner] = sums[owner] + block
        self._sum, dtype = sums[rank], blocks[rank].dtype
        sends = {owner: Message.of([total.to(dtype)]) for owner, total in sums.items() if owner != rank}
        other_hosts = sorted(set(group.hosts) - {group.hosts[rank]})
        self._far = {_partner(group, rank, host): _empty([blocks[rank]]) for host in other_hosts}
        self._far_pending = group.start(sends=sends, receives=self._far, hop=self._hop + 1)

    def wait(self) -> Tensor:
        """Return this member's sum."""
        self.pass_on()
        assert self._sum is not None, "passed on"
        self._far_pending.wait()
        total = sum((message.tensors[0] for message in self._far.values()), self._sum)
        return total.to(self._blocks[self._group.rank].dtype)


def _neighbours(group: Group) -> list[int]:
    return [member for member in group.peers if group.hosts[member] == group.hosts[group.rank]]


def _receivers(group: Group, owner: int) -> set[int]:
    """Return the members that `owner` itself sends to: its neighbours, and one member of every other host."""
    host = group.hosts[owner]
    neighbours = {member for member in range(group.size) if group.hosts[member] == host and member != owner}
    return neighbours | {_partner(group, owner, other) for other in set(group.hosts) - {host}}


def _collects(group: Group, member: int) -> list[int]:
    """List the members whose sums `member` collects on its host: itself, and its partners on other hosts."""
    host = group.hosts[member]
    return [
        owner
        for owner in range(group.size)
        if (owner == member if group.hosts[owner] == host else _partner(group, owner, host) == member)
    ]


def _partner(group: Group, member: int, host: int) -> int:
    """Return the member on `host` that exchanges with `member` of another host."""
    neighbours = [other for other in range(group.size) if group.hosts[other] == group.hosts[member]]
    there = [other for other in range(group.size) if group.hosts[other] == host]
    return there[neighbours.index(member) % len(there)]


def _empty(blocks: Sequence[Tensor]) -> Message:
    return Message.empty([block.shape for block in blocks], blocks[0])


def all_reduce(group: Group, tensor: Tensor) -> Tensor:
    """Return the sum over members: by the transport if it makes sums, see `Sums`, else by messages.

    Each member sends `2 (n - 1) / n` of the tensor, and all get the same bits. With messages each member sums its piece
    in float32, in the order of the members, rounds once, and sends the sum to all.
    """
    rank, peers = group.rank, group.peers
    bounds = cut_evenly(tensor.numel(), group.size)
    # In a ring each member sends all pieces but its own, and then all sums but one.
    num_sent = 2 * (tensor.numel() - (bounds[rank][1] - bounds[rank][0]))
    if (total := group.sum(tensor, num_sent * tensor.itemsize)) is not None:
        return total
    if group.size == 2:  # sends the whole tensor: the same bytes, and one hop instead of two
        receives = {peer: _empty([tensor]) for peer in peers}
        group.start(sends=dict.fromkeys(peers, Message.of([tensor])), receives=receives, hop=0).wait()
        return (tensor.float() + receives[1 - rank].tensors[0].float()).to(tensor.dtype)
    flat = tensor.reshape(-1)
    pieces = [flat[start:stop] for start, stop in bounds]
    receives = {peer: _empty([pieces[rank]]) for peer in peers}
    group.start(sends={peer: Message.of([pieces[peer]]) for peer in peers}, receives=receives, hop=0).wait()
    terms = [pieces[rank] if member == rank else receives[member].tensors[0] for member in range(group.size)]
    total = torch.stack([term.float() for term in terms]).sum(dim=0).to(tensor.dtype)
    receives = {peer: _empty([pieces[peer]]) for peer in peers}
    group.start(sends=dict.fromkeys(peers, Message.of([total])), receives=receives, hop=1).wait()
    sums = [total if member == rank else receives[member].tensors[0] for member in range(group.size)]
    return torch.cat(sums).view(tensor.shape)
