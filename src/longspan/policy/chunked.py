"""Continuous batching with chunked prefill, as in Sarathi-Serve and vLLM. Each request runs on one instance.

With several instances (data parallelism), a request runs where its prefill is expected to finish first.
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
        """Schedule every running request within the token budget, then admit waiting requests."""
        batch = Batch(view, frozenset(self.instances))
        for request in batch.running():
            batch.add(single_part(request, request.group[0], request.num_scheduled, batch.budget))
        for request in batch.waiting():
            batch.add(admit_alone(request, batch.budget, self.instances))
        return batch.plan()


def admit_alone(request: RequestView, budget: Budget, instances: Sequence[int]) -> ScheduledPart | None:
    """Schedule the first part of a request on the instance where its prefill is expected to finish first.

    This instance has the fewest tokens to compute, with the uncached tokens of the request. Of equals, it has the
    fewest allocated blocks. Return None if no instance has a free request slot and free blocks, or if the best one
    does not step now. A load can start there nevertheless.
    """
    kv = budget.view.kv
    hits = {i: budget.hit(request, (i,)) for i in instances}
    for instance in sorted(instances, key=lambda i: (budget.load[i] - hits[i].num_tokens, kv.num_allocated(i), i)):
        hit = hits[instance]
        missing = request.blocks_for(request.num_tokens) - hit.num_held
        if budget.seqs[instance] > 0 and missing <= budget.free_blocks(request, (instance,)):
            if instance not in budget.tokens and not hit.waits:
                return None
            return single_part(request, instance, hit.num_tokens, budget, hit)
    return None
