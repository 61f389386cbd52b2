"""Continuous batching with chunked prefill, the way of Sarathi-Serve and vLLM: each request on one instance.

On several instances a request goes to the one where its prefill is expected to end first: data parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longspan.core.protocols import PolicySettings
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget, fill, single_part
from longspan.policy.choosing import Facts
from longspan.policy.options import FixedSettings, parse_options, settings_of
from longspan.policy.placement import admit_alone, plan_coupled


@dataclass(frozen=True, kw_only=True)
class ChunkedOptions:
    """`chunked` has no options: the bounds of a step are the engine's."""


class Chunked(FixedSettings):
    """Running requests in the order of admission, then waiting ones, as long as the tokens of the step last."""

    def __init__(self, everyone: tuple[int, ...], settings: PolicySettings) -> None:
        super().__init__(settings)
        self._everyone, self._all = everyone, frozenset(everyone)

    @classmethod
    def create(cls, num_instances: int, options: Mapping[str, str], facts: Facts) -> Chunked:
        """Raises ValueError for an option."""
        settings = settings_of("chunked", parse_options("chunked", ChunkedOptions, options))
        return cls(tuple(sorted(range(num_instances), key=facts.place)), settings)

    def capacity_tokens(self, *, num_blocks: int, block_size: int) -> int:
        """All of one pool."""
        return num_blocks * block_size

    def check(self, num_prompt_tokens: int) -> None:
        """Any prompt will do."""

    def plan(self, view: ClusterView) -> Plan:
        """One batch for every instance that can take a step."""
        return plan_coupled(view, (), self._all, lambda able: fill(view, able, self) if able else Batch())

    def grow(self, request: RequestView, view: ClusterView, budget: Budget) -> ScheduledPart | None:
        """What the token budget leaves for it."""
        del view
        return single_part(request, request.group[0], request.num_scheduled, budget)

    def admit(self, request: RequestView, view: ClusterView, budget: Budget) -> ScheduledPart | None:
        """Behind the longest cached prefix, while a seat is free."""
        return admit_alone(request, view, budget, self._everyone)
