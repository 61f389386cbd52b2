"""KV that leaves devices for the memory of their hosts and comes back: a second level of the prefix cache.

What a request gives up is copied to its host, whether it ends or loses its KV to others, and is found there by the same
names as on devices. So preemption is a copy out and in again where that is quicker than to compute anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from longspan.core.account import Content, KvAccount
from longspan.core.cluster import Cluster
from longspan.core.owners import BlockRef
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import MoveKV, MoveWay


class SwapCost(Protocol):
    """Says whether KV on a host is worth its way back.

    Attributes:
        block_s: seconds in which a block comes from the host to an instance.
    """

    @property
    def block_s(self) -> float: ...

    def recompute_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Returns the seconds in which an instance computes tokens behind others whose KV it has."""


@dataclass(kw_only=True)
class _Copy:
    """A move that goes out to a host, or comes in from there.

    Attributes:
        contents: what its targets will hold.
        kept: blocks on the host that are not evicted meanwhile, in order of position.
    """

    move: MoveKV
    contents: list[Content]
    kept: list[BlockRef]


@dataclass(kw_only=True)
class _Found:
    """The beginning of a request as devices of a group and their hosts have it.

    Attributes:
        cached: its blocks on devices.
        stored: the others, which hosts have.
        num_tokens: how many tokens all of these hold, and of them devices `num_cached`.
        num_blocks: blocks of the whole request.
        num_asked: free blocks that it needs with those.
    """

    group: tuple[int, ...]
    cached: list[BlockRef] = field(default_factory=list)
    stored: list[BlockRef] = field(default_factory=list)
    num_tokens: int = 0
    num_cached: int = 0
    num_blocks: int = 0
    num_asked: int = 0

    @property
    def num_missing(self) -> int:
        return self.num_blocks - len(self.cached) - len(self.stored)


@dataclass(kw_only=True)
class _Fetch:
    """The beginning of a waiting request that is pinned on devices, or comes there by the moves of these `numbers`."""

    found: _Found
    pinned: list[BlockRef]
    numbers: set[int] = field(default_factory=set)


