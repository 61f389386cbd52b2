"""CSPS: long prompts by sequence parallelism, with attention that drops unimportant tokens far away (Zhang and Shen).

Prompts are shared as under `context`, each instance with a partition of neighbouring tokens, near ones on near devices,
and heads travel (`alltoall`, the paper's SP-NTP). What may be dropped is a setting by levels, see `core/sparse.py`; it
goes with the request, and its KV is found by none with another one. Decodes attend to all that is kept, and queries
travel (SP decode, §4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Literal

import msgspec

from longspan.core.cluster import hosts_of
from longspan.core.exchange import ALLTOALL, exchange_of, takers
from longspan.core.options import option_text
from longspan.core.sparse import MOST_LEVELS, MOST_PIECES, DropMode, RateBy, SparseSetting
from longspan.core.sparse_plan import ratios_by_rule, segments_of
from longspan.cost.csa_tuned import Tuned, is_tuned
from longspan.errors import ParameterError
from longspan.policy import PolicySpec, parse_options
from longspan.policy.choosing import Facts
from longspan.policy.context import Context, ContextOptions
from longspan.policy.csa_auto import CsaChooser, Objective
from longspan.policy.group_parts import Shape

_OFF = "off"

Ratios = float | list[float | list[float]]
"""One ratio, or one for each layer, or for each layer one for each KV head."""


class CsaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of sparse attention as files have them.

    Attributes:
        levels: how many there are; 1 drops nothing.
        micro_partitions: pieces in which tokens travel, at all levels from 2 on or by level.
        samples: queries of each member by which keys are rated.
        rate_by: see `SparseSetting`.
        drop: the ratio of level 2, from which those of further levels follow; or the ratios of levels, by their number,
            0 for those that are not named.
    """

    levels: int = 3
    drop: float | dict[int, Ratios] = {}
    drop_mode: DropMode = "qkv"
    micro_partitions: int | dict[int, int] = 1
    samples: int = 64
    rate_by: RateBy = "layer"

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= MOST_LEVELS:
            raise ValueError(f"levels are 1 to {MOST_LEVELS}, but {self.levels} given")
        pieces = self.micro_partitions if isinstance(self.micro_partitions, dict) else {2: self.micro_partitions}
        for level, number in pieces.items():
            if not 1 <= number <= MOST_PIECES:
                raise ValueError(f"micro_partitions are 1 to {MOST_PIECES}, but {number} given")
            if isinstance(self.micro_partitions, dict) and not 2 <= level <= self.levels:
                raise ValueError(f"micro_partitions name level {level}, but have levels 2 to {self.levels}")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, but {self.samples} given")
        if isinstance(self.drop, dict) and (odd := sorted(set(self.drop) - set(range(2, self.levels + 1)))):
            raise ValueError(f"drop names level {odd[0]}, but ratios are of levels 2 to {self.levels}")
        for ratio in _numbers([self.drop] if isinstance(self.drop, float) else [*self.drop.values()]):
            if not 0 <= ratio <= 1:
                raise ValueError(f"drop ratios are from 0 to 1, but {ratio:g} given")

    @classmethod
    def parse(cls, text: str) -> CsaConfig:
        """Reads JSON; raises ParameterError with what is wrong."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ParameterError("csa", f"is {_OFF} or a file of settings: {error}", text[:60]) from error

    def pieces(self) -> tuple[int, ...]:
        """Returns the micro-partitions of each level from 2 on."""
        given = self.micro_partitions
        return tuple(given.get(level, 1) if isinstance(given, dict) else given for level in range(2, self.levels + 1))

    def table(self) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """Returns the ratios by layer, KV head and level; a single entry is for all layers, or heads."""
        if isinstance(self.drop, float):
            return ((ratios_by_rule(self.drop, self.levels),),)
        by_level = [self.drop.get(level, 0.0) for level in range(2, self.levels + 1)]
        num_layers = _common("layers", [1 if isinstance(one, float) else len(one) for one in by_level])
        found = []
        for layer in range(num_layers):
            of_layer = [one if isinstance(one, float) else one[layer] for one in by_level]
            num_heads = _common("KV heads", [1 if isinstance(one, float) else len(one) for one in of_layer])
            found.append(
                tuple(
                    tuple(one if isinstance(one, float) else one[head] for one in of_layer) for head in range(num_heads)
                )
            )
        return tuple(found)


def _numbers(ratios: Sequence[float | list[float]] | Sequence[Ratios]) -> list[float]:
    found: list[float] = []
    for one in ratios:
        found += [one] if isinstance(one, float) else _numbers(one)
    return found


def _common(what: str, counts: Sequence[int]) -> int:
    most = max(counts, default=1)
    if set(counts) - {1, most}:
        raise ParameterError("csa", f"has drop ratios of {sorted(set(counts))} {what}: give all levels as many", most)
    return most


@dataclass(frozen=True, kw_only=True)
class CspsOptions(ContextOptions):
    """Options of `csps`: those of `context`, and what is dropped.

    Attributes:
        csa: `off` for exact attention, the settings of sparse attention as JSON, or a tuned file, by which they are
            chosen for each prompt.
        max_accuracy_loss: the points of score that a chosen setting may lose.
        target_ttft: seconds to the first token within which a chosen setting loses least; 0 limits the loss instead.
    """

    exchange: str = ALLTOALL.kind
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "contiguous"
    csa: str = _OFF
    max_accuracy_loss: float = 0.0
    target_ttft: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_objective()
        if self.csa == _OFF:
            return
        if self.tuned is None:
            _ = CsaConfig.parse(self.csa).table()
        for name, unset in (("weights", "auto"), ("fractions", "")):
            if (value := getattr(self, name)) != unset:
                problem = f"and csa exclude each other, but {value} given: leave one of them out"
                raise ParameterError(name, problem, value)
        is_able = self.exchange != "auto" and "sparse" in exchange_of(self.exchange).traits.parameters
        if not is_able or self.layout not in {"auto", "contiguous"}:
            given = f"layout {self.layout}" if is_able else self.exchange
            problem = (
                f"is for exchange {takers('sparse')} and layout contiguous, but {given} given: leave one of them out"
            )
            raise ParameterError("csa", problem, _OFF)

    @cached_property
    def shape(self) -> Shape:
        """The layout of prompts: neighbours are near each other."""
        shape = super().shape
        return replace(shape, in_order=shape.layout == "contiguous")

    def _check_objective(self) -> None:
        objectives = {"max_accuracy_loss": self.max_accuracy_loss, "target_ttft": self.target_ttft}
        for name, value in objectives.items():
            if not 0 <= value < math.inf:
                raise ParameterError(name, f"must be at least 0, but {value:g} given", value)
            if value and self.tuned is None:
                raise ParameterError(name, f"is for csa auto, or a tuned file, but csa is {self.csa[:60]}", value)
        if all(objectives.values()):
            problem = f"and max_accuracy_loss {self.max_accuracy_loss:g} exclude each other: leave one of them out"
            raise ParameterError("target_ttft", problem, self.target_ttft)

    @cached_property
    def tuned(self) -> Tuned | None:
        """The tuned file, if `csa` is one."""
        return Tuned.from_json(self.csa) if is_tuned(self.csa) else None

    @property
    def objective(self) -> Objective:
        return Objective(max_loss=self.max_accuracy_loss, target_s=self.target_ttft or None)

    @cached_property
    def config(self) -> CsaConfig | None:
        """The one setting of all prompts, if that is given."""
        return None if self.csa == _OFF or self.tuned is not None else CsaConfig.parse(self.csa)


class Csps(Context):
    """Shares long prompts as `context` does, and says how each may be computed sparsely."""

    def __init__(self, instances: tuple[int, ...], options: CspsOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self._facts, self._shape = facts, facts.shape
        self._hosts = hosts_of([facts.location(instance) for instance in instances])
        self._take(options)

    def _take(self, options: CspsOptions) -> None:
        self._check(options.config)
        self._chooser = None
        if options.tuned is not None and self._shape is not None:
            self._chooser = CsaChooser(options.tuned, self._facts, self._hosts)
        self._config, self._objective = options.config, options.objective

    def _check(self, config: CsaConfig | None) -> None:
        if config is None or self._shape is None:
            return
        layers, heads = len(config.table()), {len(by_head) for by_head in config.table()}
        for what, given, known in (
            ("layers", layers, self._shape.num_layers),
            ("KV heads", max(heads), self._shape.num_kv_heads),
        ):
            if given not in (1, known):
                raise ParameterError("csa", f"has drop ratios of {given} {what}, but the model has {known}", given)

    def sparse(self, num_prompt_tokens: int, block_size: int) -> SparseSetting | None:
        """Returns the setting of a prompt that is shared: a partition for each member."""
        members, config = self._num_members(num_prompt_tokens), self._config
        if self._chooser is not None and members > 1:
            config = self._chosen(self._chooser, num_prompt_tokens, members)
        if config is None or config.levels == 1 or members == 1:
            return None
        num_blocks = -(-num_prompt_tokens // block_size)
        return SparseSetting(
            partition=-(-num_blocks // members) * block_size,
            segments=segments_of(members, self._hosts[:members], config.levels),
            drop=config.table(),
            mode=config.drop_mode,
            micro_partitions=config.pieces(),
            samples=config.samples,
            rate_by=config.rate_by,
        )

    def _chosen(self, chooser: CsaChooser, num_prompt_tokens: int, members: int) -> CsaConfig:
        chosen = chooser.choose(num_prompt_tokens, members, self._objective)
        levels, drop, pieces = msgspec.structs.astuple(chosen.configuration)
        by_level = dict(enumerate(pieces, 2)) or 1
        return CsaConfig(levels=levels, drop=drop, drop_mode=chosen.mode, micro_partitions=by_level)

    def change(self, options: CspsOptions, changes: Mapping[str, str]) -> CspsOptions:
        """Takes other settings for requests to come; returns all options then."""
        unset = {"max_accuracy_loss": 0.0, "target_ttft": 0.0}  # a new objective takes the place of one before
        kept = {} if unset.keys().isdisjoint(changes) and "csa" not in changes else unset
        texts = {name: option_text(value) for name, value in {**asdict(options), **kept}.items()}
        changed = parse_options(CSPS.name, CspsOptions, {**texts, **changes})
        self._take(changed)
        return changed


def _make(instances: tuple[int, ...], options: CspsOptions, facts: Facts) -> Csps:
    options.check_instances(len(instances), facts.tp)
    return Csps(instances, options, facts)


def _hint(options: CspsOptions, facts: Facts) -> str | None:
    if options.tuned is None or facts.shape is None or facts.cluster is None:
        return None
    hosts = hosts_of(sorted(facts.location(instance) for instance in facts.cluster.prefill))
    return CsaChooser(options.tuned, facts, hosts).hint(options.objective)


CSPS = PolicySpec(
    name="csps",
    options=CspsOptions,
    make=_make,
    whole_prompts=lambda _: True,
    changeable=("csa", "max_accuracy_loss", "target_ttft"),
    change=Csps.change,
    sparse=Csps.sparse,
    hint=_hint,
)
