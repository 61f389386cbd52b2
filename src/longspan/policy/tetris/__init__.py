"""Tetris: chunkwise dynamic sequence parallelism. Prompts are planned as chunks on growing groups."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longspan.core.cluster import hosts_of
from longspan.core.exchange import RING_Q, Exchange, decoding, exchange_named, exchange_of, of_any_layout
from longspan.cost.profile import PrefillTime, fit_times
from longspan.errors import ParameterError
from longspan.policy.facts import Facts
from longspan.policy.group_parts import GroupParts
from longspan.policy.sharing import SharingOptions, check_exchange
from longspan.policy.tetris.execution import Cdsp
from longspan.policy.tetris.planner import Planner
from longspan.policy.tetris.rates import RateTable, RateWatch, check_improvement_rate

_ENOUGH_OF_A_HOST = 4
"""Groups that end at hosts with fewer instances lose more for prompts than they win for decodes at low load."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options that tell how groups compute.

    Attributes:
        exchange, decode, layout, rotate: as of `context`, but for chains and `gather_hidden`.
    """

    exchange: str = "auto"
    decode: str = RING_Q.kind
    layout: Literal["auto", "zigzag", "striped"] = "auto"
    rotate: Literal["block", "token"] = "block"

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, of_any_layout)
        check_exchange("decode", self.decode, decoding, automatic=False)

    def sharing(self) -> SharingOptions:
        layout = "zigzag" if self.layout == "auto" else self.layout
        return SharingOptions(exchange=self.exchange, decode=self.decode, layout=layout, rotate=self.rotate)

    def group_parts(self, instances: Sequence[int], facts: Facts, *, balance: bool = False) -> GroupParts:
        return GroupParts(len(instances), self.sharing(), facts, balance=balance)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        return of_any_layout() if self.exchange == "auto" else (exchange_of(self.exchange),)


@dataclass(frozen=True, kw_only=True)
class TetrisOptions(GroupOptions):
    """Options of `tetris`: how prompts are planned, and how groups compute.

    Attributes:
        improvement_rate: by which part of the time a larger group must be quicker to be taken; `auto` goes by how many
            requests arrive, and `improvement_rates`.
        improvement_rates: by requests per second, such as `0.5:0.1,1:0.3`: the nearest counts, looked up every 30 s and
            sooner after a start.
        chunking: whether a prompt may be cut into chunks on growing groups.
        sp_sizes: of groups; `auto` is powers of two, see also `_usual_size`.
        min_chunk: tokens below which a chunk does not pay, unless it is the last.
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

    def rate_table(self, default: float) -> RateTable:
        """Returns the table of improvement rates; `auto` without a table has the `default` alone."""
        if self.improvement_rates:
            return RateTable.parse(self.improvement_rates)
        rate = default if self.improvement_rate == "auto" else self.improvement_rate
        return RateTable(entries=((0.0, rate),))


class Tetris(Cdsp, name="tetris"):
    """Plans chunks by Algorithm 1."""

    Options = TetrisOptions
    changeable = ("improvement_rate", "improvement_rates", "chunking", "min_chunk")
    knows_roles = True
    reads_hosts = True

    def __init__(self, instances: tuple[int, ...], options: TetrisOptions, facts: Facts) -> None:
        planner = planner_of(
            facts,
            instances,
            options.exchanges,
            options.sp_sizes,
            min_chunk_tokens=options.min_chunk,
            usual_size=_usual_size(facts, instances) if options.sp_sizes == "auto" else None,
        )
        self._default_rate = _default_improvement_rate(has_roles=facts.has_roles)
        super().__init__(
            instances,
            options,
            planner,
            options.group_parts(instances, facts, balance=options.balance),
            RateWatch(options.rate_table(self._default_rate)),
            chunking=options.chunking,
            decode=facts.decode,
        )
        self._planner: Planner = planner

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
        self._watch.use(options.rate_table(self._default_rate))
        super().change(options)
        self.chunking, self._planner.min_chunk_tokens = options.chunking, options.min_chunk

    @property
    def hint(self) -> str | None:
        """Advise to let the improvement rate follow the request rate, when no option says how."""
        if self.options.improvement_rate != "auto" or self.options.improvement_rates:
            return None
        return (
            f"policy option improvement_rate=auto is {self._default_rate:g} at every request rate without a table: "
            "find one with longspan simulate --profile-improvement-rates, and give it as policy option "
            "improvement_rates"
        )


