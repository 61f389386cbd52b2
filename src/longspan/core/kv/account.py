"""The KV blocks of the whole cluster: the contents of each pool, and the block table of each request.

Blocks are reference-counted, kept after use for prefix reuse, and evicted least recently used first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import attrgetter

from longspan.core.blocks import BlockRef, PrefixHit
from longspan.core.kv.counts import PoolUsage
from longspan.core.kv.pool import BlockPool
from longspan.core.request import Request
from longspan.core.steps import Content
from longspan.core.view import RequestView

_NO_HIT = PrefixHit()
_MIN_COPIED_TOKENS = 16
"""Smallest common prefix of a partial block that is copied, in tokens. Half a block if that is smaller.

Shorter prefixes agree by chance.
"""


class KvAccount:
    """Owns every block of the cluster. Policies see its `KvView`, and the engine changes it.

    Args:
        num_blocks: of the pool of each instance, then of each host, then of the disk of each host.
    """

    def __init__(self, num_blocks: Sequence[int], *, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._pools = [BlockPool(num_blocks=number, block_size=block_size) for number in num_blocks]

    def keep_pools(self, before: KvAccount, first: int) -> None:
        """Keep the pools numbered `first` and above of an earlier account, with their contents."""
        self._pools[first:] = before._pools[first:]

    @property
    def num_pools(self) -> int:
        return len(self._pools)

    def pool(self, number: int) -> BlockPool:
        return self._pools[number]

    def num_blocks(self, instance: int) -> int:
        return self._pools[instance].num_blocks

    def num_free(self, instance: int) -> int:
        return self._pools[instance].num_free

    def usage(self, pools: Iterable[int]) -> PoolUsage:
        counted = [self._pools[number] for number in pools]
        return PoolUsage(
            num_blocks=sum([pool.num_blocks for pool in counted]),
            num_used=sum([len(pool.in_use) for pool in counted]),
            num_cached=sum([pool.num_cached for pool in counted]),
        )

    def num_pending_free(self, instance: int) -> int:
        return self._pools[instance].num_pending_free

    def num_allocated(self, instance: int) -> int:
        return self._pools[instance].num_allocated

    def changes(self, instances: Iterable[int]) -> int:
        pools = self._pools
        return sum([pools[instance].changes for instance in instances])

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Return the longest cached prefix of the request on `group`, at most all but its last token.

        Full blocks are shared. Of the blocks that can follow them, the hit ends with the longest common prefix. If the
        hit uses the whole block and no request references it, the request adopts it. The next turn of a conversation
        then recomputes no token of earlier turns. Otherwise the block is copied, so all prompts share prefixes.
        """
        if not self.prefix_caching or not request.max_cached:
            return _NO_HIT  # logprobs of a prompt need a forward pass over all of it
        return self._with_partial(request, group, self._full_blocks(request, group))

    def match_in_place(self, request: RequestView, max_blocks: Mapping[int, int], hosts: Sequence[int]) -> PrefixHit:
        if not self.prefix_caching or not request.max_cached:
            return _NO_HIT
        refs = self._full_blocks(request, (*max_blocks, *hosts))
        free = Counter(ref.pool for ref in refs if self._is_unused_on(ref, max_blocks))
        for index, ref in enumerate(refs):
            if self._is_unused_on(ref, max_blocks) and free[ref.pool] > max_blocks[ref.pool]:
                hosted = self.find(request.parent_key(index + 1), hosts)
                if hosted is None:
                    refs = refs[:index]
                    break
                refs[index] = hosted
                free[ref.pool] -= 1
        return self._with_partial(request, tuple(max_blocks), refs)

    def _is_unused_on(self, ref: BlockRef, instances: Mapping[int, int]) -> bool:
        return ref.pool in instances and not self._pools[ref.pool].references(ref.block)

    def _full_blocks(self, request: RequestView, pools: Sequence[int], first: int = 0) -> list[BlockRef]:
        """Find full blocks from index `first` on, each in the first pool that has it, up to the first gap."""
        refs: list[BlockRef] = []
        for index in range(first + 1, request.max_cached // self.block_size + 1):
            ref = self.find(request.parent_key(index), pools)
            if ref is None:
                break
            refs.append(ref)
        return refs

    def _with_partial(self, request: RequestView, group: Sequence[int], refs: list[BlockRef]) -> PrefixHit:
        """Append the block on `group` with the longest common prefix to a hit of full blocks, if it can be used."""
        limit = request.max_cached
        start = len(refs) * self.block_size
        rest = tuple(request.tokens(start, min(limit, start + self.block_size)))
        (instance, block), length = self.find_common_prefix(request.parent_key(len(refs)), rest, group)
        pool = self._pools[instance]
        adopts = copies = False
        if length:
            adopts = pool.is_adoptable(block, length, num_lost=0)
            has_free = pool.num_free > request.blocks_for(request.num_tokens)  # the copied block stays cached
            copies = not adopts and has_free and self.is_worth_a_copy(length)
            adopts = adopts or (not copies and pool.is_adoptable(block, length, num_lost=length))
        if not (adopts or copies):
            return PrefixHit(refs=tuple(refs), num_tokens=start)
        refs.append(BlockRef(instance, block))
        return PrefixHit(refs=tuple(refs), num_tokens=start + length, adopts_last=adopts, copies_last=copies)

    def is_worth_a_copy(self, num_tokens: int) -> bool:
        """Return whether a common prefix of `num_tokens` tokens with another block is worth a copy."""
        return num_tokens >= min(_MIN_COPIED_TOKENS, self.block_size // 2)

    def find(self, key: bytes, pools: Iterable[int]) -> BlockRef | None:
        """Return the full block with a prefix key, in the first pool that has it."""
        for pool in pools:
            block = self._pools[pool].find(key)
            if block is not None:
                return BlockRef(pool, block)
        return None

    def find_common_prefix(self, parent: bytes, tokens: tuple[int, ...], pools: Iterable[int]) -> tuple[BlockRef, int]:
        """Return the block after `parent` with the longest common prefix with `tokens`, and its length in tokens.

        The first of `pools` wins ties. The length is 0 if no block shares a token.
        """
        matches = [(self._pools[pool].find_common_prefix(parent, tokens), pool) for pool in pools]
        (block, length), pool = max(matches, key=lambda entry: entry[0][1])
        return BlockRef(pool, block), length

    def contents(self, request: Request) -> Iterator[tuple[BlockRef, Content]]:
        """Yield the blocks of a request that can be published, and their contents."""
        for index in range(-(-_num_publishable(request) // self.block_size)):
            yield request.table[index], self.content(request, index)

    def content(self, request: Request, index: int) -> Content:
        """Return the content of a block of a request, up to the last token that can be published."""
        stop = min(_num_publishable(request), (index + 1) * self.block_size)
        return Content(request.parent_key(index), request.tokens(index * self.block_size, stop))

    def num_full(self, request: Request) -> int:
        """Return the number of full blocks of a request that can be published. No step writes them any more."""
        return _num_publishable(request) // self.block_size

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        cached = (r for r in hit.refs if self.pool(r.pool).references(r.block) == 0)
        cost = Counter(r.pool for r in cached if r not in claimed)
        if hit.copies_last:
            cost[hit.refs[-1].pool] += 1
        return cost

    def reclaimable(self, request: RequestView) -> Counter[int]:
        return Counter(r.pool for r in request.table if self.pool(r.pool).references(r.block) == 1)

    def take(self, request: Request, hit: PrefixHit) -> None:
        """Begin the request's table with the blocks of a hit. Only hits were taken since the lookup.

        Call `copy_last` after all hits of a plan are taken. A copy allocates a block, and could evict another hit.
        """
        assert not request.table, "a hit begins a table"
        for ref in hit.refs[:-1] if hit.adopts_last else hit.refs:
            self.pool(ref.pool).share(ref.block)
        if hit.adopts_last:
            self.pool(hit.refs[-1].pool).adopt(hit.refs[-1].block)
        request.table.extend(hit.refs)

    def copy_last(self, request: Request, hit: PrefixHit) -> None:
        """Replace the last block of a hit by a block of the request's own, if the hit copies it.

        The old block is in `copying` until `complete_copies`.
        """
        if hit.copies_last:
            self.relocate(request, [(len(hit.refs) - 1, hit.refs[-1].instance)])

    def extend(self, request: Request, block_owners: Sequence[int]) -> None:
        """Append a new block on each instance of `block_owners` to the request's table."""
        for instance, same in groupby(block_owners):
            request.table += self._allocate(instance, len(list(same)))

    def relocate(self, request: Request, moves: Iterable[tuple[int, int]]) -> tuple[tuple[BlockRef, BlockRef], ...]:
        """Allocate new blocks for entries of the request's table, given as pairs of an index and an instance.

        Return pairs of the old block and the new block. Call `complete_copies` when they are copied.
        """
        copies = []
        for index, instance in moves:
            old = request.table[index]
            [new] = self._allocate(instance, 1)
            request.table[index] = new
            request.copying[new] = old
            copies.append((old, new))
        replaced = [old for old, _ in copies]
        self.pin(replaced)
        self.release(replaced)
        return tuple(copies)

    def complete_copies(
        self, request: Request, copies: Sequence[tuple[BlockRef, BlockRef]]
    ) -> list[tuple[BlockRef, int]]:
        """Free the old blocks after a copy, and publish the new blocks.

        Return old blocks with KV that is not finite, each with its first such slot.
        """
        first_slots = dict(request.non_finite_slots())
        self.unpin([old for old, _ in copies])
        for _, new in copies:
            del request.copying[new]
        self.publish(request, 0)
        return [(old, first_slots[new]) for old, new in copies if new in first_slots]

    def reserve(
        self, request: Request, instance: int, places: range, *, num_left: int
    ) -> tuple[tuple[BlockRef, ...], int] | None:
        """Reserve blocks for some indices of a request's table on another instance: cached blocks, then new blocks.

        Return the blocks and the number of cached blocks. Return None if fewer than `num_left` blocks would stay free.
        """
        pool, shared = self.pool(instance), list[BlockRef]()
        if self.prefix_caching and request.max_cached:
            shared = self._full_blocks(request, (instance,), places.start)[: len(places)]
        num_cached = sum(pool.references(ref.block) == 0 for ref in shared)
        if len(places) - len(shared) > pool.num_free - num_cached - num_left:
            return None
        for ref in shared:
            pool.share(ref.block)
        return (*shared, *self._allocate(instance, len(places) - len(shared))), len(shared)

    def replace(self, blocks: list[BlockRef], index: int, ref: BlockRef) -> None:
        """Replace a reserved block by a block of the same pool that is in use."""
        self.pool(ref.pool).share(ref.block)
        self.release((blocks[index],))
        blocks[index] = ref

    def pin(self, refs: Iterable[BlockRef]) -> None:
        for pool, blocks in _by_pool(refs):
            self._pools[pool].pin(*blocks)

    def unpin(self, refs: Iterable[BlockRef]) -> None:
        for pool, blocks in _by_pool(refs):
            self._pools[pool].unpin(*blocks)

    def release(self, refs: Iterable[BlockRef]) -> None:
        for pool, blocks in _by_pool(refs):
            self._pools[pool].release(*blocks)

    def replace_table(self, request: Request, blocks: Iterable[BlockRef]) -> None:
        """Replace the request's table by other blocks with the same contents. Its old blocks stay cached."""
        self.free(request)
        request.table.extend(blocks)
        self.publish(request, 0)

    def publish(self, request: Request, start: int) -> None:
        """Publish the blocks that became full between `start` and the request's `num_computed` tokens.

        When the prompt ends between them, publish its last block too. Requests copy it while the output is written.
        """
        if self.prefix_caching:
            num_full, tail = divmod(_num_publishable(request), self.block_size)
            for index in range(start // self.block_size, num_full):
                self._publish(request, index)
            if tail and start < request.num_prompt <= _num_publishable(request):
                self._publish(request, num_full)

    def withdraw(self, request: Request, position: int) -> None:
        """Unpublish the blocks of a request with tokens from `position` on, since their KV is not finite."""
        request.non_finite_from = position
        for index in range(self.num_full(request), len(request.table)):
            ref = _published(request, index)
            self.pool(ref.pool).forget(ref.block)

    def free(self, request: Request) -> None:
        """Free the request's blocks, last first. Their contents stay cached until they are evicted."""
        if self.prefix_caching and _num_publishable(request) % self.block_size:
            self._publish(request, _num_publishable(request) // self.block_size)
        self.release(reversed(request.table))
        request.table.clear()

    def _allocate(self, instance: int, number: int) -> list[BlockRef]:
        return [tuple.__new__(BlockRef, (instance, block)) for block in self._pools[instance].allocate(number)]

    def _publish(self, request: Request, index: int) -> None:
        ref = _published(request, index)
        self.pool(ref.pool).publish(ref.block, self.content(request, index))


def _by_pool(refs: Iterable[BlockRef]) -> Iterator[tuple[int, list[int]]]:
    for pool, same in groupby(refs, attrgetter("pool")):
        yield pool, [block for _, block in same]


def _published(request: Request, index: int) -> BlockRef:
    """Return the block with the KV of table entry `index` now, which differs while a copy fills the entry."""
    ref = request.table[index]
    ref = request.moving.get(ref, ref)
    while ref in request.copying:
        ref = request.copying[ref]
    return ref


def _num_publishable(request: Request) -> int:
    """Return the number of leading tokens that the prefix cache may hold: computed, with known ids and finite KV.

    The last sampled ids of an aborted request are unknown. Tokens that a `Rotation` has placed do not count, nor do
    blocks with KV that is not finite.
    """
    if not request.enable_prefix_caching:
        return 0
    num_tokens = min(request.num_computed, request.num_known)
    if request.rotation is not None:
        num_tokens = min(num_tokens, request.rotation.start)
    if request.non_finite_from is not None:
        num_tokens = min(num_tokens, request.non_finite_from) // request.block_size * request.block_size
    return num_tokens
