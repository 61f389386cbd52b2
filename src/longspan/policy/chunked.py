"""Continuous batching with chunked prefill on one instance, the way of Sarathi-Serve and vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longspan.core.protocols import ClusterView, Plan, Share
from longspan.core.request import Request
from longspan.policy.batching import Budget, fill, single_share
from longspan.policy.choosing import Facts
from longspan.policy.options import Settled, parse_options, settings_of


@dataclass(frozen=True, kw_only=True)
class ChunkedOptions:
    """`chunked` has no options: the bounds of a step are the engine's."""


class Chunked(Settled):
    """Running requests in the order of admission, then waiting ones, as long as the tokens of the step last."""

    @classmethod
    def create(cls, num_instances: int, options: Mapping[str, str], facts: Facts) -> Chunked:
        """Raises ValueError on several instances, or for an option."""
        del facts  # there is nothing to choose
        if num_instances != 1:
            raise ValueError(
                f"policy chunked runs on 1 instance, but {num_instances} given: use --policy context or auto"
            )
        return cls(settings_of("chunked", parse_options("chunked", ChunkedOptions, options)))

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        """All of the one pool."""
        return num_blocks * block_size

    def check(self, num_prompt_tokens: int) -> None:
        """Any prompt will do."""

    def plan(self, view: ClusterView) -> Plan:
        """One batch on instance 0 whenever it can take a step."""
        batch = None if view.full else fill(view, frozenset({0}), self)
        if batch is None:
            return Plan()
        return Plan(preempted=tuple(batch.preempted), batches=(tuple(batch.shares),) if batch.shares else ())

    def grow(self, request: Request, view: ClusterView, budget: Budget) -> Share | None:
        """What the token budget leaves for it."""
        del view
        return single_share(request, 0, request.num_scheduled, budget)

    def admit(self, request: Request, view: ClusterView, budget: Budget) -> Share | None:
        """Behind the longest cached prefix, while a seat is free."""
        if budget.seqs[0] <= 0:
            return None
        hit = view.account.match(request, (0,))
        return single_share(request, 0, hit.num_tokens, budget, hit)
