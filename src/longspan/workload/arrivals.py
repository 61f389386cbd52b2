"""The requests of a workload: arrival times, prompts, and the conversations that they belong to."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from longspan.errors import ParameterError
from longspan.workload.spec import MAX_LEN


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """A request that arrives at a time, or as the next turn of a conversation.

    Attributes:
        due_s: its arrival, in seconds after the start. For a later turn, in seconds after the end of the previous turn.
        prompt: token ids. For a later turn, the tokens after the previous prompt and answer.
        output_len: number of output tokens.
        follows: the lower index of the previous turn among all arrivals. None for a first turn.
        cache_salt: only requests with the same salt share KV.
        slo_class: the name of its class of service level, if it has one.
    """

    due_s: float
    prompt: Sequence[int]
    output_len: int
    follows: int | None = None
    cache_salt: str = ""
    slo_class: str = ""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """The clients of a closed loop. Each has at most one conversation at a time, and so at most one request.

    Attributes:
        think_s: seconds from the end of a client's conversation to its next one.
        together: static batches: the clients begin their next conversations when all of them have ended theirs.
    """

    number: int
    think_s: float = 0.0
    together: bool = False


class ClosedLoop:
    """Decides which conversations begin: the given ones in order, as clients become idle."""

    def __init__(self, clients: Clients, first_turns: Iterable[int]) -> None:
        self._clients, self._first_turns = clients, iter(first_turns)
        self.think_s = clients.think_s
        self._num_busy = 0

    def begin(self) -> list[int]:
        """Return the first turns of the conversations that idle clients begin."""
        if self._num_busy and self._clients.together:
            return []
        started = list(itertools.islice(self._first_turns, self._clients.number - self._num_busy))
        self._num_busy += len(started)
        return started

    def ended(self) -> list[int]:
        """Return the same, after the last answer of a conversation, or the refusal of a turn."""
        self._num_busy -= 1
        return self.begin()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests in order of arrival.

    Attributes:
        shares: whether prompts may have common prefixes, so that prefix caching is useful.
        clients: the clients of a closed loop. None: requests arrive at their times.
    """

    arrivals: Sequence[Arrival]
    shares: bool
    clients: Clients | None = None

    def at_rate(self, rate: float) -> Workload:
        """Scale the times of first turns so that all turns together arrive at this rate.

        Raises:
            ParameterError: in a closed loop, whose requests have no times.
        """
        if self.clients is not None:
            problem = f"{rate:g} needs requests with times, but a closed loop has none: leave out `concurrency`"
            raise ParameterError("rate", problem, rate)
        last_s = max(arrival.due_s for arrival in self.arrivals if arrival.follows is None)
        factor = len(self.arrivals) / rate / last_s if last_s else 0.0
        return self._first_turns_at([arrival.due_s * factor for arrival in self.arrivals])

    def one_by_one(self, gap_s: float) -> Workload:
        """Put `gap_s` seconds between the conversations, so that they do not overlap."""
        return self._first_turns_at([index * gap_s for index in range(len(self.arrivals))])

    def _first_turns_at(self, times_s: Sequence[float]) -> Workload:
        pairs = zip(self.arrivals, times_s, strict=True)
        arrivals = [replace(a, due_s=at_s) if a.follows is None else a for a, at_s in pairs]
        return replace(self, arrivals=arrivals, clients=None)


def as_conversations(arrivals: Sequence[Arrival], *, turns: int, think_s: float) -> list[Arrival]:
    """Group every `turns` consecutive requests into a conversation. Later turns follow `think_s` after an answer."""
    return [
        arrival if index % turns == 0 else replace(arrival, due_s=think_s, follows=index - 1)
        for index, arrival in enumerate(arrivals)
    ]


def arrival_times(num: int, *, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Draw `num` ascending times in seconds from the start. All are 0 for an infinite rate.

    Gaps are gamma distributed with shape `burstiness` and mean `1 / rate`. Shape 1 is a Poisson process. Smaller shapes
    are burstier, larger shapes are steadier, and infinity is regular. As in vLLM, times are scaled so that the last
    time is `num / rate`. Otherwise throughputs would depend on the seed.
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
    """Return token ids: the text `shared`, then `blocks`, then the text `name`, truncated to `num_tokens`.

    Equal numbers give equal tokens, separately for `shared` texts, `blocks` of `block_len` tokens, and `name` texts.
    """
    prefix: list[Sequence[int]] = [text(3 * shared, min(shared_len, num_tokens))]
    num_left = num_tokens - len(prefix[0])
    for block in blocks:
        prefix.append(text(3 * block + 1, min(block_len, num_left)))
        num_left -= len(prefix[-1])
    own = text(3 * name + 2, num_left)
    return TokenText([*prefix, own]) if num_left < num_tokens else own


_NUM_TEXTS = 2**63 // MAX_LEN
"""Token ids have 64 bits. The first token ids of consecutive texts differ by `MAX_LEN`."""


def text(name: int, num_tokens: int) -> range:
    """Return the token ids of a text. Equal names give equal tokens, and different names give disjoint tokens."""
    assert 0 <= num_tokens <= MAX_LEN, "texts do not overlap"
    assert 0 <= name < _NUM_TEXTS, "token ids have 64 bits"
    return range(name * MAX_LEN, name * MAX_LEN + num_tokens)


class TokenText(Sequence[int]):
    """Concatenated texts as one sequence of token ids. A slice is a `TokenText`, or a slice of one text."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        flat = (part for text in texts for part in (text.parts if isinstance(text, TokenText) else (text,)))
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
        part = bisect_right(self._ends, position)
        return self.parts[part][position - self._start(part)]

    def _start(self, part: int) -> int:
        return self._ends[part] - len(self.parts[part])

    def _between(self, start: int, stop: int) -> Sequence[int]:
        parts: list[Sequence[int]] = []
        for part in range(bisect_right(self._ends, start), len(self.parts)):
            first = self._start(part)
            if first >= stop:
                break
            parts.append(self.parts[part][max(0, start - first) : stop - first])
        return parts[0] if len(parts) == 1 else TokenText(parts)
