"""Where the tokens of one request lie: on which member of its group, in which block, in which slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.core.rotation import Rotation
from longspan.core.runs import Deal, Run
from longspan.core.steps import BlockRef


@dataclass(frozen=True, kw_only=True, slots=True)
class Homes:
    """A request's block table, read.

    Entry b of the `table` is the block of tokens `[b * block_size, (b + 1) * block_size)`. With a `rotation` that holds
    up to its start only: later entries are the blocks that members begin after it, in that order. Either way a
    member's tokens lie in its own blocks one after the other, in order of position.
    """

    table: Sequence[BlockRef]
    group: tuple[int, ...]
    block_size: int
    rotation: Rotation | None = None

    def held(self, num_tokens: int) -> Deal:
        """Which of the first `num_tokens` tokens each member of the group holds, ascending."""
        if self.rotation is None or num_tokens <= self.rotation.start:
            return self._by_blocks(num_tokens)
        before = self._by_blocks(self.rotation.start)
        return tuple((*runs, *self.rotation.runs(member, num_tokens)) for member, runs in enumerate(before))

    def counts(self, num_tokens: int) -> tuple[int, ...]:
        """How many of the first `num_tokens` tokens each member of the group holds."""
        if self.rotation is not None and num_tokens > self.rotation.start:
            return tuple(sum(len(run) for run in runs) for runs in self.held(num_tokens))
        held, size = dict.fromkeys(self.group, 0), self.block_size
        num_full, rest = divmod(num_tokens, size)
        for instance, _ in self.table[:num_full]:
            held[instance] += size
        if rest:
            held[self.table[num_full].instance] += rest
        return tuple([held[instance] for instance in self.group])

    def blocks(self, instance: int) -> tuple[int, ...]:
        """The blocks of one instance, in order of the tokens in them."""
        return tuple(ref.block for ref in self.table if ref.instance == instance)

    def slot(self, position: int) -> tuple[BlockRef, int]:
        """The block of a token, and its offset there."""
        if self.rotation is None or position < self.rotation.start:
            return self.table[position // self.block_size], position % self.block_size
        member, index = self.rotation.place(position)
        instance = self.group[member]
        return BlockRef(instance, self.blocks(instance)[index // self.block_size]), index % self.block_size

    def _by_blocks(self, num_tokens: int) -> Deal:
        """As `held`, neighbouring blocks joined, where each block holds the tokens of its place in the table."""
        held: dict[int, list[Run]] = {instance: [] for instance in self.group}
        for index, ref in enumerate(self.table[: -(-num_tokens // self.block_size)]):
            runs = held[ref.instance]
            start, stop = index * self.block_size, min(num_tokens, (index + 1) * self.block_size)
            if runs and runs[-1].stop == start:
                runs[-1] = Run(runs[-1].start, stop)
            else:
                runs.append(Run(start, stop))
        return tuple(tuple(held[instance]) for instance in self.group)
