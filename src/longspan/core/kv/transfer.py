"""The KV of one request on its way from the instances that prefill it to one that decodes it (Tetris §4.2)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable

from longspan.core.blocks import BlockRef
from longspan.core.request import Request
from longspan.core.steps import Part


class Transfer:
    """The KV of one request on its way to one instance; its first `num_computed` tokens are computed.

    Attributes:
        target: the instance that is to decode with it; what that has computed itself stays where it is.
        places: in the request's table, of the blocks that go there.
        num_tokens: that all KV of the request has when it is computed.
        waiting: indices of blocks that are computed and not sent, first computed first.
        sent: indices of blocks that are sent.
        backends: reserved for it.
        blocks: on the target, in order of `places`; none before the first backend.
        num_shared: the first `num_shared` of them were cached on the target, and are not moved.
        num_arrived: blocks that have arrived.
        moves: the sources of those in flight, by number.
        busy: instances that are sending it now.
        sources: instances that send any of it, or still have to: each can use one backend.
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
        self._unsent: Counter[int] = Counter()  # by instance, of the entries of the request's table that are known
        self.table_changed()

    @property
    def num_blocks(self) -> int:
        return len(self.places)

    @property
    def is_there(self) -> bool:
        """Whether the target has all of it."""
        return bool(self.blocks) and self.num_shared + self.num_arrived == self.num_blocks

    @property
    def to_move(self) -> range:
        """The places of blocks that were not cached on the target."""
        return self.places[self.num_shared :]

    def can_send(self, source: int) -> bool:
        """Tells whether there is a backend for this source: a free one, or if each source has its own, the one that
        takes a move from there already: they follow each other.
        """
        if source in self.busy:
            return self.backends >= len(self.sources)
        return self.backends > len(self.busy)

    def completed_by(self, part: Part) -> range:
        """Returns the indices of its blocks that a part fills, or ends the prompt in."""
        size = self.request.block_size
        stop = part.stop // size if part.sample is None else self.places.stop
        return _common(self.places, part.start // size, stop)

    def to_send(self, indices: Iterable[int]) -> dict[int, list[int]]:
        """Groups by source the blocks that the target lacks and their instance has."""
        request = self.request
        found: defaultdict[int, list[int]] = defaultdict(list)
        for index in indices:
            if index in self.to_move and (ref := request.table[index]) not in request.copying:
                found[ref.instance].append(index)
        return found

    def table_changed(self, first: int = 0) -> None:
        """Counts what is still to be sent, after a change of the request's group, or of its table from `first` on."""
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
        """Records that these blocks are on the target already."""
        self.sent.update(indices)
        self._unsent[self.target] -= len(indices)
        self.num_arrived += len(indices)
        self._count(self._num_placed)

    def end(self, number: int) -> int:
        """Records that a move is done; returns the instance that sent it."""
        source = self.moves.pop(number)
        self._count(self._num_placed)
        return source

    def _count(self, num_placed: int) -> None:
        self._num_placed = num_placed
        self.busy = set(self.moves.values())
        self.sources = self.busy.union([instance for instance, number in self._unsent.items() if number])
        if num_placed < self.places.stop:
            self.sources.update(self.request.kv_owners)  # of what is not computed yet
        self.sources.discard(self.target)


def _common(places: range, first: int, stop: int) -> range:
    """Returns those of neighbouring places that are in `[first, stop)`."""
    return range(max(places.start, first), min(places.stop, stop))
