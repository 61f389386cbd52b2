"""Requests as they come: their times, their prompts, and the conversations that they are turns of."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from longspan.errors import ParameterError


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request that comes at a time, or as the next turn of a conversation.

    Attributes:
        due_s: when it comes, after the start; a further turn of a conversation: after the end of the turn before.
        prompt: token ids; of a further turn what is new, behind all that was said before.
        output_len: how many tokens it puts out.
        follows: the index of the turn before among all arrivals, which is earlier; None for a first turn.
        cache_salt: only requests with the same one share KV.
    """

    due_s: float
    prompt: Sequence[int]
    output_len: int
    follows: int | None = None
    cache_salt: str = ""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests, in the order in which they come.

    Attributes:
        shares: whether prompts can begin alike, so that it pays to remember what was computed.
    """

    arrivals: Sequence[Arrival]
    shares: bool

    def at_rate(self, rate: float) -> Workload:
        """Scales the times of first turns so that all turns together come at this rate."""
        last_s = max(one.due_s for one in self.arrivals if one.follows is None)
        factor = len(self.arrivals) / rate / last_s if last_s else 0.0
        return self._first_turns_at([one.due_s * factor for one in self.arrivals])

    def one_by_one(self, gap_s: float) -> Workload:
        """Puts `gap_s` seconds between the conversations, so that none meets another."""
        return self._first_turns_at([index * gap_s for index in range(len(self.arrivals))])

    def _first_turns_at(self, times_s: Sequence[float]) -> Workload:
        moved = zip(self.arrivals, times_s, strict=True)
        return replace(self, arrivals=[one if one.follows is not None else replace(one, due_s=s) for one, s in moved])


def as_conversations(arrivals: Sequence[Arrival], *, turns: int, think_s: float) -> list[Arrival]:
    """Makes every `turns` neighbours one conversation: the first comes when it is due, each other one `think_s` seconds
    after the answer before.
    """
    return [
        one if index % turns == 0 else replace(one, due_s=think_s, follows=index - 1)
        for index, one in enumerate(arrivals)
    ]


def arrival_times(num: int, *, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Draws `num` times in seconds from the start, ascending; all 0 for an infinite rate.

    Gaps are gamma distributed with shape `burstiness` and mean `1 / rate`: 1 is a Poisson process, less comes in
    bursts, more is steadier, infinity is regular. As in vLLM, times are stretched so that the last one is at `num /
    rate` whatever the seed, or throughputs of different seeds would differ by chance.
    """
    if math.isinf(rate):
        return [0.0] * num
    gaps = np.ones(num) if math.isinf(burstiness) else rng.gamma(burstiness, size=num)
    times = np.cumsum(gaps)
    if not times[-1] > 0:
        problem = f"{burstiness} is too small: every gap between requests is 0; give a larger one"
        raise ParameterError("burstiness", problem, burstiness)
    return [float(time) for time in times * (num / rate / times[-1])]


def prompt_of(
    name: int, num_tokens: int, *, shared: int = 0, shared_len: int = 0, blocks: Sequence[int] = (), block_len: int = 1
) -> Sequence[int]:
    """Returns token ids: text `shared`, then `blocks`, then a text of its own, cut at `num_tokens`.

    Equal numbers give equal tokens: `shared` among those that share a beginning, `blocks` of `block_len` tokens each
    among themselves, and `name` among prompts.
    """
    beginning: list[Sequence[int]] = [text(3 * shared, min(shared_len, num_tokens))]
    left = num_tokens - len(beginning[0])
    for block in blocks:
        beginning.append(text(3 * block + 1, min(block_len, left)))
        left -= len(beginning[-1])
    own = text(3 * name + 2, left)
    return TokenText([*beginning, own]) if left < num_tokens else own


_SPACE = 2**40
"""Ids of one text lie this far from those of the next."""


def text(name: int, num_tokens: int) -> range:
    """Returns the tokens of a text: equal names, equal tokens; of different names, none is the same."""
    assert 0 <= num_tokens <= _SPACE, "a text fits into its space"
    return range(name * _SPACE, name * _SPACE + num_tokens)


class TokenText(Sequence[int]):
    """Texts one after the other, as one sequence of token ids. A slice is one, too, or the slice of one text."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        flat = (part for one in texts for part in (one.parts if isinstance(one, TokenText) else (one,)))
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
        return found[0] if len(found) == 1 else TokenText(found)
