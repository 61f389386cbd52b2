"""The time of a run is that of its phases and of the changes between them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.cluster import Cluster
from longspan.core.transitions import Transition, phase_of, phase_seconds

PREFILL, DECODE = (Cluster.of(spec) for spec in ("pp2", "tp2"))


def change(to: Cluster, idle_s: float, ended_s: float) -> Transition:
    return Transition(cluster=to, asked_s=idle_s - 0.5, idle_s=idle_s, begun_s=idle_s, ended_s=ended_s, copied_bytes=0)


CHANGES = [change(DECODE, 3.0, 4.0), change(PREFILL, 9.0, 11.0)]


@pytest.mark.parametrize(
    ("begun_s", "ended_s", "found"),
    [
        (1.0, 12.0, (3.0, 5.0, 3.0)),
        (0.0, 2.0, (2.0, 0.0, 0.0)),
        (5.0, 9.5, (0.0, 4.0, 0.5)),
        (3.5, 10.0, (0.0, 5.0, 1.5)),
        (20.0, 21.0, (1.0, 0.0, 0.0)),
    ],
)
def test_seconds_of_each_phase(begun_s: float, ended_s: float, found: tuple[float, float, float]) -> None:
    names = ("prefill", "decode", "transition")
    assert phase_seconds(CHANGES, (PREFILL, DECODE), begun_s, ended_s) == dict(zip(names, found, strict=True))


@given(st.lists(st.floats(0, 100), min_size=2, max_size=14).map(sorted))
def test_they_sum_to_the_run(times: list[float]) -> None:
    begun_s, *inner, ended_s = times
    clusters = [DECODE, PREFILL] * len(inner)
    changes = [change(*one) for one in zip(clusters, inner[::2], inner[1::2], strict=False)]
    found = phase_seconds(changes, (PREFILL, DECODE), begun_s, ended_s)
    assert sum(found.values()) == pytest.approx(ended_s - begun_s)
    assert found["transition"] == pytest.approx(sum(one.exposed_s for one in changes))


def test_a_cluster_that_stays_has_no_phases() -> None:
    assert phase_seconds([], (), 0.0, 1.0) == {}
    assert phase_of(PREFILL, ()) == ""
