"""Decode that rotates by token: each new token goes to the member that holds the fewest tokens of its request."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from longspan.core.runs import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """From position `start` on each token goes to the member that holds the fewest; of equals to the first.

    So the members with the fewest take turns until they hold as many as the next one, which then joins them. Who holds
    a token is arithmetic, and what a member holds is one run for each such phase.

    Attributes:
        held: how many tokens before `start` each member of the group holds.
    """

    start: int
    held: tuple[int, ...]

    def place(self, position: int) -> tuple[int, int]:
        """The member that holds a token at `start` or later, and how many tokens that one holds before it."""
        phase = next(phase for phase in reversed(_phases(self)) if phase.start <= position)
        rounds, turn = divmod(position - phase.start, len(phase.members))
        return phase.members[turn], phase.level + rounds

    def runs(self, member: int, stop: int) -> tuple[Run, ...]:
        """What a member holds of `[start, stop)`, ascending: one run at most for each member of the group."""
        runs = []
        for phase in _phases(self):
            if member in phase.members:
                first = phase.start + phase.members.index(member)
                end = stop if phase.stop is None else min(stop, phase.stop)
                if first < end:
                    runs.append(Run(first, end, len(phase.members)))
        return tuple(runs)

    def num_held(self, member: int, stop: int) -> int:
        """How many of the tokens `[0, stop)` a member holds; `stop` is not before `start`."""
        return self.held[member] + sum(len(run) for run in self.runs(member, stop))

    def num_blocks(self, stop: int, block_size: int) -> int:
        """Blocks that members begin for the tokens `[0, stop)`, each for its own; `stop` is not before `start`."""
        return sum(-(-self.num_held(member, stop) // block_size) for member in range(len(self.held)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """`members` take turns in the tokens `[start, stop)`, and hold `level` tokens each before; the last never ends."""

    start: int
    stop: int | None
    level: int
    members: tuple[int, ...]


@lru_cache(maxsize=1024)
def _phases(rotation: Rotation) -> tuple[_Phase, ...]:
    held, start, phases = rotation.held, rotation.start, []
    levels = sorted(set(held))
    for level, following in zip(levels, [*levels[1:], None], strict=True):
        members = tuple(member for member, number in enumerate(held) if number <= level)
        stop = None if following is None else start + len(members) * (following - level)
        phases.append(_Phase(start=start, stop=stop, level=level, members=members))
        start = start if stop is None else stop
    return tuple(phases)
