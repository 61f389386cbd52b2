"""The fleets that can follow another one: their texts, their parts, and the remainder after a loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.fleets import Fleet, fleet_text, in_phases, parse_fleet, parts, without
from longspan.errors import ParameterError

SPECS = st.builds("{}x{}".format, st.integers(1, 4), st.sampled_from(["tp1", "tp2", "pp2", "tp2pp2"]))


def fleet_of(text: str, *, phases: bool = False) -> Fleet:
    cluster = parse_fleet(text)
    return in_phases(cluster) if phases else (cluster,)


@given(SPECS, SPECS, st.sampled_from(["one", "roles", "phases"]))
def test_a_loss_leaves_the_largest_fleet_without_the_instance(first: str, second: str, kind: str) -> None:
    """It has fewer ranks, keeps each role and phase, and its text reads as itself. Or the error names the fleet."""
    text = first if kind == "one" else f"{first} prefill + {second} decode"
    try:
        fleet = fleet_of(text, phases=kind == "phases")
    except ParameterError:
        assert kind == "phases", "both phases have one spec"
        return
    for rank in range(fleet[0].num_ranks):
        try:
            left = without(fleet, rank)
        except ParameterError as error:
            assert fleet_text(fleet) in str(error)  # noqa: PT017 - most losses leave a fleet
            continue
        assert len(left) == len(fleet) and left[0].has_roles == fleet[0].has_roles
        assert len({one.num_ranks for one in left}) == 1
        assert left[0].num_ranks < fleet[0].num_ranks
        assert all(one.prefill for one in left) and bool(left[0].decode) == (kind == "roles")
        assert len({one.spec for one in left}) == len(left), "phases differ"
        assert fleet_text(fleet_of(fleet_text(left), phases=kind == "phases")) == fleet_text(left)
        if kind != "phases":
            lost = fleet[0].ranks(fleet[0].at(rank).instance)
            assert left[0].num_ranks == fleet[0].num_ranks - len(lost)


@given(SPECS, SPECS, st.booleans())
def test_parts_fall_in_size_from_the_whole_fleet(first: str, second: str, phases: bool) -> None:
    try:
        fleet = fleet_of(f"{first} prefill + {second} decode", phases=phases)
    except ParameterError:
        return
    found = list(parts(fleet))
    sizes = [sum(one.num_ranks - one.num_spare for one in part) for part in found]
    assert sizes == sorted(sizes, reverse=True)
    assert fleet_text(found[0]) == fleet_text(fleet)
    assert len({fleet_text(part) for part in found}) == len(found)


@pytest.mark.parametrize(
    ("text", "phases", "rank", "left"),
    [
        ("3", False, 1, "2"),
        ("2 prefill + 2xtp2 decode", False, 1, "1 prefill + 2xtp2 decode"),
        ("2 prefill + 2xtp2 decode", False, 4, "2 prefill + tp2 decode"),
        ("4 prefill + 2xtp2 decode", True, 0, "3 prefill + tp2 decode"),
        ("2xpp2 prefill + 2xtp2 decode", True, 3, "pp2 prefill + tp2 decode"),
        ("3 prefill + tp2 decode", True, 2, "2 prefill + tp2 decode"),
    ],
)
def test_examples_of_a_loss(text: str, phases: bool, rank: int, left: str) -> None:
    assert fleet_text(without(fleet_of(text, phases=phases), rank)) == left


@pytest.mark.parametrize(
    ("text", "phases", "rank", "problem"),
    [
        ("tp2", False, 0, "tp2 has no other instance"),
        ("2 prefill + 1 decode", False, 2, "2 prefill \\+ 1 decode has no other decode instance"),
        ("1 prefill + 2 decode", False, 0, "1 prefill \\+ 2 decode has no other prefill instance"),
        ("pp2 prefill + tp2 decode", True, 0, "pp2 prefill \\+ tp2 decode needs all of its 2 ranks"),
    ],
)
def test_the_error_names_the_fleet_and_the_role(text: str, phases: bool, rank: int, problem: str) -> None:
    with pytest.raises(ParameterError, match=f"{problem}.*restart all workers"):
        without(fleet_of(text, phases=phases), rank)
