"""Options of `csps`, and the settings of sparse attention in a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from longspan.core.exchange import ALLTOALL, RING_Q, exchange_of, with_sparse_form
from longspan.core.sparse import MAX_LEVELS, MAX_PIECES, DropMode, RateBy, is_tuned
from longspan.core.sparse_plan import ratios_by_rule
from longspan.cost.profile_key import Count
from longspan.errors import ParameterError
from longspan.policy.context import ContextOptions
from longspan.policy.csps.objective import Objective
from longspan.policy.shards import Shape

if TYPE_CHECKING:
    from longspan.policy.csps.tuned import Tuned

_OFF = "off"

Ratio = Annotated[float, msgspec.Meta(ge=0, le=1)]
_ByHead = Annotated[list[Ratio], msgspec.Meta(min_length=1)]
Ratios = Ratio | Annotated[list[Ratio | _ByHead], msgspec.Meta(min_length=1)]
"""One ratio, or one per layer, or for each layer one per KV head."""
Pieces = Annotated[int, msgspec.Meta(ge=1, le=MAX_PIECES)]


class CsaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of sparse attention in a file.

    Attributes:
        levels: the number of levels. 1 drops nothing.
        micro_partitions: pieces in which tokens are sent, at all levels from 2 on or by level.
        samples: queries of each member that rate keys.
        rate_by, drop_in_decode: as of `SparseSetting`.
        drop: the ratio of level 2, which gives the ratios of further levels, or the ratios by level. A level without
            a ratio drops nothing.
    """

    levels: Annotated[int, msgspec.Meta(ge=1, le=MAX_LEVELS)] = 3
    drop: Ratio | dict[int, Ratios] = {}
    drop_mode: DropMode = "kv"
    micro_partitions: Pieces | dict[int, Pieces] = 1
    samples: Count = 64
    rate_by: RateBy = "layer"
    drop_in_decode: bool = False

    def __post_init__(self) -> None:
        for name, given in (("drop", self.drop), ("micro_partitions", self.micro_partitions)):
            if isinstance(given, dict) and (odd := sorted(given.keys() - set(range(2, self.levels + 1)))):
                raise ValueError(f"{name} names level {odd[0]}, but levels are 2 to {self.levels}")

    @classmethod
    def parse(cls, text: str) -> CsaConfig:
        """Parse JSON, or raise ParameterError."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            problem = f"is {_OFF}, auto or settings as JSON, but {text[:60]!r} given ({error})"
            raise ParameterError("csa", problem, text[:60]) from error

    def pieces(self) -> tuple[int, ...]:
        """Return the micro-partitions of each level from 2 on."""
        given = self.micro_partitions
        return tuple(given.get(level, 1) if isinstance(given, dict) else given for level in range(2, self.levels + 1))

    def table(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Return the ratios by layer, KV head and level. A single entry is for all layers, or heads."""
        if isinstance(self.drop, float):
            return ((ratios_by_rule(self.drop, self.levels),),)
        by_level = [self.drop.get(level, 0.0) for level in range(2, self.levels + 1)]
        num_layers = _common("layers", [1 if isinstance(ratios, float) else len(ratios) for ratios in by_level])
        table = []
        for layer in range(num_layers):
            of_layer = [ratios if isinstance(ratios, float) else ratios[layer] for ratios in by_level]
            num_heads = _common("KV heads", [1 if isinstance(ratios, float) else len(ratios) for ratios in of_layer])
            heads = range(num_heads)
            table.append(tuple(tuple(r if isinstance(r, float) else r[head] for r in of_layer) for head in heads))
        return tuple(table)


def _common(unit: str, counts: Sequence[int]) -> int:
    """Return the number of ratios that all levels have, or 1 if each has one."""
    largest = max(counts, default=1)
    if set(counts) - {1, largest}:
        problem = f"has drop ratios of {sorted(set(counts))} {unit}: give all levels as many"
        raise ParameterError("csa", problem, largest)
    return largest


