"""The blocks of one pool: which are in use, cached or blank, and their contents."""

from __future__ import annotations

from bisect import bisect, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush

from longspan.core.steps import Content


class BlockPool:
    """Accounts for `num_blocks` blocks of `block_size` tokens.

    A block is in use (referenced), cached (unreferenced with a known content) or blank. Cached blocks are free. They
    are evicted, least recently used first, when no blank block is left. Blank blocks are allocated lowest number first.
    A request's blocks thus tend to be adjacent, and can be read in place.

    Attributes:
        changes: number of changes that affect lookups or free blocks.
        num_allocated: number of blocks allocated so far. A pool with fewer is emptier, or has older contents.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.changes = self.num_allocated = 0
        self._references: dict[int, int] = {}  # of blocks in use
        self._pins: dict[int, int] = {}
        self._blank = list(range(num_blocks))  # a heap
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._twins: dict[int, Content] = {}  # blocks in use whose content is published for another block
        self._twins_by_key: dict[bytes, list[int]] = {}
        self._by_first_token: dict[tuple[bytes, int], list[int]] = {}  # by parent and first token, sorted by all tokens
        self._compared: dict[int, tuple[int, ...]] = {}  # tokens of the blocks compared so far

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
        """The number of references of each block in use, pins included."""
        return self._references

    @property
    def pinned(self) -> Mapping[int, int]:
        """The number of pins of each block by in-flight copies."""
        return self._pins

    def has_all_blocks(self) -> bool:
        """Return whether each block is in use, cached or blank. The time depends on the blocks in use only."""
        num_blocks = len(self._references) + len(self._cached) + len(self._blank)
        return num_blocks == self.num_blocks and self._references.keys().isdisjoint(self._cached.keys())

    def allocate(self, number: int) -> list[int]:
        """Return free blocks with one reference each. The caller has checked `num_free`."""
        blank = self._blank
        blocks = [heappop(blank) for _ in range(min(number, len(blank)))]
        while len(blocks) < number:
            assert self._cached, "allocation beyond the free blocks"
            oldest, _ = self._cached.popitem(last=False)
            self._forget(oldest)
            blocks.append(oldest)
        self._references.update(dict.fromkeys(blocks, 1))
        self.changes += 1
        self.num_allocated += number
        return blocks

    def place(self, content: Content) -> int:
        """Return a block for a content, with one reference. The caller has checked `num_free`.

        Prefer a cached block with a prefix of the content, since the whole content replaces it.
        """
        block, length = self.find_common_prefix(content.parent, tuple(content.tokens))
        if block not in self._cached or length < len(self._content[block].tokens):
            return self.allocate(1)[0]
        self.adopt(block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block whose content is known or being filled."""
        assert block in self._content or block in self._references, "a blank block is not shared"
        self._cached.pop(block, None)
        self._references[block] = self._references.get(block, 0) + 1
        self.changes += 1

    def pin(self, *blocks: int) -> None:
        """Add a pin, which is a reference for an in-flight copy, to blocks in use."""
        references, pins = self._references, self._pins
        for block in blocks:
            assert block in references, "only blocks in use are pinned"
            references[block] += 1
            pins[block] = pins.get(block, 0) + 1
        self.changes += 1

    def unpin(self, *blocks: int) -> None:
        """Drop a pin of each block when a copy is done."""
        for block in blocks:
            num_pins = self._pins.pop(block) - 1
            if num_pins:
                self._pins[block] = num_pins
        self.release(*blocks)

    @property
    def num_pending_free(self) -> int:
        """The number of blocks with pins only. They are free when the copies are done."""
        return sum(self._references[block] == number for block, number in self._pins.items())

    def adopt(self, block: int) -> None:
        """Take a cached block for a request that overwrites its tail, and unpublish its content."""
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
        """Publish a block's content for reuse.

        Of two full blocks with the same content the first is published, or the second once the first is evicted.
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
        insort(self._by_first_token.setdefault((content.parent, content.tokens[0]), []), block, key=self._tokens)

    def restore(self, contents: Iterable[tuple[int, Content]]) -> None:
        """Make blank blocks cached blocks with these contents. The first is evicted first."""
        for block, content in contents:
            self.publish(block, content)
            if block in self._content:  # otherwise another block has the same content
                self._cached[block] = None
        self._blank = [block for block in self._blank if block not in self._cached]  # still a heap, since sorted

    def seal(self) -> list[int]:
        """Add a reference to each cached block and remove all blank blocks, so that no content changes.

        Return the cached blocks.
        """
        cached = [*self._cached]
        for block in cached:
            self.share(block)
        self.num_blocks -= len(self._blank)
        self._blank.clear()
        return cached

    def forget(self, block: int) -> None:
        """Unpublish the content of a block in use, which may be damaged."""
        assert block in self._references, "the block is in use"
        self._forget(block)
        self.changes += 1

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def content(self, block: int) -> Content:
        return self._content[block]

    def holder(self, content: Content) -> int | None:
        """Return a block with all tokens of this content, and perhaps more."""
        if len(content.tokens) == self.block_size:
            return self.find(content.key)
        block, length = self.find_common_prefix(content.parent, tuple(content.tokens))
        return block if length == len(content.tokens) else None

    def find_common_prefix(self, parent: bytes, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return the block after `parent` with the longest common prefix with `tokens`, and its length in tokens.

        Return (-1, 0) if no block shares a token.
        """
        best = (-1, 0)
        if tokens and (blocks := self._by_first_token.get((parent, tokens[0]))):
            index = bisect(blocks, tokens, key=self._tokens)  # the longest common prefix is next to it
            for block in blocks[max(0, index - 1) : index + 1]:
                if (length := _common_length(self._tokens(block), tokens)) > best[1]:
                    best = block, length
        return best

    def is_adoptable(self, block: int, length: int, *, num_lost: int) -> bool:
        """Return whether a block can be overwritten after `length` tokens.

        The block is unused and not full, and loses at most `num_lost` tokens.
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
        blocks = self._by_first_token[content.parent, content.tokens[0]]
        blocks.remove(block)
        if not blocks:
            del self._by_first_token[content.parent, content.tokens[0]]
        if len(content.tokens) == self.block_size:
            del self._by_key[content.key]
            if content.key in self._twins_by_key:
                twin = self._twins_by_key[content.key][0]
                self._drop_twin(twin)
                self.publish(twin, content)

    def _drop_twin(self, block: int) -> None:
        """Forget that a block in use is a twin. Its use counts as a use of the published block."""
        if (content := self._twins.pop(block, None)) is None:
            return
        twins = self._twins_by_key[content.key]
        twins.remove(block)
        if not twins:
            del self._twins_by_key[content.key]
        offered = self._by_key.get(content.key)
        if offered is not None and offered in self._cached:
            self._cached.move_to_end(offered)


def _common_length(tokens: tuple[int, ...], others: tuple[int, ...]) -> int:
    """Return the length of the common prefix, by binary search."""
    common, upper = 0, min(len(tokens), len(others))
    while common < upper:
        middle = (common + upper + 1) // 2
        if tokens[common:middle] == others[common:middle]:
            common = middle
        else:
            upper = middle - 1
    return common
