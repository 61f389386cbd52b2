"""Copies of KV between tiers that are under way, by the numbers of their moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from longspan.core.blocks import BlockRef
from longspan.core.request import Request
from longspan.core.steps import Content, MoveKV, MoveWay

Pair = tuple[BlockRef, BlockRef, Content]
"""A block, the one that it is copied to, and what both hold then."""


@dataclass(kw_only=True)
class Copy:
    """A move from one tier to another.

    Attributes:
        contents: what its targets will hold.
        held: blocks that others may use, too, and which are not free before the copy is done.
        kept: blocks with a reference of the copy, so that they are not evicted, in order of position.
        behind: copies to devices that follow, of what this one brings to a host; each has a reference of its source.
        spilled: the request whose table names the targets, of a spill or of what comes back. Ranks read them there from
            then on. None for other copies.
    """

    move: MoveKV
    contents: Sequence[Content]
    held: Sequence[BlockRef]
    kept: Sequence[BlockRef]
    behind: list[Pair] = field(default_factory=list)
    spilled: Request | None = None


class Copies:
    """Numbers moves between tiers, and remembers them until they are done.

    Args:
        number: gives the next step's number.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._copies: dict[int, Copy] = {}
        self._coming: dict[tuple[int, bytes], int] = {}  # blocks, by their pools and the contents on their way there
        self._filling: dict[BlockRef, int] = {}  # the move that fills a block

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._copies.values())

    @property
    def on_devices(self) -> bool:
        """Whether any copy is to or from a device."""
        return any(copy.move.way in ("out", "in") for copy in self._copies.values())

    def begin(
        self,
        way: MoveWay,
        request_id: int,
        pairs: Sequence[Pair],
        *,
        held: Sequence[BlockRef],
        kept: Sequence[BlockRef],
        spilled: Request | None = None,
    ) -> MoveKV:
        """Makes a move of each pair; see `Copy` for the others."""
        copies, contents = tuple((source, target) for source, target, _ in pairs), tuple(one for _, _, one in pairs)
        on_disk = contents if way in ("save", "load") else ()
        move = MoveKV(number=self._number(), request_id=request_id, copies=copies, way=way, contents=on_disk)
        self._copies[move.number] = Copy(move=move, contents=contents, held=held, kept=kept, spilled=spilled)
        self._expect(move.number, pairs)
        return move

    def follow(self, number: int, pairs: Sequence[Pair]) -> None:
        """Lets copies to devices follow one under way, see `Copy.behind`."""
        self._copies[number].behind.extend(pairs)
        self._expect(number, pairs)

    def _expect(self, number: int, pairs: Sequence[Pair]) -> None:
        self._coming.update({(target.pool, content.key): target.block for _, target, content in pairs})
        self._filling.update({target: number for _, target, _ in pairs})

    def end(self, number: int) -> Copy | None:
        """Forgets a copy that is done, and returns it; None for other numbers."""
        if (copy := self._copies.pop(number, None)) is None:
            return None
        filled = [(target, content) for (_, target), content in zip(copy.move.copies, copy.contents, strict=True)]
        for target, content in (*filled, *((target, content) for _, target, content in copy.behind)):
            self._coming.pop((target.pool, content.key), None)
            self._filling.pop(target, None)
        return copy

    def clear(self) -> list[Copy]:
        """Forgets all copies, and returns them."""
        copies = list(self._copies.values())
        self._copies.clear()
        self._coming.clear()
        self._filling.clear()
        return copies

    def coming(self, key: bytes, pools: Iterable[int]) -> BlockRef | None:
        """Finds a block, in the first of some pools, that is being filled with a content."""
        for pool in pools if self._coming else ():
            if (block := self._coming.get((pool, key))) is not None:
                return BlockRef(pool, block)
        return None

    def content(self, ref: BlockRef) -> Content | None:
        """Returns what a block will hold that is being filled."""
        if (number := self._filling.get(ref)) is None:
            return None
        copy = self._copies[number]
        pairs = zip(copy.move.copies, copy.contents, strict=True)
        return next((content for (_, target), content in pairs if target == ref), None)

    def filling(self, ref: BlockRef) -> int | None:
        """Returns the number of the move that fills a block, if any does."""
        return self._filling.get(ref)