@dataclass(frozen=True, kw_only=True)
class CspsOptions(ContextOptions):
    """Options of `csps`: the options of `context`, and the drops of sparse attention.

    Attributes:
        csa: `off` for exact attention, the settings of sparse attention as JSON, or a tuned file, which chooses the
            settings of each prompt.
        max_accuracy_loss: upper bound for the points of score that chosen settings lose. By default they lose none.
        target_ttft: seconds to the first token, within which chosen settings lose least. Excludes the bound above.
        target_tbt: wanted bound for the seconds of steps that prefill a shared prompt and decode.
        partition: upper bound for the tokens of a prompt on each instance, from which the length gives the number of
            instances. `memory` is half of an instance's KV memory. With `auto`, `threshold` decides the number, and all
            instances have equally many tokens.
    """

    exchange: str = ALLTOALL.kind
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "contiguous"
    csa: str = _OFF
    max_accuracy_loss: float | None = None
    target_ttft: float | None = None
    target_tbt: float | None = None
    partition: int | Literal["auto", "memory"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_tbt is not None and not 0 < self.target_tbt < math.inf:
            problem = f"must be above 0 seconds, but {self.target_tbt:g} given"
            raise ParameterError("target_tbt", problem, self.target_tbt)
        self._check_objective()
        self._check_partition()
        if self.csa == _OFF:
            return
        if self.tuned is None:
            _ = CsaConfig.parse(self.csa).table()
        for name, unset in (("weights", "auto"), ("fractions", ""), ("micro_partitions", 1)):
            if (value := getattr(self, name)) != unset:
                problem = f"and csa exclude each other, but {value} given: leave one of them out"
                raise ParameterError(name, problem, value)
        is_able = self.exchange != "auto" and exchange_of(self.exchange).has_sparse_form
        self._check_decode()
        if not is_able or self.layout not in {"auto", "contiguous"}:
            given = f"layout {self.layout}" if is_able else f"exchange {self.exchange}"
            able = ", ".join(exchange.kind for exchange in with_sparse_form())
            problem = f"is for exchange {able} and layout contiguous, but {given} given: leave one of them out"
            raise ParameterError("csa", problem, _OFF)

    def _check_decode(self) -> None:
        """Raise ParameterError unless decodes know the dropped tokens, if these are to stay dropped."""
        given = {"exchange": (self.exchange, ALLTOALL.kind), "decode": (self.decode, RING_Q.kind)}
        for name, (value, able) in given.items() if self.config is not None and self.config.drop_in_decode else ():
            if value != able:
                problem = f"with drop_in_decode is for {name} {able}, but {value} given: leave one of them out"
                raise ParameterError("csa", problem, value)

    def _check_partition(self) -> None:
        if self.partition == "auto":
            return
        if self.partition != "memory" and self.partition < 1:
            raise ParameterError("partition", f"must be at least 1, but {self.partition} given", self.partition)
        given = {"threshold": (self.threshold, "auto"), "fractions": (self.fractions, "")}
        for name, (value, unset) in given.items():
            if value != unset:
                problem = f"({self.partition}) sets the shares of prompts, but {name} {value} given: leave one out"
                raise ParameterError("partition", problem, self.partition)
        if self.layout not in {"auto", "contiguous"}:
            problem = f"is for layout contiguous, but layout {self.layout} given: leave one of them out"
            raise ParameterError("partition", problem, self.partition)

    @cached_property
    def shape(self) -> Shape:
        """The layout of prompts. Neighbouring pieces are on instances near each other."""
        shape = super().shape
        return replace(shape, in_order=shape.layout == "contiguous")

    def _check_objective(self) -> None:
        objectives = {"max_accuracy_loss": self.max_accuracy_loss, "target_ttft": self.target_ttft}
        given = {name: value for name, value in objectives.items() if value is not None}
        for name, value in given.items():
            if not 0 <= value < math.inf or (name == "target_ttft" and not value):
                least = "above 0" if name == "target_ttft" else "from 0 on"
                raise ParameterError(name, f"must be a number {least}, but {value:g} given", value)
            if self.tuned is None:
                csa = self.csa if self.csa == _OFF else "settings of its own"
                raise ParameterError(name, f"is for csa auto, or a tuned file, but csa is {csa}: give one", value)
        if len(given) > 1:
            problem = f"and max_accuracy_loss {self.max_accuracy_loss:g} exclude each other: leave one of them out"
            raise ParameterError("target_ttft", problem, self.target_ttft)

    @cached_property
    def tuned(self) -> Tuned | None:
        """The tuned file, if `csa` is one."""
        if not is_tuned(self.csa):
            return None
        from longspan.policy.csps.tuned import Tuned  # noqa: PLC0415 - settings in a file need no fits

        return Tuned.from_json(self.csa)

    @property
    def objective(self) -> Objective:
        return Objective(max_loss=self.max_accuracy_loss or 0.0, target_s=self.target_ttft)

    @cached_property
    def config(self) -> CsaConfig | None:
        """The settings of all prompts, if `csa` has them."""
        return None if self.csa == _OFF or self.tuned is not None else CsaConfig.parse(self.csa)
