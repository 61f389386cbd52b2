"""Instances that share a request step together: what they wait for, and how a batch is cut into one step for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from longspan.core.protocols import ClusterView, Plan, Share
from longspan.policy.batching import Batch


def teams_of(groups: Iterable[tuple[int, ...]]) -> list[frozenset[int]]:
    """The smallest sets of the instances of these groups such that no group reaches across two."""
    team_of: dict[int, set[int]] = {}
    for group in groups:
        met = {id(team_of[i]): team_of[i] for i in group if i in team_of}
        joined = set(group).union(*met.values())
        if any(len(team) == len(joined) for team in met.values()):
            continue  # one of them has all of it
        team_of.update(dict.fromkeys(joined, joined))
    return sorted(map(frozenset, {id(team): team for team in team_of.values()}.values()), key=min)


def plan_for_teams(
    view: ClusterView,
    groups: Iterable[tuple[int, ...]],
    everyone: Iterable[int],
    fill: Callable[[frozenset[int]], Batch | None],
) -> Plan:
    """One batch per set of instances that share requests, where all of the set can take a step.

    `groups` step together, besides those of running requests. `fill` plans a step of the instances it is given, or
    returns None when somebody in flight is in the way; it is then asked again for those that have nothing in flight.
    """
    teams = teams_of([*view.running.shared_groups, *groups])

    def attempt(taken: frozenset[int]) -> Batch | None:
        return fill(frozenset(everyone).difference(taken, *(t for t in teams if not t.isdisjoint(taken))))

    batch = attempt(view.full) or attempt(view.busy) or Batch()
    return Plan(preempted=tuple(batch.preempted), batches=_by_team(batch.shares))


def _by_team(shares: Sequence[Share]) -> tuple[tuple[Share, ...], ...]:
    """A batch for each set of instances that these shares connect, in ascending order."""
    groups = {_touched(share) for share in shares}
    if len(groups) <= 1:
        return (tuple(shares),) if shares else ()
    teams = teams_of(groups)
    team_of = {i: number for number, team in enumerate(teams) for i in team}
    batches: list[list[Share]] = [[] for _ in teams]
    for share in shares:
        batches[team_of[share.group[0]]].append(share)
    return tuple(tuple(batch) for batch in batches)


def _touched(share: Share) -> tuple[int, ...]:
    """The instances that a share's step names: also who passes on a token that was sampled elsewhere."""
    request, group = share.request, share.group
    if request.num_tokens == request.num_known or request.sampler in group:
        return group
    return (*group, request.sampler)
