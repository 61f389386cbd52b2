"""In which order requests get what they need to send their KV to a decode instance (Tetris §4.2).

An instance receives as many transfers at once as it has backends. If any transfer could take any of them, a request
with KV on many instances might never be done, and keep its place there half filled. So a request shakes hands when its
first chunk is dispatched. In the order of these handshakes, each reserves as many backends as it needs, and with the
first the blocks for all its KV; it keeps them until everything is there. Who cannot have that lets nobody pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from longspan.core.account import KvAccount
from longspan.core.request import Request
from longspan.core.steps import BlockRef, MoveKV


@dataclass(kw_only=True, eq=False)
class Transfer:
    """The KV of one request on its way.

    Attributes:
        target: the instance that is to decode it.
        num_tokens, num_blocks: that its KV has when all is computed.
        sources: instances that have held any of it; each can use one backend.
        backends: reserved for it.
        blocks: on the target, by place in the request's table; none before the first backend.
        num_shared: so many of these, the first, held its beginning already: they are not moved.
        waiting: places of blocks that are computed and not sent, first computed first.
        sent: places of blocks that are sent.
        moves: in flight, by number.
        num_arrived: blocks that are there.
    """

    request: Request
    target: int
    num_tokens: int
    num_blocks: int
    sources: set[int] = field(default_factory=set)
    backends: int = 0
    blocks: tuple[BlockRef, ...] = ()
    num_shared: int = 0
    waiting: list[int] = field(default_factory=list)
    sent: set[int] = field(default_factory=set)
    moves: dict[int, MoveKV] = field(default_factory=dict)
    num_arrived: int = 0

    @property
    def is_there(self) -> bool:
        """Whether the target has all of it."""
        return bool(self.blocks) and self.num_shared + self.num_arrived == self.num_blocks

    def can_send(self, source: int) -> bool:
        """Whether there is a backend for this source: a free one, or if each source has its own, the one that takes a
        move from there already: they follow each other.
        """
        busy = {move.sources[0] for move in self.moves.values()}
        return self.backends >= len(self.sources) if source in busy else self.backends > len(busy)


class Handshakes:
    """Reserves backends and blocks of decode instances.

    Args:
        backends: of each decode instance.
        num_seats: for how many more requests an instance has a seat, those on their way to it not counted.
    """

    def __init__(self, account: KvAccount, backends: int, num_seats: Callable[[int], int]) -> None:
        self._account, self._backends, self._num_seats = account, backends, num_seats
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
        self._taken[transfer.target] += len(transfer.moves) - transfer.backends
        if not transfer.blocks:
            self.promised[transfer.target] -= transfer.num_blocks

    def left_behind_done(self, target: int) -> None:
        """A move of a transfer that was given up has ended."""
        self._taken[target] -= 1

    def in_order(self) -> list[Transfer]:
        """Those that have a backend, by target, after reserving what can be."""
        found = []
        for target, transfers in self._order.items():
            if self._taken[target] < self._backends:
                self._reserve(target, transfers.values())
            found += [transfer for transfer in transfers.values() if transfer.backends]
        return found

    def _reserve(self, target: int, transfers: Collection[Transfer]) -> None:
        for transfer in transfers:
            left = self._backends - self._taken[target]
            if left <= 0 or not (transfer.blocks or self._allocate(transfer)):
                return
            more = max(0, min(left, len(transfer.sources) - transfer.backends))
            transfer.backends += more
            self._taken[target] += more

    def _allocate(self, transfer: Transfer) -> bool:
        """Blocks for all of it, and a seat, or nothing; not tried again before another number is free."""
        target = transfer.target
        num_coming = sum(bool(other.blocks) for other in self._order[target].values())
        attempt = transfer.request.id, self._account.pool(target).num_free
        if self._num_seats(target) <= num_coming or self._refused.get(target) == attempt:
            return False
        found = self._account.reserve(transfer.request, target, transfer.num_blocks)
        if found is None:
            self._refused[target] = attempt
            return False
        transfer.blocks, transfer.num_shared = found
        self.promised[target] -= transfer.num_blocks
        return True
