"""In which order requests get what they need to send their KV to a decode instance (Tetris §4.2).

An instance receives as many transfers at once as it has backends. If any transfer could take any of them, a request
with KV on many instances might never be done, and keep its place there half filled. So a request shakes hands when its
first chunk is dispatched. In the order of these handshakes, each reserves as many backends as it needs, and with the
first the blocks for all its KV; it keeps them until everything is there. Who cannot have that lets nobody pass.

Blocks of who came later are taken back when who decodes there already needs them. It keeps its place in the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from longspan.core.account import KvAccount
from longspan.core.request import Request
from longspan.core.running import Running
from longspan.core.steps import BlockRef, Part


@dataclass(kw_only=True, eq=False)
class Transfer:
    """The KV of one request on its way.

    Attributes:
        target: the instance that is to decode it.
        num_tokens, num_blocks: that its KV has when all is computed.
        num_placed: entries of the request's table that `table_changed` has seen.
        unsent: those of them that are still to be sent, by instance.
        backends: reserved for it.
        blocks: on the target, by place in the request's table; none before the first backend.
        num_shared: so many of these, the first, held its beginning already: they are not moved.
        waiting: places of blocks that are computed and not sent, first computed first.
        sent: places of blocks that are sent.
        moves: the sources of those in flight, by number.
        num_arrived: blocks that are there.
        busy: instances that it moves from now.
        sources: instances that send any of it, or still have to: each can use one backend.
    """

    request: Request
    target: int
    num_tokens: int
    num_blocks: int
    num_placed: int = 0
    unsent: Counter[int] = field(default_factory=Counter)
    backends: int = 0
    blocks: tuple[BlockRef, ...] = ()
    num_shared: int = 0
    waiting: list[int] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    moves: dict[int, int] = field(default_factory=dict)
    num_arrived: int = 0
    busy: set[int] = field(default_factory=set)
    sources: set[int] = field(default_factory=set)

    @property
    def is_there(self) -> bool:
        """Whether the target has all of it."""
        return bool(self.blocks) and self.num_shared + self.num_arrived == self.num_blocks

    def can_send(self, source: int) -> bool:
        """Whether there is a backend for this source: a free one, or if each source has its own, the one that takes a
        move from there already: they follow each other.
        """
        if source in self.busy:
            return self.backends >= len(self.sources)
        return self.backends > len(self.busy)

    def table_changed(self, part: Part | None = None) -> None:
        """Counts what is still to be sent, after a change of the request's table or group: of a part only its new
        blocks, if it does not tell the whole table.
        """
        table, first = self.request.table, 0 if part is None else part.first_block
        if not first:
            self.unsent.clear()
        self.num_placed = len(table)
        new = range(max(first, self.num_shared), len(table))
        self.unsent.update(table[index].instance for index in new if index not in self.sent)
        self._count()

    def begin(self, number: int, source: int, indices: Collection[int]) -> None:
        """A move of these places in the table is sent."""
        self.moves[number] = source
        self.sent.update(indices)
        self.unsent[source] -= len(indices)
        self._count()

    def end(self, number: int) -> int:
        """A move is done; returns the instance that sent it."""
        source = self.moves.pop(number)
        self._count()
        return source

    def _count(self) -> None:
        """Moves, what is unsent, or the group have changed."""
        self.busy = set(self.moves.values())
        self.sources = self.busy.union([instance for instance, number in self.unsent.items() if number])
        if self.num_placed < self.num_blocks:
            self.sources.update(self.request.keepers)  # of what is not computed yet

    def withdrawn(self) -> Transfer:
        """The same with nothing on the target: all that is computed waits to be sent again."""
        request = self.request
        is_done = request.num_computed >= self.num_tokens
        num_full = self.num_blocks if is_done else request.num_computed // request.block_size
        again = Transfer(
            request=request,
            target=self.target,
            num_tokens=self.num_tokens,
            num_blocks=self.num_blocks,
            waiting=list(range(num_full)),
        )
        again.table_changed()
        return again


class Handshakes:
    """Reserves backends and blocks of decode instances.

    Args:
        running: who decodes there.
        backends: of each decode instance.
        max_num_seqs: seats of each instance.
    """

    def __init__(self, account: KvAccount, running: Running, *, backends: int, max_num_seqs: int) -> None:
        self._account, self._running = account, running
        self._backends, self._max_num_seqs = backends, max_num_seqs
        self._order: dict[int, dict[int, Transfer]] = {}
        self._taken: Counter[int] = Counter()  # backends that are reserved, or used by moves of transfers given up
        self._refused: dict[int, tuple[int, int]] = {}
        self.promised: Counter[int] = Counter()
        """Blocks that transfers without a backend will need, by target."""

    def shake(self, transfer: Transfer) -> None:
        """A transfer stands behind all others to its target."""
        self._order.setdefault(transfer.target, {})[transfer.request.id] = transfer
        self.promised[transfer.target] += transfer.num_blocks

    def part(self, transfer: Transfer) -> None:
        """A transfer is over, or given up: its backends are free, but for those that moves in flight use."""
        del self._order[transfer.target][transfer.request.id]
        if not self._order[transfer.target]:
            del self._order[transfer.target]
        self._taken[transfer.target] += len(transfer.busy) - transfer.backends
        if not transfer.blocks:
            self.promised[transfer.target] -= transfer.num_blocks

    def left_behind_done(self, target: int) -> None:
        """The last move from an instance, of a transfer that was given up, has ended."""
        self._taken[target] -= 1

    def outgrown(self, full: Collection[int]) -> Iterator[Transfer]:
        """Who has to give its blocks back, last come first, since its target can take a step and lacks blocks for it.

        Who came last of those with blocks there gives way: one that decodes is preempted by the policy, not here.
        """
        for target, transfers in self._order.items():
            pool, decodes = self._account.pool(target), self._running.on(target)
            if target in full or pool.num_free >= len(decodes):
                continue
            room = pool.num_free + pool.num_leaving
            coming = {transfer.request.id: transfer for transfer in transfers.values() if transfer.blocks}
            able = [request for request in decodes if request.num_scheduled < request.num_tokens]
            giving = sorted([*able, *(one.request for one in coming.values())], key=lambda r: r.admission)
            for request in sorted(filter(_asks, able), key=lambda r: r.admission):
                while room < 1 and giving[-1].admission > request.admission:
                    last = giving.pop()
                    if (transfer := coming.get(last.id)) is None:
                        room += self._account.reclaimable(last)[target]
                    else:
                        room += transfer.num_blocks - transfer.num_shared
                        yield transfer
                room -= 1

    def replace(self, transfer: Transfer, other: Transfer) -> None:
        """Another stands in the place of one that gives its blocks back, as if it were given up."""
        self._taken[transfer.target] += len(transfer.busy) - transfer.backends
        self._order[transfer.target][transfer.request.id] = other
        self.promised[transfer.target] += transfer.num_blocks

    def in_order(self) -> list[Transfer]:
        """Those that have a backend, by target, after reserving what can be."""
        found = []
        for target, transfers in self._order.items():
            for transfer in transfers.values():
                if transfer.backends > len(transfer.sources):
                    self._set_backends(transfer, len(transfer.sources))
            if self._taken[target] < self._backends:
                self._reserve(target, transfers.values())
            found += [transfer for transfer in transfers.values() if transfer.backends]
        return found

    def _reserve(self, target: int, transfers: Collection[Transfer]) -> None:
        for transfer in transfers:
            left = self._backends - self._taken[target]
            if left <= 0 or not (transfer.blocks or self._allocate(transfer)):
                return
            self._set_backends(transfer, min(transfer.backends + left, len(transfer.sources)))

    def _set_backends(self, transfer: Transfer, number: int) -> None:
        self._taken[transfer.target] += number - transfer.backends
        transfer.backends = number

    def _allocate(self, transfer: Transfer) -> bool:
        """Blocks for all of it, and a seat, or nothing; not tried again before more are free.

        What those need at once who came earlier and decode there is left to them. Another choice of a prompt that is on
        its way there waits for it, and then shares its blocks.
        """
        target, request = transfer.target, transfer.request
        leader = request.leader
        if leader is not None and leader.id in self._order[target] and leader.admission < request.admission:
            return False
        decodes = self._running.on(target)
        num_coming = sum(bool(other.blocks) for other in self._order[target].values())
        num_free = self._account.pool(target).num_free
        refused_id, too_few = self._refused.get(target, (request.id, -1))
        if self._max_num_seqs <= len(decodes) + num_coming or (refused_id == request.id and num_free <= too_few):
            return False
        num_asked = sum(r.admission < request.admission and _asks(r) for r in decodes)
        found = self._account.reserve(request, target, transfer.num_blocks, num_left=num_asked)
        if found is None:
            self._refused[target] = request.id, num_free - num_asked
            return False
        transfer.blocks, transfer.num_shared = found
        transfer.table_changed()
        self.promised[target] -= transfer.num_blocks
        return True


def _asks(request: Request) -> bool:
    """Whether the next token of one that decodes begins a block."""
    num_scheduled = request.num_scheduled
    return num_scheduled < request.num_tokens and request.blocks_for(num_scheduled + 1) > len(request.table)
