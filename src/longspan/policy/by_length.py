"""The default placement: a group size by predicted times or by a threshold, and the least loaded instances."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from longspan.core.view import ClusterView, RequestView
from longspan.policy.batching import Budget
from longspan.policy.choosing import Chooser
from longspan.policy.facts import Facts
from longspan.policy.group_parts import expected_answer

if TYPE_CHECKING:
    from longspan.policy.context import ContextOptions

_UNMEASURED_THRESHOLD = 1024
"""Threshold in tokens if no profile was measured. A higher threshold leaves more prompts to one instance."""


class ByLength:
    """Shares a prompt over the number of instances that is expected to finish it first, or by a threshold."""

    def __init__(self, instances: Sequence[int], options: ContextOptions, facts: Facts, chooser: Chooser) -> None:
        self.instances, self._threshold, self._chooser = instances, options.threshold, chooser
        self._all_or_one = bool(options.fractions)
        self.host = {i: facts.location(i).host_id for i in instances}

    @property
    def is_concurrent(self) -> bool:
        """True if a prompt may get fewer instances than its prefill alone could use."""
        return self._threshold == "auto" and self._chooser.prices_answers

    def members(self, request: RequestView, cached_tokens: int, view: ClusterView) -> int:
        del view
        return self.num_members(request.num_tokens - cached_tokens, cached_tokens, expected_answer(request))

    def num_members(self, new_tokens: int, cached_tokens: int = 0, answer_tokens: int = 0) -> int:
        num_instances, threshold, members = len(self.instances), self._threshold, None
        if threshold == "auto":
            members = self._chooser.members(new_tokens, cached_tokens, answer_tokens)
        if members is None:
            limit = _UNMEASURED_THRESHOLD if threshold == "auto" else threshold
            members = num_instances if new_tokens > limit else 1
        return num_instances if members > 1 and self._all_or_one else members

    def partition(self, request: RequestView, view: ClusterView) -> int:
        del request, view
        return 0

    def ranked(
        self, able: Sequence[int], cached: Mapping[int, int], request: RequestView, budget: Budget, members: int
    ) -> list[int]:
        """Sort by cached blocks, then low load, then hosts with many candidates, then few allocated blocks."""
        del request, members
        kv, host = budget.view.kv, self.host
        near, used = Counter(host[i] for i in able), self.used_blocks(able, budget)
        return sorted(
            able,
            key=lambda i: (-cached[i], budget.load[i], -near[host[i]], used[host[i]], host[i], kv.num_allocated(i)),
        )

    def used_blocks(self, instances: Sequence[int], budget: Budget) -> Counter[tuple[int, int]]:
        """Count the blocks that the instances of each host have allocated so far."""
        used = Counter[tuple[int, int]]()
        for i in instances:
            used[self.host[i]] += budget.view.kv.num_allocated(i)
        return used
