"""CSPS: long prompts by sequence parallelism, with attention that drops distant, unimportant tokens (Zhang and Shen).

Policy `context` plans the prompts. Each instance has a partition of neighbouring tokens. Neighbouring partitions are on
instances near each other, and heads are sent (`alltoall`, the paper's SP-NTP). The last instance of a prompt has the
last tokens, and prefills short prompts in the same step. A setting (`core/sparse.py`) has the drop ratio of each
level. It is part of the request, and requests share cached KV only if their settings are equal.

Decodes attend to all KV, and send queries. With roles, the KV of a shared prompt goes to several instances that only
decode, concurrently with short requests (SP decode, §4.2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from longspan.core.exchange import exchange_of
from longspan.core.locations import hosts_of
from longspan.core.policy import Policy
from longspan.core.sparse import SparseSetting
from longspan.core.sparse_plan import segments_of
from longspan.core.view import ClusterView, Plan, ScheduledPart
from longspan.errors import ParameterError
from longspan.policy.batching import Batch
from longspan.policy.context import Context
from longspan.policy.csps.placement import ByPartition
from longspan.policy.csps.settings import CsaConfig, CspsOptions
from longspan.policy.facts import Facts
from longspan.policy.routing import Router

if TYPE_CHECKING:
    from longspan.policy.auto.estimates import Estimates


class Csps(Policy, name="csps"):
    """Plans long prompts by policy `context`, and chooses the setting of sparse attention for each."""

    Options = CspsOptions
    changeable = ("csa", "max_accuracy_loss", "target_ttft", "target_tbt")
    knows_roles = shards_decodes = True

    def __init__(self, instances: tuple[int, ...], options: CspsOptions, facts: Facts) -> None:
        super().__init__(instances, options, facts)
        self.whole_prompts = True
        by_partition = partial(ByPartition, size=options.partition)
        self._context = Context(
            instances, options, facts, chain_cuts=None, placement=by_partition, step_tokens=self._step_tokens
        )
        assert isinstance(self._context.placement, ByPartition)
        self._placement = self._context.placement
        self._facts, self._shape = facts, facts.shape
        self._hosts = hosts_of([facts.location(instance) for instance in instances])
        self._decode = tuple(sorted(facts.decode, key=facts.location))
        self._use(options)

    def _use(self, options: CspsOptions) -> None:
        """Use these settings of sparse attention for new requests."""
        self._check(options.config)
        chooser = None
        if options.tuned is not None and self._shape is not None:
            from longspan.policy.csps.chooser import CsaChooser  # noqa: PLC0415 - settings in a file choose nothing

            sizes, exchange = self._group_sizes(options), options.exchange
            chooser = CsaChooser(options.tuned, self._facts, self.instances, exchange, sizes=sizes)
        self._chooser, self._config, self._objective = chooser, options.config, options.objective
        self._estimates: Estimates | None = None
        if options.target_tbt is not None:
            from longspan.policy.auto.estimates import Estimates  # noqa: PLC0415 - few bound their steps

            exchanges, members = [exchange_of(options.exchange)], len(self.instances)
            self._estimates = Estimates(self._facts, exchanges, members, options.target_tbt)

    def _group_sizes(self, options: CspsOptions) -> Sequence[int]:
        """Return the numbers of instances that may share a prompt: all, or any with a partition or a profile."""
        largest = len(self.instances)
        varies = options.partition != "auto" or self._facts.profile is not None
        return range(2 if varies else max(2, largest), largest + 1)

    def _check(self, config: CsaConfig | None) -> None:
        """Raise ParameterError unless the settings fit the roles of instances, and the layers and KV heads."""
        if config is not None and config.drop_in_decode and self._decode:
            problem = (
                "with drop_in_decode is for instances without roles, whose ranks know the dropped tokens: leave it out"
            )
            raise ParameterError("csa", problem, "drop_in_decode")
        if config is None or self._shape is None:
            return
        layers, heads = len(config.table()), {len(by_head) for by_head in config.table()}
        for unit, given, actual in (
            ("layers", layers, self._shape.num_layers),
            ("KV heads", max(heads), self._shape.num_kv_heads),
        ):
            if given not in (1, actual):
                raise ParameterError("csa", f"must have drop ratios of 1 or {actual} {unit}, but {given} given", given)

    def _step_tokens(self, view: ClusterView, members: int, cached_tokens: int) -> float:
        """Return the tokens of a shared prompt in a step that also decodes (C_TBT of §3.2.6), by `target_tbt`.

        Sparse attention takes less time, so the step is shorter than the bound.
        """
        if self._estimates is None:
            return math.inf
        own = frozenset(self.instances)
        decodes = [one for one in view.running.within(own) if one.num_tokens - one.num_scheduled == 1]
        if not decodes:
            return math.inf
        context = sum(one.num_tokens for one in decodes)
        decode_s = self._estimates.step_s(len(decodes) / len(self.instances), context / len(self.instances))
        return self._estimates.max_tokens(members, cached_tokens, decode_s)

    @property
    def capacity(self) -> int:
        return self._context.capacity

    def plan(self, view: ClusterView) -> Plan:
        """Plan as `context`. With roles, plan the instances that only decode, too.

        The KV of a prompt goes to at most as many decode instances as have computed it. They then step together.
        """
        prefills = self._context.plan(view)
        if not self._decode:
            return prefills
        router, batch = Router(view, self._decode), Batch(view, frozenset(self._decode))
        for request in batch.running():
            batch.add(self._context.parts.next(request, batch.budget, view.max_num_batched_tokens))
        decodes = batch.plan()
        batches = tuple([tuple([_routed(part, router) for part in parts]) for parts in prefills.batches])
        return Plan(
            preempted=prefills.preempted + decodes.preempted,
            loads=tuple([_routed(part, router) for part in prefills.loads]),
            batches=batches + decodes.batches,
        )

    def sparse(self, num_prompt_tokens: int, block_size: int, num_blocks: int) -> SparseSetting | None:
        """Return the setting of a prompt on several instances, with a partition for each. None for one instance."""
        members, partition = self._placement.sized(num_prompt_tokens, block_size, num_blocks)
        hosts, config, chooser = self._hosts[:members], self._config, self._chooser
        if members == 1:
            return None
        if chooser is not None:
            chosen = chooser.choose(num_prompt_tokens, members, self._objective)
            levels, _, pieces = msgspec.structs.astuple(chosen.configuration)
            if levels == 1:
                return None
            segments, drop = segments_of(members, hosts, levels), chooser.drop(chosen, members)
            return SparseSetting(partition, segments, drop, chosen.mode, pieces)
        if config is None or config.levels == 1:
            return None
        return SparseSetting(
            partition=partition,
            segments=segments_of(members, hosts, config.levels),
            drop=config.table(),
            mode=config.drop_mode,
            micro_partitions=config.pieces(),
            samples=config.samples,
            rate_by=config.rate_by,
            drop_in_decode=config.drop_in_decode,
        )

    def merged(self, changes: Mapping[str, str | None]) -> dict[str, str | None]:
        """Return the options after a change. A new objective or new settings replace the earlier objective."""
        objectives = {"max_accuracy_loss", "target_ttft"}
        dropped = objectives if "csa" in changes or objectives & changes.keys() else set()
        return {**{name: value for name, value in self.given.items() if name not in dropped}, **changes}

    def change(self, options: CspsOptions) -> None:
        self._use(options)
        super().change(options)

    @property
    def hint(self) -> str | None:
        config, sizes = self._config, range(2, len(self.instances) + 1)
        if config is not None:
            most = 1 + max((len(segments_of(n, self._hosts[:n], config.levels)) for n in sizes), default=0)
            if most >= config.levels:
                return None
            levels = f"csa has {config.levels} levels, but groups of {len(self.instances)} instances have {most}"
            return f"{levels}: the ratios of further levels are not used"
        if self._chooser is None or self._facts.cluster is None:
            return None
        return self._chooser.hint(self._objective)


def _routed(part: ScheduledPart, router: Router) -> ScheduledPart:
    """Add the decode instances to the first part of a request."""
    return part if part.hit is None else replace(part, targets=router.route(part.request, len(part.group)))
