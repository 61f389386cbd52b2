"""Instances that share a request step together: who can take a step, and how a batch is cut into one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longspan.core.protocols import ClusterView, Plan, Share
from longspan.core.teams import teams_of
from longspan.policy.batching import Batch


def plan_for_teams(
    view: ClusterView,
    groups: Sequence[tuple[int, ...]],
    everyone: frozenset[int],
    fill: Callable[[frozenset[int]], Batch | None],
) -> Plan:
    """One batch per set of instances that share requests, where all of the set can take a step.

    `groups` step together, besides those of running requests. `fill` plans a step of the instances it is given, or
    returns None when somebody in flight is in the way; it is then asked again for those that have nothing in flight.
    """
    teams = view.running.teams
    if joined := [g for g in groups if len(g) > 1 and not any(team.issuperset(g) for team in teams)]:
        teams = teams_of([*teams, *joined])

    def attempt(taken: frozenset[int]) -> Batch | None:
        return fill(everyone.difference(taken, *[team for team in teams if not team.isdisjoint(taken)]))

    batch = attempt(view.full) or attempt(view.busy) or Batch()
    return Plan(preempted=tuple(batch.preempted), batches=_by_team(batch.shares))


def _by_team(shares: Sequence[Share]) -> tuple[tuple[Share, ...], ...]:
    """A batch for each set of instances that these shares connect, in ascending order."""
    if not shares:
        return ()
    groups = {_touched(share) for share in shares}
    if len(groups) == 1:
        return (tuple(shares),)
    teams = teams_of(groups)
    team_of = {i: number for number, team in enumerate(teams) for i in team}
    batches: list[list[Share]] = [[] for _ in teams]
    for share in shares:
        batches[team_of[share.group[0]]].append(share)
    return tuple(tuple(batch) for batch in batches)


def _touched(share: Share) -> tuple[int, ...]:
    """The instances that a share's step names: also who passes on a token that was sampled elsewhere."""
    request, group = share.request, share.group
    if request.sampler in group or request.num_tokens == request.num_known:
        return group
    return (*group, request.sampler)
