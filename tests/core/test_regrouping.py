"""The states of a change of clusters."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import count

import pytest
from cluster import Cluster as Simulated
from cluster_setup import Setup

from longspan.core.cluster import Cluster
from longspan.core.config import EngineConfig
from longspan.core.policy import Policy
from longspan.core.regrouping import Change, Regrouping
from longspan.core.steps import Completion
from longspan.policy.chunked import Chunked
from longspan.policy.registry import make_policy

ONE, TWO = (Cluster.of(spec, num_blocks=[4]) for spec in ("tp2", "pp2"))
ONE_POOL, TWO_POOLS = Cluster.of("1", num_blocks=[4]), Cluster.of("2", num_blocks=[4, 4])


class Choosy(Chunked, name="choosy"):
    """Refuses prompts of 7 tokens."""

    def check_prompt(self, num_prompt_tokens: int) -> None:
        if num_prompt_tokens == 7:
            raise ValueError("7 tokens are refused")


def policy() -> Policy:
    return make_policy("chunked", num_instances=1, options={})


def switched(regrouping: Regrouping, number: int) -> Change | None:
    """Drain at once and complete the Reshard."""
    reshard = regrouping.drain(lambda: number, 2.0, computes=False, moves=False)
    assert reshard is not None and reshard.number == number and regrouping.state == "switching"
    assert regrouping.complete(Completion(number=number + 1, sampled=(), bytes_sent={}), 3.0) is None, "another step"
    return regrouping.complete(Completion(number=number, sampled=(), bytes_sent={}), 3.0)


def test_a_change_passes_through_every_state() -> None:
    regrouping, numbers = Regrouping(), count(7)
    change = Change(cluster=TWO, policy=policy())
    states = [regrouping.state]
    regrouping.ask(change, 1.0)
    states.append(regrouping.state)
    assert regrouping.drain(numbers.__next__, 2.0, computes=True, moves=True) is None
    assert regrouping.drain(numbers.__next__, 3.0, computes=False, moves=True) is None
    reshard = regrouping.drain(numbers.__next__, 4.0, computes=False, moves=False)
    assert reshard is not None and (reshard.number, reshard.cluster) == (7, TWO)
    states.append(regrouping.state)
    assert regrouping.complete(Completion(number=7, sampled=(), bytes_sent={}), 5.0) is change
    states.append(regrouping.state)
    regrouping.resumed(5.0)
    states.append(regrouping.state)
    assert states == ["running", "draining", "switching", "resuming", "running"]
    [transition] = regrouping.transitions
    assert (transition.asked_s, transition.idle_s, transition.begun_s, transition.ended_s) == (1.0, 3.0, 4.0, 5.0)


def test_a_change_of_the_user_follows_a_change_of_the_policy() -> None:
    regrouping, asked = Regrouping(), Change(cluster=ONE, policy=policy())
    regrouping.ask(Change(cluster=TWO), 1.0)
    regrouping.ask(asked, 1.5)
    with pytest.raises(RuntimeError, match="a change of clusters is in progress"):
        regrouping.ask(asked, 1.5)
    assert switched(regrouping, 3) == Change(cluster=TWO)
    regrouping.resumed(3.0)
    assert regrouping.state == "draining"
    assert switched(regrouping, 5) is asked
    regrouping.resumed(3.0)
    assert regrouping.state == "running" and len(regrouping.transitions) == 2


@pytest.mark.parametrize("num_events", [0, 1, 2])
@pytest.mark.parametrize("is_of_policy", [False, True])
def test_lost_workers_end_a_change_in_any_state(num_events: int, is_of_policy: bool) -> None:
    """The change begins again, unless the policy asked for it or the new workers have other places."""
    for shrinks in (False, True):
        regrouping = Regrouping()
        regrouping.ask(Change(cluster=TWO, policy=None if is_of_policy else policy()), 1.0)
        if num_events > 0:
            regrouping.drain(lambda: 3, 2.0, computes=False, moves=num_events == 1)
        regrouping.restart(Change(cluster=ONE, policy=policy()) if shrinks else None, 4.0)
        assert regrouping.state == ("resuming" if shrinks else "running" if is_of_policy else "draining")
        assert regrouping.complete(Completion(number=3, sampled=(), bytes_sent={}), 5.0) is None, (
            "of workers that are lost"
        )
        assert not regrouping.transitions


@pytest.mark.parametrize("is_refused_after", [False, True])
def test_prompts_are_checked_by_the_policy_after_a_change_under_way(is_refused_after: bool) -> None:
    chunked, choosy = policy(), Choosy((0,), Choosy.Options(), None)
    before, after = (chunked, choosy) if is_refused_after else (choosy, chunked)
    cluster = Simulated(Setup(num_instances=1))
    cluster.engine.set_policy(before)
    for is_refused in (not is_refused_after, is_refused_after):
        with pytest.raises(ValueError, match="7 tokens are refused") if is_refused else nullcontext():
            cluster.engine.check(7)
        if is_refused != is_refused_after:
            cluster.engine.reshard(Change(cluster=cluster.engine.config.cluster, policy=after))


def test_a_change_of_the_user_bounds_requests_behind_a_change_of_the_policy() -> None:
    regrouping, config = Regrouping(), EngineConfig(cluster=ONE_POOL, block_size=16, max_model_len=1000)
    first, second = policy(), policy()
    assert regrouping.target(first, config) == (first, config)
    regrouping.ask(Change(cluster=TWO), 1.0)
    regrouping.ask(Change(cluster=TWO_POOLS, policy=second), 1.5)
    chosen, after = regrouping.target(first, config)
    assert (chosen, after.cluster) == (second, TWO_POOLS)
