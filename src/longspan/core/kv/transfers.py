"""KV transfers from prefill instances to decode instances: their order, moves and completion (Tetris §4.2).

The KV of a request may be sharded over several targets (CSPS §4.2). Each target has its own transfer, for some indices
of the request's table. The request resumes when all of its transfers are complete.
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
    """Accounts for transfers, their moves, and the backends and blocks that they reserve on decode instances.

    It numbers the moves, and the engine submits them.

    Args:
        running: the requests that decode on each instance.
        number: returns the next step's number.
        backends: number of backends of each decode instance.
        max_num_seqs: request slots of each instance.

    Attributes:
        dirty: whether more blocks might be sent now, or transfers might be complete.
        expected: blocks that transfers without a backend will need, by target.
    """

    def __init__(
        self, account: KvAccount, running: Running, number: Callable[[], int], *, backends: int, max_num_seqs: int
    ) -> None:
        self._account, self._running, self._number = account, running, number
        self._backends, self._max_num_seqs = backends, max_num_seqs
        self._transfers: dict[int, tuple[Transfer, ...]] = {}  # by request, in order of their places
        self._order: dict[int, dict[int, Transfer]] = {}  # by target and request, in order of their handshakes
        self._moves: dict[int, tuple[MoveKV, Transfer]] = {}
        self._taken: Counter[int] = Counter()  # backends that are reserved, or used by moves of cancelled transfers
        self._refused: dict[int, tuple[int, int]] = {}
        self._uncleared: dict[BlockRef, int] = {}  # blocks with KV that is not finite, and its first slot
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
        """The sources and targets of all moves in flight."""
        return [ref for move, _ in self._moves.values() for pair in move.copies for ref in pair]

    def open(self, request: Request, targets: Sequence[Target]) -> None:
        """Begin the transfers of a request, before its first chunk is computed. Cached blocks can be sent at once."""
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
        """Return moves of the blocks that these parts of a Forward complete, up to the free backends."""
        if not (transfers := self._transfers):
            return ()
        affected = [(part, transfer) for part in parts for transfer in transfers.get(part.request_id, ())]
        if not affected:
            return ()
        for part, transfer in affected:
            transfer.table_changed(part.first_block)
        self._reserve()
        return tuple([m for part, transfer in affected for m in self._send(transfer, transfer.completed_by(part))])

    def pending_moves(self) -> list[MoveKV]:
        """Return moves of computed blocks that were not sent, up to the free backends, in order of handshakes."""
        moves: list[MoveKV] = []
        for transfer in self._reserve():
            if transfer.waiting and (not transfer.sources or any(map(transfer.can_send, transfer.sources))):
                moves += self._send(transfer, transfer.waiting)
                waiting = (index for index in transfer.waiting if index not in transfer.sent)
                transfer.waiting = [index for index in waiting if index in transfer.to_move]
        return moves

    def computed(self, forward: Forward) -> None:
        """Queue the blocks that a completed Forward filled and did not stream."""
        if not (transfers := self._transfers):
            return
        for part in forward.parts:
            for transfer in transfers.get(part.request_id, ()):
                transfer.waiting += [index for index in transfer.completed_by(part) if index not in transfer.sent]
                self.dirty = True

    def moved(self, number: int) -> bool:
        """Take the completion of a step if it is a move. Return whether it is."""
        if number not in self._moves:
            return False
        move, transfer = self._moves.pop(number)
        self.dirty = True
        self._account.unpin(chain(*zip(*move.copies, strict=True)))
        source = transfer.end(number)
        if transfer in self._transfers.get(move.request_id, ()):
            transfer.num_arrived += len(move.copies)
        elif source not in transfer.busy:
            self._taken[transfer.target] -= 1  # the last move of a cancelled transfer from this source
        return True

    def complete(self) -> list[Request]:
        """Move the requests whose KV has arrived to their targets, with the blocks there. Return these requests.

        Blocks may be cached on a target before they are computed here, so a request also waits for its next token.
        """
        ready = [shares for shares in self._transfers.values() if all(map(_has_arrived, shares))]
        for shares in ready:
            self._end(shares)
        self.dirty = bool(ready)
        for shares in ready:
            request = shares[0].request
            self._account.replace_table(request, [ref for share in shares for ref in share.blocks])
            request.move_to(*[share.target for share in shares])
        return [shares[0].request for shares in ready]

    def latest_blocked(self) -> Request | None:
        """Return the most recently admitted request with a transfer that has no blocks yet."""
        waiting = [
            shares[0].request for shares in self._transfers.values() if not all(share.blocks for share in shares)
        ]
        return max(waiting, key=lambda request: request.admission, default=None)

    def cancel(self, request: Request) -> None:
        """Drop the transfers of a request that ends or is preempted, and free their blocks."""
        self.dirty = True
        if (shares := self._transfers.get(request.id)) is not None:
            self._end(shares)
            for transfer in reversed(shares):
                self._release(transfer)

    def clearable(self, slots: Iterable[tuple[BlockRef, int]] = ()) -> tuple[tuple[BlockRef, int], ...]:
        """Add slots with KV that is not finite, see `Free`. Return the slots to clear now, earlier ones included.

        A block that an in-flight move names is not free before the move is done. Its slots are cleared then.
        """
        self._uncleared.update(slots)
        if not self._uncleared:
            return ()
        named = {ref for move, _ in self._moves.values() for pair in move.copies for ref in pair}
        ready = [ref for ref in self._uncleared if ref not in named]
        return tuple([(ref, self._uncleared.pop(ref)) for ref in ready])

    def free_for_decodes(self, full: Collection[int]) -> None:
        """Free the blocks of transfers for earlier decoding requests that lack blocks. Skip `full` instances.

        The blocks are sent again later. The request keeps its old blocks until its transfers are complete.
        """
        for transfer in list(self._transfers_to_free(full)) if self._transfers else ():
            request, target, num_tokens = transfer.request, transfer.target, transfer.num_tokens
            again = Transfer(request, target, transfer.places, num_tokens=num_tokens, num_computed=request.num_computed)
            shares = self._transfers[request.id]
            self._transfers[request.id] = tuple(again if share is transfer else share for share in shares)
            self._order[target][request.id] = again  # at the same position
            self._free_backends(transfer)
            self.expected[target] += transfer.num_blocks
            self._release(transfer)
            self.dirty = True

    def _release(self, transfer: Transfer) -> None:
        """Free the blocks of a transfer. Received blocks are cleared later if a chunk has NaN, or may have it."""
        request = transfer.request
        if request.non_finite_from is not None or request.in_flight:
            received = set(transfer.blocks[transfer.num_shared :]).difference(request.table)
            self._uncleared.update(dict.fromkeys(received, 0))
        self._account.release(reversed(transfer.blocks))

    def _transfers_to_free(self, full: Collection[int]) -> Iterator[Transfer]:
        """Yield the transfers whose blocks are freed so that requests decoding on the target can continue.

        If a request that decodes there must be preempted too, the policy preempts it.
        """
        for target, transfers in self._order.items():
            pool, decoding = self._account.pool(target), self._running.on(target)
            if target in full or pool.num_free >= len(decoding):
                continue
            num_free = pool.num_free + pool.num_pending_free
            if num_free >= sum(map(_needs_block, decoding)):
                continue
            reserving = {transfer.request.admission: transfer for transfer in transfers.values() if transfer.blocks}
            holders = [Holder(order, share.num_blocks - share.num_shared) for order, share in reserving.items()]
            for request in decoding:
                if request.num_scheduled < request.num_tokens:
                    num_blocks = self._account.reclaimable(request)[target]
                    holders.append(Holder(request.admission, num_blocks, _needs_block(request)))
            released = (holder.admission for holder in holders_to_release(num_free, holders))
            yield from [reserving[order] for order in released if order in reserving]

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
        """Free the backends of a complete or cancelled transfer. Moves in flight keep their backends."""
        self._taken[transfer.target] += len(transfer.busy) - transfer.backends

    def _send(self, transfer: Transfer, indices: Iterable[int]) -> list[MoveKV]:
        moves, table = [], transfer.request.table
        first = transfer.places.start
        for source, sent in transfer.to_send(indices).items():
            if source == transfer.target:
                for index in sent if transfer.blocks else ():
                    self._account.replace(transfer.blocks, index - first, table[index])
                transfer.keep(sent if transfer.blocks else ())
                continue
            if not transfer.can_send(source):
                continue
            copies = tuple((table[index], transfer.blocks[index - first]) for index in sent)
            move = MoveKV(number=self._number(), request_id=transfer.request.id, copies=copies)
            self._account.pin(chain(*zip(*copies, strict=True)))
            self._moves[move.number] = move, transfer
            transfer.begin(move.number, source, sent)
            moves.append(move)
        return moves

    def _reserve(self) -> list[Transfer]:
        """Reserve backends and blocks as far as possible. Return the transfers with a backend, by target."""
        active = []
        for target, transfers in self._order.items():
            for transfer in transfers.values():
                self._set_backends(transfer, min(transfer.backends, len(transfer.sources)))
            for transfer in transfers.values():
                left = self._backends - self._taken[target]
                if left <= 0 or not (transfer.blocks or self._allocate(transfer)):
                    break
                self._set_backends(transfer, min(transfer.backends + left, len(transfer.sources)))
            active += [share for share in transfers.values() if share.backends or (share.blocks and not share.sources)]
        return active

    def _set_backends(self, transfer: Transfer, number: int) -> None:
        self._taken[transfer.target] += number - transfer.backends
        transfer.backends = number

    def _allocate(self, transfer: Transfer) -> bool:
        """Reserve all blocks of a transfer and a request slot, or nothing. Retry when more blocks are free.

        Blocks that earlier requests decoding there need for their next token stay free. If an earlier choice of the
        same prompt has a transfer there, wait for it to share its blocks.
        """
        target, request = transfer.target, transfer.request
        leader = request.leader
        if leader is not None and leader.id in self._order[target] and leader.admission < request.admission:
            return False
        decoding = self._running.on(target)
        num_reserving = sum(bool(share.blocks) for share in self._order[target].values())
        if len(decoding) + num_reserving >= self._max_num_seqs:
            return False
        num_free = self._account.pool(target).num_free
        refused_id, too_few = self._refused.get(target, (None, 0))
        if refused_id == request.id and num_free <= too_few:
            return False
        num_needed = sum(r.admission < request.admission and _needs_block(r) for r in decoding)
        reserved = self._account.reserve(request, target, transfer.places, num_left=num_needed)
        if reserved is None:
            self._refused[target] = request.id, num_free - num_needed
            return False
        transfer.blocks, transfer.num_shared = [*reserved[0]], reserved[1]
        transfer.table_changed()
        self.expected[target] -= transfer.num_blocks
        return True


class Holder(NamedTuple):
    """A request with `num_blocks` blocks to release on an instance. `needs_block`: its next token begins a block."""

    admission: int
    num_blocks: int
    needs_block: bool = False


def holders_to_release(num_free: int, holders: Iterable[Holder]) -> list[Holder]:
    """Choose the holders to release, last admitted first, so that earlier holders get the block that they need.

    `num_free` counts the blocks of the instance that are free, or will be when copies are done.
    """
    by_admission = sorted(holders)
    staying = list(by_admission)
    released: list[Holder] = []
    for needy in [holder for holder in by_admission if holder.needs_block]:
        while num_free < 1 and staying[-1].admission > needy.admission:
            released.append(staying.pop())
            num_free += released[-1].num_blocks
        num_free -= 1
    return released


def _has_arrived(transfer: Transfer) -> bool:
    return transfer.is_complete and transfer.request.num_known > transfer.num_tokens


def _needs_block(request: Request) -> bool:
    """Return whether a decoding request needs a new block for its next token."""
    num_scheduled = request.num_scheduled
    return num_scheduled < request.num_tokens and request.blocks_for(num_scheduled + 1) > len(request.table)
