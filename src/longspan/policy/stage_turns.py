"""Decodes of instances with several pipeline stages: which of them take part in the next step."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

from longspan.core.view import ClusterView, RequestView
from longspan.policy.batching import is_decode


def take_turns(
    view: ClusterView, instances: frozenset[int], runnable: Iterable[RequestView]
) -> tuple[deque[RequestView], list[RequestView], deque[RequestView]]:
    """Leaves decodes to later steps, so that every stage has some to compute.

    A step gets 1/pp of each group's, and none that the latest pp - 1 steps sample for: it would wait for the last
    stage. Unless there is nothing else: then a step that waits is ready a moment earlier.

    Returns:
        Who takes part, who has the next turn, and those of the latter who could take the place of another.
    """
    decoding, steps = Counter[tuple[int, ...]](), defaultdict[tuple[int, ...], set[int]](set)
    for request in view.running.within(instances):
        decoding[request.group] += request.residency.can_compute and is_decode(request, request.num_scheduled)
        if request.num_steps:
            steps[request.group].add(request.last_step)
    num_stages = {group: view.cluster.pp(group[0]) for group in decoding}
    latest = {group: sorted(steps[group])[1 - pp :] if pp > 1 else [] for group, pp in num_stages.items()}
    left = {group: -(-number // num_stages[group]) for group, number in decoding.items()}
    now = [r for r in runnable if not is_decode(r, r.num_scheduled)]
    later, spare = list[RequestView](), deque[RequestView]()
    idle = decoding.keys() - {r.group for r in now} if not view.startable else set()
    for request in sorted(runnable, key=lambda r: (r.last_step, r.admission)):
        group = request.group
        if not is_decode(request, request.num_scheduled):
            continue
        is_known = request.num_scheduled < request.num_known or request.num_steps < view.max_steps_in_flight
        is_able = is_known and (group in idle or request.last_step not in latest[group])
        if is_able and left[group]:
            left[group] -= 1
            if request.last_step not in latest[group]:
                idle.discard(group)
            now.append(request)
        else:
            later.append(request)
            if is_able:
                spare.append(request)
    return deque(sorted(now, key=lambda r: r.admission)), later, spare
