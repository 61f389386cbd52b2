"""Instances that share a request step together: what they wait for, and how a batch is cut into one step for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from longspan.core.protocols import ClusterView, Plan
from longspan.policy.batching import Batch


def teams_of(groups: Iterable[tuple[int, ...]], everyone: tuple[int, ...]) -> list[frozenset[int]]:
    """Splits the instances into the smallest sets such that no group reaches across two."""
    teams = [frozenset({i}) for i in everyone]
    for group in groups:
        touched = [team for team in teams if team.intersection(group)]
        teams = [team for team in teams if team not in touched] + [frozenset().union(*touched)]
    return sorted(teams, key=min)


def plan_for_teams(
    view: ClusterView,
    groups: Iterable[tuple[int, ...]],
    everyone: tuple[int, ...],
    fill: Callable[[frozenset[int]], Batch | None],
) -> Plan:
    """One batch per set of instances that share requests, where all of the set can take a step.

    `fill` plans a step of the instances it is given, or returns None when somebody in flight is in the way; it is then
    asked again for those that have nothing in flight.
    """
    teams = teams_of(groups, everyone)

    def attempt(taken: frozenset[int]) -> Batch | None:
        return fill(frozenset(i for team in teams if not taken.intersection(team) for i in team))

    batch = attempt(view.full) or attempt(view.busy) or Batch()
    teams = teams_of((share.group for share in batch.shares), everyone)
    batches = (tuple(s for s in batch.shares if team.issuperset(s.group)) for team in teams)
    return Plan(preempted=tuple(batch.preempted), batches=tuple(b for b in batches if b))
