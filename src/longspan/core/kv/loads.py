"""KV loads: copies from hosts and disks to the devices of a request that is admitted.

A request holds its blocks from its admission on, and computes nothing before all of them are filled. Blocks that are
only on a disk are copied to its host first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from longspan.core.blocks import BlockRef, Target
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies, Copy, Pair
from longspan.core.kv.counts import TierCounts
from longspan.core.request import Request
from longspan.core.steps import Content, MoveKV, MoveWay


@dataclass(kw_only=True)
class _Load:
    """The load of one request.

    Attributes:
        num_tokens: the number of tokens of the table when the load is complete.
        targets: the instances that decode the request, once it has been loaded and prefilled.
        numbers: the moves that the request waits for, including moves that other requests started.
    """

    request: Request
    num_tokens: int
    targets: Sequence[Target]
    numbers: set[int] = field(default_factory=set)


class Loads:
    """Begins the tables of requests with blocks that moves from hosts and disks fill.

    Args:
        counts: updated by this object.
    """

    _account: KvAccount
    _cluster: Cluster

    def __init__(self, copies: Copies, counts: TierCounts) -> None:
        self._copies, self._counts = copies, counts
        self._loads: dict[int, _Load] = {}

    def regroup(self, account: KvAccount, cluster: Cluster) -> None:
        """Continue with another account and cluster. Requests in loads have lost their blocks."""
        self._loads.clear()
        self._account, self._cluster = account, cluster

    def begin(
        self, request: Request, num_tokens: int, owners: Sequence[int], targets: Sequence[Target]
    ) -> list[MoveKV]:
        """Return moves of the table's blocks on hosts and disks to new blocks of `owners`, in order.

        If a host has no free block for a block from its disk, the table ends there. The last block may be used in part.

        Args:
            num_tokens: the number of tokens of the table when the load is complete.
            targets: see `_Load`.
        """
        account, table, owner = self._account, request.table, iter(owners)
        load = _Load(request=request, num_tokens=num_tokens, targets=targets)
        pairs: defaultdict[tuple[MoveWay, int], list[Pair]] = defaultdict(list)
        followers: defaultdict[int, list[Pair]] = defaultdict(list)
        for index, ref in enumerate(table):
            tier = self._cluster.tier(ref.pool)
            if tier == "device":
                if (number := self._copies.move_filling(ref)) is not None:
                    load.numbers.add(number)
                continue
            if tier == "disk" and not account.num_free(self._host_of(ref.pool)):
                self._truncate(load, index)
                break
            content, instance = self._copies.content(ref) or account.pool(ref.pool).content(ref.block), next(owner)
            num_used = min(request.block_size, num_tokens - index * request.block_size)
            used = content if num_used == len(content.tokens) else Content(content.parent, content.tokens[:num_used])
            target = table[index] = BlockRef(instance, account.pool(instance).place(used))
            self._counts.num_hits += num_used
            if tier == "host" and (number := self._copies.move_filling(ref)) is not None:
                self._copies.add_followers(number, [(ref, target, used)])
                load.numbers.add(number)
            elif tier == "host":
                pairs["in", ref.pool].append((ref, target, used))
            else:
                host = self._host_of(ref.pool)
                on_host = BlockRef(host, account.pool(host).place(content))
                pairs["load", ref.pool].append((ref, on_host, content))
                followers[ref.pool].append((on_host, target, used))
        moves = []
        for (way, pool), same in pairs.items():
            if way == "in":
                moves.append(self._begin_load(request.id, same))
            else:
                sources = [source for source, _, _ in same]
                moves.append(self._copies.begin("load", request.id, same, pinned=[], owned=sources))
                self._copies.add_followers(moves[-1].number, followers[pool])
        load.numbers.update(move.number for move in moves)
        self._loads[request.id] = load
        return moves

    def _host_of(self, disk: int) -> int:
        return next(host for host in self._cluster.host_pools if self._cluster.disk_pool(host) == disk)

    def _begin_load(self, request_id: int, pairs: Sequence[Pair]) -> MoveKV:
        """Begin a move to devices. The sources have a reference for it."""
        sources, targets = [source for source, _, _ in pairs], [target for _, target, _ in pairs]
        self._account.pin(targets)
        return self._copies.begin("in", request_id, pairs, pinned=targets, owned=sources)

    def moved(self, copy: Copy, failed: Sequence[int]) -> list[MoveKV]:
        """Take a complete copy, with the indices of the blocks that a disk failed to read. Return moves to submit.

        A table ends before its first block that no copy fills. Blocks loaded from disk to a host go on to devices.
        """
        damaged = {copy.move.copies[index][1] for index in failed}
        waiting = [load for load in self._loads.values() if copy.move.number in load.numbers]
        lost = {target for on_host, target, _ in copy.followers if on_host in damaged}
        for load in waiting:
            load.numbers.discard(copy.move.number)
            first = next((index for index, ref in enumerate(load.request.table) if ref in lost), None)
            if first is not None:
                self._truncate(load, first)
        needed = set[BlockRef]().union(*(load.request.table for load in waiting)) if copy.followers else ()
        self._account.release(reversed([on_host for on_host, target, _ in copy.followers if target not in needed]))
        if not (pairs := [pair for pair in copy.followers if pair[1] in needed]):
            return []
        move, filled = self._begin_load(copy.move.request_id, pairs), {target for _, target, _ in pairs}
        for load in waiting:
            if not filled.isdisjoint(load.request.table):
                load.numbers.add(move.number)
        return [move]

    def _truncate(self, load: _Load, index: int) -> None:
        """Truncate a table before an entry that no copy fills."""
        table = load.request.table
        load.num_tokens = min(load.num_tokens, index * load.request.block_size)
        self._account.release(reversed(table[index:]))
        del table[index:]

    def complete(self) -> list[tuple[Request, Sequence[Target]]]:
        """End the loads that wait for no move. Return their requests, which can compute, and the targets of these."""
        ready = [load for load in self._loads.values() if not load.numbers]
        for load in ready:
            del self._loads[load.request.id]
            load.request.num_computed = load.request.num_scheduled = load.num_tokens
            self._account.publish(load.request, 0)
        return [(load.request, load.targets) for load in ready]

    @property
    def waiting(self) -> list[Request]:
        """The requests with unfinished loads."""
        return [load.request for load in self._loads.values()]

    @property
    def numbers(self) -> set[int]:
        """The moves that requests wait for."""
        return set[int]().union(*(load.numbers for load in self._loads.values()))

    def num_tokens(self, request: Request) -> int | None:
        """Return the tokens that a request has at the end of its load. None without a load."""
        load = self._loads.get(request.id)
        return None if load is None else load.num_tokens
