"""Changes from one cluster to another, and how the time of a run is made up of them and of what lies between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.core.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change from one cluster to another, in seconds of the engine's clock.

    Attributes:
        asked_s: when the policy asked for it.
        idle_s: when nothing was computed any more.
        begun_s: when all KV had left the devices, and ranks began to regroup.
        ended_s: when they had.
        copied_bytes: of weights, which were not there already.
    """

    cluster: Cluster
    asked_s: float
    idle_s: float
    begun_s: float
    ended_s: float
    copied_bytes: int

    @property
    def exposed_s(self) -> float:
        """The time in which nothing was computed."""
        return self.ended_s - self.idle_s


def phase_of(cluster: Cluster, turns: Sequence[Cluster]) -> str:
    """Names what a cluster is for: the first of those that take turns prefills. Empty for one that stays."""
    if not turns:
        return ""
    return "prefill" if cluster.spec == turns[0].spec else "decode"


def phase_seconds(
    transitions: Sequence[Transition], turns: Sequence[Cluster], begun_s: float, ended_s: float
) -> dict[str, float]:
    """Returns the seconds of a run on each of two clusters that take turns, and those of changes between them.

    Changes count while nothing is computed. The sum is the length of the run; {} for a cluster that stays.

    Args:
        transitions: all of an engine, also before the run.
        turns: the clusters, the first of which prefills and is the engine's first.
        begun_s, ended_s: when the run began and ended, by the engine's clock.
    """
    if not turns:
        return {}
    found = {"prefill": 0.0, "decode": 0.0, "transition": 0.0}
    cluster, at_s = turns[0], begun_s

    def until(name: str, end_s: float) -> None:
        nonlocal at_s
        end_s = min(max(end_s, at_s), ended_s)
        found[name] += end_s - at_s
        at_s = end_s

    for one in transitions:
        until(phase_of(cluster, turns), one.idle_s)
        until("transition", one.ended_s)
        cluster = one.cluster
    until(phase_of(cluster, turns), ended_s)
    return found
