"""Plans that a policy skips because nothing changed would have changed nothing."""

from __future__ import annotations

import itertools
from unittest.mock import patch

from cluster import Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_roles import setups
from workloads import RANDOM_RUNS, Job, jobs, play

from longspan.core.view import ClusterView


@settings(RANDOM_RUNS, max_examples=100)
@given(setups(), st.lists(jobs(), min_size=1, max_size=10))
def test_looking_every_time_gives_the_same_steps(setup: Setup, work: list[Job]) -> None:
    number = itertools.count()
    with patch.object(ClusterView, "changes", lambda *_: next(number)):
        looking = play(setup, work).executor.steps
    assert play(setup, work).executor.steps == looking
