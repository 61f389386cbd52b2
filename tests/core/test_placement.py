"""Places of ranks on several hosts, and the options that need them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan import LLM
from longspan.args import EngineArgs
from longspan.core.cluster import Cluster
from longspan.core.locations import Location
from longspan.core.placement import (
    PlacedHost,
    Placement,
    Racks,
    largest_share,
    parse_racks,
    rank_groups,
)
from longspan.errors import ParameterError


@pytest.mark.parametrize(
    ("clusters", "groups"),
    [
        ([Cluster.of("3")], [(0,), (1,), (2,)]),
        ([Cluster.of("tp2pp2")], [(0, 1), (2, 3)]),
        ([Cluster.of("2", "tp2")], [(0,), (1,), (2, 3)]),
        ([Cluster.of("pp4"), Cluster.of("2xtp2")], [(0, 1), (2, 3)]),
        ([Cluster.of("tp2pp2"), Cluster.of("tp4")], [(0, 1, 2, 3)]),
    ],
)
def test_shards_of_a_stage_share_a_host_in_every_phase(clusters: list[Cluster], groups: list[tuple[int, ...]]) -> None:
    assert [tuple(group) for group in rank_groups(clusters)] == groups


@pytest.mark.parametrize(
    ("cpus", "spec", "share"),
    [([8], "2", 4), ([8, 8], "2", 8), ([8, 8], "tp2", 4), ([8, 3], "3", 3), ([2], "4", 1), ([], "1", 1)],
)
def test_ranks_share_cpus_equally(cpus: list[int], spec: str, share: int) -> None:
    assert largest_share(cpus, rank_groups([Cluster.of(spec)])) == share


def test_the_cluster_of_an_engine_has_the_given_places() -> None:
    places = tuple(Location(host=rank // 2, device=rank) for rank in range(4))
    resolved = EngineArgs("m", parallel="2xtp2", executor="ray").resolve(Placement(locations=places, threads=3))
    assert (resolved.cluster.hosts, resolved.threads) == ((0, 0, 1, 1), 3)
    assert EngineArgs("m", executor="ray", parallel="500").resolve().cluster.num_ranks == 500, "not of this machine"


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"ray_address": "10.0.0.1:6379"}, "ray_address"),
        ({"executor": "mp"}, "executor"),
        ({"topology": "racks.toml"}, "topology"),
        ({"executor": "ray", "topology": "/nowhere/racks.toml"}, "topology"),
    ],
)
def test_options_that_exclude_each_other_are_refused(given: dict[str, Any], parameter: str) -> None:
    with pytest.raises(ParameterError) as refused:
        LLM("m", **given)
    assert refused.value.parameter == parameter


def test_a_missing_package_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "longspan.runtime.executor.ray_hosts", raising=False)
    monkeypatch.delitem(sys.modules, "longspan.runtime.executor.ray_actor", raising=False)
    with pytest.raises(ParameterError, match=r"executor ray needs .* missing \(ray\): pip install 'longspan\[ray\]'"):
        LLM(str(tiny), executor="ray", skip_tokenizer_init=True)


FOUR = {name: PlacedHost(address=f"10.0.0.{number}") for number, name in enumerate("dcba", 1)}
FILE = """
[racks]
left = ["10.0.0.1", "10.0.0.4"]
right = ["10.0.0.2", "10.0.0.3", "10.0.0.9"]
"""


@pytest.mark.parametrize(
    ("own", "order"),
    [
        ("d", {"d": 0, "a": 0, "c": 1, "b": 1}),
        ("b", {"b": 0, "c": 0, "d": 1, "a": 1}),
        ("?", {"d": 0, "a": 0, "c": 1, "b": 1}),
    ],
)
def test_hosts_are_in_order_of_racks_with_the_own_rack_and_host_first(own: str, order: dict[str, int]) -> None:
    racks = Racks(parse_racks(FILE))
    racks.check(FOUR.values())
    assert [*racks.in_order(FOUR, own).items()] == [*order.items()]


def test_labels_name_racks_whose_numbers_stay_when_hosts_come() -> None:
    racks, hosts = Racks(), {name: replace(host, label="z" if name in "ad" else "y") for name, host in FOUR.items()}
    assert [*racks.in_order(hosts, "c").items()] == [("c", 0), ("b", 0), ("d", 1), ("a", 1)]
    hosts["e"] = PlacedHost(address="10.0.0.5", label="m")
    assert [*racks.in_order(hosts, "c").items()] == [("c", 0), ("b", 0), ("d", 1), ("a", 1), ("e", 2)]
    assert {*Racks().in_order(FOUR, "c").values()} == {0}, "without labels there is one rack"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("racks", "not TOML"),
        ("", "nothing"),
        ("[hosts]", "hosts"),
        ("[racks]", "racks"),
        ("[racks]\na = '10.0.0.1'", "rack a"),
        ("[racks]\na = ['node-1']", "node-1"),
        ("[racks]\na = [3]", "3"),
        ("[racks]\na = ['10.0.0.1']\nb = ['10.0.0.1']", "10.0.0.1"),
    ],
)
def test_a_wrong_topology_is_refused_with_the_value_and_a_remedy(text: str, named: str) -> None:
    with pytest.raises(ParameterError, match=rf"topology .*{named}.*(give|keep)") as refused:
        parse_racks(text)
    assert refused.value.parameter == "topology"


def test_hosts_without_a_rack_are_named() -> None:
    with pytest.raises(ParameterError, match=r"lacks 10\.0\.0\.7, .*add them"):
        Racks(parse_racks(FILE)).check([*FOUR.values(), PlacedHost(address="10.0.0.7")])
    labelled = [*FOUR.values(), PlacedHost(address="10.0.0.7", label="a")]
    with pytest.raises(ParameterError, match=r"10\.0\.0\.1, .* have no label rack.*ray start --labels rack=NAME"):
        Racks().check(labelled)
    Racks().check(FOUR.values())
