"""The blocks of one KV pool: reference-counted, kept after use for prefix reuse, evicted least recently used first."""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import neg

ROOT = b""
"""Parent key of a request's first block."""


def chain_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Names a full block by its tokens and all before them."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a cached block: its first `len(tokens)` slots, after the prefix that `parent` names."""

    parent: bytes
    tokens: Sequence[int]


class BlockPool:
    """Accounts for `num_blocks` blocks of `block_size` tokens.

    A block is either in use (referenced), cached (unreferenced, content known) or blank. Cached blocks count as free:
    they are evicted, least recently used first, when no blank one is left. Blank blocks are handed out lowest number
    first, so that a request's blocks tend to be adjacent and can be read in place.

    Attributes:
        changes: how often anything has changed that others can see.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.changes = 0
        self._references = [0] * num_blocks
        self._held: dict[int, int] = {}
        self._blank = list(range(num_blocks - 1, -1, -1))  # descending
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._content: dict[int, Content] = {}
        self._by_key: dict[bytes, int] = {}
        self._tails: dict[bytes, set[int]] = {}

    @property
    def num_free(self) -> int:
        """So many blocks can be allocated now, cached ones included."""
        return len(self._blank) + len(self._cached)

    def references(self, block: int) -> int:
        """Counts the requests and copies under way that hold the block."""
        return self._references[block]

    def allocate(self, number: int) -> list[int]:
        """Returns blank blocks with one reference each. The caller has checked `num_free`."""
        num_left = max(0, len(self._blank) - number)
        found = self._blank[num_left:]
        found.reverse()
        del self._blank[num_left:]
        while len(found) < number:
            assert self._cached, "allocation beyond the free blocks"
            oldest, _ = self._cached.popitem(last=False)
            self._forget(oldest)
            found.append(oldest)
        for block in found:
            self._references[block] = 1
        self.changes += 1
        return found

    def share(self, block: int) -> None:
        """Adds a reference to a block whose content is known."""
        assert block in self._content, "only blocks with known content are shared"
        self._cached.pop(block, None)
        self._references[block] += 1
        self.changes += 1

    def hold(self, *blocks: int) -> None:
        """Adds a reference to blocks that have one, for a copy of each under way."""
        references, held = self._references, self._held
        for block in blocks:
            assert references[block] > 0, "only blocks in use are held"
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
        """So many blocks are held by copies under way alone; they are free when these are done."""
        return sum(self._references[block] == number for block, number in self._held.items())

    def adopt(self, block: int) -> None:
        """Takes over a cached block to write on in it; its content is no longer offered to others."""
        assert self._references[block] == 0 and block in self._cached, "only unreferenced cached blocks are adopted"
        del self._cached[block]
        self._forget(block)
        self._references[block] = 1
        self.changes += 1

    def release(self, *blocks: int) -> None:
        """Drops a reference to each, in this order."""
        references, content, blank = self._references, self._content, list[int]()
        for block in blocks:
            assert references[block] > 0, "a block is released once per reference"
            references[block] -= 1
            if references[block]:
                continue
            if block in content:
                self._cached[block] = None
            else:
                blank.append(block)
        if blank:
            self._put_back(sorted(blank, reverse=True))
        self.changes += 1

    def _put_back(self, blocks: list[int]) -> None:
        """Puts descending blocks back. Mostly no other blank one lies between them: they were allocated together."""
        blank = self._blank
        place = bisect_left(blank, -blocks[0], key=neg)
        if place == len(blank) or blank[place] < blocks[-1]:
            blank[place:place] = blocks
        else:
            for block in blocks:
                insort(blank, block, key=neg)

    def publish(self, block: int, content: Content) -> None:
        """Offers a block's content for reuse. Of two blocks with the same content the first stays the one offered."""
        full = len(content.tokens) == self.block_size
        key = chain_key(content.parent, content.tokens) if full else None
        if key is not None and key in self._by_key:
            return
        self._forget(block)
        self._content[block] = content
        self.changes += 1
        if key is not None:
            self._by_key[key] = block
        else:
            self._tails.setdefault(content.parent, set()).add(block)

    def find(self, key: bytes) -> int | None:
        """Finds the block whose content is the full block named `key`."""
        return self._by_key.get(key)

    def find_adoptable(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Finds the unreferenced tail after `parent` that shares the longest beginning with `tokens`, and that length.

        A tail is a block that is not full. One that would lose more tokens than it gives is left to its
        conversation, since nearly all prompts begin alike. Returns (-1, 0) when there is none.
        """
        best = (-1, 0)
        for block in sorted(self._tails.get(parent, ())):
            known = self._content[block].tokens
            length = _common_prefix(known, tokens)
            if self._references[block] == 0 and 2 * length >= len(known):
                best = max(best, (block, length), key=lambda candidate: candidate[1])
        return best

    def _forget(self, block: int) -> None:
        content = self._content.pop(block, None)
        if content is None:
            return
        if len(content.tokens) == self.block_size:
            del self._by_key[chain_key(content.parent, content.tokens)]
            return
        siblings = self._tails[content.parent]
        siblings.discard(block)
        if not siblings:
            del self._tails[content.parent]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