class Tiers:
    """Keeps account of copies between devices and hosts, and of the requests that wait for them.

    It numbers moves, and the engine submits them. Without pools on hosts it does nothing.

    Args:
        running: what it still needs of instances is left to it.
        number: gives the next step's number.
        swap: prices; None when a copy always pays.

    Attributes:
        changes: how often other requests could be admitted than before.
        num_hits: tokens that were found on hosts.
    """

    def __init__(
        self,
        account: KvAccount,
        cluster: Cluster,
        running: Running,
        number: Callable[[], int],
        *,
        swap: SwapCost | None = None,
    ) -> None:
        self._account, self._cluster, self._running = account, cluster, running
        self._number, self._swap = number, swap
        self._is_active = bool(cluster.host_blocks) and account.prefix_caching
        self.changes = self.num_hits = self._times_relented = 0
        self._copies: dict[int, _Copy] = {}
        self._leaving: set[tuple[int, bytes]] = set()  # contents on their way to the pool of a host
        self._fetches: dict[int, _Fetch] = {}
        self._groups: dict[int, tuple[int, ...]] = {}  # of several, that requests had when they gave up their KV
        self._hidden, self._first_hidden = set[int](), math.inf

    @property
    def in_flight(self) -> bool:
        return bool(self._copies)

    def restart(self, account: KvAccount) -> None:
        """Goes on with another account, which may have the same pools on hosts; copies under way are forgotten."""
        for copy in self._copies.values():
            self._account.give_back(reversed(copy.kept))
        self._account = account
        for kept in (self._copies, self._leaving, self._fetches, self._groups):
            kept.clear()

    def moved(self, number: int) -> bool:
        """Takes the completion of a step if it is a copy; returns whether it is."""
        if (copy := self._copies.pop(number, None)) is None:
            return False
        move, account = copy.move, self._account
        sources, targets = zip(*move.copies, strict=True)
        for target, content in zip(targets, copy.contents, strict=True):
            account.pool(target.pool).publish(target.block, content)
        account.let_go(reversed(sources if move.way == "out" else targets))
        account.give_back(reversed(copy.kept))
        self._leaving.difference_update((targets[0].pool, content.key) for content in copy.contents)
        if (fetch := self._fetches.get(move.request_id)) is not None:
            fetch.numbers.discard(number)
        return True

    # ---------------------------------------------------------------- out

    def leave(self, request: Request) -> list[MoveKV]:
        """Makes moves of what a request is about to give up and its hosts do not have, as far as they have room."""
        if not self._is_active:
            return []
        if len(request.group) > 1 and request.finish_reason is None:
            self._groups[request.id] = request.group
        copies: defaultdict[int, list[tuple[BlockRef, BlockRef, Content]]] = defaultdict(list)
        kept: defaultdict[int, list[BlockRef]] = defaultdict(list)
        for ref, content in self._account.contents(request):
            number = self._cluster.host_pool(ref.instance)
            pool = self._account.pool(number)
            if (number, content.key) in self._leaving:
                continue
            if (block := pool.holder(content)) is not None:
                pool.share(block)
            elif pool.num_free:
                [block] = pool.allocate(1)
                copies[number].append((ref, BlockRef(number, block), content))
            else:
                continue
            kept[number].append(BlockRef(number, block))
        moves = []
        for number, blocks in kept.items():
            if found := copies.get(number):
                self._account.hold([source for source, _, _ in found])
                self._leaving.update((number, content.key) for _, _, content in found)
                pairs = [(source, target) for source, target, _ in found]
                moves.append(self._move("out", request, pairs, [content for _, _, content in found], blocks))
            else:
                self._account.give_back(reversed(blocks))  # which makes them the last that are evicted
        return moves

    def _move(
        self,
        way: MoveWay,
        request: Request,
        pairs: Iterable[tuple[BlockRef, BlockRef]],
        contents: list[Content],
        kept: list[BlockRef],
    ) -> MoveKV:
        move = MoveKV(number=self._number(), request_id=request.id, copies=tuple(pairs), way=way)
        self._copies[move.number] = _Copy(move=move, contents=contents, kept=kept)
        return move

    # ---------------------------------------------------------------- in

    def ready(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Returns those of the requests that `arrange` lets be admitted."""
        if not (self._hidden or self._first_hidden < math.inf):
            return waiting
        return [one for one in waiting if one.id < self._first_hidden and one.id not in self._hidden]

    def arrange(self, waiting: Sequence[Request], *, may_fetch: bool) -> list[MoveKV]:
        """Decides which requests can be admitted, first come first, and makes moves of what others wait for.

        One that has no room for what a host has of it waits for that, and those behind it do, too.
        """
        if not self._is_active:
            return []
        before, moves = (self._hidden, self._first_hidden), list[MoveKV]()
        self._hidden, self._first_hidden = set(), math.inf
        seen = waiting if not self._times_relented else waiting[: 2 - self._times_relented]
        if self._times_relented == 1 and len(waiting) > 1:
            self._first_hidden = waiting[1].id
        due_blocks, load = self._running.due_blocks, list(self._running.due_tokens)
        room = {i: self._account.num_free(i) - max(0, due_blocks[i]) for i in self._cluster.prefill}
        for request in seen:
            if not self._arrange(request, room, load, moves, may_fetch):
                self._first_hidden = request.id
                break
        self.changes += before != (self._hidden, self._first_hidden)
        return moves

    def _arrange(
        self, request: Request, room: dict[int, int], load: list[int], moves: list[MoveKV], may_fetch: bool
    ) -> bool:
        """Claims room for a request; tells whether those behind it can have what is left.

        One that has come where the policy would not let it begin now, since more is to be computed there than
        elsewhere, waits until that is done.
        """
        if (fetch := self._fetches.get(request.id)) is not None:
            if fetch.numbers:
                self._hidden.add(request.id)
            elif not _has_room(room, fetch.found.group, fetch.found.num_missing):
                if max(room.values()) >= fetch.found.num_blocks:
                    self._unpin(request.id)  # to be fetched to where there is room
                return False
            elif not self._is_best(request, fetch.found, load):
                return False
            _claim(room, load, fetch.found, fetch.found.num_missing, request)
            return True
        if max(room.values()) <= 0 or any(copy.move.request_id == request.id for copy in self._copies.values()):
            return False
        found = [self._find(request, group) for group in self._groups_for(request)]
        able = [one for one in found if _has_room(room, one.group, one.num_asked)]
        best = max(
            able or found,
            key=lambda one: (one.num_tokens - load[one.group[0]], one.num_cached, room[one.group[0]]),
        )
        pays = bool(best.stored) and self._pays(best)
        if pays and not (able and may_fetch):
            return False
        if pays:
            self._hidden.add(request.id)
        else:
            best.stored, best.num_tokens = [], best.num_cached
        _claim(room, load, best, best.num_asked, request)
        if able and may_fetch and best.num_tokens:
            moves += self._fetch(request, best)
        return True

    def _is_best(self, request: Request, found: _Found, load: Sequence[int]) -> bool:
        """Tells whether a prefill would end sooner on one instance, with what is there, than on any that has less."""
        if len(found.group) > 1:
            return True
        cached = {i: self._find(request, (i,)).num_cached for i in self._cluster.prefill if i not in found.group}
        best = load[found.group[0]] - found.num_tokens
        return all(best < load[i] - number or number >= found.num_tokens for i, number in cached.items())

    def release(self, request: Request) -> None:
        """Drops the pins of a request that has been admitted or has ended."""
        self._groups.pop(request.id, None)
        self._times_relented = 0
        self._unpin(request.id)

    def make_room(self) -> bool:
        """Drops all pins, so that nobody has to give up KV for those who wait; returns whether there were any."""
        fetches = list(self._fetches)
        for request_id in fetches:
            self._unpin(request_id)
        return bool(fetches)

    def relent(self) -> bool:
        """Lets requests be admitted that wait although nothing runs: first one, and then all, with what devices have.

        Returns False when that has been tried.
        """
        self.make_room()
        self._times_relented += 1
        return self._is_active and self._times_relented <= 2

    def _unpin(self, request_id: int) -> None:
        if (fetch := self._fetches.pop(request_id, None)) is not None:
            for ref in reversed(fetch.pinned):
                self._account.pool(ref.pool).unpin(ref.block)

    def _groups_for(self, request: Request) -> list[tuple[int, ...]]:
        """Returns the groups that a request could be admitted on with what hosts have of it."""
        everyone = tuple(self._cluster.prefill)
        if request.id in self._groups:
            return [self._groups[request.id]]
        if request.blocks_for(request.num_tokens) > self._account.num_blocks(everyone[0]):
            return [everyone]
        return [(instance,) for instance in everyone]

    def _find(self, request: Request, group: tuple[int, ...]) -> _Found:
        account, size = self._account, request.block_size
        limit = 0 if request.scores_prompt else request.num_tokens - 1  # logprobs of a prompt need all of it computed
        hosts = sorted({self._cluster.host_pool(instance) for instance in group})
        found = _Found(group=group, num_blocks=request.blocks_for(request.num_tokens))
        index = 0
        while (index + 1) * size <= limit:
            key = request.parent_key(index + 1)
            if (ref := account.find(key, group) or account.find(key, hosts)) is None:
                break
            self._add(found, ref, size)
            index += 1
        rest = tuple(request.tokens(index * size, min(limit, (index + 1) * size)))
        ref, length = account.find_begun(request.parent_key(index), rest, (*group, *hosts))
        if length:
            self._add(found, ref, length)
        in_use = sum(account.pool(ref.pool).references(ref.block) > 0 for ref in found.cached)
        found.num_asked = found.num_blocks - in_use
        return found

    def _add(self, found: _Found, ref: BlockRef, num_tokens: int) -> None:
        found.num_tokens += num_tokens
        if self._cluster.tier(ref.pool) == "host":
            found.stored.append(ref)
        else:
            found.cached.append(ref)
            found.num_cached += num_tokens

    def _pays(self, found: _Found) -> bool:
        if self._swap is None:
            return True
        copy_s = len(found.stored) * self._swap.block_s / len(found.group)
        return copy_s < self._swap.recompute_s(found.num_tokens - found.num_cached, found.num_cached)

    def _fetch(self, request: Request, found: _Found) -> list[MoveKV]:
        """Returns moves of what hosts have of a request to members with most room; what devices have is pinned."""
        account = self._account
        fetch = self._fetches[request.id] = _Fetch(found=found, pinned=[])
        for ref in found.cached:
            account.pool(ref.pool).share(ref.block)
            self._pin(fetch, ref)
        pairs: defaultdict[int, list[tuple[BlockRef, BlockRef]]] = defaultdict(list)
        for source in found.stored:
            near = [i for i in found.group if self._cluster.host_pool(i) == source.pool]
            instance = max(near, key=account.num_free)
            if not account.num_free(instance):
                break
            target = BlockRef(instance, account.pool(instance).allocate(1)[0])
            self._pin(fetch, target)
            account.hold([target])
            account.pool(source.pool).share(source.block)
            pairs[source.pool].append((source, target))
        moves = []
        for same in pairs.values():
            sources = [source for source, _ in same]
            contents = [account.pool(source.pool).content(source.block) for source in sources]
            moves.append(self._move("in", request, same, contents, sources))
        fetch.numbers.update(move.number for move in moves)
        if moves:
            self.num_hits += found.num_tokens - found.num_cached
        return moves

    def _pin(self, fetch: _Fetch, ref: BlockRef) -> None:
        self._account.pool(ref.pool).pin(ref.block)
        fetch.pinned.append(ref)


def _has_room(room: dict[int, int], group: Sequence[int], num_blocks: int) -> bool:
    return num_blocks <= sum([room[instance] for instance in group])


def _claim(room: dict[int, int], load: list[int], found: _Found, num_blocks: int, request: Request) -> None:
    for instance in found.group:
        room[instance] -= -(-num_blocks // len(found.group))
        load[instance] += -(-(request.num_tokens - found.num_tokens) // len(found.group))
