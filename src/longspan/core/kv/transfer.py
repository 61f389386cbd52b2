"""The transfer of one request's KV from its prefill instances to a decode instance (Tetris §4.2)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from longspan.core.blocks import BlockRef
from longspan.core.request import Request
from longspan.core.steps import Part


class Transfer:
    """The KV of one request that is sent to one decode instance, as it is computed.

    Args:
        num_computed: number of the request's tokens with KV so far.

    Attributes:
        target: the decode instance. Blocks that it computed itself are not moved.
        places: the indices, in the request's table, of the blocks that go to the target.
        num_tokens: the request's tokens with KV at the end of its prefill.
        waiting: indices of blocks that are computed and not sent, in order of their computation.
        sent: indices of blocks that are sent.
        backends: number of reserved backends.
        blocks: blocks on the target, in order of `places`. Empty before the first backend.
        num_shared: number of leading blocks that were cached on the target, and are not moved.
        num_arrived: blocks that have arrived.
        moves: the sources of the moves in flight, by number.
        busy: instances with a move in flight.
        sources: instances that send blocks or still have to. Each can use one backend.
    """

    def __init__(self, request: Request, target: int, places: range, *, num_tokens: int, num_computed: int) -> None:
        self.request, self.target, self.places, self.num_tokens = request, target, places, num_tokens
        num_full = places.stop if num_computed >= num_tokens else num_computed // request.block_size
        self.waiting = [*_common(places, 0, num_full)]
        self.sent: set[int] = set()
        self.backends = 0
        self.blocks: list[BlockRef] = []
        self.num_shared = self.num_arrived = 0
        self.moves: dict[int, int] = {}
        self.busy: set[int] = set()
        self.sources: set[int] = set()
        self._unsent: Counter[int] = Counter()  # unsent blocks in the request's table, by instance
        self.table_changed()

    @property
    def num_blocks(self) -> int:
        return len(self.places)

    @property
    def is_complete(self) -> bool:
        """Whether the target has all blocks."""
        return bool(self.blocks) and self.num_shared + self.num_arrived == self.num_blocks

    @property
    def to_move(self) -> range:
        """The places of blocks that were not cached on the target."""
        return self.places[self.num_shared :]

    def can_send(self, source: int) -> bool:
        """Return whether a backend can take a move from a source: a free backend, or the source's own.

        If each source has a backend, moves from a source queue on its own.
        """
        if source in self.busy:
            return self.backends >= len(self.sources)
        return self.backends > len(self.busy)

    def completed_by(self, part: Part) -> range:
        """Return the indices of the transfer's blocks that a part fills, or in which the prompt ends."""
        size = self.request.block_size
        stop = part.stop // size if part.sample is None else self.places.stop
        return _common(self.places, part.start // size, stop)

    def to_send(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """Group by source the blocks that the target lacks and that are not being copied."""
        request = self.request
        by_source: defaultdict[int, list[int]] = defaultdict(list)
        for index in indices:
            if index in self.to_move and (ref := request.table[index]) not in request.copying:
                by_source[ref.instance].append(index)
        return by_source

    def table_changed(self, first: int = 0) -> None:
        """Count the unsent blocks again after a change of the request's group, or of its table from `first` on."""
        if not first:
            self._unsent.clear()
        table = self.request.table
        new = _common(self.to_move, first, len(table))
        self._unsent.update(table[index].instance for index in new if index not in self.sent)
        self._count(len(table))

    def begin(self, number: int, source: int, indices: Collection[int]) -> None:
        self.moves[number] = source
        self.sent.update(indices)
        self._unsent[source] -= len(indices)
        self._count(self._num_placed)

    def keep(self, indices: Collection[int]) -> None:
        """Record that these blocks are on the target already."""
        self.sent.update(indices)
        self._unsent[self.target] -= len(indices)
        self.num_arrived += len(indices)
        self._count(self._num_placed)

    def end(self, number: int) -> int:
        """Record that a move is done. Return the instance that sent it."""
        source = self.moves.pop(number)
        self._count(self._num_placed)
        return source

    def _count(self, num_placed: int) -> None:
        self._num_placed = num_placed
        self.busy = set(self.moves.values())
        self.sources = self.busy.union([instance for instance, number in self._unsent.items() if number])
        if num_placed < self.places.stop:
            self.sources.update(self.request.kv_owners)  # they will send the blocks that are not computed yet
        self.sources.discard(self.target)


def _common(places: range, first: int, stop: int) -> range:
    """Return the part of a range of indices that is in `[first, stop)`."""
    return range(max(places.start, first), min(places.stop, stop))
