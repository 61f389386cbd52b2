"""Decodes of instances with several pipeline stages, split over steps to keep all stages busy."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from longspan.core.view import ClusterView, RequestView
from longspan.policy.batching import is_decode


def split_decodes(
    view: ClusterView, instances: frozenset[int], runnable: Iterable[RequestView]
) -> tuple[deque[RequestView], list[RequestView], deque[RequestView]]:
    """Postpone decodes to later steps, to keep all stages busy.

    A step gets 1/pp of the decodes of each group. Requests that the latest pp - 1 steps sample for are postponed,
    because the step would wait for the last stage. If there are no other tokens, they are scheduled nevertheless.

    Returns:
        Scheduled requests, postponed requests, and the postponed requests that may be scheduled instead of another.
    """
    decoding, steps = Counter[tuple[int, ...]](), defaultdict[tuple[int, ...], set[int]](set)
    for request in view.running.within(instances):
        decoding[request.group] += request.residency.can_compute and is_decode(request, request.num_scheduled)
        if request.num_steps:
            steps[request.group].add(request.last_step)
    num_stages = {group: view.cluster.pp(group[0]) for group in decoding}
    latest = {group: sorted(steps[group])[1 - pp :] if pp > 1 else [] for group, pp in num_stages.items()}
    quota = {group: -(-number // num_stages[group]) for group, number in decoding.items()}
    now = [r for r in runnable if not is_decode(r, r.num_scheduled)]
    postponed, spare = list[RequestView](), deque[RequestView]()
    idle = decoding.keys() - {r.group for r in now} if not view.startable else set()
    for request in sorted(runnable, key=lambda r: (r.last_step, r.admission)):
        group = request.group
        if not is_decode(request, request.num_scheduled):
            continue
        is_known = request.num_scheduled < request.num_known or request.num_steps < view.max_steps_in_flight
        is_able = is_known and (group in idle or request.last_step not in latest[group])
        if is_able and quota[group]:
            quota[group] -= 1
            if request.last_step not in latest[group]:
                idle.discard(group)
            now.append(request)
        else:
            postponed.append(request)
            if is_able:
                spare.append(request)
    return deque(sorted(now, key=lambda r: r.admission)), postponed, spare
