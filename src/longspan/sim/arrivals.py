"""What comes to a simulated cluster: requests with a time, a prompt and a length of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from longspan.sim.tokens import Texts, text

_LONGEST_S = 1e5
"""A day and a little: much longer ones would reach into the next of conversations that are to be far apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One request.

    Attributes:
        due_s: when it comes, after the start; a further turn of a conversation: after the end of the turn before.
        prompt: token ids; of a further turn what is new, behind all that was said before.
        output_len: how many tokens it puts out.
        follows: the place of the turn before among all arrivals, which is earlier; None for a first turn.
    """

    due_s: float
    prompt: Sequence[int]
    output_len: int
    follows: int | None = None


def prompt_of(
    name: int, num_tokens: int, *, shared: int = 0, shared_len: int = 0, blocks: Sequence[int] = (), block_len: int = 1
) -> Sequence[int]:
    """The token ids of a prompt, as far as it is long: text `shared`, then `blocks`, then a text of its own.

    Equal numbers give equal tokens: `shared` among those that share a beginning, `blocks` of `block_len` tokens each
    among themselves, and `name` among prompts.
    """
    beginning: list[Sequence[int]] = [text(3 * shared, min(shared_len, num_tokens))]
    left = num_tokens - len(beginning[0])
    for block in blocks:
        beginning.append(text(3 * block + 1, min(block_len, left)))
        left -= len(beginning[-1])
    own = text(3 * name + 2, left)
    return Texts([*beginning, own]) if left < num_tokens else own


def conversations(arrivals: Sequence[Arrival], *, turns: int, think_s: float) -> list[Arrival]:
    """Makes every `turns` neighbours one conversation: the first comes when it is due, each other one `think_s` seconds
    after the answer before.

    Raises:
        ValueError: for less than one turn, or a time below 0 or above 1e5 seconds.
    """
    if turns < 1:
        raise ValueError(f"a conversation has at least 1 turn, but {turns} given")
    if not 0 <= think_s <= _LONGEST_S:
        raise ValueError(f"the time between turns is from 0 to {_LONGEST_S:g} seconds, but {think_s} given")
    return list(_joined(arrivals, turns, think_s))


def _joined(arrivals: Iterable[Arrival], turns: int, think_s: float) -> Iterator[Arrival]:
    for place, one in enumerate(arrivals):
        if place % turns == 0:
            yield one
        else:
            yield Arrival(due_s=think_s, prompt=one.prompt, output_len=one.output_len, follows=place - 1)
