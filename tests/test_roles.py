"""Instances that prefill and instances that decode: routes, handshakes, transfers, and what is left when things end."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby

import pytest
from cluster import Cluster, Setup
from hypothesis import given, settings
from hypothesis import strategies as st
from test_engine import RANDOM_RUNS, Job, add, assert_lawful, jobs, play, setups_of
from test_tetris import GROUPS, machine

from longspan.core.engine import EngineConfig
from longspan.core.fleet import Roles
from longspan.core.places import Place
from longspan.core.request import Request
from longspan.core.sampling import SamplingParams
from longspan.core.steps import Forward, Free, MoveKV
from longspan.policy import make_policy
from longspan.policy.choosing import Facts


def disaggregated(
    num_prefill: int = 2, num_decode: int = 1, backends: int = 2, *, facts: Facts | None = None, **wishes: object
) -> Cluster:
    roles = Roles(num_prefill=num_prefill, num_decode=num_decode, backends=backends)
    setup = Setup(
        num_instances=num_prefill + num_decode,
        policy="tetris",
        options={"min_chunk": "16", "improvement_rate": "0"},
        facts=facts or machine(*range(1, num_prefill + 1)),
        roles=roles,
    )
    return Cluster(replace(setup, **wishes))  # type: ignore[arg-type]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    num_prefill, num_decode = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    roles = Roles(num_prefill=num_prefill, num_decode=num_decode, backends=draw(st.integers(1, 4)))
    options = dict(draw(st.sampled_from(GROUPS)))
    policy = draw(st.sampled_from(["tetris", "tetris", "fixed-sp"]))
    if policy == "fixed-sp":
        options["sp"] = str(draw(st.sampled_from([size for size in (1, 2, 3, 4) if num_prefill % size == 0])))
    else:
        options |= {"improvement_rate": draw(st.sampled_from(["0", "0.3"])), "min_chunk": "1"}
        sizes = draw(st.sets(st.integers(1, num_prefill), min_size=1))
        options["sp_sizes"] = ",".join(map(str, sorted(sizes)))
    options["balance"] = draw(st.sampled_from(["true", "true", "false"]))
    setup = draw(setups_of(policy, num_prefill, options))
    facts = draw(st.sampled_from([Facts(), machine(*range(1, num_prefill + 1), start_s=0.0)]))
    places = tuple(Place(host=i % 2, device=i) for i in range(num_prefill + num_decode))
    setup = replace(
        setup,
        num_instances=num_prefill + num_decode,
        roles=roles,
        decode_blocks=draw(st.none() | st.integers(1, 20)),
        facts=replace(facts, places=places),
        max_model_len=None,
    )
    capacity = Cluster(setup).engine.config.max_model_len
    return replace(setup, max_model_len=min(100, capacity)) if capacity > 1 else replace(setup, block_size=2)


@settings(RANDOM_RUNS, max_examples=300)
@given(setups(), st.lists(jobs(), min_size=1, max_size=10), st.randoms(use_true_random=False))
def test_any_workload_finishes_lawfully(setup: Setup, work: list[Job], timeouts: random.Random) -> None:
    assert_lawful(play(setup, work, timeouts))


def test_a_prompt_moves_to_the_instance_that_decodes_it() -> None:
    cluster = disaggregated()
    request = cluster.add(range(100), max_tokens=5)
    cluster.run()
    assert_lawful(cluster)
    groups = [part.group for part in cluster.parts_of(request)]
    assert groups[-4:] == [(2,)] * 4 and all(set(group) <= {0, 1} for group in groups[:-4])
    assert sum(len(move.copies) for move in cluster.moves) == -(-100 // 16)
