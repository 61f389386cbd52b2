"""Owners of KV: the member of a group, the block and the slot of each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from longspan.core.blocks import BlockRef
from longspan.core.runs import Run, SpanShards


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotation:
    """Assigns each token from `start` on to the member with the fewest tokens. The first member wins ties.

    Members with the fewest tokens alternate until the next member joins them. A member has one run per such phase.

    Attributes:
        held: number of tokens before `start` on each member of the group.
    """

    start: int
    held: tuple[int, ...]

    def place(self, position: int) -> tuple[int, int]:
        """Return the member of a token from `start` on, and the number of its earlier tokens on that member."""
        phase = next(phase for phase in reversed(_phases(self)) if phase.start <= position)
        rounds, turn = divmod(position - phase.start, len(phase.members))
        return phase.members[turn], phase.level + rounds

    def runs(self, member: int, stop: int) -> tuple[Run, ...]:
        """Return the runs of a member in `[start, stop)`, ascending."""
        runs = []
        for phase in _phases(self):
            if member in phase.members:
                first = phase.start + phase.members.index(member)
                end = stop if phase.stop is None else min(stop, phase.stop)
                if first < end:
                    runs.append(Run(first, end, len(phase.members)))
        return tuple(runs)

    def num_held(self, member: int, stop: int) -> int:
        """Return the number of tokens of `[0, stop)` on a member. `stop` is at least `start`."""
        return self.held[member] + sum(len(run) for run in self.runs(member, stop))

    def num_blocks(self, stop: int, block_size: int) -> int:
        """Return the number of blocks that the tokens `[0, stop)` fill or begin. `stop` is at least `start`."""
        return sum(-(-self.num_held(member, stop) // block_size) for member in range(len(self.held)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Phase:
    """Tokens `[start, stop)` alternate over `members` with `level` earlier tokens each. The last has no `stop`."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Owners:
    """Reads a request's block table.

    Entry b of the `table` is the block of tokens `[b * block_size, (b + 1) * block_size)`. With a `rotation`, this is
    true up to its start. Later entries are the blocks that members begin after it, in that order. A member's tokens
    fill its blocks in order of position.

    Blocks in pools outside `group`, such as host pools, are left out.
    """

    table: Sequence[BlockRef]
    group: tuple[int, ...]
    block_size: int
    rotation: Rotation | None = None

    def held(self, num_tokens: int) -> SpanShards:
        """Return the runs of each member in the first `num_tokens` tokens, ascending."""
        if self.rotation is None or num_tokens <= self.rotation.start:
            return self._by_blocks(num_tokens)
        before = self._by_blocks(self.rotation.start)
        return tuple((*runs, *self.rotation.runs(member, num_tokens)) for member, runs in enumerate(before))

    def counts(self, num_tokens: int) -> tuple[int, ...]:
        if self.rotation is not None and num_tokens > self.rotation.start:
            return tuple(sum(len(run) for run in runs) for runs in self.held(num_tokens))
        held, size = dict.fromkeys(self.group, 0), self.block_size
        num_full, rest = divmod(num_tokens, size)
        for pool, number in Counter([pool for pool, _ in self.table[:num_full]]).items():
            if pool in held:
                held[pool] += number * size
        if rest:
            held[self.table[num_full].pool] += rest  # the last block is on a device
        return tuple([held[instance] for instance in self.group])

    def blocks(self, instance: int) -> tuple[int, ...]:
        return tuple(ref.block for ref in self.table if ref.pool == instance)

    def slots(self, run: Run) -> Iterator[tuple[range, Sequence[BlockRef]]]:
        """Yield the slots of a run's tokens, in order, as ranges of places in a sequence of blocks."""
        size, rotation = self.block_size, self.rotation
        before = run.positions if rotation is None else range(run.start, min(run.stop, rotation.start), run.step)
        if before:
            first = before[0] // size
            shift = first * size
            yield range(before.start - shift, before.stop - shift, run.step), self.table[first : before[-1] // size + 1]
        if rotation is not None:
            for position in run.positions[len(before) :]:
                member, index = rotation.place(position)
                instance, place = self.group[member], index % size
                yield range(place, place + 1), (BlockRef(instance, self.blocks(instance)[index // size]),)

    def _by_blocks(self, num_tokens: int) -> SpanShards:
        held: dict[int, list[Run]] = {instance: [] for instance in self.group}
        pools = [pool for pool, _ in self.table[: -(-num_tokens // self.block_size)]]
        firsts = [index for index, pool in enumerate(pools) if not index or pool != pools[index - 1]]
        edges = [*(first * self.block_size for first in firsts), num_tokens]
        for first, (start, stop) in zip(firsts, pairwise(edges), strict=True):
            if pools[first] in held:
                held[pools[first]].append(Run(start, stop))
        return tuple(tuple(held[instance]) for instance in self.group)
