"""Configurations of sparse attention for one group, and the best of them by an objective (CSPS §3.2.6, supplement B).

A configuration has a number of levels, the drop ratio of level 2 and micro-partitions for each level. The number of
levels depends on the hosts of the group. The ratios of further levels follow from that of level 2.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, product

import msgspec

from longspan.core.exchange import ALLTOALL
from longspan.core.sparse import MAX_LEVELS, DropMode, SparseSetting
from longspan.core.sparse_plan import ratios_by_rule, segments_of
from longspan.cost.csa_pipeline import Members, Rates
from longspan.cost.csa_price import prompt_s
from longspan.cost.shape import ModelShape

STEP = 0.02
"""Distance between two drop ratios of a grid (supplement B)."""
_MAX_DEVIATION = 0.2
"""Upper bound for the difference between the ratio of a KV head and the mean ratio."""
_WITHOUT_DROPS = 2
"""Layers without drops: the first and the last."""

Loss = Callable[[int, tuple[float, ...]], float]
"""A_d in points, by tokens of the prompt and mean drop ratio of each level from 2 on. Exact attention has no ratios."""


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Levels (1 is exact attention), the drop ratio of level 2, and micro-partitions of the levels from 2 on."""

    levels: int
    drop: float = 0.0
    micro_partitions: tuple[int, ...] = ()


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration with its predicted time to first token and its predicted loss in points.

    Attributes:
        is_met: whether the choice is expected to meet the objective.
    """

    configuration: Configuration
    mode: DropMode
    ttft_s: float
    loss: float
    is_met: bool = True


def least_ttft(choices: Iterable[Choice], max_loss: float) -> Choice | None:
    """Return the quickest choice that loses at most `max_loss` points (Eq. 8), or None if every choice loses more."""
    return min(
        (choice for choice in choices if choice.loss <= max_loss), key=lambda choice: choice.ttft_s, default=None
    )


def least_loss(choices: Iterable[Choice], max_ttft_s: float) -> Choice | None:
    """Return the choice of least loss that takes at most `max_ttft_s` (Eq. 9), or None if every choice takes longer.

    Of equal losses the quicker choice is returned.
    """
    in_time = (choice for choice in choices if choice.ttft_s <= max_ttft_s)
    return min(in_time, key=lambda choice: (choice.loss, choice.ttft_s), default=None)


@dataclass(frozen=True, kw_only=True)
class Group:
    """The members that share prompts of one model, and how they compute them.

    Attributes:
        hosts: the host of each member, with members of one host next to each other.
        racks: the number of racks of these hosts.
        kind: the exact exchange whose sparse form computes the prompts.
        deviations: standard deviations of attention scores by layer and KV head. The ratio of a head is proportional to
            its deviation, within 0.2 of the mean ratio. If empty, all have the same ratio.
    """

    shape: ModelShape
    hosts: tuple[int, ...]
    rates: Rates
    racks: int = 1
    kind: str = ALLTOALL.kind
    mode: DropMode = "qkv"
    block_size: int = 16
    deviations: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.deviations and len(self.deviations) != self.shape.num_layers:
            given, layers = len(self.deviations), self.shape.num_layers
            raise ValueError(f"{given} standard deviations given for {layers} layers: give one for each")

    def levels(self) -> tuple[int, ...]:
        """Return the numbers of levels to try. A group on several hosts or racks has more levels."""
        fewest = 3 if self.racks > 1 else 2 if len(set(self.hosts)) > 1 else 1
        largest = len(segments_of(len(self.hosts), self.hosts, MAX_LEVELS)) + 1
        return tuple(levels for levels in (fewest, fewest + 1) if levels <= largest) or (largest,)

    def table(self, configuration: Configuration) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Return the ratios by layer, KV head and level from 2 on. A single entry is for all layers, or heads."""
        drop, levels = configuration.drop, configuration.levels
        if not self.deviations:
            return ((ratios_by_rule(drop, levels),),)
        inner = self.deviations[1:-1] or self.deviations
        mean = statistics.fmean(chain.from_iterable(inner))

        def ratio(deviation: float) -> float:
            ratio = min(max(drop * deviation / mean, drop - _MAX_DEVIATION), drop + _MAX_DEVIATION)
            return min(1.0, max(0.0, round(round(ratio / STEP) * STEP, 2)))

        return tuple(tuple(ratios_by_rule(ratio(one), levels) for one in heads) for heads in self.deviations)

    def mean_drop(self, configuration: Configuration) -> tuple[float, ...]:
        """Return the mean ratio of each level from 2 on, over KV heads and layers."""
        table, num_layers = self.table(configuration), self.shape.num_layers
        share = max(0, num_layers - _WITHOUT_DROPS) / num_layers
        by_level = zip(*chain.from_iterable(table[1:-1] or table), strict=True)
        return tuple(share * statistics.fmean(ratios) for ratios in by_level)

    def partition(self, num_tokens: int) -> int:
        """Return the tokens of a partition, rounded up to whole blocks."""
        return -(-num_tokens // (len(self.hosts) * self.block_size)) * self.block_size

    def setting(self, num_tokens: int, configuration: Configuration) -> SparseSetting | None:
        """Return the setting of a whole prompt, or None for exact attention."""
        levels = configuration.levels
        if levels == 1:
            return None
        return SparseSetting(
            partition=self.partition(num_tokens),
            segments=segments_of(len(self.hosts), self.hosts, levels),
            drop=self.table(configuration),
            mode=self.mode,
            micro_partitions=configuration.micro_partitions,
        )

    def ttft_s(self, num_tokens: int, configuration: Configuration) -> float:
        """Predict T_a + R L_in of a whole prompt, by the speeds of the group alone (Eq. 6)."""
        setting, partition = self.setting(num_tokens, configuration), self.partition(num_tokens)
        return prompt_s(setting, num_tokens, partition, Members(self.hosts, self.shape, self.rates), self.kind)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The configurations that are enumerated.

    Attributes:
        drops: ratios of level 2, ascending.
        near_pieces, far_pieces: micro-partitions of level 2, and of further levels.
    """

    drops: tuple[float, ...] = tuple(round(STEP * number, 2) for number in range(50))
    near_pieces: tuple[int, ...] = tuple(range(1, 17))
    far_pieces: tuple[int, ...] = tuple(range(1, 9))

    def options(self, group: Group) -> list[Configuration]:
        """Return one configuration without micro-partitions for each number of levels and drop ratio."""
        return [Configuration(n, drop) for n in group.levels() for drop in (self.drops if n > 1 else (0.0,))]

    def _pieces(self, levels: int) -> Iterator[tuple[int, ...]]:
        """Yield the micro-partitions of the levels from 2 on."""
        yield from product(*[self.near_pieces, *[self.far_pieces] * (levels - 2)][: levels - 1])

    def quickest(self, group: Group, num_tokens: int, option: Configuration) -> tuple[float, Configuration]:
        """Return the least seconds of an option and its micro-partitions. Of equally quick ones the fewest win."""
        cut = (Configuration(option.levels, option.drop, pieces) for pieces in self._pieces(option.levels))
        timed = ((group.ttft_s(num_tokens, configuration), configuration) for configuration in cut)
        return min(timed, key=lambda pair: (pair[0], pair[1].micro_partitions))

    def choices(self, group: Group, num_tokens: int, loss: Loss) -> Iterator[Choice]:
        """Yield the options of a group, each with its quickest micro-partitions."""
        for option in self.options(group):
            ttft_s, configuration = self.quickest(group, num_tokens, option)
            yield Choice(configuration, group.mode, ttft_s, loss(num_tokens, group.mean_drop(option)))
