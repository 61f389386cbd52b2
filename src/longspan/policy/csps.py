"""CSPS: long prompts by sequence parallelism, with attention that drops unimportant tokens far away (Zhang and Shen).

Prompts are shared as under `context`, each instance with a partition of neighbouring tokens, near ones on near devices,
and heads travel (`alltoall`, the paper's SP-NTP). With a `partition`, the length says how many instances share a prompt
(§3.2.2); the last of them has what is left, and prefills short prompts in the same step. What may be dropped is a
setting by levels, see `core/sparse.py`; it goes with the request, and its KV is found by none with another one. Decodes
attend to all KV, and queries travel; with roles, the KV of a shared prompt goes to several instances that only decode,
beside short requests (SP decode, §4.2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import msgspec

from longspan.core.exchange import ALLTOALL, exchange_of, with_sparse_form
from longspan.core.locations import hosts_of
from longspan.core.sparse import MAX_LEVELS, MAX_PIECES, DropMode, RateBy, SparseSetting, is_tuned
from longspan.core.sparse_plan import ratios_by_rule, segments_of
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.cost.csa_tuned import Tuned
from longspan.errors import ParameterError
from longspan.policy.batching import Batch, Budget
from longspan.policy.context import Context, ContextOptions
from longspan.policy.csa_auto import CsaChooser, Objective
from longspan.policy.facts import Facts
from longspan.policy.group_parts import Partitions, Shape
from longspan.policy.routing import Router

_OFF = "off"
_OF_MEMORY = 0.5
"""The part of an instance's KV memory that a partition fills with `partition=memory`: the rest is for outputs, and for
requests beside it, so that a prompt seldom waits until its instances are empty."""

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
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ValueError(f"levels are 1 to {MAX_LEVELS}, but {self.levels} given")
        pieces = self.micro_partitions if isinstance(self.micro_partitions, dict) else {2: self.micro_partitions}
        for level, number in pieces.items():
            if not 1 <= number <= MAX_PIECES:
                raise ValueError(f"micro_partitions are 1 to {MAX_PIECES}, but {number} given")
            if isinstance(self.micro_partitions, dict) and not 2 <= level <= self.levels:
                raise ValueError(f"micro_partitions name level {level}, but have levels 2 to {self.levels}")
        if self.samples < 1:
            raise ValueError(f"samples must be at least 1, but {self.samples} given")
        if isinstance(self.drop, dict) and (odd := sorted(set(self.drop) - set(range(2, self.levels + 1)))):
            raise ValueError(f"drop names level {odd[0]}, but ratios are of levels 2 to {self.levels}")
        for ratios in self.drop.values() if isinstance(self.drop, dict) else ():
            if _has_none(ratios):
                raise ValueError("drop has an empty list: give a ratio for each layer, or KV head, or one for all")
        for ratio in _numbers([self.drop] if isinstance(self.drop, float) else [*self.drop.values()]):
            if not 0 <= ratio <= 1:
                raise ValueError(f"drop ratios are from 0 to 1, but {ratio:g} given")

    @classmethod
    def parse(cls, text: str) -> CsaConfig:
        """Reads JSON; raises ParameterError with what is wrong."""
        try:
            return msgspec.json.decode(text.encode(), type=cls)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            problem = f"is {_OFF}, auto or settings as JSON, but {text[:60]!r} given ({error})"
            raise ParameterError("csa", problem, text[:60]) from error

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


def _has_none(ratios: Ratios | list[float]) -> bool:
    return isinstance(ratios, list) and (not ratios or any(isinstance(one, list) and not one for one in ratios))


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
        max_accuracy_loss: the points of score that a chosen setting may lose; by default none.
        target_ttft: seconds to the first token within which a chosen setting loses least, in place of that.
        partition: the most tokens of a prompt that an instance has, by which the length says how many instances share
            it; `memory` is half of what the KV memory of an instance holds. With `auto`, `threshold` says how many, and
            all have equally many tokens.
    """

    exchange: str = ALLTOALL.kind
    layout: Literal["auto", "zigzag", "striped", "contiguous"] = "contiguous"
    csa: str = _OFF
    max_accuracy_loss: float | None = None
    target_ttft: float | None = None
    partition: int | Literal["auto", "memory"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_objective()
        self._check_partition()
        if self.csa == _OFF:
            return
        if self.tuned is None:
            _ = CsaConfig.parse(self.csa).table()
        for name, unset in (("weights", "auto"), ("fractions", "")):
            if (value := getattr(self, name)) != unset:
                problem = f"and csa exclude each other, but {value} given: leave one of them out"
                raise ParameterError(name, problem, value)
        is_able = self.exchange != "auto" and exchange_of(self.exchange).has_sparse_form
        if not is_able or self.layout not in {"auto", "contiguous"}:
            given = f"layout {self.layout}" if is_able else self.exchange
            able = ", ".join(one.kind for one in with_sparse_form())
            problem = f"is for exchange {able} and layout contiguous, but {given} given: leave one of them out"
            raise ParameterError("csa", problem, _OFF)

    def _check_partition(self) -> None:
        if self.partition == "auto":
            return
        if self.partition != "memory" and self.partition < 1:
            raise ParameterError("partition", f"must be at least 1, but {self.partition} given", self.partition)
        given = {"threshold": (self.threshold, "auto"), "fractions": (self.fractions, "")}
        for name, (value, unset) in given.items():
            if value != unset:
                problem = f"({self.partition}) says how prompts are shared, but {name} {value} given: leave one out"
                raise ParameterError("partition", problem, self.partition)
        if self.layout not in {"auto", "contiguous"}:
            problem = f"is for layout contiguous, but layout {self.layout} given: leave one of them out"
            raise ParameterError("partition", problem, self.partition)

    @cached_property
    def shape(self) -> Shape:
        """The layout of prompts: neighbours are near each other."""
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
                raise ParameterError(name, f"is for csa auto, or a tuned file, but csa is {csa}", value)
        if len(given) > 1:
            problem = f"and max_accuracy_loss {self.max_accuracy_loss:g} exclude each other: leave one of them out"
            raise ParameterError("target_ttft", problem, self.target_ttft)

    @cached_property
    def tuned(self) -> Tuned | None:
        """The tuned file, if `csa` is one."""
        return Tuned.from_json(self.csa) if is_tuned(self.csa) else None

    @property
    def objective(self) -> Objective:
        return Objective(max_loss=self.max_accuracy_loss or 0.0, target_s=self.target_ttft)

    @cached_property
    def config(self) -> CsaConfig | None:
        """The one setting of all prompts, if that is given."""
        return None if self.csa == _OFF or self.tuned is not None else CsaConfig.parse(self.csa)


class Csps(Context, name="csps"):
    """Shares long prompts as `context` does, and says how each may be computed sparsely."""

    Options = CspsOptions
    changeable = ("csa", "max_accuracy_loss", "target_ttft")
    knows_roles = shards_decodes = True
    reads_hosts = False

    def __init__(self, instances: tuple[int, ...], options: CspsOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self.whole_prompts = True
        self._facts, self._shape, self._size = facts, facts.shape, options.partition
        self._hosts = hosts_of([facts.location(instance) for instance in instances])
        self._decode = tuple(sorted(facts.decode, key=facts.location))
        self._take(options)

    def _partitions_of(self, options: CspsOptions, facts: Facts) -> Partitions | None:
        del options, facts
        return None

    def _take(self, options: CspsOptions) -> None:
        """Use these settings of sparse attention for requests to come."""
        self._check(options.config)
        chooser = None
        if options.tuned is not None and self._shape is not None:
            chooser = CsaChooser(options.tuned, self._facts, self._hosts, self._sizes())
        self._chooser, self._config, self._objective = chooser, options.config, options.objective

    def _sizes(self) -> Sequence[int]:
        """Returns the numbers of instances that may share a prompt: all, or as many as a size or a profile says."""
        most = len(self._hosts)
        varies = self._size != "auto" or self._facts.profile is not None
        return range(2 if varies else max(2, most), most + 1)

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

    def plan(self, view: ClusterView) -> Plan:
        """Plans as `context` does; with roles, the instances that decode by themselves.

        The KV of a prompt goes to as many of those as have shared it, at most, which then step together.
        """
        prefills = super().plan(view)
        if not self._decode:
            return prefills
        router, batch = Router(view, self._decode), Batch(view, frozenset(self._decode))
        for request in batch.running():
            batch.add(self._group_parts.next(request, batch.budget, view.max_num_batched_tokens))
        decodes = batch.plan()
        batches = tuple([tuple([_routed(part, router) for part in parts]) for parts in prefills.batches])
        return Plan(
            preempted=prefills.preempted + decodes.preempted,
            loads=tuple([_routed(part, router) for part in prefills.loads]),
            batches=batches + decodes.batches,
        )

    @property
    def _side_by_side(self) -> bool:
        return self._size != "auto" or super()._side_by_side

    def _sized(self, num_tokens: int, block_size: int, num_blocks: int) -> tuple[int, int] | None:
        """Returns how many instances share that many tokens, and the partition of each; None if no option says so."""
        if self._size == "auto":
            return None
        wanted, given = -(-num_tokens // block_size), self._size
        blocks = int(_OF_MEMORY * num_blocks) if given == "memory" else min(-(-given // block_size), num_blocks)
        members = min(-(-wanted // max(1, blocks)), len(self.instances))
        return members, max(blocks, -(-wanted // members)) * block_size

    def _members(self, request: RequestView, cached_tokens: int, view: ClusterView) -> int:
        """Counts the instances by what they must hold, cached or new; or else by what is quickest."""
        sized = self._sized(request.num_tokens, request.block_size, view.kv.num_blocks(0))
        if sized is not None:
            return sized[0]
        if request.sparse is not None:  # its partition is of a number of instances that leaves out the answer
            return self._num_members(request.num_tokens - cached_tokens, cached_tokens)
        return super()._members(request, cached_tokens, view)

    def _partition(self, request: RequestView, view: ClusterView) -> int:
        sized = self._sized(request.num_tokens, request.block_size, view.kv.num_blocks(0))
        return 0 if sized is None else sized[1]

    def _best(
        self, able: Sequence[int], held: Mapping[int, int], request: RequestView, budget: Budget, members: int
    ) -> list[int]:
        """Sorts instances for a prompt: those with most of its prefix, then with room for a partition, then idle ones,
        on hosts with the most idle ones first (§3.2.2). Where an option sizes partitions, all must have room.
        """
        view, host = budget.view, self._host
        partition = self._partition(request, view)
        each = partition // request.block_size or -(-request.blocks_for(request.num_tokens) // members)
        cramped = {i: budget.blocks[i] - budget.reserved[i] + held[i] < each for i in able}
        if partition:
            able = [i for i in able if not cramped[i]]
        busy = {i: len(view.running.on(i)) > 0 or budget.load[i] > 0 for i in able}
        num_idle, used = Counter(host[i] for i in able if not busy[i]), self._used(able, budget)
        return sorted(
            able,
            key=lambda i: (
                *(-held[i], cramped[i], busy[i], -num_idle[host[i]], used[host[i]], host[i]),
                *(budget.load[i], view.kv.num_allocated(i)),
            ),
        )

    def sparse(self, num_prompt_tokens: int, block_size: int, num_blocks: int) -> SparseSetting | None:
        """Returns the setting of a prompt that is shared: a partition for each member."""
        config = self._config
        sized = self._sized(num_prompt_tokens, block_size, num_blocks)
        members = self._num_members(num_prompt_tokens) if sized is None else sized[0]
        if self._chooser is not None and members > 1:
            config = self._chosen(self._chooser, num_prompt_tokens, members)
        if config is None or config.levels == 1 or members == 1:
            return None
        wanted = -(-num_prompt_tokens // block_size)
        return SparseSetting(
            partition=-(-wanted // members) * block_size if sized is None else sized[1],
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

    def merged(self, changes: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the options after a change. A new objective, or new settings, replace the objective before."""
        objectives = {"max_accuracy_loss", "target_ttft"}
        dropped = objectives if "csa" in changes or objectives & changes.keys() else set()
        return {**{name: value for name, value in self.given.items() if name not in dropped}, **changes}

    def change(self, options: CspsOptions) -> None:
        self._take(options)
        super().change(options)

    @property
    def hint(self) -> str | None:
        if self.options.tuned is None or self._shape is None or self._facts.cluster is None:
            return None
        return CsaChooser(self.options.tuned, self._facts, self._hosts, ()).hint(self.options.objective)


def _routed(part: ScheduledPart, router: Router) -> ScheduledPart:
    """Says where a request that is admitted will decode."""
    return part if part.hit is None else replace(part, targets=router.route(part.request, len(part.group)))
