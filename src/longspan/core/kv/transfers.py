"""KV on its way from instances that prefill to those that decode: in which order, and when it is there (Tetris §4.2).

The KV of a request may be sharded over several targets (CSPS §4.2). Each has a transfer of its own, for its places in
the request's table; the request goes on when all are done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from longspan.core.blocks import BlockRef, Target
from longspan.core.kv.account import KvAccount
from longspan.core.kv.transfer import Transfer
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Forward, MoveKV, Part


class Transfers:
    """Keeps account of transfers, of the backends and blocks of decode instances that are reserved for them, and of
    their moves. It numbers moves, and the engine submits them.

    Args:
        running: who decodes there.
        number: gives the next step's number.
        backends: of each decode instance.
        max_num_seqs: seats of each instance.

    Attributes:
        dirty: whether anything has happened by which more could be sent `by_themselves`, or have `arrived`.
        expected: blocks that transfers without a backend will need, by target.
    """

    def __init__(
        self, account: KvAccount, running: Running, number: Callable[[], int], *, backends: int, max_num_seqs: int
    ) -> None:
        self._account, self._running, self._number = account, running, number
        self._backends, self._max_num_seqs = backends, max_num_seqs
        self._transfers: dict[int, tuple[Transfer, ...]] = {}  # of each request, in order of their places
        self._order: dict[int, dict[int, Transfer]] = {}  # the same by target, first handshake first
        self._moves: dict[int, tuple[MoveKV, Transfer]] = {}
        self._taken: Counter[int] = Counter()  # backends that are reserved, or used by moves of transfers given up
        self._refused: dict[int, tuple[int, int]] = {}
        self._uncleared: dict[BlockRef, int] = {}  # blocks with KV that is not finite, from a slot on
        self.dirty = False
        self.expected: Counter[int] = Counter()

    def note_free_blocks(self) -> None:
        """Record that blocks were freed: more can be sent."""
        self.dirty = True

    @property
    def in_flight(self) -> bool:
        return bool(self._moves)

    @property
    def in_progress(self) -> list[Transfer]:
        return [transfer for shares in self._transfers.values() for transfer in shares]

    @property
    def moving_blocks(self) -> list[BlockRef]:
        """The sources and targets of all moves."""
        return [ref for move, _ in self._moves.values() for pair in move.copies for ref in pair]

    def open(self, request: Request, targets: Sequence[Target]) -> None:
        """Opens transfers when the first chunk is about to be sent; cached blocks can move at once."""
        num_tokens, num_computed = request.num_tokens, request.num_scheduled
        stops = [*accumulate(target.num_blocks for target in targets)]
        assert stops[-1] == request.blocks_for(num_tokens), "every block has a target"
        request.targets = tuple([target.instance for target in targets])
        self._transfers[request.id] = tuple(
            Transfer(request, target, range(stop - number, stop), num_tokens=num_tokens, num_computed=num_computed)
            for (target, number), stop in zip(targets, stops, strict=True)
        )
        for transfer in self._transfers[request.id]:
            self._order.setdefault(transfer.target, {})[request.id] = transfer
            self.expected[transfer.target] += transfer.num_blocks
        self.dirty = True

    def streams(self, parts: Sequence[Part]) -> tuple[MoveKV, ...]:
        """Makes moves of what these parts of a Forward complete, as far as backends are free."""
        if not (transfers := self._transfers):
            return ()
        known = [(part, one) for part in parts for one in transfers.get(part.request_id, ())]
        if not known:
            return ()
        for part, transfer in known:
            transfer.table_changed(part.first_block)
        self._reserve()
        return tuple([move for part, transfer in known for move in self._send(transfer, transfer.completed_by(part))])

    def by_themselves(self) -> list[MoveKV]:
        """Makes moves of what is computed and was not sent, as far as backends are free; first handshakes first."""
        found: list[MoveKV] = []
        for transfer in self._reserve():
            if transfer.waiting and (not transfer.sources or any(map(transfer.can_send, transfer.sources))):
                found += self._send(transfer, transfer.waiting)
                waiting = (index for index in transfer.waiting if index not in transfer.sent)
                transfer.waiting = [index for index in waiting if index in transfer.to_move]
        return found

    def computed(self, forward: Forward) -> None:
        """Queues what a completed Forward filled and did not stream."""
        if not (transfers := self._transfers):
            return
        for part in forward.parts:
            for transfer in transfers.get(part.request_id, ()):
                transfer.waiting += [index for index in transfer.completed_by(part) if index not in transfer.sent]
                self.dirty = True

    def moved(self, number: int) -> bool:
        """Takes the completion of a step if it is a move; returns whether it is."""
        if number not in self._moves:
            return False
        move, transfer = self._moves.pop(number)
        self.dirty = True
        self._account.let_go(chain(*zip(*move.copies, strict=True)))
        source = transfer.end(number)
        if transfer in self._transfers.get(move.request_id, ()):
            transfer.num_arrived += len(move.copies)
        elif source not in transfer.busy:
            self._taken[transfer.target] -= 1  # the transfer was given up, and this move was its last from there
        return True

    def hand_over(self) -> list[Request]:
        """Give the requests whose KV has arrived to their targets, with the blocks there. Return them.

        Blocks may have been cached on a target before they were computed here. So the next token is waited for, too.
        """
        ready = [shares for shares in self._transfers.values() if all(map(_has_arrived, shares))]
        for shares in ready:
            self._end(shares)
        self.dirty = bool(ready)
        for shares in ready:
            request = shares[0].request
            self._account.hand_over(request, [ref for share in shares for ref in share.blocks])
            request.move_to(*[share.target for share in shares])
        return [shares[0].request for shares in ready]

    def stuck(self) -> Request | None:
        """Returns the last admitted request that has no room yet where it goes."""
        waiting = [shares[0].request for shares in self._transfers.values() if not all(one.blocks for one in shares)]
        return max(waiting, key=lambda request: request.admission, default=None)

    def give_up(self, request: Request) -> None:
        """Drops the transfer of a request that ends or loses its KV; this leaves more room for others."""
        self.dirty = True
        if (shares := self._transfers.get(request.id)) is not None:
            self._end(shares)
            for transfer in reversed(shares):
                if request.non_finite_from is not None:
                    received = set(transfer.blocks[transfer.num_shared :]).difference(request.table)
                    self._uncleared.update(dict.fromkeys(received, 0))
                self._account.give_back(reversed(transfer.blocks))

    def clearable(self, slots: Iterable[tuple[BlockRef, int]] = ()) -> tuple[tuple[BlockRef, int], ...]:
        """Takes slots with KV that is not finite, see `Free`; returns those to clear now, old ones included.

        Slots of blocks that a move in flight names are cleared when the move is done: these blocks are not free before.
        """
        self._uncleared.update(slots)
        if not self._uncleared:
            return ()
        named = {ref for move, _ in self._moves.values() for pair in move.copies for ref in pair}
        ready = [ref for ref in self._uncleared if ref not in named]
        return tuple([(ref, self._uncleared.pop(ref)) for ref in ready])

    def make_room(self, full: Collection[int]) -> None:
        """Takes blocks back from KV on its way, for those that decode on instances that are not full and came before.

        What was sent is sent again later: its old blocks are kept until the request is handed over.
        """
        for transfer in list(self._outgrown(full)) if self._transfers else ():
            request, target, num_tokens = transfer.request, transfer.target, transfer.num_tokens
            again = Transfer(request, target, transfer.places, num_tokens=num_tokens, num_computed=request.num_computed)
            shares = self._transfers[request.id]
            self._transfers[request.id] = tuple(again if one is transfer else one for one in shares)
            self._order[target][request.id] = again  # in the same place
            self._free_backends(transfer)
            self.expected[target] += transfer.num_blocks
            self._account.give_back(reversed(transfer.blocks))
            self.dirty = True

    def _outgrown(self, full: Collection[int]) -> Iterator[Transfer]:
        """Yields transfers that must give their blocks back, so that requests decoding on the target can go on.

        Where a request that decodes there has to give way, too, the policy preempts it.
        """
        for target, transfers in self._order.items():
            pool, decoding = self._account.pool(target), self._running.on(target)
            if target in full or pool.num_free >= len(decoding):
                continue
            room = pool.num_free + pool.num_leaving
            if room >= sum(map(_needs_block, decoding)):
                continue
            coming = {transfer.request.admission: transfer for transfer in transfers.values() if transfer.blocks}
            holders = [Holder(admission, one.num_blocks - one.num_shared) for admission, one in coming.items()]
            for request in decoding:
                if request.num_scheduled < request.num_tokens:
                    num_blocks = self._account.reclaimable(request)[target]
                    holders.append(Holder(request.admission, num_blocks, _needs_block(request)))
            yield from [coming[one.admission] for one in who_gives_way(room, holders) if one.admission in coming]

    def _end(self, shares: Sequence[Transfer]) -> None:
        del self._transfers[shares[0].request.id]
        for transfer in shares:
            target = transfer.target
            del self._order[target][transfer.request.id]
            if not self._order[target]:
                del self._order[target]
            self._free_backends(transfer)
            if not transfer.blocks:
                self.expected[target] -= transfer.num_blocks

    def _free_backends(self, transfer: Transfer) -> None:
        """Frees the backends of a transfer that is over, or given up, but for those that moves in flight use."""
        self._taken[transfer.target] += len(transfer.busy) - transfer.backends

    def _send(self, transfer: Transfer, indices: Iterable[int]) -> list[MoveKV]:
        found, table = [], transfer.request.table
        first = transfer.places.start
        for source, there in transfer.to_send(indices).items():
            if source == transfer.target:
                for index in there if transfer.blocks else ():
                    self._account.replace(transfer.blocks, index - first, table[index])
                transfer.keep(there if transfer.blocks else ())
                continue
            if not transfer.can_send(source):
                continue
            copies = tuple((table[index], transfer.blocks[index - first]) for index in there)
            move = MoveKV(number=self._number(), request_id=transfer.request.id, copies=copies)
            self._account.hold(chain(*zip(*copies, strict=True)))
            self._moves[move.number] = move, transfer
            transfer.begin(move.number, source, there)
            found.append(move)
        return found

    def _reserve(self) -> list[Transfer]:
        """Reserves backends and blocks as far as it can; returns the transfers that have a backend, by target."""
        found = []
        for target, transfers in self._order.items():
            for transfer in transfers.values():
                self._set_backends(transfer, min(transfer.backends, len(transfer.sources)))
            for transfer in transfers.values():
                left = self._backends - self._taken[target]
                if left <= 0 or not (transfer.blocks or self._allocate(transfer)):
                    break
                self._set_backends(transfer, min(transfer.backends + left, len(transfer.sources)))
            found += [one for one in transfers.values() if one.backends or (one.blocks and not one.sources)]
        return found

    def _set_backends(self, transfer: Transfer, number: int) -> None:
        self._taken[transfer.target] += number - transfer.backends
        transfer.backends = number

    def _allocate(self, transfer: Transfer) -> bool:
        """Reserves all its blocks and a seat, or nothing. After a refusal it waits until more blocks are free.

        What those need at once who came earlier and decode there is left to them. Another choice of a prompt that is on
        its way there waits for it, and then shares its blocks.
        """
        target, request = transfer.target, transfer.request
        leader = request.leader
        if leader is not None and leader.id in self._order[target] and leader.admission < request.admission:
            return False
        decoding = self._running.on(target)
        num_coming = sum(bool(other.blocks) for other in self._order[target].values())
        if len(decoding) + num_coming >= self._max_num_seqs:
            return False
        num_free = self._account.pool(target).num_free
        refused_id, too_few = self._refused.get(target, (None, 0))
        if refused_id == request.id and num_free <= too_few:
            return False
        num_needed = sum(r.admission < request.admission and _needs_block(r) for r in decoding)
        found = self._account.reserve(request, target, transfer.places, num_left=num_needed)
        if found is None:
            self._refused[target] = request.id, num_free - num_needed
            return False
        transfer.blocks, transfer.num_shared = [*found[0]], found[1]
        transfer.table_changed()
        self.expected[target] -= transfer.num_blocks
        return True


class Holder(NamedTuple):
    """A request that can give back `num_blocks` blocks on an instance; `needs_block` if its next token begins one."""

    admission: int
    num_blocks: int
    needs_block: bool = False


def who_gives_way(room: int, holders: Iterable[Holder]) -> list[Holder]:
    """Chooses who gives its blocks back, last admitted first, so that those before it get the block that they need.

    `room` counts the blocks of the instance that are free, or will be.
    """
    by_admission = sorted(holders)
    staying = list(by_admission)
    leaving: list[Holder] = []
    for needy in [holder for holder in by_admission if holder.needs_block]:
        while room < 1 and staying[-1].admission > needy.admission:
            leaving.append(staying.pop())
            room += leaving[-1].num_blocks
        room -= 1
    return leaving


def _has_arrived(transfer: Transfer) -> bool:
    return transfer.is_there and transfer.request.num_known > transfer.num_tokens


def _needs_block(request: Request) -> bool:
    """Tells whether a decoding request needs a new block for its next token, from whichever member of its group."""
    num_scheduled = request.num_scheduled
    return num_scheduled < request.num_tokens and request.blocks_for(num_scheduled + 1) > len(request.table)
