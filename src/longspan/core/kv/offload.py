"""KV that leaves devices for the memory of their hosts: a second level of the prefix cache.

What a request gives up is copied to its host, whether it ends or loses its KV to others, and is found there by the same
names as on devices. Disks are a third level: what has come to a host is saved there at once.

Of a request that outgrows its device the oldest blocks are spilled: they go to the host and stay in use there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies, Copy
from longspan.core.kv.counts import TierCounts
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Content, MoveKV


class Offload:
    """Copies KV from devices to hosts, and from these to their disks.

    What a request gives up while it goes on stays on hosts until it is admitted again or ends. That of ended requests
    is a cache, which is evicted when others need the room. A host that is full of the former takes no more: what finds
    no room is computed anew.

    Args:
        running: what it still needs of instances is left to it.
        step_tokens, max_num_seqs: the bounds of a step on one instance.
        counts: updated by this object.
    """

    _account: KvAccount
    _cluster: Cluster

    def __init__(
        self, copies: Copies, running: Running, *, step_tokens: int, max_num_seqs: int, counts: TierCounts
    ) -> None:
        self._copies, self._running, self._counts = copies, running, counts
        self._step_tokens, self._max_num_seqs = step_tokens, max_num_seqs
        self._given_up: dict[int, list[BlockRef]] = {}  # on hosts, of requests that go on; each has a reference for it
        self._still_read: dict[int, list[BlockRef]] = {}  # by step, spilled blocks that the step still reads
        self._readers: dict[int, Request] = {}  # by id, those that may read blocks on hosts

    def regroup(self, account: KvAccount, cluster: Cluster) -> None:
        """Goes on with another cluster and its account, which has the same pools on hosts and disks."""
        self._account, self._cluster = account, cluster

    def restart(self, lost: Sequence[Copy]) -> None:
        """Forgets what was under way to hosts. What requests gave up before stays theirs."""
        incomplete = {target for copy in lost for _, target in copy.move.copies}
        for request_id, blocks in self._given_up.items():
            self._account.give_back([ref for ref in blocks if ref in incomplete])  # which copies of others were to fill
            self._given_up[request_id] = [ref for ref in blocks if ref not in incomplete]
        self._account.let_go([ref for ref in self.read_blocks if self._cluster.tier(ref.pool) == "host"])
        self._still_read.clear()

    def moved(self, copy: Copy) -> list[MoveKV]:
        """Takes a copy to a host, or of a spilled request, that is done; returns the moves to disks that follow."""
        is_out = copy.move.way == "out"
        saves = self._save(copy) if is_out else []
        if (owner := copy.spilled) is None:
            self._account.let_go(reversed(copy.held))
        else:
            there = [pair for pair in copy.move.copies if owner.spilling.pop(pair[1], None) is not None]
            moved = Counter([target.pool if is_out else source.pool for source, target in there])
            owner.hosted = owner.hosted + moved if is_out else owner.hosted - moved
            self._read_hosted(owner, copy.held)
        if is_out:
            self._keep(copy.move.request_id, copy.kept)
        else:
            self._account.give_back(reversed(copy.kept))
        return saves

    def has_given_up(self, request: Request) -> bool:
        """Tells whether hosts keep what a request gave up."""
        return request.id in self._given_up

    def is_leaving(self, request: Request) -> bool:
        """Tells whether what a request gave up is still on its way to hosts."""
        return any(copy.move.request_id == request.id and copy.move.way == "out" for copy in self._copies)

    @property
    def owners(self) -> set[int]:
        """The ids of the requests for which hosts keep blocks."""
        return set(self._given_up)

    @property
    def kept_blocks(self) -> list[BlockRef]:
        """Blocks on hosts of requests that have given them up and go on."""
        return [ref for blocks in self._given_up.values() for ref in blocks]

    @property
    def read_blocks(self) -> list[BlockRef]:
        """Blocks that in-flight steps still read, although their contents have moved."""
        return [ref for blocks in self._still_read.values() for ref in blocks]

    def release(self, request: Request) -> None:
        """Leaves to the cache what a request gave up that has been admitted or has ended."""
        self._account.give_back(reversed(self._given_up.pop(request.id, [])))

    # ---------------------------------------------------------------- out

    def leave(self, request: Request) -> list[MoveKV]:
        """Makes moves of what a request is about to give up and its hosts do not have, as far as they have room."""
        if request.finish_reason is None:
            self._given_up.setdefault(request.id, [])
        copies: defaultdict[int, list[tuple[BlockRef, BlockRef, Content]]] = defaultdict(list)
        kept: defaultdict[int, list[BlockRef]] = defaultdict(list)
        contents: defaultdict[int, list[Content]] = defaultdict(list)
        for named, content in self._account.contents(request):
            is_coming_back = named in request.spilling and self._cluster.tier(named.pool) == "device"
            ref = request.spilling[named] if is_coming_back else named
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
                moves.append(self._copies.begin("out", request.id, found, held=sources, kept=blocks))
            else:
                self._keep(request.id, blocks)
        self.note_peak()
        return moves

    def note_peak(self) -> None:
        """Update the peak of host blocks in use."""
        counts = self._counts
        counts.peak_host_blocks = max(counts.peak_host_blocks, self._account.usage(self._cluster.host_pools).num_used)

    def _on_host(self, number: int, content: Content) -> int | None:
        """Finds the block of a host that has a content, or is about to."""
        block = self._account.pool(number).holder(content)
        return self._coming(number, content) if block is None else block

    def _coming(self, pool: int, content: Content) -> int | None:
        ref = self._copies.coming(content.key, (pool,))
        return None if ref is None else ref.block

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

    def _save(self, copy: Copy) -> list[MoveKV]:
        """Makes a move to its disk of what has come to a host, as far as the disk lacks it and has room."""
        host = copy.move.copies[0][1].pool
        if (disk := self._cluster.disk_pool(host)) is None:
            return []
        above, below = self._account.pool(host), self._account.pool(disk)
        found = []
        for (_, source), content in zip(copy.move.copies, copy.contents, strict=True):
            if above.holder(content) != source.block or self._coming(disk, content) is not None:
                continue
            if below.holder(content) is None and below.num_free:
                above.share(source.block)
                found.append((source, BlockRef(disk, below.place(content)), content))
        kept = [ref for source, target, _ in found for ref in (source, target)]
        return [self._copies.begin("save", copy.move.request_id, found, held=[], kept=kept)] if found else []

    # ---------------------------------------------------------------- out, and in use there

    def spill(self, waiting: Sequence[Request], device_limit: int) -> list[MoveKV]:
        """Return moves of the oldest blocks of requests above `device_limit` to hosts, as far as devices lack blocks.

        An instance needs free blocks for its next step, and for the first waiting request if it lacks only blocks.
        """
        due, asked = self._running.due_blocks, 0
        room = {i: self._account.num_free(i) + self._account.num_leaving(i) for i in self._cluster.prefill}
        most = {i: self._step_blocks(i) for i in room}
        if waiting:
            asked = waiting[0].blocks_for(waiting[0].num_tokens)
            asked = most[0] if asked > device_limit else asked  # it takes a step at a time
            asked = _lacking(asked, [free - due[i] for i, free in room.items()], self._cluster.num_blocks[0])
        moves = list[MoveKV]()
        for i, free in room.items():
            has_seat = due[i] <= most[i] and len(self._running.on(i)) < self._max_num_seqs
            num_short = min(max(0, due[i]), most[i]) + (asked if has_seat else 0) - free
            if (num_short := min(num_short, most[i])) > 0:
                for request in reversed(list(self._running.on(i))):
                    outgrows = request.blocks_for(request.num_tokens) > device_limit and not request.targets
                    if num_short > 0 and outgrows:
                        num_short -= self._spill(request, i, num_short, moves)
        self.note_peak()
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
            moves.append(self._copies.begin("out", request.id, copies, held=held, kept=kept, spilled=request))
        if there:
            request.hosted[number] += len(there)
            self._read_hosted(request, there)
        return len(copies) + len(there)

    def bring_back(self, waiting: Sequence[Request]) -> list[MoveKV]:
        """Return moves of host blocks back to devices with spare blocks, the newest blocks first.

        Blocks for two steps and for the first waiting request stay free, to avoid spilling again at once.
        """
        self._readers = {one: request for one, request in self._readers.items() if request.hosted}
        moves, due = list[MoveKV](), self._running.due_blocks
        asked = waiting[0].blocks_for(waiting[0].num_tokens) if waiting and self._readers else 0
        for request in self._readers.values():
            for i in request.group if not (request.spilling or request.targets) else ():
                step = self._step_blocks(i)
                spare = self._account.num_free(i) - max(0, due[i]) - 2 * step - asked
                if spare > 0 and request.hosted[self._cluster.host_pool(i)]:
                    self._return(request, i, min(spare, step), moves)
        return moves

    def _return(self, request: Request, instance: int, most: int, moves: list[MoveKV]) -> None:
        """Append a move of up to `most` blocks of a request from the host pool to an instance."""
        account, host = self._account, self._cluster.host_pool(instance)
        places = [index for index, ref in enumerate(request.table) if ref.pool == host][-most:]
        copies = list[tuple[BlockRef, BlockRef, Content]]()
        if not places:
            return  # all of them come back already
        for index in places:
            source, content = request.table[index], account.content(request, index)
            target = request.table[index] = BlockRef(instance, account.pool(instance).place(content))
            account.pool(instance).share(target.block)  # for the copy, which goes on if the request loses its KV
            request.spilling[target] = source
            copies.append((source, target, content))
        sources, targets = [source for source, _, _ in copies], [target for _, target, _ in copies]
        account.hold(sources)
        account.give_back(sources)
        moves.append(self._copies.begin("in", request.id, copies, held=sources, kept=targets, spilled=request))

    def _step_blocks(self, instance: int) -> int:
        """Return the largest number of blocks that one step of an instance allocates."""
        return -(-self._step_tokens // self._account.block_size) + len(self._running.on(instance))

    def read(self, request: Request) -> None:
        """Register a request that reads blocks on hosts, for `bring_back`."""
        self._readers[request.id] = request

    def _read_hosted(self, request: Request, before: Sequence[BlockRef]) -> None:
        """Send the table anew with the next part. Blocks `before` are freed after the last step that reads them."""
        self.read(request)
        request.sent_blocks = request.sent_output = 0
        if request.in_flight:
            self._still_read.setdefault(request.last_step, []).extend(before)
        else:
            self._account.let_go(before)

    def computed(self, number: int) -> None:
        """Takes the completion of a step: what it still read on devices is free."""
        if self._still_read:
            self._account.let_go(self._still_read.pop(number, ()))

    def relent(self) -> bool:
        """Leaves to the cache what requests that wait gave up; returns whether there was any."""
        has_any = any(self._given_up.values())
        self._forget_given_up()
        return has_any

    def _forget_given_up(self) -> None:
        """Leaves to the cache what requests that wait gave up."""
        for blocks in self._given_up.values():
            self._account.give_back(reversed(blocks))
            blocks.clear()


def _lacking(asked: int, room: Sequence[int], num_blocks: int) -> int:
    """Return the free blocks that a waiting request of `asked` blocks lacks per instance. Large ones share evenly."""
    if asked <= num_blocks:
        return 0 if max(room) >= asked else asked
    return 0 if sum(room) >= asked else -(-asked // len(room))
