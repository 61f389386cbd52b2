"""Tetris: chunkwise dynamic sequence parallelism. Prompts are planned as chunks on growing groups."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from longspan.core.exchange import RING_Q, Exchange, decoding, exchange_named, exchange_of, of_any_layout
from longspan.cost.profile import PrefillTime, fit_times
from longspan.errors import ParameterError
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts
from longspan.policy.group_times import nearest_times
from longspan.policy.sharing import SharingOptions, check_exchange
from longspan.policy.tetris.execution import Cdsp
from longspan.policy.tetris.planner import Planner
from longspan.policy.tetris.rates import RateTable, RateWatch, check_improvement_rate

if TYPE_CHECKING:
    from longspan.policy.traffic import Traffic

_ENOUGH_OF_A_HOST = 4
"""Least instances per host to bound groups by hosts. With fewer, prompts lose more than decodes gain at low load."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options for the exchanges and layouts of groups.

    Attributes:
        exchange, decode, layout, rotate: as of `context`, without chains and `gather_hidden`.
    """

    exchange: str = "auto"
    decode: str = RING_Q.kind
    layout: Literal["auto", "zigzag", "striped"] = "auto"
    rotate: Literal["block", "token"] = "block"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, of_any_layout)
        check_exchange("decode", self.decode, decoding, automatic=False)

    def sharing(self) -> SharingOptions:
        return SharingOptions.of(self, layout="zigzag" if self.layout == "auto" else self.layout)

    def group_parts(self, instances: Sequence[int], facts: Facts, *, balance: bool = False) -> GroupParts:
        return GroupParts(len(instances), self.sharing(), facts, balance=balance)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return of_any_layout() if self.exchange == "auto" else (exchange_of(self.exchange),)


@dataclass(frozen=True, kw_only=True)
class TetrisOptions(GroupOptions):
    """Options of `tetris`: for plans, and for the exchanges and layouts of groups.

    Attributes:
        improvement_rate: the share of the time that a larger group must save. `auto` looks it up in
            `improvement_rates` by the observed request rate.
        improvement_rates: improvement rates by requests per second, such as `0.5:0.1,1:0.3`. The nearest request rate
            counts. It is looked up every 30 s, and more often after a start. Without it, `auto` learns the rates from
            the requests, see `learning`.
        chunking: whether a prompt may be cut into chunks on growing groups.
        sp_sizes: sizes of groups. `auto` is powers of two, see also `_usual_size`.
        min_chunk: lower bound for the tokens of a chunk, except the last.
        balance: whether the KV of earlier chunks is spread evenly over a group that has grown.
    """

    improvement_rate: float | Literal["auto"] = "auto"
    improvement_rates: str = ""
    chunking: bool = True
    sp_sizes: str = "auto"
    min_chunk: int = 256
    balance: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.improvement_rate != "auto":
            check_improvement_rate(self.improvement_rate)
            if self.improvement_rates:
                raise ValueError(
                    f"improvement_rates are for improvement_rate auto, but {self.improvement_rate} given: leave one out"
                )
        if self.min_chunk < 1:
            raise ParameterError("min_chunk", f"must be at least 1, but {self.min_chunk} given", self.min_chunk)

    @property
    def rate_table(self) -> RateTable | None:
        """The given improvement rates. None if none was given."""
        if self.improvement_rates:
            return RateTable.parse(self.improvement_rates)
        return None if self.improvement_rate == "auto" else RateTable(entries=((0.0, self.improvement_rate),))


class Tetris(Cdsp, name="tetris"):
    """Plans chunks by Algorithm 1."""

    Options = TetrisOptions
    changeable = ("improvement_rate", "improvement_rates", "chunking", "min_chunk")
    knows_roles = True
    reads_hosts = True

    def __init__(self, instances: tuple[int, ...], options: TetrisOptions, facts: Facts) -> None:
        times, hosts = sp_times(facts, options.exchanges, options.sp_sizes, len(instances)), facts.hosts(instances)
        usual_size = _usual_size(facts, instances) if options.sp_sizes == "auto" else None
        planner = Planner(times, hosts, min_chunk_tokens=options.min_chunk, usual_size=usual_size)
        default = RateTable(entries=((0.0, _default_improvement_rate(has_roles=facts.has_roles)),))
        super().__init__(
            instances,
            options,
            planner,
            options.group_parts(instances, facts, balance=options.balance),
            RateWatch(default),
            chunking=options.chunking,
            decode=facts.decode,
        )
        self._planner: Planner = planner
        self._default, self._traffic = default, facts.traffic
        self._use_rates(options)

    def merged(self, changes: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the options after a change. An improvement rate replaces a table, and the reverse."""
        kept = dict(self.given)
        if changes.get("improvement_rate") not in (None, "auto"):
            kept.pop("improvement_rates", None)
        if changes.get("improvement_rates"):
            kept.pop("improvement_rate", None)
        return {**kept, **changes}

    def change(self, options: TetrisOptions) -> None:
        """Apply other options to prompts that are planned from now on."""
        self._use_rates(options)
        super().change(options)
        self.chunking, self._planner.min_chunk_tokens = options.chunking, options.min_chunk

    def _use_rates(self, options: TetrisOptions) -> None:
        """Use the given improvement rates, or learn them."""
        table, self._traffic, self._learner = options.rate_table, self.traffic, None
        if table is None:
            from longspan.policy.tetris.learning import Learner  # noqa: PLC0415 - `auto` learns no rates

            self._learner = Learner(self._planner, self._traffic)
            table = self._learner.table or self._default
        self._watch.use(table)

    @property
    def rate_table(self) -> RateTable:
        """The improvement rates in use: given, learned, or the default."""
        return self._watch.table

    @property
    def hint(self) -> str | None:
        """Advise a table of improvement rates, if none is given or was found for earlier requests."""
        if self._learner is None or self._learner.table is not None:
            return None
        return (
            f"policy option improvement_rate=auto is {self._watch.improvement_rate:g} until rates for the requests are "
            "found: find a table before with longspan simulate --profile-improvement-rates, and give it as policy "
            "option improvement_rates"
        )

    @property
    def traffic(self) -> Traffic | None:
        return self._traffic if self._learner is None else self._learner.traffic


