"""In-flight copies of KV between tiers, by the numbers of their moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from longspan.core.blocks import BlockRef
from longspan.core.request import Request
from longspan.core.steps import Completion, Content, MoveKV, MoveWay

Pair = tuple[BlockRef, BlockRef, Content]
"""A source block, a target block, and the content of both after the copy."""


@dataclass(kw_only=True)
class Copy:
    """A move from one tier to another.

    Attributes:
        contents: contents of the targets after the copy.
        pinned: blocks, which requests may use and which are not free before the copy is done.
        owned: blocks with a reference of the copy, so that they are not evicted, in order of position.
        followers: copies from targets on the host to devices after this copy, which has a reference of each source.
        owner: the request whose table names the targets, if this copy moves its resident blocks. Ranks read the
            targets after the copy. None for other copies.
        is_computed: False for a stream whose Forward is not complete.
        is_finite: False for a stream of KV that is NaN or infinite. Its targets are not published.
        arrived: the completion of a stream that arrived before the completion of its Forward.
    """

    move: MoveKV
    contents: Sequence[Content]
    pinned: Sequence[BlockRef]
    owned: Sequence[BlockRef]
    followers: list[Pair] = field(default_factory=list)
    owner: Request | None = None
    is_computed: bool = True
    is_finite: bool = True
    arrived: Completion | None = None


class Copies:
    """Numbers moves between tiers, and keeps them until they are done.

    Args:
        number: returns the next step's number.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self._number = number
        self._copies: dict[int, Copy] = {}
        self._in_flight: dict[tuple[int, bytes], int] = {}  # the block being filled, by its pool and content key
        self._filling: dict[BlockRef, int] = {}  # the number of the move that fills a block

    def __bool__(self) -> bool:
        return bool(self._copies)

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._copies.values())

    @property
    def on_devices(self) -> bool:
        """Whether a copy is from or to a device."""
        return any(copy.move.way in ("out", "in") for copy in self._copies.values())

    def begin(
        self,
        way: MoveWay,
        request_id: int,
        pairs: Sequence[Pair],
        *,
        pinned: Sequence[BlockRef],
        owned: Sequence[BlockRef],
        owner: Request | None = None,
        is_computed: bool = True,
    ) -> MoveKV:
        """Begin a move of each pair. See `Copy` for the other arguments."""
        copies, contents = (
            tuple((source, target) for source, target, _ in pairs),
            tuple(content for _, _, content in pairs),
        )
        on_disk = contents if way in ("save", "load") else ()
        move = MoveKV(number=self._number(), request_id=request_id, copies=copies, way=way, contents=on_disk)
        self._copies[move.number] = Copy(
            move=move, contents=contents, pinned=pinned, owned=owned, owner=owner, is_computed=is_computed
        )
        self._expect(move.number, pairs)
        return move

    def add_followers(self, number: int, pairs: Sequence[Pair]) -> None:
        """Add copies to devices that start after an in-flight copy, see `Copy.followers`."""
        self._copies[number].followers.extend(pairs)
        self._expect(number, pairs)

    def _expect(self, number: int, pairs: Sequence[Pair]) -> None:
        self._in_flight.update({(target.pool, content.key): target.block for _, target, content in pairs})
        self._filling.update({target: number for _, target, _ in pairs})

    def get(self, number: int) -> Copy | None:
        return self._copies.get(number)

    def end(self, number: int) -> Copy | None:
        """Remove and return a copy that is done. Return None for other numbers."""
        if (copy := self._copies.pop(number, None)) is None:
            return None
        filled = [(target, content) for (_, target), content in zip(copy.move.copies, copy.contents, strict=True)]
        for target, content in (*filled, *((target, content) for _, target, content in copy.followers)):
            self._in_flight.pop((target.pool, content.key), None)
            self._filling.pop(target, None)
        return copy

    def clear(self) -> list[Copy]:
        """Remove and return all copies."""
        copies = list(self._copies.values())
        self._copies.clear()
        self._in_flight.clear()
        self._filling.clear()
        return copies

    def find_in_flight(self, key: bytes, pools: Iterable[int], *, computed: bool = False) -> BlockRef | None:
        """Return the block being filled with a content, in the first pool that has one. Maybe only `computed` ones."""
        for pool in pools if self._in_flight else ():
            if (block := self._in_flight.get((pool, key))) is not None:
                ref = BlockRef(pool, block)
                if not computed or self._copies[self._filling[ref]].is_computed:
                    return ref
        return None

    def content(self, ref: BlockRef) -> Content | None:
        """Return the content that an in-flight move fills a block with."""
        if (number := self._filling.get(ref)) is None:
            return None
        copy = self._copies[number]
        pairs = zip(copy.move.copies, copy.contents, strict=True)
        return next((content for (_, target), content in pairs if target == ref), None)

    def move_filling(self, ref: BlockRef) -> int | None:
        """Return the number of the move that fills a block, or None."""
        return self._filling.get(ref)
