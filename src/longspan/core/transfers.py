"""KV on its way from instances that prefill to one that decodes: in which order, and when it is there (Tetris §4.2)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from longspan.core.account import KvAccount
from longspan.core.owners import BlockRef
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Forward, MoveKV, Part


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
        waiting: indices of blocks that are computed and not sent, first computed first.
        sent: indices of blocks that are sent.
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
        """The target has all of it."""
        return bool(self.blocks) and self.num_shared + self.num_arrived == self.num_blocks

    def can_send(self, source: int) -> bool:
        """Tells whether there is a backend for this source: a free one, or if each source has its own, the one that
        takes a move from there already: they follow each other.
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
        """A move of these entries of the table is sent."""
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
            self.sources.update(self.request.kv_owners)  # of what is not computed yet

    def withdrawn(self) -> Transfer:
        """Begins the transfer again with nothing on the target: all that is computed waits to be sent."""
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
        """Frees the backend of a transfer that was given up, when its last move from an instance has ended."""
        self._taken[target] -= 1

    def outgrown(self, full: Collection[int]) -> Iterator[Transfer]:
        """Finds who has to give its blocks back, last come first, since its target can take a step and lacks blocks for
        it.

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
        """Returns the transfers that have a backend, by target, after reserving what can be."""
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
    """Tells whether the next token of one that decodes begins a block."""
    num_scheduled = request.num_scheduled
    return num_scheduled < request.num_tokens and request.blocks_for(num_scheduled + 1) > len(request.table)


class Transfers:
    """Keeps account of transfers and their moves. It numbers moves, and the engine submits them.

    Args:
        number: gives the next step's number.

    Attributes:
        dirty: whether anything has happened by which more could be sent `by_themselves`, or have `arrived`.
    """

    def __init__(self, account: KvAccount, handshakes: Handshakes, number: Callable[[], int]) -> None:
        self._account, self._handshakes, self._number = account, handshakes, number
        self._transfers: dict[int, Transfer] = {}
        self._moves: dict[int, tuple[MoveKV, Transfer]] = {}
        self.dirty = False

    @property
    def promised(self) -> Mapping[int, int]:
        """These blocks are promised to transfers, see `ClusterView`."""
        return self._handshakes.promised

    @property
    def in_flight(self) -> bool:
        return bool(self._moves)

    def is_move(self, number: int) -> bool:
        return number in self._moves

    def shake(self, request: Request, target: int) -> None:
        """The first chunk of a request is about to be dispatched: behind what is cached of it, and waits already."""
        transfer = Transfer(
            request=request,
            target=target,
            num_tokens=request.num_tokens,
            num_blocks=request.blocks_for(request.num_tokens),
            waiting=list(range(request.num_scheduled // request.block_size)),
        )
        transfer.table_changed()
        request.target = target
        self.dirty = True
        self._transfers[request.id] = transfer
        self._handshakes.shake(transfer)

    def streams(self, parts: Sequence[Part]) -> tuple[MoveKV, ...]:
        """Makes moves of what these parts of a Forward complete, as far as backends are free."""
        if not (transfers := self._transfers):
            return ()
        known = [(part, transfers[part.request_id]) for part in parts if part.request_id in transfers]
        if not known:
            return ()
        for part, transfer in known:
            transfer.table_changed(part)
        self._handshakes.in_order()
        found = []
        for part, transfer in known:
            found += self._send(transfer, _to_send(transfer, _completed(part, transfer)))
        return tuple(found)

    def by_themselves(self) -> list[MoveKV]:
        """Makes moves of what is computed and was not sent, as far as backends are free; first handshakes first."""
        found: list[MoveKV] = []
        for transfer in self._handshakes.in_order():
            if transfer.waiting and any(map(transfer.can_send, transfer.sources)):
                found += self._send(transfer, _to_send(transfer, transfer.waiting))
                waiting = (index for index in transfer.waiting if index not in transfer.sent)
                transfer.waiting = [index for index in waiting if index >= transfer.num_shared]
        return found

    def computed(self, forward: Forward) -> None:
        """Queues what a completed Forward filled and did not stream."""
        if not (transfers := self._transfers):
            return
        for part in forward.parts:
            if (transfer := transfers.get(part.request_id)) is not None:
                transfer.waiting += [i for i in _completed(part, transfer) if i not in transfer.sent]
                self.dirty = True

    def moved(self, number: int) -> None:
        """Takes in that a move is done."""
        move, transfer = self._moves.pop(number)
        self.dirty = True
        self._account.let_go(chain(*zip(*move.copies, strict=True)))
        source = transfer.end(number)
        if self._transfers.get(move.request_id) is transfer:
            transfer.num_arrived += len(move.copies)
        elif source not in transfer.busy:
            self._handshakes.left_behind_done(transfer.target)

    def arrived(self) -> list[tuple[Request, int, tuple[BlockRef, ...]]]:
        """Requests whose KV is all computed and there; with their targets, and their blocks there, theirs from now on.

        What is there may have been there before it was computed here: also wait for the token that goes on with it.
        """
        ready = [one for one in self._transfers.values() if one.is_there and one.request.num_known > one.num_tokens]
        for transfer in ready:
            self._end(transfer)
        self.dirty = bool(ready)
        return [(transfer.request, transfer.target, transfer.blocks) for transfer in ready]

    def give_up(self, request: Request) -> None:
        """A request ends, or loses its KV: there is more room for others, too."""
        self.dirty = True
        if (transfer := self._transfers.get(request.id)) is not None:
            self._end(transfer)
            self._account.give_back(reversed(transfer.blocks))

    def make_room(self, full: Collection[int]) -> None:
        """Takes blocks back from KV on its way, for those that decode on instances that are not full and came before.

        What was sent is sent again when there is room: its old blocks are kept until the request is handed over.
        """
        if not self._transfers:
            return
        for transfer in list(self._handshakes.outgrown(full)):
            self.dirty = True
            again = self._transfers[transfer.request.id] = transfer.withdrawn()
            self._handshakes.replace(transfer, again)
            self._account.give_back(reversed(transfer.blocks))

    def _end(self, transfer: Transfer) -> None:
        del self._transfers[transfer.request.id]
        self._handshakes.part(transfer)

    def _send(self, transfer: Transfer, by_source: Mapping[int, Sequence[int]]) -> list[MoveKV]:
        found, table = [], transfer.request.table
        for source, indices in by_source.items():
            if not transfer.can_send(source):
                continue
            copies = tuple((table[index], transfer.blocks[index]) for index in indices)
            move = MoveKV(number=self._number(), request_id=transfer.request.id, copies=copies)
            self._account.hold(chain(*zip(*copies, strict=True)))
            self._moves[move.number] = move, transfer
            transfer.begin(move.number, source, indices)
            found.append(move)
        return found


def _completed(part: Part, transfer: Transfer) -> range:
    """Returns the indices of the blocks that a part fills, or ends the prompt in."""
    size = transfer.request.block_size
    return range(part.start // size, part.stop // size if part.sample is None else transfer.num_blocks)


def _to_send(transfer: Transfer, indices: Iterable[int]) -> dict[int, list[int]]:
    """Groups by source the blocks that the target lacks and their instance has; first come first."""
    table, found = transfer.request.table, defaultdict[int, list[int]](list)
    for index in indices:
        if index >= transfer.num_shared and table[index] not in transfer.request.copying:
            found[table[index].instance].append(index)
    return found