def _default_improvement_rate(*, has_roles: bool) -> float:
    """Return the rate before any is learned: between the paper's best rates for low and for high request rates.

    If instances also decode, it is low: most groups have the largest size, and few wait for overlapping other groups.
    """
    return 0.3 if has_roles else 0.05


def _usual_size(facts: Facts, instances: Sequence[int]) -> int | None:
    """Return the number of instances of the largest host, as an upper bound for groups. None is no bound.

    There is a bound if instances also decode and hosts are large enough. A decode steps together with all prompts on
    its group, and with their groups. Groups within one host do not overlap with other hosts. Larger groups overlap,
    until all instances of the cluster wait for each other in every step.
    """
    per_host = max(Counter(facts.hosts(instances)).values())
    return per_host if not facts.has_roles and per_host >= _ENOUGH_OF_A_HOST else None


# ---------------------------------------------------------------- times of chunks


_ONE_INSTANCE = PrefillTime(start_s=0.02, token_s=1e-4, cached_s=2e-9, square_s=1e-9)
"""Times of one instance if no cost is known. Only the order of lengths matters."""
_HOP_S = 1e-3
"""Seconds that each further member adds to a step, if nothing was measured."""


def sp_times(facts: Facts, exchanges: Collection[Exchange], given: str, num_instances: int) -> dict[int, PrefillTime]:
    """Return measured or expected times of chunks by group size, ascending.

    The sizes are the `given` ones (`1,2,4`). `auto` is powers of two, which leave no odd instances. With measurements,
    `auto` has measured sizes only.
    """
    measured = measured_times(facts, exchanges)
    if given == "auto":
        powers = [1 << bit for bit in range(num_instances.bit_length())]
        sizes = [size for size in powers if not measured or size in measured] or [1]
    else:
        parts = given.split(",")
        if not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"sp_sizes are numbers of instances such as 1,2,4, but {given!r} given")
        sizes = [int(part) for part in parts]
        if sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"sp_sizes ascend from at least 1, such as 1,2,4, but {given} given")
        if sizes[-1] > num_instances:
            raise ValueError(
                f"sp size {sizes[-1]} is more than the {num_instances} instances: give a larger `parallel`"
            )
        if measured and (missing := [size for size in sizes if size not in measured]):
            raise ValueError(
                f"the profile of this machine has no times for sp size {missing[0]}, only for "
                f"{', '.join(map(str, sorted(measured)))}: measure it with longspan profile, or leave the size out"
            )
    times = expected_times(facts, sizes) | measured
    return {size: times[size] for size in sizes}


def measured_times(facts: Facts, exchanges: Collection[Exchange]) -> dict[int, PrefillTime]:
    """Fit times for every measured number of instances, by the quickest of these exchanges. Empty without a profile.

    If none of these exchanges was measured for a number of instances, the quickest measured exact exchange counts.
    """
    profile = nearest_times(facts)
    prefills = () if profile is None else [x for x in profile.prefills if not x.kind[1].is_sparse_form]
    quickest: dict[tuple[int, bool], dict[tuple[int, int], float]] = defaultdict(dict)
    for prefill in prefills:
        seconds = quickest[prefill.members, exchange_named(prefill.exchange) in exchanges]
        lengths = prefill.new_tokens, prefill.cached_tokens
        seconds[lengths] = min(prefill.median_s, seconds.get(lengths, math.inf))
    times: dict[int, PrefillTime] = {}
    for (members, _), seconds in sorted(quickest.items()):  # the given exchanges are last, and replace the other times
        fit = fit_times([(*lengths, s) for lengths, s in seconds.items()])
        if fit is not None and fit.token_s + fit.square_s > 0:
            times[members] = fit
    return times


def expected_times(facts: Facts, sizes: Collection[int]) -> dict[int, PrefillTime]:
    """Predict prefill times without a profile: one instance by FLOPs, a group by even shares and `_HOP_S` per hop."""
    shape, hardware = facts.shape, facts.hardware
    alone = _ONE_INSTANCE
    if shape is not None and hardware is not None:
        weights = 12 * shape.num_layers * shape.hidden_size**2  # of a standard layer, whatever the model has
        pair_s = shape.num_layers * shape.pair_flops / hardware.flops_per_s
        alone = replace(alone, token_s=2 * weights / hardware.flops_per_s, cached_s=pair_s, square_s=pair_s / 2)
    return {
        size: PrefillTime(
            start_s=alone.start_s + _HOP_S * (size - 1),
            token_s=alone.token_s / size,
            cached_s=alone.cached_s / size,
            square_s=alone.square_s / size,
        )
        for size in sizes
    }
