"""Configurations of sparse attention, and the best of them by enumeration (CSPS §3.2.6, supplement B).

What is enumerated: levels by where members are, the drop ratio of level 2, from which those of further levels follow,
and micro-partitions. Drops are tried from few to many, and a branch ends where it breaks the constraint on accuracy:
a loss must not become less by more drops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import msgspec

from longspan.core.sparse import MAX_LEVELS, DropMode, SparseSetting
from longspan.core.sparse_plan import ratios_by_rule, segments_of
from longspan.cost.architecture import ModelShape
from longspan.cost.csa_pipeline import Rates
from longspan.cost.csa_price import prompt_s

STEP = 0.02
"""The distance of drop ratios that are tried."""
_MOST_APART = 0.2
"""The most by which the ratio of a layer differs from the mean."""

Loss = Callable[[int, tuple[float, ...]], float]
"""A_d: the loss of accuracy by tokens of the prompt and mean drop ratio of each level from 2 on; none for one level."""


class Configuration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice: levels (1 is exact attention), the drop ratio of level 2, micro-partitions of levels from 2 on."""

    levels: int
    drop: float = 0.0
    micro_partitions: tuple[int, ...] = ()


class Choice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A configuration, and what is predicted of it."""

    configuration: Configuration
    ttft_s: float
    loss: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """The members that share prompts of one model, and how they compute them.

    Attributes:
        hosts: the host of each member, neighbours together.
        racks: how many these hosts are in.
        deviations: standard deviations of attention scores, one for each layer; ratios of layers are in proportion to
            them, but not farther than 0.2 from their mean. Without them all layers have the same.
    """

    shape: ModelShape
    hosts: tuple[int, ...]
    rates: Rates
    racks: int = 1
    mode: DropMode = "qkv"
    block_size: int = 16
    samples: int = 64
    deviations: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.deviations and len(self.deviations) != self.shape.num_layers:
            given, layers = len(self.deviations), self.shape.num_layers
            raise ValueError(f"{given} standard deviations given for {layers} layers: give one for each")

    @property
    def bytes_per_s(self) -> float:
        """Speed of the slowest link in use: between hosts if there are several."""
        return (self.rates.between if len(set(self.hosts)) > 1 else self.rates.inside).bytes_per_s

    def with_link(self, bytes_per_s: float) -> Group:
        """Returns the same with another speed of the slowest link."""
        name = "between" if len(set(self.hosts)) > 1 else "inside"
        speed = msgspec.structs.replace(getattr(self.rates, name), bytes_per_s=bytes_per_s)
        return replace(self, rates=msgspec.structs.replace(self.rates, **{name: speed}))

    def levels(self) -> tuple[int, ...]:
        """Returns the numbers of levels to try: more, the farther apart members are."""
        fewest = 3 if self.racks > 1 else 2 if len(set(self.hosts)) > 1 else 1
        most = len(segments_of(len(self.hosts), self.hosts, MAX_LEVELS)) + 1
        return tuple(levels for levels in (fewest, fewest + 1) if levels <= most) or (most,)

    def layer_ratios(self, drop: float) -> list[float]:
        """Returns the ratio of level 2 in each layer; the first and the last drop nothing."""
        layers = self.shape.num_layers
        inner = self.deviations[1:-1] or (1.0,) * (layers - 2)
        found = []
        for deviation in inner:
            ratio = drop * deviation * len(inner) / sum(inner)
            near = min(max(ratio, drop - _MOST_APART), drop + _MOST_APART)
            found.append(min(1.0, max(0.0, round(near / STEP) * STEP)) if self.deviations else drop)
        return [0.0, *found, 0.0][:layers] if layers > 1 else [0.0]

    def mean_drop(self, configuration: Configuration) -> tuple[float, ...]:
        """Returns the mean ratio over layers of each level from 2 on."""
        ratios = self.layer_ratios(configuration.drop)
        inner = [ratios_by_rule(ratio, configuration.levels) for ratio in ratios[1:-1]]
        return tuple(sum(level) / len(ratios) for level in zip(*inner, strict=True)) or (0.0,) * (
            configuration.levels - 1
        )

    def partition(self, num_tokens: int) -> int:
        """Returns the tokens of a partition, of whole blocks."""
        return -(-num_tokens // (len(self.hosts) * self.block_size)) * self.block_size

    def settings(self, configuration: Configuration) -> dict[str, object]:
        """Returns a configuration as a file of settings has it (`--csa`)."""
        by_layer = [ratios_by_rule(ratio, configuration.levels) for ratio in self.layer_ratios(configuration.drop)]
        by_level = dict(enumerate(map(list, zip(*by_layer, strict=True)), 2))
        return {
            "levels": configuration.levels,
            "drop": {level: ratios[1] if len(set(ratios[1:-1])) == 1 else ratios for level, ratios in by_level.items()},
            "drop_mode": self.mode,
            "micro_partitions": dict(enumerate(configuration.micro_partitions, 2)),
            "samples": self.samples,
        }

    def ttft_s(self, num_tokens: int, configuration: Configuration) -> float:
        """Returns T_a + R L_in: what attention takes in all layers, and the rest (§3.2.6)."""
        partition, levels, setting = self.partition(num_tokens), configuration.levels, None
        if levels > 1:
            setting = SparseSetting(
                partition=partition,
                segments=segments_of(len(self.hosts), self.hosts, levels),
                drop=tuple((ratios_by_rule(ratio, levels),) for ratio in self.layer_ratios(configuration.drop)),
                mode=self.mode,
                micro_partitions=configuration.micro_partitions,
                samples=self.samples,
            )
        return prompt_s(setting, num_tokens, partition, self.hosts, self.shape, self.rates)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values that enumeration tries.

    Attributes:
        drops: ratios of level 2, ascending.
        near_pieces, far_pieces: micro-partitions of level 2, and of further ones.
    """

    drops: tuple[float, ...] = tuple(round(STEP * number, 2) for number in range(50))
    near_pieces: tuple[int, ...] = tuple(range(1, 17))
    far_pieces: tuple[int, ...] = tuple(range(1, 9))

    def configurations(self, levels: int, drop: float) -> Iterator[Configuration]:
        """Yields those that differ in micro-partitions."""
        by_level = [self.near_pieces, *[self.far_pieces] * (levels - 2)][: levels - 1]
        for pieces in product(*by_level):
            yield Configuration(levels, drop, pieces)

    def ratios(self, levels: int) -> tuple[float, ...]:
        return self.drops if levels > 1 else (0.0,)

    def quickest(self, group: Group, num_tokens: int, levels: int, drop: float) -> tuple[float, Configuration]:
        """Chooses micro-partitions; of equally quick ones the fewest."""
        found = ((group.ttft_s(num_tokens, one), one) for one in self.configurations(levels, drop))
        return min(found, key=lambda pair: (pair[0], pair[1].micro_partitions))


