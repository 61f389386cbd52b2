"""Tetris (chunkwise dynamic sequence parallelism), and fixed groups, its baseline, on the same machinery."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from longspan.core.cluster import hosts_of
from longspan.core.exchange import RING_Q, Exchange, decoding, exchange_of, of_any_layout
from longspan.core.view import ClusterView, Plan
from longspan.policy.choosing import Chooser, Facts
from longspan.policy.group_parts import GroupParts, SharingOptions, check_exchange
from longspan.policy.spec import PolicySettings, PolicySpec, option_text, parse_options
from longspan.policy.tetris.execution import Cdsp
from longspan.policy.tetris.planner import Chunk, ChunkPlan, Planner, Prompt
from longspan.policy.tetris.rates import RateTable, RateWatch, check_improvement_rate
from longspan.policy.tetris.times import SpTimes, check_sizes, expected_times, measured_times, sp_sizes


class FixedGroups:
    """Groups of `size` neighbours, in the order of `everyone`, who divide into such groups."""

    def __init__(self, times: SpTimes, everyone: Sequence[int], size: int) -> None:
        assert len(everyone) % size == 0, "nobody is left over"
        self.groups = [tuple(everyone[start : start + size]) for start in range(0, len(everyone), size)]
        self._times = times

    @property
    def largest(self) -> int:
        """Counts the instances that can have one prompt."""
        return len(self.groups[0])

    def seconds(self, size: int, new_tokens: int, cached_tokens: int) -> float:
        """Predicts a chunk."""
        assert size == self.largest, "there is one size"
        return self._times.seconds(new_tokens, cached_tokens)

    def plan(self, prompt: Prompt, queue_s: Sequence[float]) -> ChunkPlan | None:
        """Puts all tokens in one chunk, on the group with the shortest queue that has all of `prompt.held`."""
        able = [group for group in self.groups if set(prompt.held) <= set(group)]
        if not able:
            return None
        group = min(able, key=lambda one: max(queue_s[i] for i in one))
        seconds = self._times.seconds(prompt.new_tokens, prompt.cached_tokens)
        chunk = Chunk(num_tokens=prompt.new_tokens, group=group)
        return ChunkPlan(chunks=(chunk,), ttft_s=max(queue_s[i] for i in group) + seconds)


_ENOUGH_OF_A_HOST = 4
"""With fewer instances to a host, groups that end there lose more for prompts than they win for decodes at low load."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """Options that tell how groups compute.

    Attributes:
        exchange, decode, layout, rotate: as of `context`, but for chains and `gather_hidden`.
        balance: whether the KV of earlier chunks is spread evenly over a group that has grown.
    """

    exchange: str = "auto"
    decode: str = RING_Q.kind
    layout: Literal["auto", "zigzag", "striped"] = "auto"
    rotate: Literal["block", "token"] = "block"
    balance: bool = True

    def __post_init__(self) -> None:
        check_exchange("exchange", self.exchange, of_any_layout())
        check_exchange("decode", self.decode, decoding(), automatic=False)

    def sharing(self) -> SharingOptions:
        """Returns the options that parts are shaped by."""
        layout = "zigzag" if self.layout == "auto" else self.layout
        return SharingOptions(exchange=self.exchange, decode=self.decode, layout=layout, rotate=self.rotate)

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """Lists the exchanges that prompts may be computed with."""
        return of_any_layout() if self.exchange == "auto" else (exchange_of(self.exchange),)


@dataclass(frozen=True, kw_only=True)
class TetrisOptions(GroupOptions):
    """Options of `tetris`: how prompts are planned, and how groups compute.

    Attributes:
        improvement_rate: by which part of the time a larger group must be quicker to be taken; `auto` goes by how many
            requests arrive, and `improvement_rates`.
        improvement_rates: by requests per second, such as `0.5:0.1,1:0.3`: the nearest counts, looked up every 30 s
            and sooner after a start.
        chunking: whether a prompt may be cut into chunks on growing groups.
        sp_sizes: of groups; `auto` is powers of two, see also `_usual_size`.
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
        super().__post_init__()
        if self.improvement_rate != "auto":
            check_improvement_rate(self.improvement_rate)
            if self.improvement_rates:
                raise ValueError(
                    f"improvement_rates are for improvement_rate auto, but {self.improvement_rate} given: leave one out"
                )
        if self.min_chunk < 1:
            raise ValueError(f"min_chunk must be at least 1, but {self.min_chunk} given")

    def rate_table(self, default: float) -> RateTable:
        """Returns the table of improvement rates; `auto` without a table has the `default` alone.

        Raises:
            ValueError: when it cannot be read.
        """
        if self.improvement_rates:
            return RateTable.parse(self.improvement_rates)
        rate = default if self.improvement_rate == "auto" else self.improvement_rate
        return RateTable(entries=((0.0, rate),))

    def changed(self, options: Mapping[str, str]) -> TetrisOptions:
        """Returns the options with other values. An improvement rate takes the place of a table, and the reverse.

        Raises:
            ValueError: for an unknown option or a bad value.
        """
        kept = asdict(self)
        if options.get("improvement_rate", "auto") != "auto":
            kept["improvement_rates"] = ""
        if options.get("improvement_rates"):
            kept["improvement_rate"] = "auto"
        return parse_options("tetris", TetrisOptions, {**{name: option_text(kept[name]) for name in kept}, **options})


