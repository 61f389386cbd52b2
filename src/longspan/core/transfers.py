"""KV on its way from the instances that prefill to the one that decodes: what is sent when, and when all is there.

Blocks are sent when they are full, the last one when the prompt is done: inside the Forward that completes them where a
backend is free, or by themselves later. A move holds a reference to each block that it names, so a request may end
meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain

from longspan.core.account import KvAccount
from longspan.core.handshake import Handshakes, Transfer
from longspan.core.request import Request
from longspan.core.steps import BlockRef, Forward, MoveKV, Part


class Transfers:
    """Keeps account of transfers and their moves. It numbers moves, and the engine submits them.

    Args:
        number: gives the next step's number.

    Attributes:
        stirred: whether anything has happened by which more could be sent `by_themselves`, or have `arrived`.
    """

    def __init__(self, account: KvAccount, handshakes: Handshakes, number: Callable[[], int]) -> None:
        self._account, self._handshakes, self._number = account, handshakes, number
        self._transfers: dict[int, Transfer] = {}
        self._moves: dict[int, tuple[MoveKV, Transfer]] = {}
        self.stirred = False

    @property
    def promised(self) -> Mapping[int, int]:
        """See `ClusterView`."""
        return self._handshakes.promised

    @property
    def in_flight(self) -> bool:
        """Whether any move is."""
        return bool(self._moves)

    def is_move(self, number: int) -> bool:
        """Whether the step of that number is a move."""
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
        self.stirred = True
        self._transfers[request.id] = transfer
        self._handshakes.shake(transfer)

    def streams(self, parts: Sequence[Part]) -> tuple[MoveKV, ...]:
        """Of what these parts of a Forward complete, as far as backends are free."""
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
        """Of what is computed and was not sent, as far as backends are free; first handshakes first."""
        found: list[MoveKV] = []
        for transfer in self._handshakes.in_order():
            if transfer.waiting and any(map(transfer.can_send, transfer.sources)):
                found += self._send(transfer, _to_send(transfer, transfer.waiting))
                waiting = (index for index in transfer.waiting if index not in transfer.sent)
                transfer.waiting = [index for index in waiting if index >= transfer.num_shared]
        return found

    def computed(self, forward: Forward) -> None:
        """A Forward is done: what it completed and did not stream waits."""
        if not (transfers := self._transfers):
            return
        for part in forward.parts:
            if (transfer := transfers.get(part.request_id)) is not None:
                transfer.waiting += [i for i in _completed(part, transfer) if i not in transfer.sent]
                self.stirred = True

    def moved(self, number: int) -> None:
        """A move is done."""
        move, transfer = self._moves.pop(number)
        self.stirred = True
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
        self.stirred = bool(ready)
        return [(transfer.request, transfer.target, transfer.blocks) for transfer in ready]

    def give_up(self, request: Request) -> None:
        """A request ends, or loses its KV: there is more room for others, too."""
        self.stirred = True
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
            self.stirred = True
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
    """The places of the blocks that a part fills, or ends the prompt in."""
    size = transfer.request.block_size
    return range(part.start // size, part.stop // size if part.sample is None else transfer.num_blocks)


def _to_send(transfer: Transfer, indices: Iterable[int]) -> dict[int, list[int]]:
    """Those that the target lacks and that their instance has, by instance; first come first."""
    table, found = transfer.request.table, defaultdict[int, list[int]](list)
    for index in indices:
        if index >= transfer.num_shared and table[index] not in transfer.request.copying:
            found[table[index].instance].append(index)
    return found
