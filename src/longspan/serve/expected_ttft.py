"""Predicts the time to the first token of a new request, by the profile of this machine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING

from longspan.core.exchange import LOCAL
from longspan.core.request import Request
from longspan.policy.group_times import nearest_times
from longspan.service import Service

if TYPE_CHECKING:  # types alone
    from longspan.cost.profile import Kind, Profile, Times


def expected_ttft_s(service: Service, request: Request, before: Iterable[Request]) -> float | None:
    """Return the predicted seconds, or None if no prefill on one instance was measured.

    A request waits for the prompts before it. If the policy prefills each prompt on one instance, it waits for the
    instance that is idle first. Otherwise prompts use all instances one after the other. Decodes of other requests are
    neglected, so answers delay the real token.

    Args:
        before: the unfinished requests that arrived before.
    """
    profile, policy, config = nearest_times(service.setup.facts), service.setup.policy, service.engine.config
    if profile is None:
        return None
    measured = _times(profile)
    alone = measured.get((1, LOCAL))
    if alone is None:
        return None
    instances = list(service.setup.facts.prefill(config.cluster.num_instances))
    busy_s = dict.fromkeys(instances, 0.0)
    for other in before:
        if other.output or other.leader is not None:
            continue
        quickest = min(busy_s, key=busy_s.__getitem__)
        instance = other.group[0] if len(other.group) == 1 and other.group[0] in busy_s else quickest
        busy_s[instance] += alone.fit.seconds(other.num_prompt - other.num_computed, other.num_computed)
    is_alone = policy.capacity == 1
    wait_s = min(busy_s.values()) if is_alone else sum(busy_s.values()) / len(instances)
    groups = [*((instance,) for instance in instances), tuple(instances)]
    num_cached = max(service.engine.kv.account.match(request, group).num_tokens for group in groups)
    num_new = request.num_prompt - num_cached
    return wait_s + min(
        times.seconds(num_new, num_cached)
        + times.fit.start_s * (ceil(num_new / (config.max_num_batched_tokens * members)) - 1)
        for (members, exchange), times in measured.items()
        if members <= (1 if is_alone else len(instances)) and not exchange.is_sparse_form
    )


@lru_cache(maxsize=1)
def _times(profile: Profile) -> dict[Kind, Times]:
    """Return the fits of the latest profile."""
    return profile.times()
