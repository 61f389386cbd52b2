"""Token ids of prompts that nobody reads but the prefix cache: made when they are looked at."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import overload

_SPACE = 2**40
"""Ids of one text lie this far from those of the next."""


def text(name: int, num_tokens: int) -> range:
    """The tokens of a text: equal names, equal tokens; of different names, none is the same."""
    assert 0 <= num_tokens <= _SPACE, "a text fits into its space"
    return range(name * _SPACE, name * _SPACE + num_tokens)


class Texts(Sequence[int]):
    """Texts one after the other, as one sequence of token ids. A slice is one, too, or the slice of one text."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        flat = (part for one in texts for part in (one.parts if isinstance(one, Texts) else (one,)))
        self.parts: list[Sequence[int]] = [part for part in flat if len(part)]
        self._ends = list(itertools.accumulate(map(len, self.parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(self.parts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            assert step == 1, "prompts are read forwards"
            return self._between(start, max(start, stop))
        position = range(len(self))[index]
        place = bisect_right(self._ends, position)
        return self.parts[place][position - self._start(place)]

    def _start(self, place: int) -> int:
        return self._ends[place] - len(self.parts[place])

    def _between(self, start: int, stop: int) -> Sequence[int]:
        found: list[Sequence[int]] = []
        for place in range(bisect_right(self._ends, start), len(self.parts)):
            first = self._start(place)
            if first >= stop:
                break
            found.append(self.parts[place][max(0, start - first) : stop - first])
        return found[0] if len(found) == 1 else Texts(found)
