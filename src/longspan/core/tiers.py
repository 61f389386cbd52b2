"""KV that leaves devices for the memory of their hosts and comes back: a second level of the prefix cache.

What a request gives up is copied to its host, whether it ends or loses its KV to others, and is found there by the same
names as on devices. So preemption is a copy out and in again where that is quicker than to compute anew. Disks are a
third level: what has come to a host is saved there at once, and comes back by way of the host.

Of a request that outgrows its device the oldest blocks are spilled: they go to the host and stay in use there.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longspan.core.account import KvAccount
from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Completion, Content, MoveKV, MoveWay
from longspan.core.tier_lookup import Found, SwapPrices, TierLookup
from longspan.core.view import RequestView

_STEPS_AHEAD = 4
"""Requests are looked up so many steps before they begin, so that what they need of hosts is there in time."""


@dataclass(kw_only=True)
class _Copy:
    """A move from one tier to another that is under way.

    Attributes:
        contents: what its targets will hold.
        held: blocks that others have, too, and which are not free before it is done.
        kept: blocks that are not evicted meanwhile, in order of position.
        spilled: the request whose table names the targets, where ranks read them from then on; None for other copies.
    """

    move: MoveKV
    contents: Sequence[Content]
    held: Sequence[BlockRef]
    kept: Sequence[BlockRef]
    spilled: Request | None = None


@dataclass(kw_only=True)
class _Fetch:
    """The beginning of a waiting request that is pinned on devices, or comes there by the moves of these `numbers`.

    One that `loads` is pinned on hosts, or comes there from disks, and goes to devices when all of it is there.
    """

    found: Found
    loads: bool
    pinned: list[BlockRef] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)

    @property
    def num_claimed(self) -> int:
        return self.found.num_asked if self.loads else self.found.num_missing


class Tiers:
    """Keeps account of copies between devices, hosts and disks, and of the requests that wait for them.

    It numbers moves, and the engine submits them. Without pools on hosts it does nothing.

    Args:
        running: what it still needs of instances is left to it.
        number: gives the next step's number.
        step_tokens, max_num_seqs: the bounds of a step on one instance.
        swap: prices of a cluster; None when a copy always pays.

    What a request gives up while it goes on stays on hosts until it is admitted again or ends. That of ended requests
    is a cache, which is evicted when others need the room. A host that is full of the former takes no more: what finds
    no room is computed anew.

    Attributes:
        changes: how often other requests could be admitted than before, or elsewhere.
        returning: see `ClusterView`.
        num_hits: tokens that were found on hosts. `num_disk_hits`: those that came there from disks.
        num_swapped_blocks: blocks that were copied from devices to hosts and back.
        peak_host_blocks: the most blocks of all hosts that were in use at once.
    """

    def __init__(
        self,
        account: KvAccount,
        cluster: Cluster,
        running: Running,
        number: Callable[[], int],
        *,
        step_tokens: int,
        max_num_seqs: int,
        swap: SwapPrices | None = None,
    ) -> None:
        self._account, self._cluster, self._running = account, cluster, running
        self._number, self._swap = number, swap
        self._step_tokens, self._max_num_seqs = step_tokens, max_num_seqs
        self._is_active = bool(cluster.host_blocks) and account.prefix_caching
        self._lookup = self._new_lookup()
        self.changes = self.num_hits = self.num_disk_hits = self._times_relented = 0
        self.num_swapped_blocks = self.peak_host_blocks = 0
        self._copies: dict[int, _Copy] = {}
        self._coming: dict[tuple[int, bytes], int] = {}  # blocks, by their pools and the contents on their way there
        self._given_up: dict[int, list[BlockRef]] = {}  # on hosts, of requests that go on; each has a reference for it
        self._fetches: dict[int, _Fetch] = {}
        self._groups: dict[int, tuple[int, ...]] = {}  # of several, that requests had when they gave up their KV
        self._still_read: dict[int, list[BlockRef]] = {}  # by step, what it reads of blocks that were spilled meanwhile
        self._asked: dict[int, int] = {}  # free blocks without which a request was not fetched, and waits
        self._hidden, self._first_hidden = set[int](), math.inf
        self.returning: dict[int, tuple[int, ...]] = {}

    def _new_lookup(self) -> TierLookup:
        prices = None if self._swap is None or not self._is_active else self._swap(self._cluster)
        return TierLookup(self._account, self._cluster, prices)

    @property
    def in_flight(self) -> bool:
        return bool(self._copies)

    @property
    def on_devices(self) -> bool:
        """Whether any copy under way is to or from a device."""
        return any(copy.move.way in ("out", "in") for copy in self._copies.values())

    def restart(self, account: KvAccount) -> None:
        """Goes on with another account, which may have the same pools on hosts; copies under way are forgotten.

        What requests gave up before stays theirs, as far as its copies were complete.
        """
        incomplete = {target for copy in self._copies.values() for _, target in copy.move.copies}
        for copy in self._copies.values():
            self._account.let_go(copy.held)
            self._account.give_back(reversed(copy.kept))
        for request_id, blocks in self._given_up.items():
            self._account.give_back([ref for ref in blocks if ref in incomplete])  # which copies of others were to fill
            self._given_up[request_id] = [ref for ref in blocks if ref not in incomplete]
        self.make_room()
        self._account = account
        self._lookup = self._new_lookup()
        for kept in (self._copies, self._coming, self._fetches, self._groups, self._asked, self._still_read):
            kept.clear()

    def regroup(self, account: KvAccount, cluster: Cluster) -> None:
        """Goes on with another cluster and its account, which has the same pools on hosts and disks.

        No copy to or from a device is under way.
        """
        assert not self.on_devices, "KV has left the devices"
        self.make_room()
        self._groups.clear()
        self._asked.clear()
        self.returning = {}
        self._account, self._cluster = account, cluster
        self._lookup = self._new_lookup()

    def moved(self, done: Completion) -> list[MoveKV] | None:
        """Takes the completion of a step if it is a copy; returns the moves to disks that follow, None for others.

        What a disk could not give is offered no more.
        """
        if (copy := self._copies.pop(done.number, None)) is None:
            return None
        move, account = copy.move, self._account
        self.num_swapped_blocks += len(move.copies) if move.way in ("out", "in") else 0
        for index, ((source, target), content) in enumerate(zip(move.copies, copy.contents, strict=True)):
            if index not in done.failed:
                account.pool(target.pool).publish(target.block, content)
                self.num_disk_hits += len(content.tokens) if move.way == "load" else 0
            elif move.way == "load":
                account.pool(source.pool).forget(source.block)
        for (_, target), content in zip(move.copies, copy.contents, strict=True):
            self._coming.pop((target.pool, content.key), None)
        saves = self._save(copy) if move.way == "out" else []
        if copy.spilled is None:
            account.let_go(reversed(copy.held))
        else:
            owner = copy.spilled
            owner.num_hosted += sum(owner.spilling.pop(target, None) is not None for _, target in move.copies)
            self._read_hosted(owner, copy.held)
        if move.way == "out":
            self._keep(move.request_id, copy.kept)
        else:
            account.give_back(reversed(copy.kept))
        if (fetch := self._fetches.get(move.request_id)) is not None:
            fetch.numbers.discard(done.number)
        return saves

    # ---------------------------------------------------------------- out

    def leave(self, request: Request) -> list[MoveKV]:
        """Makes moves of what a request is about to give up and its hosts do not have, as far as they have room."""
        if not self._is_active:
            return []
        if request.finish_reason is None:
            self._given_up.setdefault(request.id, [])
            if len(request.group) > 1 and request.group[0] in self._cluster.prefill:
                self._groups[request.id] = request.group
        copies: defaultdict[int, list[tuple[BlockRef, BlockRef, Content]]] = defaultdict(list)
        kept: defaultdict[int, list[BlockRef]] = defaultdict(list)
        contents: defaultdict[int, list[Content]] = defaultdict(list)
        for ref, content in self._account.contents(request):
            is_hosted = self._cluster.tier(ref.pool) == "host"
            number = ref.pool if is_hosted else self._cluster.host_pool(ref.instance)
            pool = self._account.pool(number)
            if (block := ref.block if is_hosted else self._on_host(number, content)) is not None:
                pool.share(block)
            elif pool.num_free:
                block = pool.place(content)
                copies[number].append((ref, BlockRef(number, block), content))
            else:
                break  # nobody finds what lies behind one that is missing
            kept[number].append(BlockRef(number, block))
            contents[number].append(content)
        moves = []
        for number, blocks in kept.items():
            self._use_saved(self._cluster.disk_pool(number), contents[number])
            if found := copies.get(number):
                sources = [source for source, _, _ in found]
                self._account.hold(sources)
                moves.append(self._move("out", request.id, found, held=sources, kept=blocks))
            else:
                self._keep(request.id, blocks)
        self._note_peak()
        return moves

    @property
    def used_host_blocks(self) -> int:
        """Counts the blocks of all hosts that are in use."""
        pools = map(self._account.pool, self._cluster.host_pools)
        return sum([one.num_blocks - one.num_free for one in pools])

    def _note_peak(self) -> None:
        self.peak_host_blocks = max(self.peak_host_blocks, self.used_host_blocks)

    def _on_host(self, number: int, content: Content) -> int | None:
        """Finds the block of a host that has a content, or is about to."""
        block = self._account.pool(number).holder(content)
        return self._coming.get((number, content.key)) if block is None else block

    def _keep(self, request_id: int, blocks: Sequence[BlockRef]) -> None:
        """Makes references of blocks on hosts those of a request that gave them up and goes on.

        Of one that has ended, or was admitted meanwhile, they become the last that are evicted.
        """
        if request_id in self._given_up:
            self._given_up[request_id] += blocks
        else:
            self._account.give_back(reversed(blocks))

    def _use_saved(self, disk: int | None, contents: Sequence[Content]) -> None:
        """Makes those that a disk has the last that are evicted there, and the first of them the very last."""
        if disk is None:
            return
        pool = self._account.pool(disk)
        for content in reversed(contents):
            if (block := pool.holder(content)) is not None:
                pool.share(block)
                pool.release(block)

    def _save(self, copy: _Copy) -> list[MoveKV]:
        """Makes a move to its disk of what has come to a host, as far as the disk lacks it and has room."""
        host = copy.move.copies[0][1].pool
        if (disk := self._cluster.disk_pool(host)) is None:
            return []
        above, below = self._account.pool(host), self._account.pool(disk)
        found = []
        for (_, source), content in zip(copy.move.copies, copy.contents, strict=True):
            if above.holder(content) != source.block or (disk, content.key) in self._coming:
                continue
            if below.holder(content) is None and below.num_free:
                above.share(source.block)
                found.append((source, BlockRef(disk, below.place(content)), content))
        kept = [ref for source, target, _ in found for ref in (source, target)]
        return [self._move("save", copy.move.request_id, found, held=[], kept=kept)] if found else []

    def _move(
        self,
        way: MoveWay,
        request_id: int,
        found: Sequence[tuple[BlockRef, BlockRef, Content]],
        *,
        held: Sequence[BlockRef],
        kept: Sequence[BlockRef],
    ) -> MoveKV:
        """Makes a move from the first to the second of each."""
        copies, contents = tuple((source, target) for source, target, _ in found), tuple(one for _, _, one in found)
        self._coming.update({(target.pool, content.key): target.block for _, target, content in found})
        on_disk = contents if way in ("save", "load") else ()
        move = MoveKV(number=self._number(), request_id=request_id, copies=copies, way=way, contents=on_disk)
        self._copies[move.number] = _Copy(move=move, contents=contents, held=held, kept=kept)
        return move

    # ---------------------------------------------------------------- out, and in use there

    def spill(self, waiting: Sequence[Request]) -> list[MoveKV]:
        """Makes moves of the oldest blocks of requests that outgrow their device, as far as others need their room.

        These are what the next step of an instance takes, and the first that waits where that is all it lacks.
        """
        if not self._is_active:
            return []
        due, most, asked = self._running.due_blocks, dict[int, int](), 0
        room = {i: self._account.num_free(i) + self._account.num_leaving(i) for i in self._cluster.prefill}
        for i in room:
            most[i] = -(-self._step_tokens // self._account.block_size) + len(self._running.on(i))
        if waiting:
            asked = waiting[0].blocks_for(waiting[0].num_tokens)
            asked = 0 if any(room[i] - due[i] >= asked for i in room) else asked
        moves = list[MoveKV]()
        for i, free in room.items():
            has_seat = due[i] <= most[i] and len(self._running.on(i)) < self._max_num_seqs
            num_short = min(max(0, due[i]), most[i]) + (min(asked, most[i]) if has_seat else 0) - free
            if num_short > 0:
                for request in reversed(list(self._running.on(i))):
                    if num_short > 0 and self._account.outgrows(request, i):
                        num_short -= self._spill(request, i, num_short, moves)
        self._note_peak()
        return moves

    def _spill(self, request: Request, instance: int, most: int, moves: list[MoveKV]) -> int:
        """Lets up to so many of a request's blocks lie on its host from now on; returns how many do.

        Those that others read, too, stay: an instance would gain no room.
        """
        account, number = self._account, self._cluster.host_pool(instance)
        own, host = account.pool(instance), account.pool(number)
        copies, there = list[tuple[BlockRef, BlockRef, Content]](), list[BlockRef]()
        for index in range(account.num_full(request)):
            ref = request.table[index]
            if ref.pool != instance or own.references(ref.block) > 1:
                continue
            content = account.content(request, index)
            if (block := host.holder(content)) is not None:
                host.share(block)
                there.append(ref)
            else:
                if not host.num_free:
                    self._forget_given_up()
                if not host.num_free:
                    break
                block = host.place(content)
                host.share(block)  # for the copy, which goes on if the request loses its KV
                copies.append((ref, BlockRef(number, block), content))
            request.table[index] = BlockRef(number, block)
            if len(copies) + len(there) == most:
                break
        held = [source for source, _, _ in copies]
        account.hold([*there, *held])
        account.give_back([*there, *held])
        if copies:
            request.spilling.update({target: source for source, target, _ in copies})
            kept = [target for _, target, _ in copies]
            moves.append(self._move("out", request.id, copies, held=held, kept=kept))
            self._copies[moves[-1].number].spilled = request
        if there:
            request.num_hosted += len(there)
            self._read_hosted(request, there)
        return len(copies) + len(there)

    def _read_hosted(self, request: Request, before: Sequence[BlockRef]) -> None:
        """Lets ranks read what has come to a host; its blocks `before` are free once no step in flight reads them."""
        request.sent_blocks = request.sent_output = 0
        if request.in_flight:
            self._still_read.setdefault(request.last_step, []).extend(before)
        else:
            self._account.let_go(before)

    def computed(self, number: int) -> None:
        """Takes the completion of a step: what it still read on devices is free."""
        if self._still_read:
            self._account.let_go(self._still_read.pop(number, ()))

    def _forget_given_up(self) -> None:
        """Leaves to the cache what requests that wait gave up."""
        for blocks in self._given_up.values():
            self._account.give_back(reversed(blocks))
            blocks.clear()

    # ---------------------------------------------------------------- in

    def ready(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Returns those of the requests that `arrange` lets be admitted."""
        if not (self._hidden or self._first_hidden < math.inf):
            return waiting
        return [one for one in waiting if self.is_ready(one)]

    def is_ready(self, request: RequestView) -> bool:
        """Return True if `arrange` lets a waiting request be admitted."""
        return request.id < self._first_hidden and request.id not in self._hidden

    def arrange(self, waiting: Sequence[Request], *, may_fetch: bool, reads_hosts: bool = False) -> list[MoveKV]:
        """Decides which requests can be admitted, first come first, and makes moves of what others wait for.

        One that has no room for what a host has of it waits for that, and those behind it do, too. Of a long queue only
        those are looked up that could begin soon. Where a policy `reads_hosts`, one that outgrows the devices needs
        nothing there, and those behind it wait until it is admitted.
        """
        if not self._is_active:
            return []
        before, moves = (self._hidden, self._first_hidden, self.returning), list[MoveKV]()
        self._hidden, self._first_hidden, self.returning = set(), math.inf, {}
        seen = waiting if not self._times_relented else waiting[: max(0, 2 - self._times_relented)]
        if self._times_relented == 1 and len(waiting) > 1:
            self._first_hidden = waiting[1].id
        due_blocks, load = self._running.due_blocks, list(self._running.due_tokens)
        room = {i: self._account.num_free(i) - max(0, due_blocks[i]) for i in self._cluster.prefill}
        most_load = {i: load[i] + _STEPS_AHEAD * self._step_tokens for i in room}
        most = sum(max(0, self._max_num_seqs - len(self._running.on(i))) + _STEPS_AHEAD for i in room)
        for request in seen[:most]:
            if all(load[i] > number for i, number in most_load.items()):
                break
            if reads_hosts and all(self._account.outgrows(request, i) for i in room):
                self._first_hidden = min(self._first_hidden, request.id + 1)
                break
            if not self._arrange(request, room, load, moves, may_fetch):
                self._first_hidden = request.id
                break
        self.changes += before != (self._hidden, self._first_hidden, self.returning)
        return moves

    def _arrange(
        self, request: Request, room: dict[int, int], load: list[int], moves: list[MoveKV], may_fetch: bool
    ) -> bool:
        """Claims room for a request; tells whether those behind it can have what is left.

        A request that was admitted before resumes where its KV was loaded. A new one may start on other instances,
        too, if the policy expects that to be quicker.
        """
        fetch = self._fetches.get(request.id)
        if fetch is not None and (fetch.numbers or not fetch.loads):
            if fetch.numbers:
                self._hidden.add(request.id)
            elif not _has_room(room, fetch.found.group, fetch.found.num_missing):
                if max(room.values()) >= fetch.found.num_blocks:
                    self._unpin(request.id)  # to be fetched to where there is room
                return False
            elif request.was_admitted:
                self._return(request, fetch.found)
            _claim(room, load, fetch.found, fetch.num_claimed, request)
            return True
        if max(room.values()) < self._asked.get(request.id, 1) or self._is_copied(request):
            return False
        if self._lookup.host_of and fetch is None:
            begun = self._begin(request, room, load, moves, may_fetch, on_disks=True)
            if begun is not None:
                return begun
        return bool(self._begin(request, room, load, moves, may_fetch, on_disks=False))

    def _begin(
        self,
        request: Request,
        room: dict[int, int],
        load: list[int],
        moves: list[MoveKV],
        may_fetch: bool,
        *,
        on_disks: bool,
    ) -> bool | None:
        """Does what `_arrange` does for a request of which nothing is fetched yet; None when it is not worth a disk."""
        best, has_room = self._best(request, room, load, on_disks=on_disks)
        wanted = best.saved if on_disks else best.stored
        pays = bool(wanted) and self._lookup.pays(best)
        if on_disks and not pays:
            return None
        if pays and not (has_room and may_fetch):
            if not has_room and len(best.group) == 1:
                self._asked[request.id] = best.num_asked
            return False
        if not pays:
            best.stored, best.num_tokens = [], best.num_cached
        is_coming = pays and self._is_coming(wanted[0], best)
        can_fetch = has_room and may_fetch and best.num_tokens and not is_coming
        fetching = self._fetch(request, best) if can_fetch else []
        if on_disks and not (fetching or is_coming):
            return None
        if pays:
            self._hidden.add(request.id)
        else:
            self._return(request, best)
        moves += fetching
        _claim(room, load, best, best.num_asked, request)
        return True

    def _return(self, request: Request, found: Found) -> None:
        """Lets a request that gave up its KV go on where devices have it again."""
        if request.was_admitted and found.num_tokens:
            self.returning[request.id] = found.group

    def _is_coming(self, ref: BlockRef, found: Found) -> bool:
        """Tells whether what is in a block is on its way, for another request, to where it is wanted."""
        key = self._account.pool(ref.pool).content(ref.block).key
        pools = found.group if ref.pool not in self._lookup.host_of else (self._lookup.host_of[ref.pool],)
        return any((pool, key) in self._coming for pool in pools)

    def _is_copied(self, request: Request) -> bool:
        """Tells whether a copy that a request waits for is under way."""
        return any(copy.move.request_id == request.id and copy.move.way != "save" for copy in self._copies.values())

    def _best(
        self, request: Request, room: dict[int, int], load: Sequence[int], *, on_disks: bool
    ) -> tuple[Found, bool]:
        """Returns what there is of a request where a prefill would end first, and whether it has room there.

        Where it has none, none has.
        """
        found = [self._lookup.find(request, group, on_disks=on_disks) for group in self._groups_for(request)]
        able = [one for one in found if _has_room(room, one.group, one.num_asked)]
        best = max(
            able or found,
            key=lambda one: (one.num_tokens - load[one.group[0]], one.num_cached, room[one.group[0]]),
        )
        return best, bool(able)

    def release(self, request: Request) -> None:
        """Drops the pins of a request that has been admitted or has ended, and leaves what it gave up to the cache."""
        self._groups.pop(request.id, None)
        self._asked.pop(request.id, None)
        self._account.give_back(reversed(self._given_up.pop(request.id, [])))
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

        By then the first may need all of its host, too.

        Returns False when that has been tried.
        """
        self.make_room()
        if self._times_relented:
            self._forget_given_up()
        self._times_relented += 1
        return self._is_active and self._times_relented <= 2

    def _unpin(self, request_id: int) -> None:
        if (fetch := self._fetches.pop(request_id, None)) is not None:
            self._drop(fetch)

    def _drop(self, fetch: _Fetch) -> None:
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

    def _fetch(self, request: Request, found: Found) -> list[MoveKV]:
        """Returns moves of what hosts have of a request to members with most room; what devices have is pinned.

        If disks have some, it is moved to hosts first, as far as these have room, and what hosts have is pinned.
        """
        account, before = self._account, self._fetches.pop(request.id, None)
        loads = bool(found.saved)
        fetch = self._fetches[request.id] = _Fetch(found=found, loads=loads)
        for ref in found.stored if loads else found.cached:
            account.pool(ref.pool).share(ref.block)
            self._pin(fetch, ref)
        copies: defaultdict[int, list[tuple[BlockRef, BlockRef, Content]]] = defaultdict(list)
        for source in found.saved if loads else found.stored:
            pool = self._lookup.host_of[source.pool] if loads else self._roomiest(found.group, source.pool)
            if not account.num_free(pool):
                break
            content = account.pool(source.pool).content(source.block)
            target = BlockRef(pool, account.pool(pool).place(content))
            self._pin(fetch, target)
            account.hold([target])
            account.pool(source.pool).share(source.block)
            copies[source.pool].append((source, target, content))
        moves = []
        for same in copies.values():
            sources, targets, _ = zip(*same, strict=True)
            moves.append(self._move("load" if loads else "in", request.id, same, held=targets, kept=sources))
        fetch.numbers.update(move.number for move in moves)
        if not moves and (loads or found.stored):
            self._unpin(request.id)
        elif not loads:
            most = request.block_size * sum(len(move.copies) for move in moves)  # of a group, a member may have no room
            self.num_hits += min(most, found.num_tokens - found.num_cached)
        self._note_peak()
        if before is not None:
            self._drop(before)
        return moves

    def _roomiest(self, group: Sequence[int], host: int) -> int:
        near = [instance for instance in group if self._cluster.host_pool(instance) == host]
        return max(near, key=self._account.num_free)

    def _pin(self, fetch: _Fetch, ref: BlockRef) -> None:
        self._account.pool(ref.pool).pin(ref.block)
        fetch.pinned.append(ref)


def _has_room(room: dict[int, int], group: Sequence[int], num_blocks: int) -> bool:
    return num_blocks <= sum([room[instance] for instance in group])


def _claim(room: dict[int, int], load: list[int], found: Found, num_blocks: int, request: Request) -> None:
    """Takes blocks of those with most room, as fetches do, and shares what is to be computed."""
    if len(found.group) == 1:
        room[found.group[0]] -= num_blocks
    else:
        for _ in range(num_blocks):
            room[max(found.group, key=room.__getitem__)] -= 1
    for instance in found.group:
        load[instance] += -(-(request.num_tokens - found.num_tokens) // len(found.group))
