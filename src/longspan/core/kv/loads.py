"""KV on its way from hosts and disks to the devices of a request that is admitted with it.

The request holds its blocks from its admission on, and computes nothing before all of them are filled. What only a disk
has is copied to its host first.
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
    """The KV of one request on its way.

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
    """Begins the tables of requests with blocks that are filled by moves from hosts and disks.

    Args:
        counts: updated by this object.
    """

    _account: KvAccount
    _cluster: Cluster

    def __init__(self, copies: Copies, counts: TierCounts) -> None:
        self._copies, self._counts = copies, counts
        self._loads: dict[int, _Load] = {}

    def regroup(self, account: KvAccount, cluster: Cluster) -> None:
        """Goes on with another account and cluster; requests that wait have lost their blocks."""
        self._loads.clear()
        self._account, self._cluster = account, cluster

    def begin(
        self, request: Request, num_tokens: int, owners: Sequence[int], targets: Sequence[Target]
    ) -> list[MoveKV]:
        """Makes moves of what a request's table names on hosts and disks, to new blocks of `owners`, in order.

        Where a host has no room for what comes from its disk, the table ends. Of the last block a request may use only
        the beginning, behind which it writes on.

        Args:
            num_tokens: the number of tokens of the table when the load is complete.
            targets: see `_Load`.
        """
        account, table, owner = self._account, request.table, iter(owners)
        load = _Load(request=request, num_tokens=num_tokens, targets=targets)
        pairs: defaultdict[tuple[MoveWay, int], list[Pair]] = defaultdict(list)
        behind: defaultdict[int, list[Pair]] = defaultdict(list)
        for index, ref in enumerate(table):
            tier = self._cluster.tier(ref.pool)
            if tier == "device":
                if (number := self._copies.filling(ref)) is not None:
                    load.numbers.add(number)
                continue
            if tier == "disk" and not account.num_free(self._host_of(ref.pool)):
                self._cut(load, index)
                break
            content, instance = self._copies.content(ref) or account.pool(ref.pool).content(ref.block), next(owner)
            num_used = min(request.block_size, num_tokens - index * request.block_size)
            used = content if num_used == len(content.tokens) else Content(content.parent, content.tokens[:num_used])
            target = table[index] = BlockRef(instance, account.pool(instance).place(used))
            self._counts.num_hits += num_used
            if tier == "host" and (number := self._copies.filling(ref)) is not None:
                self._copies.follow(number, [(ref, target, used)])
                load.numbers.add(number)
            elif tier == "host":
                pairs["in", ref.pool].append((ref, target, used))
            else:
                host = self._host_of(ref.pool)
                above = BlockRef(host, account.pool(host).place(content))
                pairs["load", ref.pool].append((ref, above, content))
                behind[ref.pool].append((above, target, used))
        moves = []
        for (way, pool), same in pairs.items():
            if way == "in":
                moves.append(self._copy_in(request.id, same))
            else:
                sources = [source for source, _, _ in same]
                moves.append(self._copies.begin("load", request.id, same, held=[], kept=sources))
                self._copies.follow(moves[-1].number, behind[pool])
        load.numbers.update(move.number for move in moves)
        self._loads[request.id] = load
        return moves

    def _host_of(self, disk: int) -> int:
        return next(host for host in self._cluster.host_pools if self._cluster.disk_pool(host) == disk)

    def _copy_in(self, request_id: int, pairs: Sequence[Pair]) -> MoveKV:
        """Makes a move to devices; the sources have a reference for it."""
        sources, targets = [source for source, _, _ in pairs], [target for _, target, _ in pairs]
        self._account.hold(targets)
        return self._copies.begin("in", request_id, pairs, held=targets, kept=sources)

    def moved(self, copy: Copy, failed: Sequence[int]) -> list[MoveKV]:
        """Takes a copy that is done, with the indices of what a disk could not give; returns moves to submit.

        A table ends before the first block that nothing fills. What has come to a host goes on to devices.
        """
        damaged = {copy.move.copies[index][1] for index in failed}
        waiting = [load for load in self._loads.values() if copy.move.number in load.numbers]
        lost = {target for above, target, _ in copy.behind if above in damaged}
        for load in waiting:
            load.numbers.discard(copy.move.number)
            first = next((index for index, ref in enumerate(load.request.table) if ref in lost), None)
            if first is not None:
                self._cut(load, first)
        wanted = set[BlockRef]().union(*(load.request.table for load in waiting)) if copy.behind else ()
        self._account.give_back(reversed([above for above, target, _ in copy.behind if target not in wanted]))
        if not (there := [pair for pair in copy.behind if pair[1] in wanted]):
            return []
        move, filled = self._copy_in(copy.move.request_id, there), {target for _, target, _ in there}
        for load in waiting:
            if not filled.isdisjoint(load.request.table):
                load.numbers.add(move.number)
        return [move]

    def _cut(self, load: _Load, index: int) -> None:
        """Ends a table before an entry that nothing fills."""
        table = load.request.table
        load.num_tokens = min(load.num_tokens, index * load.request.block_size)
        self._account.give_back(reversed(table[index:]))
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
        """The requests that wait for moves."""
        return [load.request for load in self._loads.values()]

    @property
    def numbers(self) -> set[int]:
        """The moves that requests wait for."""
        return set[int]().union(*(load.numbers for load in self._loads.values()))

    def num_tokens(self, request: Request) -> int | None:
        """Returns the tokens that a request will have when all is there; None for one that waits for nothing."""
        load = self._loads.get(request.id)
        return None if load is None else load.num_tokens