@dataclass(frozen=True, kw_only=True)
class FixedOptions(GroupOptions):
    """Options of `fixed-sp`: the size of groups, and how they compute.

    Attributes:
        sp: instances of a group.
    """

    sp: int = 1


class Tetris:
    """Plans chunks with `Cdsp`; some options may change while it serves."""

    def __init__(self, instances: tuple[int, ...], options: TetrisOptions, facts: Facts) -> None:
        everyone = sorted(instances)
        self._planner = planner_of(
            facts,
            everyone,
            options.exchanges,
            options.sp_sizes,
            min_chunk_tokens=options.min_chunk,
            usual_size=_usual_size(facts, everyone) if options.sp_sizes == "auto" else None,
        )
        self._default_rate = _default_improvement_rate(has_roles=facts.has_roles)
        self._watch = RateWatch(options.rate_table(self._default_rate))
        self._cdsp = Cdsp(
            instances,
            self._planner,
            _group_parts(instances, options, facts),
            self._watch,
            chunking=options.chunking,
            decode=facts.decode,
        )

    @property
    def capacity(self) -> int:
        """The largest group can have one request."""
        return self._planner.largest

    def plan(self, view: ClusterView) -> Plan:
        """Plans by the options in force."""
        return self._cdsp.plan(view)

    def change(self, options: TetrisOptions, given: Mapping[str, str]) -> TetrisOptions:
        """Applies other options to prompts that are planned from now on, and returns all that are in force."""
        changed = options.changed(given)
        self._watch.use(changed.rate_table(self._default_rate))
        self._cdsp.chunking, self._planner.min_chunk_tokens = changed.chunking, changed.min_chunk
        return changed


def hint_of_a_constant_rate(settings: PolicySettings, *, has_roles: bool) -> str | None:
    """Tells people that the improvement rate is to go by the request rate, but nobody said how."""
    told = settings.options
    if settings.name != "tetris" or told["improvement_rate"] != "auto" or told["improvement_rates"]:
        return None
    rate = _default_improvement_rate(has_roles=has_roles)
    return (
        f"-o improvement_rate=auto is {rate:g} at every request rate without a table: find one with longspan simulate "
        "--profile-improvement-rates, and give it as -o improvement_rates="
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
    per_host = max(Counter(hosts_of([facts.location(i) for i in instances])).values())
    return per_host if not facts.has_roles and per_host >= _ENOUGH_OF_A_HOST else None


def planner_of(
    facts: Facts,
    everyone: Sequence[int],
    exchanges: Collection[Exchange],
    sizes: str,
    *,
    min_chunk_tokens: int = 1,
    usual_size: int | None = None,
) -> Planner:
    """Plans by measured seconds, or expected ones; see `Planner`.

    Raises:
        ValueError: for sizes that cannot be, or have no measurements where others have them.
    """
    measured = measured_times(facts, exchanges)
    found = sp_sizes(sizes, len(everyone), measured)
    times = measured or expected_times(facts, found)
    return Planner(
        {size: times[size] for size in found},
        hosts_of([facts.location(i) for i in everyone]),
        min_chunk_tokens=min_chunk_tokens,
        usual_size=usual_size,
    )


def _group_parts(instances: Sequence[int], options: GroupOptions, facts: Facts) -> GroupParts:
    sharing = options.sharing()
    return GroupParts(sharing, Chooser(len(instances), facts, sharing.wanted), balance=options.balance)


def _make_fixed(instances: tuple[int, ...], options: FixedOptions, facts: Facts) -> Cdsp:
    measured = measured_times(facts, options.exchanges)
    check_sizes([options.sp], len(instances), measured, all_taken=True)
    times = measured or expected_times(facts, [options.sp])
    return Cdsp(
        instances,
        FixedGroups(times[options.sp], instances, options.sp),
        _group_parts(instances, options, facts),
        RateWatch(RateTable(entries=((0.0, 0.0),))),
        decode=facts.decode,
    )


TETRIS = PolicySpec(
    name="tetris",
    options=TetrisOptions,
    make=Tetris,
    capacity=lambda policy: policy.capacity,
    changeable=("improvement_rate", "improvement_rates", "chunking", "min_chunk"),
    change=Tetris.change,
    knows_roles=True,
)
FIXED_SP = PolicySpec(
    name="fixed-sp",
    options=FixedOptions,
    make=_make_fixed,
    capacity=lambda policy: policy.capacity,
    knows_roles=True,
)
