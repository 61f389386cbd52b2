"""Tetris (chunkwise dynamic sequence parallelism), and fixed groups, its baseline, on the same machinery.

Both plan each prompt when it arrives, by seconds that were measured (`longspan profile`) or expected, see
`cdsp_times.py`; `cdsp_policy.py` runs the plans. Decode is as in `context`: KV stays where it is, queries move. Where
some instances only decode, KV goes to one of these instead (`routing.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from longspan.core.places import hosts_of
from longspan.core.steps import Exchange
from longspan.policy.cdsp import Planner
from longspan.policy.cdsp_fixed import FixedGroups
from longspan.policy.cdsp_policy import Cdsp, ChunkPlanner
from longspan.policy.cdsp_rates import RateTable, RateWatch, check_improvement_rate
from longspan.policy.cdsp_times import check_sizes, expected_times, measured_times, sp_sizes
from longspan.policy.choosing import Chooser, Facts
from longspan.policy.group_shares import GroupShares
from longspan.policy.options import parse_options
from longspan.policy.sharing import SharingOptions

_IMPROVEMENT_RATE = 0.3
"""Where no table says otherwise: between what the paper finds best for few and for many requests."""
_EXCHANGES: tuple[Exchange, ...] = ("ring_kv", "ring_q", "alltoall", "gather_kv")


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How groups compute.

    Attributes:
        exchange, decode, layout, rotate: as of `context`, but for chains and `gather_hidden`.
        balance: whether the KV of earlier chunks is spread evenly over a group that has grown.
    """

    exchange: Literal["auto", "ring_kv", "ring_q", "alltoall", "gather_kv"] = "auto"
    decode: Literal["ring_q", "ring_kv", "alltoall", "gather_kv"] = "ring_q"
    layout: Literal["auto", "zigzag", "striped"] = "auto"
    rotate: Literal["block", "token"] = "block"
    balance: bool = True

    def sharing(self) -> SharingOptions:
        """The same, as the options that shares are shaped by."""
        layout = "zigzag" if self.layout == "auto" else self.layout
        return SharingOptions(exchange=self.exchange, decode=self.decode, layout=layout, rotate=self.rotate)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Those that prompts may be computed with."""
        return _EXCHANGES if self.exchange == "auto" else (self.exchange,)


@dataclass(frozen=True, kw_only=True)
class TetrisOptions(GroupOptions):
    """Options of `tetris`.

    Attributes:
        improvement_rate: by which part of the time a larger group must be quicker to be taken; `auto` goes by how many
            requests arrive, and `improvement_rates`.
        improvement_rates: by requests per second, such as `0.5:0.1,1:0.3`: the nearest counts, looked up every 30 s.
        chunking: whether a prompt may be cut into chunks on growing groups.
        sp_sizes: of groups; `auto` is powers of two.
        min_chunk: tokens below which a chunk does not pay, unless it is the last.

    Raises:
        ValueError: for a value out of range.
    """

    improvement_rate: float | Literal["auto"] = "auto"
    improvement_rates: str = ""
    chunking: bool = True
    sp_sizes: str = "auto"
    min_chunk: int = 256

    def __post_init__(self) -> None:
        if self.improvement_rate != "auto":
            check_improvement_rate(self.improvement_rate)
            if self.improvement_rates:
                raise ValueError(
                    f"improvement_rates are for improvement_rate auto, but {self.improvement_rate} given: leave one out"
                )
        if self.min_chunk < 1:
            raise ValueError(f"min_chunk must be at least 1, but {self.min_chunk} given")

    def watch(self) -> RateWatch:
        """What says the improvement rate."""
        if self.improvement_rates:
            return RateWatch(RateTable.parse(self.improvement_rates))
        rate = _IMPROVEMENT_RATE if self.improvement_rate == "auto" else self.improvement_rate
        return RateWatch(RateTable(entries=((0.0, rate),)))


@dataclass(frozen=True, kw_only=True)
class FixedOptions(GroupOptions):
    """Options of `fixed-sp`.

    Attributes:
        sp: instances of a group.
    """

    sp: int = 1


def create_tetris(num_instances: int, options: Mapping[str, str], facts: Facts) -> Cdsp:
    """The policy.

    Raises:
        ValueError: for an unknown option, a bad value, or sizes without measurements where others have them.
    """
    parsed = parse_options("tetris", TetrisOptions, options)
    measured, everyone = measured_times(facts, parsed.exchanges), _prefilling(num_instances, facts)
    sizes = sp_sizes(parsed.sp_sizes, len(everyone), measured)
    times = measured or expected_times(facts, sizes)
    planner = Planner(
        {size: times[size] for size in sizes},
        hosts_of([facts.place(i) for i in everyone]),
        min_chunk_tokens=parsed.min_chunk,
    )
    return _policy(everyone, parsed, facts, planner, parsed.watch(), chunking=parsed.chunking)


def create_fixed(num_instances: int, options: Mapping[str, str], facts: Facts) -> Cdsp:
    """The policy.

    Raises:
        ValueError: for an unknown option, a bad value, or a size that does not divide the instances.
    """
    parsed = parse_options("fixed-sp", FixedOptions, options)
    measured, everyone = measured_times(facts, parsed.exchanges), _prefilling(num_instances, facts)
    check_sizes([parsed.sp], len(everyone), measured)
    times = measured or expected_times(facts, [parsed.sp])
    planner = FixedGroups(times[parsed.sp], sorted(everyone, key=facts.place), parsed.sp)
    return _policy(everyone, parsed, facts, planner, RateWatch(RateTable(entries=((0.0, 0.0),))))


def _prefilling(num_instances: int, facts: Facts) -> range:
    """The instances that prompts go to."""
    return range(num_instances) if facts.roles is None else facts.roles.prefill


def _policy(
    instances: range,
    options: GroupOptions,
    facts: Facts,
    planner: ChunkPlanner,
    watch: RateWatch,
    *,
    chunking: bool = True,
) -> Cdsp:
    sharing = options.sharing()
    shares = GroupShares(sharing, Chooser(len(instances), facts, sharing.wanted), balance=options.balance)
    everyone = tuple(sorted(instances, key=facts.place))
    decode = range(0) if facts.roles is None else facts.roles.decode
    return Cdsp(everyone, planner, shares, watch, chunking=chunking, decode=decode)