def least_ttft(group: Group, num_tokens: int, loss: Loss, max_loss: float, grid: Grid) -> Choice | None:
    """Finds the quickest configuration of which no more loss is predicted than `max_loss` (Eq. 8); None if all have."""
    best: Choice | None = None
    for levels in group.levels():
        for drop in grid.ratios(levels):
            lost = loss(num_tokens, group.mean_drop(Configuration(levels, drop)))
            if lost > max_loss:
                break
            ttft_s, found = grid.quickest(group, num_tokens, levels, drop)
            if best is None or ttft_s < best.ttft_s:
                best = Choice(found, ttft_s, lost)
    return best


def least_loss(group: Group, num_tokens: int, loss: Loss, max_ttft_s: float, grid: Grid) -> Choice | None:
    """Finds the configuration of least predicted loss that takes no longer than `max_ttft_s` (Eq. 9); None if all do.

    Of equal losses the quicker is chosen.
    """
    best: Choice | None = None
    for levels in group.levels():
        for drop in grid.ratios(levels):
            lost = loss(num_tokens, group.mean_drop(Configuration(levels, drop)))
            if best is not None and lost > best.loss:
                break
            ttft_s, found = grid.quickest(group, num_tokens, levels, drop)
            if ttft_s <= max_ttft_s and (best is None or (lost, ttft_s) < (best.loss, best.ttft_s)):
                best = Choice(found, ttft_s, lost)
    return best
