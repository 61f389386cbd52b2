"""Parallel specs: one spelling, read and refused alike everywhere."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from longspan import LLM, args, limits
from longspan.args import EngineArgs
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.locations import Location, hosts_of
from longspan.core.splits import ParallelSpec


@given(st.integers(1, 4096))
def test_instances_round_trip(instances: int) -> None:
    spec = ParallelSpec.parse(str(instances))
    assert spec == ParallelSpec(instances=instances)
    assert spec.num_ranks == instances
    assert ParallelSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("text", ["1", " 3 ", "1xtp1", "2xtp1pp1", "tp1", "pp1"])
def test_degrees_of_one_may_be_spelled_out(text: str) -> None:
    spec = ParallelSpec.parse(text)
    assert (spec.tp, spec.pp) == (1, 1)
    assert str(spec) == str(spec.instances)


@pytest.mark.parametrize("text", ["", " ", "x", "4x", "xtp2", "tp", "-1", "1.5", "two", "pp1tp1", "tp1xpp1", "2 xtp1"])
def test_other_spellings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is neither N nor"):
        ParallelSpec.parse(text)


@pytest.mark.parametrize("text", ["0", "tp0", "2xpp0"])
@pytest.mark.parametrize("name", ["parallel", "prefill_parallel"])
def test_degrees_below_one_are_refused_by_the_name_of_the_spec(text: str, name: str) -> None:
    with refused(name):
        ParallelSpec.parse(text, name)


@pytest.mark.parametrize("spec", ["1000000", "4096xtp2", "tp5000"])
def test_more_ranks_than_can_be_planned_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match=r"parallel .* ranks, but at most 4,096 .* use fewer"):
        ParallelSpec.parse(spec)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_splits_round_trip(instances: int, tp: int, pp: int) -> None:
    spec = ParallelSpec(instances=instances, tp=tp, pp=pp)
    assert ParallelSpec.parse(str(spec)) == spec
    assert spec.num_ranks == instances * tp * pp


@given(st.text(alphabet="0123456789xtp ", max_size=8))
def test_every_text_is_read_or_refused(text: str) -> None:
    try:
        spec = ParallelSpec.parse(text)
    except ValueError:
        return
    assert spec.num_ranks >= 1


@pytest.mark.parametrize(
    ("num_ranks", "given", "hosts"),
    [
        (1, "1", (0,)),
        (4, "2", (0, 0, 1, 1)),
        (3, "2", (0, 0, 1)),
        (3, " 3 ", (0, 1, 2)),
        (4, "0-0,1-0,0-0,0-1", (0, 1, 0, 2)),
        (2, "0-12, 0-12", (0, 0)),
    ],
)
def test_ranks_lie_on_hosts(num_ranks: int, given: str, hosts: tuple[int, ...]) -> None:
    assert hosts_of(locations_of_ranks(num_ranks, given)) == hosts


def test_neighbours_are_near() -> None:
    racks = locations_of_ranks(5, "1-0,0-1,0-0,0-1,1-0")
    assert sorted(range(5), key=racks.__getitem__) == [2, 1, 3, 0, 4]
    assert racks[3] == Location(rack=0, host=1, device=3)


def test_pretended_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGSPAN_HOSTS", raising=False)
    assert hosts_of(args.locations(4)) == (0, 0, 0, 0)
    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    assert hosts_of(args.locations(4)) == (0, 0, 1, 1)


@pytest.mark.parametrize("given", ["0", "3", "-1", "two", "1.5", " ", "0-0", "0-0,0-1,0-2", "0-0,1", "0-0,0--1"])
def test_impossible_hosts_are_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_HOSTS", given)
    with pytest.raises(ValueError, match=f"LONGSPAN_HOSTS: .*2 ranks .*but '?{given}'? given"):
        args.locations(2)


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"parallel": "500"}, "parallel"),
        ({"parallel": "8xtp5"}, "parallel"),
        ({"instances": 33}, "instances"),
        ({"tp": 33}, "tp"),
        ({"prefill_parallel": "30", "decode_parallel": "tp3"}, "prefill_parallel"),
        ({"threads_per_rank": 33}, "threads_per_rank"),
        ({"parallel": "8", "threads_per_rank": 5}, "threads_per_rank"),
    ],
)
def test_more_ranks_or_threads_than_cores_can_serve_are_refused_by_name(
    given: dict[str, Any], parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 2)
    with refused(parameter):
        EngineArgs(**given).resolve()
    monkeypatch.setattr(limits, "cores", lambda: 64)
    EngineArgs(**given).resolve()


def test_roles() -> None:
    uniform = EngineArgs(parallel="2xtp2").resolve()
    assert (uniform.cluster.num_ranks, uniform.cluster.has_roles, uniform.cluster.backends) == (4, False, 2)
    split = partial(EngineArgs, prefill_parallel="3", decode_parallel="2xtp2")
    cluster = split().resolve().cluster
    assert (list(cluster.ranks(3)), cluster.at(6)) == ([3, 4], (4, 0, 1))
    assert ([*cluster.prefill], [*cluster.decode], cluster.backends) == ([0, 1, 2], [3, 4], 3)
    assert split(transfer_backends=1).resolve().cluster.backends == 1


def test_the_signature_shows_every_argument() -> None:
    shown = inspect.signature(LLM).parameters
    assert shown.keys() == {field.name for field in fields(EngineArgs)}
    assert shown["block_size"].default == 256
    with pytest.raises(TypeError, match=r"^LLM\(\) got an unexpected keyword argument 'blocksize'"):
        LLM(blocksize=16)  # type: ignore[call-arg]  # of no such name
