"""The KV blocks of the whole cluster, and what each request holds of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import attrgetter

from longspan.core.blocks import BlockPool, Content
from longspan.core.cluster import Pool
from longspan.core.owners import BlockRef, PrefixHit
from longspan.core.request import Request
from longspan.core.view import RequestView

_NO_HIT = PrefixHit()


class KvAccount:
    """Owns every block of the cluster. Policies see the `KvView` of it, the engine changes it."""

    def __init__(self, pools: Sequence[Pool], *, block_size: int, prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._pools = [BlockPool(num_blocks=pool.num_blocks, block_size=block_size) for pool in pools]

    def pool(self, number: int) -> BlockPool:
        return self._pools[number]

    def num_blocks(self, instance: int) -> int:
        """Counts all blocks of an instance's pool."""
        return self._pools[instance].num_blocks

    def num_free(self, instance: int) -> int:
        """Counts the blocks of an instance that can be allocated now, cached ones included."""
        return self._pools[instance].num_free

    def num_leaving(self, instance: int) -> int:
        """Counts the blocks of an instance that only copies under way hold."""
        return self._pools[instance].num_leaving

    def changes(self, instances: Iterable[int]) -> int:
        """Counts how often anything has changed in their pools."""
        pools = self._pools
        return sum([pools[instance].changes for instance in instances])

    def match(self, request: RequestView, group: Sequence[int]) -> PrefixHit:
        """Finds the longest beginning of the request whose KV lies on members of `group`, one token short of it at
        most.

        Full blocks are shared. The tail after them is taken over when nobody uses it, so that a following turn of a
        conversation recomputes no token of the turns before.
        """
        if not self.prefix_caching or request.scores_prompt:
            return _NO_HIT  # logprobs of a prompt need all of it computed
        limit = request.num_tokens - 1
        refs: list[BlockRef] = []
        while (len(refs) + 1) * self.block_size <= limit:
            ref = self._find(request.parent_key(len(refs) + 1), group)
            if ref is None:
                break
            refs.append(ref)
        start = len(refs) * self.block_size
        rest = request.tokens(start, min(limit, start + self.block_size))
        last, length = self._find_adoptable(request.parent_key(len(refs)), rest, group)
        if last is None:
            return PrefixHit(refs=tuple(refs), num_tokens=start)
        return PrefixHit(refs=(*refs, last), num_tokens=start + length, adopts_last=True)

    def hit_cost(self, hit: PrefixHit, claimed: AbstractSet[BlockRef]) -> Counter[int]:
        """Counts the free blocks that taking a hit uses up, per instance; `claimed` ones are taken before."""
        cached = (r for r in hit.refs if self.pool(r.pool).references(r.block) == 0)
        return Counter(r.pool for r in cached if r not in claimed)

    def reclaimable(self, request: RequestView) -> Counter[int]:
        """Counts the blocks per instance that become free when the request is preempted."""
        return Counter(r.pool for r in request.table if self.pool(r.pool).references(r.block) == 1)

    def take(self, request: Request, hit: PrefixHit) -> None:
        """Begins the request's table with the blocks of a hit, found since the last change of this account."""
        assert not request.table, "a hit begins a table"
        shared = hit.refs[:-1] if hit.adopts_last else hit.refs
        for ref in shared:
            self.pool(ref.pool).share(ref.block)
        if hit.adopts_last:
            self.pool(hit.refs[-1].pool).adopt(hit.refs[-1].block)
        request.table.extend(hit.refs)

    def extend(self, request: Request, block_owners: Sequence[int]) -> None:
        """Appends a block to the request's table per entry of `block_owners`, on that instance."""
        for instance, same in groupby(block_owners):
            request.table += self._allocate(instance, len(list(same)))

    def relocate(self, request: Request, moves: Iterable[tuple[int, int]]) -> tuple[tuple[BlockRef, BlockRef], ...]:
        """Allocates new blocks for some entries of the request's table, each on the instance named with it.

        Returns the old blocks and the new ones; call `complete_copies` when they are copied.
        """
        copies = []
        for index, instance in moves:
            old = request.table[index]
            [new] = self._allocate(instance, 1)
            request.table[index] = new
            request.copying[new] = old
            copies.append((old, new))
        replaced = [old for old, _ in copies]
        self.hold(replaced)
        self.give_back(replaced)
        return tuple(copies)

    def complete_copies(self, request: Request, copies: Sequence[tuple[BlockRef, BlockRef]]) -> None:
        """Gives the old blocks back after a copy, and offers the new ones."""
        self.let_go([old for old, _ in copies])
        for _, new in copies:
            del request.copying[new]
        self.publish(request, 0)

    def reserve(
        self, request: Request, instance: int, num_blocks: int, *, num_left: int
    ) -> tuple[tuple[BlockRef, ...], int] | None:
        """Reserves blocks for a request on one more instance: those that hold its beginning there already, and new
        ones.

        Returns them, and how many hold something; None when there is no room for them beside `num_left` others.
        """
        pool, hit = self.pool(instance), self.match(request, (instance,))
        shared = hit.refs[:-1] if hit.adopts_last else hit.refs
        num_cached = sum(pool.references(ref.block) == 0 for ref in shared)
        if num_blocks - len(shared) > pool.num_free - num_cached - num_left:
            return None
        for ref in shared:
            pool.share(ref.block)
        return (*shared, *self._allocate(instance, num_blocks - len(shared))), len(shared)

    def hold(self, refs: Iterable[BlockRef]) -> None:
        """Adds a reference to each of these blocks, for a copy under way."""
        for pool, blocks in _by_pool(refs):
            self._pools[pool].hold(*blocks)

    def let_go(self, refs: Iterable[BlockRef]) -> None:
        """Drops the references that `hold` added, when the copy is done."""
        for pool, blocks in _by_pool(refs):
            self._pools[pool].let_go(*blocks)

    def give_back(self, refs: Iterable[BlockRef]) -> None:
        """Drops a reference to each of these blocks, in this order."""
        for pool, blocks in _by_pool(refs):
            self._pools[pool].release(*blocks)

    def hand_over(self, request: Request, blocks: Iterable[BlockRef]) -> None:
        """Gives the request these blocks, which hold the same; its old ones stay cached where they are."""
        self.release(request)
        request.table.extend(blocks)
        self.publish(request, 0)

    def publish(self, request: Request, start: int) -> None:
        """Offers the blocks that became full between `start` and the request's `num_computed` tokens."""
        if self.prefix_caching:
            for index in range(start // self.block_size, _num_namable(request) // self.block_size):
                self._publish(request, index)

    def release(self, request: Request) -> None:
        """Gives all the request's blocks back, last first; what they hold stays cached until they are needed."""
        if self.prefix_caching and _num_namable(request) % self.block_size:
            self._publish(request, _num_namable(request) // self.block_size)
        self.give_back(reversed(request.table))
        request.table.clear()

    def _allocate(self, instance: int, number: int) -> list[BlockRef]:
        return [tuple.__new__(BlockRef, (instance, block)) for block in self._pools[instance].allocate(number)]

    def _publish(self, request: Request, index: int) -> None:
        stop = min(_num_namable(request), (index + 1) * self.block_size)
        tokens = request.tokens(index * self.block_size, stop)
        ref = request.table[index]
        while ref in request.copying:
            ref = request.copying[ref]
        self.pool(ref.pool).publish(ref.block, Content(request.parent_key(index), tokens))

    def _find(self, key: bytes, group: Sequence[int]) -> BlockRef | None:
        for instance in group:
            block = self.pool(instance).find(key)
            if block is not None:
                return BlockRef(instance, block)
        return None

    def _find_adoptable(
        self, parent: bytes, tokens: Sequence[int], group: Sequence[int]
    ) -> tuple[BlockRef | None, int]:
        found = [(self.pool(instance).find_adoptable(parent, tokens), instance) for instance in group]
        (block, length), instance = max(found, key=lambda candidate: candidate[0][1])
        return (BlockRef(instance, block), length) if length else (None, 0)


def _by_pool(refs: Iterable[BlockRef]) -> Iterator[tuple[int, list[int]]]:
    """Groups neighbouring blocks by their pool."""
    for pool, same in groupby(refs, attrgetter("pool")):
        yield pool, [block for _, block in same]


def _num_namable(request: Request) -> int:
    """Counts the tokens that others can be offered: computed ones whose ids are known.

    Of an aborted request the last sampled ids are not known. Where owners rotate by token, no block holds neighbours.
    """
    num_tokens = min(request.num_computed, request.num_known)
    return num_tokens if request.rotation is None else min(num_tokens, request.rotation.start)
