"""Policy `last` runs every request on the last instance."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.core.options import at_least_one
from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan
from longspan.policy.batching import Batch, single_part


@dataclass(frozen=True, kw_only=True)
class LastOptions:
    """The options of `last`.

    Attributes:
        most: the maximum number of tokens of a request in one step.
    """

    most: int = 100

    def __post_init__(self) -> None:
        at_least_one(most=self.most)


class Last(Policy, name="last"):
    """Runs each request on the last instance, at most `most` of its tokens in a step."""

    Options = LastOptions
    changeable = ("most",)

    def plan(self, view: ClusterView) -> Plan:
        batch, last, most = Batch(view, frozenset(self.instances)), self.instances[-1], self.options.most
        for request in batch.running():
            batch.add(single_part(request, last, request.num_scheduled, batch.budget, most=most))
        for request in batch.waiting():
            if last in batch.instances:
                hit = view.kv.match(request, (last,))
                batch.add(single_part(request, last, hit.num_tokens, batch.budget, hit, most=most))
        return batch.plan()
