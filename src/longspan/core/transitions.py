"""Changes from one cluster to another, and the seconds of a run in each phase and in changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longspan.core.cluster import Cluster


@dataclass(frozen=True, kw_only=True)
class Transition:
    """A change from one cluster to another, in seconds of the engine's clock.

    Attributes:
        asked_s: time of the request for the change.
        idle_s: time when the last step before the change was complete.
        begun_s: time when all KV had left the devices, and ranks began to regroup.
        ended_s: time when ranks had regrouped.
        copied_bytes: bytes of weights that ranks did not have yet.
    """

    cluster: Cluster
    asked_s: float
    idle_s: float
    begun_s: float
    ended_s: float
    copied_bytes: int

    @property
    def exposed_s(self) -> float:
        """The time without computation."""
        return self.ended_s - self.idle_s

    @property
    def swap_s(self) -> float:
        """The time without computation in which KV left the devices."""
        return self.begun_s - self.idle_s


def phase_of(cluster: Cluster, phases: Sequence[Cluster]) -> str:
    """Return the phase of a cluster. The first of the two clusters prefills. Empty without phases."""
    if not phases:
        return ""
    return "prefill" if cluster.spec == phases[0].spec else "decode"


def phase_seconds(
    transitions: Sequence[Transition], phases: Sequence[Cluster], begun_s: float, ended_s: float
) -> dict[str, float]:
    """Return the seconds of a run in its prefill phases, decode phases, and changes. Empty without phases.

    Changes count from their `idle_s` on. The sum is the length of the run.

    Args:
        transitions: all changes of an engine, including changes before the run.
        phases: the clusters of both phases. The engine began with the first, which prefills.
        begun_s, ended_s: begin and end of the run, by the engine's clock.
    """
    if not phases:
        return {}
    seconds = {"prefill": 0.0, "decode": 0.0, "transition": 0.0}
    cluster, at_s = phases[0], begun_s

    def until(name: str, end_s: float) -> None:
        nonlocal at_s
        end_s = min(max(end_s, at_s), ended_s)
        seconds[name] += end_s - at_s
        at_s = end_s

    for transition in transitions:
        until(phase_of(cluster, phases), transition.idle_s)
        until("transition", transition.ended_s)
        cluster = transition.cluster
    until(phase_of(cluster, phases), ended_s)
    return seconds
