"""Instances that share requests: whoever takes part in a step of one waits for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable


def teams_of(groups: Iterable[Collection[int]]) -> list[frozenset[int]]:
    """The smallest sets of the instances of these groups such that no group reaches across two."""
    team_of: dict[int, set[int]] = {}
    for group in groups:
        met = {id(team_of[i]): team_of[i] for i in group if i in team_of}
        joined = set(group).union(*met.values())
        if any(len(team) == len(joined) for team in met.values()):
            continue  # one of them has all of it
        team_of.update(dict.fromkeys(joined, joined))
    return sorted(map(frozenset, {id(team): team for team in team_of.values()}.values()), key=min)
