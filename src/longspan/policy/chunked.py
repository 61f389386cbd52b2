"""Continuous batching with chunked prefill, as Sarathi-Serve and vLLM do it: each request on one instance.

On several instances a request goes to the one where its prefill is expected to end first: data parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence

from longspan.core.policy import Policy
from longspan.core.view import ClusterView, Plan, RequestView, ScheduledPart
from longspan.policy.batching import Batch, Budget, single_part


class Chunked(Policy, name="chunked"):
    """Schedules running requests in the order of admission, then waiting ones, up to the token budget of the step."""

    reads_hosts = True

    def plan(self, view: ClusterView) -> Plan:
        """Give every running request what the token budget leaves for it, and then admit waiting requests."""
        batch = Batch(view, frozenset(self.instances))
        for request in batch.running():
            batch.add(single_part(request, request.group[0], request.num_scheduled, batch.budget))
        for request in batch.waiting():
            batch.add(admit_alone(request, batch.budget, self.instances))
        return batch.plan()


def admit_alone(request: RequestView, budget: Budget, instances: Sequence[int]) -> ScheduledPart | None:
    """Schedules the first part of a request on the instance where its prefill is expected to end first.

    That is the one with the fewest tokens to compute, its own uncached ones included; of equals the one that has handed
    out the fewest blocks. Returns None while no instance has a seat and room for it, or the best one takes no part in
    this step. It can be loaded there nevertheless.
    """
    kv = budget.view.kv
    hits = {i: budget.hit(request, (i,)) for i in instances}
    for instance in sorted(instances, key=lambda i: (budget.load[i] - hits[i].num_tokens, kv.num_allocated(i), i)):
        hit = hits[instance]
        missing = request.blocks_for(request.num_tokens) - hit.num_held
        if budget.seqs[instance] > 0 and missing <= budget.room(request, (instance,)):
            if instance not in budget.tokens and not hit.waits:
                return None
            return single_part(request, instance, hit.num_tokens, budget, hit)
    return None
