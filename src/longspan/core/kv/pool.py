"""The blocks of one pool: which are in use, cached or blank, and what they hold."""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush

from longspan.core.steps import Content


class BlockPool:
    """Accounts for `num_blocks` blocks of `block_size` tokens.

    A block is in use (referenced), cached (unreferenced, content known) or blank. Cached blocks are free: they are
    evicted, least recently used first, when no blank one is left. Blank blocks are handed out lowest number first, so
    that a request's blocks tend to be adjacent and can be read in place.

    Attributes:
        changes: how often anything has changed that others can see.
        num_allocated: blocks handed out so far. A pool with fewer is emptier, or has the older contents.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.changes = self.num_allocated = 0
        self._references: dict[int, int] = {}  # of blocks in use
        self._held: dict[int, int] = {}
        self._blank = list(range(num_blocks))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._twins: dict[int, Content] = {}  # blocks in use with a content that another block is offered for
        self._twins_by_key: dict[bytes, list[int]] = {}
        self._begun: dict[tuple[bytes, int], list[int]] = {}  # by parent and first token, in order of all their tokens
        self._compared: dict[int, tuple[int, ...]] = {}  # tokens of those that were compared

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references.get(block, 0)

    @property
    def in_use(self) -> Mapping[int, int]:
        """The number of references of each block in use."""
        return self._references

    @property
    def held(self) -> Mapping[int, int]:
        """The number of references that copies in flight have, by block."""
        return self._held

    def has_all_blocks(self) -> bool:
        """Return whether each block is in use, cached or blank. The time depends on the blocks in use only."""
        num_blocks = len(self._references) + len(self._cached) + len(self._blank)
        return num_blocks == self.num_blocks and self._references.keys().isdisjoint(self._cached.keys())

    def allocate(self, number: int) -> list[int]:
        """Returns blank blocks with one reference each; the caller has checked `num_free`."""
        blank = self._blank
        found = [heappop(blank) for _ in range(min(number, len(blank)))]
        while len(found) < number:
            assert self._cached, "allocation beyond the free blocks"
            oldest, _ = self._cached.popitem(last=False)
            self._forget(oldest)
            found.append(oldest)
        self._references.update(dict.fromkeys(found, 1))
        self.changes += 1
        self.num_allocated += number
        return found

    def place(self, content: Content) -> int:
        """Returns a block for a content, with one reference; the caller has checked `num_free`.

        It is a cached one that holds a beginning of it, which nobody misses beside the whole, or else a blank one.
        """
        block, length = self.find_begun(content.parent, tuple(content.tokens))
        if block not in self._cached or length < len(self._content[block].tokens):
            return self.allocate(1)[0]
        self.adopt(block)
        return block

    def share(self, block: int) -> None:
        """Adds a reference to a block whose content is known, or on its way."""
        assert block in self._content or block in self._references, "nobody shares a blank block"
        self._cached.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1
        self.changes += 1

    def hold(self, *blocks: int) -> None:
        """Adds a reference to blocks that have one, for a copy under way of each."""
        references, held = self._references, self._held
        for block in blocks:
            assert block in references, "only blocks in use are held"
            references[block] += 1
            held[block] = held.get(block, 0) + 1
        self.changes += 1

    def let_go(self, *blocks: int) -> None:
        """Drops the references that `hold` added, when a copy of each block is done."""
        for block in blocks:
            num_held = self._held.pop(block) - 1
            if num_held:
                self._held[block] = num_held
        self.release(*blocks)

    @property
    def num_leaving(self) -> int:
        """Blocks that only copies under way hold; they are free when these are done."""
        return sum(self._references[block] == number for block, number in self._held.items())

    def adopt(self, block: int) -> None:
        """Takes over a cached block to write on in it; its content is no longer offered to others."""
        assert block in self._cached, "only unreferenced cached blocks are adopted"
        del self._cached[block]
        self._forget(block)
        self._references[block] = 1
        self.changes += 1

    def release(self, *blocks: int) -> None:
        references, content = self._references, self._content
        for block in blocks:
            assert block in references, "a block is released once per reference"
            if references[block] > 1:
                references[block] -= 1
                continue
            del references[block]
            if block in content:
                self._cached[block] = None
            else:
                self._drop_twin(block)
                heappush(self._blank, block)
        self.changes += 1

    def publish(self, block: int, content: Content) -> None:
        """Offers a block's content for reuse.

        Of two full blocks with the same content the first stays offered. If that is evicted while the second is in use,
        the second is offered in its place.
        """
        full = len(content.tokens) == self.block_size
        key = content.key if full else None
        if key is not None and self._by_key.get(key) == block:
            return
        self._forget(block)
        if key is not None and key in self._by_key:
            if block in self._references:
                self._twins[block] = content
                self._twins_by_key.setdefault(key, []).append(block)
            return
        self._content[block] = content
        self.changes += 1
        if key is not None:
            self._by_key[key] = block
        insort(self._begun.setdefault((content.parent, content.tokens[0]), []), block, key=self._tokens)

    def restore(self, contents: Iterable[tuple[int, Content]]) -> None:
        """Takes blank blocks for cached ones with these contents; those that come first are evicted first."""
        for block, content in contents:
            self.publish(block, content)
            if block in self._content:  # else another one has the same
                self._cached[block] = None
        self._blank = [block for block in self._blank if block not in self._cached]  # still a heap, since sorted

    def forget(self, block: int) -> None:
        """Ceases to offer the content of a block in use. It may be damaged."""
        assert block in self._references, "blocks that nobody uses are evicted"
        self._forget(block)
        self.changes += 1

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def content(self, block: int) -> Content:
        return self._content[block]

    def holder(self, content: Content) -> int | None:
        """Finds a block that holds all of this content, and perhaps more."""
        if len(content.tokens) == self.block_size:
            return self.find(content.key)
        block, length = self.find_begun(content.parent, tuple(content.tokens))
        return block if length == len(content.tokens) else None

    def find_begun(self, parent: bytes, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Finds the block after `parent` that shares the longest beginning with `tokens`, and that length.

        Returns (-1, 0) when none shares any.
        """
        best = (-1, 0)
        if tokens and (blocks := self._begun.get((parent, tokens[0]))):
            place = bisect(blocks, tokens, key=self._tokens)  # what begins most alike is next to it
            for block in blocks[max(0, place - 1) : place + 1]:
                if (length := _num_alike(self._tokens(block), tokens)) > best[1]:
                    best = block, length
        return best

    def is_adoptable(self, block: int, length: int, *, num_lost: int) -> bool:
        """Tells whether a block can be written on behind `length` tokens: it is not full, nobody uses it, and at most
        `num_lost` tokens are lost.
        """
        num_known = len(self._content[block].tokens)
        return block not in self._references and num_known < self.block_size and num_known - length <= num_lost

    def _tokens(self, block: int) -> tuple[int, ...]:
        if block not in self._compared:
            self._compared[block] = tuple(self._content[block].tokens)
        return self._compared[block]

    def _forget(self, block: int) -> None:
        self._compared.pop(block, None)
        content = self._content.pop(block, None)
        if content is None:
            self._drop_twin(block)
            return
        begun = self._begun[content.parent, content.tokens[0]]
        begun.remove(block)
        if not begun:
            del self._begun[content.parent, content.tokens[0]]
        if len(content.tokens) == self.block_size:
            del self._by_key[content.key]
            if content.key in self._twins_by_key:
                twin = self._twins_by_key[content.key][0]
                self._drop_twin(twin)
                self.publish(twin, content)

    def _drop_twin(self, block: int) -> None:
        """Forgets that a block in use has the content of another one; its use counts as one of that other block."""
        if (content := self._twins.pop(block, None)) is None:
            return
        twins = self._twins_by_key[content.key]
        twins.remove(block)
        if not twins:
            del self._twins_by_key[content.key]
        offered = self._by_key.get(content.key)
        if offered is not None and offered in self._cached:
            self._cached.move_to_end(offered)


def _num_alike(tokens: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Counts the tokens with which both begin, by halving."""
    alike, most = 0, min(len(tokens), len(others))
    while alike < most:
        middle = (alike + most + 1) // 2
        if tokens[alike:middle] == others[alike:middle]:
            alike = middle
        else:
            most = middle - 1
    return alike
