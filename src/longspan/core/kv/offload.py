"""KV offload: copies blocks from device pools to host pools, which are a second level of the prefix cache.

When a request ends or is preempted, its blocks are copied to its host. They have the same prefix keys as on devices.
A step can copy the blocks that it fills, layer by layer, if its requests are to be parked: a stream.
Disks are a third level. Blocks are stored on disk as soon as they are on a host.

The oldest blocks of a request that exceeds its device are host-resident: the request keeps using them there.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from longspan.core.blocks import BlockRef
from longspan.core.cluster import Cluster
from longspan.core.kv.account import KvAccount
from longspan.core.kv.copies import Copies, Copy, Pair
from longspan.core.kv.counts import TierCounts
from longspan.core.kv.pool import BlockPool
from longspan.core.queues import Running
from longspan.core.request import Request
from longspan.core.steps import Content, MoveKV, Part


class Offload:
    """Copies KV from devices to hosts, and from hosts to their disks.

    Blocks offloaded by preemption stay in the host pool until the request is admitted again or finishes. Blocks of
    finished requests are a cache, and are evicted when blocks are needed. KV without a free host block is recomputed.

    Args:
        running: running requests. The blocks that they still need stay free.
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
        self._offloaded: dict[int, list[BlockRef]] = {}
        """By request that waits, or runs with streams: host blocks with a reference for it."""
        self._read_by_step: dict[int, list[BlockRef]] = {}
        """By step: pinned blocks that the step reads although they were moved."""

    def regroup(self, account: KvAccount, cluster: Cluster) -> None:
        """Continue with another cluster and its account, which has the same pools on hosts and disks."""
        self._account, self._cluster = account, cluster

    def restart(self, lost: Sequence[Copy]) -> None:
        """Forget in-flight copies to hosts. Blocks offloaded before stay in the host pools."""
        incomplete = {target for copy in lost for _, target in copy.move.copies}
        for request_id, blocks in self._offloaded.items():
            self._account.release([ref for ref in blocks if ref in incomplete])  # a lost copy was to fill them
            self._offloaded[request_id] = [ref for ref in blocks if ref not in incomplete]
        self._account.unpin([ref for ref in self.read_blocks if self._cluster.tier(ref.pool) == "host"])
        self._read_by_step.clear()

    def moved(self, copy: Copy) -> list[MoveKV]:
        """Take a complete copy to a host, or of resident blocks back. Return the moves to disks that follow."""
        is_out = copy.move.way == "out"
        saves = self._store(copy) if is_out else []
        if (owner := copy.owner) is None:
            self._account.unpin(reversed(copy.pinned))
        else:
            copied = [pair for pair in copy.move.copies if owner.moving.pop(pair[1], None) is not None]
            moved = Counter([target.pool if is_out else source.pool for source, target in copied])
            owner.hosted = owner.hosted + moved if is_out else owner.hosted - moved
            self._switch_reads(owner, copy.pinned)
        if is_out:
            self._assign(copy.move.request_id, copy.owned)
        else:
            self._account.release(reversed(copy.owned))
        return saves

    def was_offloaded(self, request: Request) -> bool:
        """Return whether the request waits after an offload, complete or not."""
        return request.id in self._offloaded

    def is_offloading(self, request: Request) -> bool:
        """Return whether copies of the request's blocks to hosts are in flight."""
        return any(copy.move.request_id == request.id and copy.move.way == "out" for copy in self._copies)

    @property
    def owners(self) -> set[int]:
        """The ids of requests that were offloaded."""
        return set(self._offloaded)

    @property
    def offloaded_blocks(self) -> list[BlockRef]:
        """The host blocks of requests that were offloaded."""
        return [ref for blocks in self._offloaded.values() for ref in blocks]

    @property
    def read_blocks(self) -> list[BlockRef]:
        """Blocks that in-flight steps still read although they were moved."""
        return [ref for blocks in self._read_by_step.values() for ref in blocks]

    def release(self, request: Request) -> None:
        """Leave the offloaded blocks of a request to the cache, when it is admitted or has ended."""
        self._account.release(reversed(self._offloaded.pop(request.id, [])))

    # ---------------------------------------------------------------- offload

    def offload(self, request: Request) -> list[MoveKV]:
        """Return moves of the request's blocks that its hosts lack, up to the free blocks of the hosts."""
        streamed = self._offloaded.pop(request.id, [])
        if request.finish_reason is None:
            self._offloaded[request.id] = []
        moves = self._copy_to_hosts(request, self._account.contents(request))
        self._account.release(reversed(streamed))
        return moves

    def streams(self, parts: Iterable[tuple[Request, Part]]) -> tuple[MoveKV, ...]:
        """Return moves of the blocks that a step fills, or in which prompts end. Ranks copy each layer in the step."""
        moves = list[MoveKV]()
        for request, part in parts:
            self._offloaded.setdefault(request.id, [])
            moves += self._copy_to_hosts(request, _filled(request, part), is_stream=True)
        return tuple(moves)

    def _copy_to_hosts(
        self, request: Request, blocks: Iterable[tuple[BlockRef, Content]], *, is_stream: bool = False
    ) -> list[MoveKV]:
        """Return moves of blocks that the hosts lack, up to their free blocks. Reference the blocks of the hosts."""
        copies: defaultdict[int, list[tuple[BlockRef, BlockRef, Content]]] = defaultdict(list)
        kept: defaultdict[int, list[BlockRef]] = defaultdict(list)
        contents: defaultdict[int, list[Content]] = defaultdict(list)
        for named, content in blocks:
            is_loading = named in request.moving and self._cluster.tier(named.pool) == "device"
            ref = request.moving[named] if is_loading else named
            is_hosted = self._cluster.tier(ref.pool) == "host"
            number = ref.pool if is_hosted else self._cluster.host_pool(ref.instance)
            pool = self._account.pool(number)
            if (block := ref.block if is_hosted else self._find_on_host(number, content)) is not None:
                pool.share(block)
            elif pool.num_free:
                block = pool.place(content)
                copies[number].append((ref, BlockRef(number, block), content))
            else:
                break  # lookups end at the first missing block
            kept[number].append(BlockRef(number, block))
            contents[number].append(content)
        moves = []
        for number, held in kept.items():
            if (disk := self._cluster.disk_pool(number)) is not None:
                _touch(self._account.pool(disk), contents[number])
            if moved := copies.get(number):
                sources = [source for source, _, _ in moved]
                self._account.pin(sources)
                begin = self._copies.begin
                moves.append(begin("out", request.id, moved, pinned=sources, owned=held, is_computed=not is_stream))
            else:
                self._assign(request.id, held)
            if is_stream:
                request.streamed[number] += len(held)
        self.note_peak()
        return moves

    def note_peak(self) -> None:
        """Update the peak number of host blocks in use."""
        counts = self._counts
        counts.peak_host_blocks = max(counts.peak_host_blocks, self._account.usage(self._cluster.host_pools).num_used)

    def _find_on_host(self, number: int, content: Content) -> int | None:
        """Return the block of a host that has a content, or is being filled with it."""
        if (block := self._account.pool(number).holder(content)) is not None:
            return block
        ref = self._copies.find_in_flight(content.key, (number,))
        return None if ref is None else ref.block

    def _assign(self, request_id: int, blocks: Sequence[BlockRef]) -> None:
        """Assign references of host blocks to the request that was offloaded.

        If the request has ended or was admitted meanwhile, leave the blocks to the cache. They are evicted last.
        """
        if request_id in self._offloaded:
            self._offloaded[request_id] += blocks
        else:
            self._account.release(reversed(blocks))

    def _store(self, copy: Copy) -> list[MoveKV]:
        """Return a move of the copied blocks to the host's disk, up to its free blocks, if the disk lacks any."""
        if (disk := self._cluster.disk_pool(copy.move.copies[0][1].pool)) is None:
            return []
        saved = list(_place_on_disk(self._account, self._copies, copy, disk))
        kept = [ref for source, target, _ in saved for ref in (source, target)]
        return [self._copies.begin("save", copy.move.request_id, saved, pinned=[], owned=kept)] if saved else []

    # ---------------------------------------------------------------- host-resident blocks

    def move_to_hosts(self, waiting: Sequence[Request], device_limit: int) -> list[MoveKV]:
        """Return moves of the oldest blocks of requests above `device_limit` to hosts, as far as devices lack blocks.

        An instance needs free blocks for its next step, and for the first waiting request if it lacks only blocks.
        """
        due, demand = self._running.due_blocks, 0
        free = {i: self._account.num_free(i) + self._account.num_pending_free(i) for i in self._cluster.prefill}
        step_blocks = {i: self._step_blocks(i) for i in free}
        if waiting:
            demand = waiting[0].blocks_for(waiting[0].num_tokens)
            demand = step_blocks[0] if demand > device_limit else demand  # its prefill allocates blocks step by step
            demand = _missing(demand, [free[i] - due[i] for i in free], self._cluster.num_blocks[0])
        moves = list[MoveKV]()
        for i, max_blocks in step_blocks.items():
            has_slot = due[i] <= max_blocks and len(self._running.on(i)) < self._max_num_seqs
            num_short = min(max(0, due[i]), max_blocks) + (demand if has_slot else 0) - free[i]
            if (num_short := min(num_short, max_blocks)) > 0:
                for request in reversed(list(self._running.on(i))):
                    exceeds_device = request.blocks_for(request.num_tokens) > device_limit and not request.targets
                    if num_short > 0 and exceeds_device:
                        num_short -= self._move_to_host(request, i, num_short, moves)
                self.note_peak()
        return moves

    def _move_to_host(self, request: Request, instance: int, max_blocks: int, moves: list[MoveKV]) -> int:
        """Move up to `max_blocks` of a request's blocks to its host, where steps read them. Return their number.

        Blocks that other requests share stay on the device. Moving them would free nothing.
        """
        account, number = self._account, self._cluster.host_pool(instance)
        own, host = account.pool(instance), account.pool(number)
        copies, cached = list[tuple[BlockRef, BlockRef, Content]](), list[BlockRef]()
        for index in range(account.num_full(request)):
            ref = request.table[index]
            if ref.pool != instance or own.references(ref.block) > 1:
                continue
            content = account.content(request, index)
            if (block := host.holder(content)) is not None:
                host.share(block)
                cached.append(ref)
            else:
                if not host.num_free:
                    self._release_offloaded()
                if not host.num_free:
                    break
                block = host.place(content)
                host.share(block)  # for the copy, which continues if the request is preempted
                copies.append((ref, BlockRef(number, block), content))
            request.table[index] = BlockRef(number, block)
            if len(copies) + len(cached) == max_blocks:
                break
        sources = [source for source, _, _ in copies]
        account.pin([*cached, *sources])
        account.release([*cached, *sources])
        if copies:
            request.moving.update({target: source for source, target, _ in copies})
            targets = [target for _, target, _ in copies]
            moves.append(self._copies.begin("out", request.id, copies, pinned=sources, owned=targets, owner=request))
        if cached:
            request.hosted[number] += len(cached)
            self._switch_reads(request, cached)
        return len(copies) + len(cached)

    def load_back(self, waiting: Sequence[Request]) -> list[MoveKV]:
        """Return moves of host blocks back to devices with spare blocks, the newest blocks first.

        Blocks for two steps and for the first waiting request stay free, to avoid moves to hosts right after.
        """
        if not any(self._account.pool(pool).in_use for pool in self._cluster.host_pools):
            return []
        hosted = [request for request in self._running if request.hosted]
        moves, due = list[MoveKV](), self._running.due_blocks
        demand = waiting[0].blocks_for(waiting[0].num_tokens) if waiting and hosted else 0
        for request in hosted:
            for i in request.group if not (request.moving or request.targets) else ():
                step = self._step_blocks(i)
                spare = self._account.num_free(i) - max(0, due[i]) - 2 * step - demand
                if spare > 0 and request.hosted[self._cluster.host_pool(i)]:
                    self._load_back(request, i, min(spare, step), moves)
        return moves

    def _load_back(self, request: Request, instance: int, max_blocks: int, moves: list[MoveKV]) -> None:
        """Append a move of up to `max_blocks` blocks of a request from the host pool to an instance."""
        account, host = self._account, self._cluster.host_pool(instance)
        places = [index for index, ref in enumerate(request.table) if ref.pool == host][-max_blocks:]
        copies = list[tuple[BlockRef, BlockRef, Content]]()
        if not places:
            return  # all host-resident blocks are being loaded
        for index in places:
            source, content = request.table[index], account.content(request, index)
            target = request.table[index] = BlockRef(instance, account.pool(instance).place(content))
            account.pool(instance).share(target.block)  # for the copy, which continues if the request is preempted
            request.moving[target] = source
            copies.append((source, target, content))
        sources, targets = [source for source, _, _ in copies], [target for _, target, _ in copies]
        account.pin(sources)
        account.release(sources)
        moves.append(self._copies.begin("in", request.id, copies, pinned=sources, owned=targets, owner=request))

    def _step_blocks(self, instance: int) -> int:
        """Return the largest number of blocks that one step of an instance allocates."""
        return -(-self._step_tokens // self._account.block_size) + len(self._running.on(instance))

    def _switch_reads(self, request: Request, before: Sequence[BlockRef]) -> None:
        """Send the whole table with the next part. Unpin the blocks `before` after the last step that reads them."""
        request.sent_blocks = request.sent_output = 0
        if request.in_flight:
            self._read_by_step.setdefault(request.last_step, []).extend(before)
        else:
            self._account.unpin(before)

    def computed(self, number: int) -> None:
        """Take the completion of a step, and unpin the moved blocks that it was the last to read."""
        if self._read_by_step:
            self._account.unpin(self._read_by_step.pop(number, ()))

    def release_all(self) -> bool:
        """Leave the offloaded blocks of waiting requests to the cache. Return whether there were any."""
        has_any = any(self._offloaded.values())
        self._release_offloaded()
        return has_any

    def _release_offloaded(self) -> None:
        """Leave the offloaded blocks of waiting requests to the cache."""
        for blocks in self._offloaded.values():
            self._account.release(reversed(blocks))
            blocks.clear()


def _missing(demand: int, free: Sequence[int], num_blocks: int) -> int:
    """Return the free blocks that a waiting request lacks per instance. Requests above `num_blocks` share evenly."""
    if demand <= num_blocks:
        return 0 if max(free) >= demand else demand
    return 0 if sum(free) >= demand else -(-demand // len(free))


def _filled(request: Request, part: Part) -> list[tuple[BlockRef, Content]]:
    """Return the blocks that a part fills, or in which the prompt ends, with their contents after the part."""
    if not request.enable_prefix_caching:
        return []
    size = request.block_size
    stop = part.stop // size if part.sample is None else request.blocks_for(part.stop)
    return [
        (request.table[i], Content(request.parent_key(i), request.tokens(i * size, min(part.stop, (i + 1) * size))))
        for i in range(part.start // size, stop)
    ]


def _touch(pool: BlockPool, contents: Sequence[Content]) -> None:
    """Make the blocks with these contents most recently used, the first of them last of all."""
    for content in reversed(contents):
        if (block := pool.holder(content)) is not None:
            pool.share(block)
            pool.release(block)


def _place_on_disk(account: KvAccount, copies: Copies, copy: Copy, disk: int) -> Iterator[Pair]:
    """Place the contents of copied blocks on a disk that lacks them. Share their blocks on the host."""
    disk_pool = account.pool(disk)
    for (_, source), content in zip(copy.move.copies, copy.contents, strict=True):
        host_pool = account.pool(source.pool)
        if host_pool.holder(content) != source.block or copies.find_in_flight(content.key, (disk,)) is not None:
            continue
        if disk_pool.holder(content) is None and disk_pool.num_free:
            host_pool.share(source.block)
            yield source, BlockRef(disk, disk_pool.place(content)), content
