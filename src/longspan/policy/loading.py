"""Requests whose beginning lies on hosts or disks: where that is loaded to."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from longspan.core.exchange import LOCAL
from longspan.core.view import RequestView, ScheduledPart

if TYPE_CHECKING:  # types alone
    from longspan.core.blocks import PrefixHit
    from longspan.core.cluster import Cluster
    from longspan.policy.batching import Budget

_STEPS_AHEAD = 4
"""A load may begin so many steps before its request can compute."""


def held_near(hit: PrefixHit, cluster: Cluster) -> Counter[int]:
    """Return the number of blocks of a hit that each instance has, or can load from its host or the host's disk."""
    held = Counter[int]()
    for pool, number in Counter([ref.pool for ref in hit.refs]).items():
        is_on_device = cluster.tier(pool) == "device"
        near = (pool,) if is_on_device else (i for i in cluster.instances if pool in cluster.load_pools(i))
        held.update(dict.fromkeys(near, number))
    return held


def load_part(request: RequestView, group: tuple[int, ...], budget: Budget, hit: PrefixHit) -> ScheduledPart | None:
    """Admits a request with a hit that has to be loaded, to the members of a group with most room that are near it.

    Returns None while a member has tokens to compute for more steps than a load takes: others may need the room.
    """
    most = _STEPS_AHEAD * budget.view.max_num_batched_tokens
    if any(budget.load[instance] > most for instance in group):
        return None
    cluster, cost = budget.view.cluster, budget.view.kv.hit_cost(hit, budget.claimed)
    left = {i: budget.blocks[i] - budget.reserved[i] - cost[i] for i in group}
    owners = cluster.load_owners(hit.refs if hit.num_loaded else (), left)
    return ScheduledPart(
        request=request,
        group=group,
        start=hit.num_tokens,
        stop=hit.num_tokens,
        runs=((),) * len(group),
        block_owners=tuple([owner for _, owner in owners]),
        exchange=LOCAL,
        hit=hit,
    )
