"""Where a request goes that one instance computes."""

from __future__ import annotations

from collections.abc import Sequence

from longspan.core.account import PrefixHit
from longspan.core.protocols import ClusterView, Share
from longspan.core.request import Request
from longspan.policy.batching import Budget, single_share


def admit_alone(request: Request, view: ClusterView, budget: Budget, everyone: Sequence[int]) -> Share | None:
    """The first share of a request on the instance where its prefill is expected to end first.

    That is the one with the fewest tokens to compute, its own uncached ones included. None while no instance has a seat
    and room for it, or the best one takes no part in this step.
    """
    hits = {i: view.account.match(request, (i,)) for i in everyone}
    best_first = sorted(everyone, key=lambda i: (budget.load[i] - hits[i].num_tokens, i))
    able = (i for i in best_first if budget.seqs[i] > 0 and _has_room(request, i, hits[i], budget))
    home = next(able, None)
    if home is None or home not in budget.tokens:
        return None
    return single_share(request, home, hits[home].num_tokens, budget, hits[home])


def _has_room(request: Request, instance: int, hit: PrefixHit, budget: Budget) -> bool:
    """Whether the prompt is likely to fit beside what is promised; `Budget.admits` has the last word."""
    missing = request.blocks_for(request.num_tokens) - len(hit.refs)
    return missing <= budget.blocks[instance] - budget.reserved[instance]