def _default_improvement_rate(*, has_roles: bool) -> float:
    """Returns the rate without a table: between what the paper finds best for few and for many requests.

    Where instances also decode, the lowest: then most groups are as large as they get, and few wait for one of another
    size that overlaps with them.
    """
    return 0.3 if has_roles else 0.05


def _usual_size(facts: Facts, instances: Sequence[int]) -> int | None:
    """Counts the most instances of a host, if that is enough of them and they also decode; None for no bound.

    A decode steps together with all prompts on its group, and with their groups. Groups of one host end there; larger
    ones overlap, until all instances of the cluster wait for each other in every step.
    """
    per_host = max(Counter(hosts_of([facts.location(i) for i in sorted(instances)])).values())
    return per_host if not facts.has_roles and per_host >= _ENOUGH_OF_A_HOST else None


def planner_of(
    facts: Facts,
    instances: Sequence[int],
    exchanges: Collection[Exchange],
    sizes: str,
    *,
    min_chunk_tokens: int = 1,
    usual_size: int | None = None,
) -> Planner:
    """Makes a `Planner` by the times of `sp_times`."""
    return Planner(
        sp_times(facts, exchanges, sizes, len(instances)),
        hosts_of([facts.location(i) for i in sorted(instances)]),
        min_chunk_tokens=min_chunk_tokens,
        usual_size=usual_size,
    )


# ---------------------------------------------------------------- times of chunks


_ONE_INSTANCE = PrefillTime(start_s=0.02, token_s=1e-4, cached_s=2e-9, square_s=1e-9)
"""A guess for want of any cost: it only says that longer prompts take longer."""
_HOP_S = 1e-3
"""Seconds that each further member adds to a step, for want of measurements."""


def sp_times(facts: Facts, exchanges: Collection[Exchange], given: str, num_instances: int) -> dict[int, PrefillTime]:
    """Predicts chunks, by measured seconds or expected ones, for the sizes of groups to choose from, ascending.

    Those are the `given` ones (`1,2,4`), or with `auto` powers of two, so that groups of different sizes leave no odd
    instances; with measurements only sizes that were measured.
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
            raise ValueError(f"sp size {sizes[-1]} is more than the {num_instances} instances: give a larger parallel")
        if measured and (missing := [size for size in sizes if size not in measured]):
            raise ValueError(
                f"the profile of this machine has no times for sp size {missing[0]}, only for "
                f"{', '.join(map(str, sorted(measured)))}: measure it with longspan profile, or leave the size out"
            )
    times = expected_times(facts, sizes) | measured
    return {size: times[size] for size in sizes}


def measured_times(facts: Facts, exchanges: Collection[Exchange]) -> dict[int, PrefillTime]:
    """Fits times for every number of instances measured, by the quickest of these exchanges; empty without a profile.

    Where none of these was measured with a number of instances, it is the quickest of all others.
    """
    prefills = facts.profile.prefills if facts.profile is not None else ()
    quickest: dict[tuple[int, bool], dict[tuple[int, int], float]] = defaultdict(dict)
    for one in prefills:
        known = quickest[one.members, exchange_named(one.exchange) in exchanges]
        lengths = one.new_tokens, one.cached_tokens
        known[lengths] = min(one.median_s, known.get(lengths, math.inf))
    found: dict[int, PrefillTime] = {}
    for (members, _), seconds in sorted(quickest.items()):  # what was asked for comes last, and counts
        fit = fit_times([(*lengths, s) for lengths, s in seconds.items()])
        if fit is not None and fit.token_s + fit.square_s > 0:
            found[members] = fit
    return found


def expected_times(facts: Facts, sizes: Collection[int]) -> dict[int, PrefillTime]:
    """Predicts unmeasured times: one instance by shape and hardware, several by even shares and a start for each."""
    shape, hardware = facts.shape, facts.hardware
    alone = _ONE_INSTANCE
    if shape is not None and hardware is not None:
        weights = 12 * shape.num_layers * shape.hidden_size**2  # of a usual layer, whatever the model's is
        pair_s = 4 * shape.num_layers * shape.num_heads * shape.head_dim / hardware.flops_per_s
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
