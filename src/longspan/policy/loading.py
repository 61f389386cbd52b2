"""Loads of cached KV from hosts and disks, for requests that start with it."""

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
"""Upper bound for the steps between a load and the first step of its request. More steps hold blocks longer."""


def held_near(hit: PrefixHit, cluster: Cluster) -> Counter[int]:
    """Count the blocks of a hit that each instance has, or can load from its host and the disk of its host."""
    held = Counter[int]()
    for pool, number in Counter([ref.pool for ref in hit.refs]).items():
        is_on_device = cluster.tier(pool) == "device"
        near = (pool,) if is_on_device else (i for i in cluster.instances if pool in cluster.load_pools(i))
        held.update(dict.fromkeys(near, number))
    return held


def load_part(request: RequestView, group: tuple[int, ...], budget: Budget, hit: PrefixHit) -> ScheduledPart | None:
    """Admit a request whose hit must be loaded. Each block is loaded to the nearby member with the most free blocks.

    Return None if a member has tokens to compute for more than `_STEPS_AHEAD` steps, so that the blocks stay free.
    """
    max_tokens = _STEPS_AHEAD * budget.view.max_num_batched_tokens
    if any(budget.load[instance] > max_tokens for instance in group):
        return None
    cluster, cost = budget.view.cluster, budget.view.kv.hit_cost(hit, budget.claimed)
    free = {i: budget.blocks[i] - budget.reserved[i] - cost[i] for i in group}
    owners = cluster.load_owners(hit.refs if hit.num_loaded else (), free)
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
