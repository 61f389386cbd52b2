"""The candidates of a space: their policies, options and devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.splits import ParallelSpec
from longspan.errors import ParameterError
from longspan.planner.candidates import OFFLINE_POLICIES, STATIC, Candidate, Space, candidates

SPACE = Space(hardware=("a100-sxm-80g",), max_gpus=4, num_layers=32)


@given(st.integers(1, 12), st.booleans())
def test_candidates_are_different_and_take_the_devices_that_there_are(max_gpus: int, fewer: bool) -> None:
    every = list(candidates(replace(SPACE, max_gpus=max_gpus, fewer=fewer)))
    assert len(set(every)) == len(every) > 0
    assert all(1 <= one.num_gpus <= max_gpus if fewer else one.num_gpus == max_gpus for one in every)
    assert {one.num_gpus for one in every} == (set(range(1, max_gpus + 1)) if fewer else {max_gpus})


def test_policies_that_share_prompts_need_several_instances() -> None:
    shared = [one for one in candidates(SPACE) if one.policy != STATIC and one.decode is None]
    assert shared and all(one.spec.instances > 1 for one in shared)


def test_many_devices_have_thousands_of_candidates() -> None:
    assert len(list(candidates(replace(SPACE, max_gpus=64)))) > 10_000


def test_seesaw_needs_memory_on_hosts_and_equal_devices() -> None:
    space = replace(SPACE, policies=OFFLINE_POLICIES, host_kv_gib=(0.0, 64.0))
    pairs = [one for one in candidates(space) if one.policy == "seesaw"]
    assert pairs and all(one.host_kv_gib == 64 for one in pairs)
    assert all(one.decode is not None and one.spec.num_ranks == one.decode.num_ranks == one.num_gpus for one in pairs)


@pytest.mark.parametrize(
    ("layout", "policies"),
    [("4xtp2", {"chunked", "auto"}), ("2xtp2 prefill + tp4 decode", {"tetris"})],
)
def test_given_layouts_get_the_policies_that_can_serve_them(layout: str, policies: set[str]) -> None:
    space = replace(SPACE, max_gpus=8, layouts=(layout,), policies=("chunked", "auto", "seesaw"))
    space = replace(space, policies=("tetris",)) if "prefill" in layout else space
    every = list(candidates(space))
    assert {one.layout for one in every} == {layout}
    assert {one.policy for one in every} == policies


@pytest.mark.parametrize(
    ("layout", "policies"),
    [("8", ("chunked",)), ("4 prefill + 2 decode", ("tetris",)), ("8 prefill + tp8 decode", ("seesaw",))],
)
def test_a_given_layout_with_more_devices_than_there_are_is_a_mistake(layout: str, policies: tuple[str, ...]) -> None:
    space = replace(SPACE, layouts=(layout,), policies=policies, host_kv_gib=(64.0,))
    with pytest.raises(ParameterError, match=r"devices, more than `gpus` \(4\)"):
        list(candidates(space))
    assert list(candidates(replace(space, max_gpus=8)))


def test_a_family_differs_in_step_and_tier_alone() -> None:
    one = Candidate(hardware="x", spec=ParallelSpec(tp=2), max_num_batched_tokens=2048, host_kv_gib=1.0)
    assert one.family == replace(one, max_num_batched_tokens=None, host_kv_gib=0.0)
    assert one.flags[-4:] == ("--max-num-batched-tokens", "2048", "--host-kv-gib", "1")
