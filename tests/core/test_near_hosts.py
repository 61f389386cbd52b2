"""Hosts for groups of ranks: groups that work together are on one host, else in one rack, else in few racks."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.core.cluster import Cluster
from longspan.core.placement import bundles_of_groups, group_sizes, near_hosts

HOSTS = "abcdefgh"


@st.composite
def hosts(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, int]]:
    """Return the capacity and the rack of each host, with the hosts of a rack next to each other."""
    capacities = draw(st.lists(st.integers(0, 6), min_size=1, max_size=len(HOSTS)))
    racks = sorted(draw(st.lists(st.integers(0, 2), min_size=len(capacities), max_size=len(capacities))))
    names = HOSTS[: len(capacities)]
    return dict(zip(names, capacities, strict=True)), dict(zip(names, racks, strict=True))


ALIKE = st.builds(lambda size, groups, number: [[size] * groups] * number, *map(st.integers, (1, 1, 1), (3, 3, 5)))
"""Instances of one parallel spec."""
ANY = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=5)


@given(ANY, hosts())
def test_every_group_has_a_host_with_the_capacity(
    instances: list[list[int]], given_hosts: tuple[dict[str, int], dict[str, int]]
) -> None:
    free, racks = given_hosts
    if (chosen := near_hosts(instances, free, racks)) is None:
        return
    assert [*map(len, chosen)] == [*map(len, instances)]
    used = Counter[str]()
    for host, size in zip(chain(*chosen), chain(*instances), strict=True):
        used[host] += size
    assert all(used[host] <= free[host] for host in used)


@given(ALIKE, hosts())
def test_groups_of_one_size_are_near_and_are_placed_whenever_they_fit(
    instances: list[list[int]], given_hosts: tuple[dict[str, int], dict[str, int]]
) -> None:
    free, racks = given_hosts
    size, number = instances[0][0], sum(map(len, instances))
    slots = {host: capacity // size for host, capacity in free.items()}
    of_rack = Counter[int]()
    for host, count in slots.items():
        of_rack[racks[host]] += count
    chosen = near_hosts(instances, free, racks)
    assert (chosen is None) == (sum(slots.values()) < number)
    if chosen is None:
        return
    used = {*chain(*chosen)}
    large_hosts = [host for host in slots if slots[host] >= number]
    large_racks = [rack for rack in sorted(of_rack) if of_rack[rack] >= number]
    if large_hosts:
        assert used == {large_hosts[0]}, "the nearest host that holds all"
    elif large_racks and size == 1:
        counts = sorted((slots[host] for host in slots if racks[host] == large_racks[0]), reverse=True)
        assert {racks[host] for host in used} == {large_racks[0]}, "the nearest rack that holds all"
        assert len(used) == next(k for k in range(1, len(counts) + 1) if sum(counts[:k]) >= number), "few hosts"
    elif large_racks:
        assert len({racks[host] for host in used}) == 1


@given(st.integers(1, 3), st.integers(1, 6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_an_instance_is_not_split_if_hosts_hold_whole_instances(stages: int, number: int, counts: list[int]) -> None:
    free = {host: count * stages for host, count in zip(HOSTS, counts, strict=False)}
    chosen = near_hosts([[1] * stages] * number, free, dict.fromkeys(free, 0))
    assert chosen is None or all(len({*of_instance}) == 1 for of_instance in chosen)


@pytest.mark.parametrize(
    ("spec", "free", "racks", "chosen"),
    [
        ("4", "22 22", "ab cd", "aabb"),
        ("4", "11 22", "ab cd", "ccdd"),  # in one rack, although the nearest rack has two places
        ("3", "12 2", "ab c", "abb"),
        ("2xpp2", "33", "ab", "aabb"),  # no instance is split
        ("2xpp2", "12 1", "ab c", "bbac"),
        ("pp3", "1 11 1", "a bc d", "abc"),
        ("2xtp2", "3 3", "a b", "ab"),
        ("3xtp2", "3 3", "a b", ""),
        ("2", "0 0 2", "a b c", "cc"),
    ],
)
def test_stages_and_instances_are_near(spec: str, free: str, racks: str, chosen: str) -> None:
    """Hosts are named in order of proximity, with a space between racks."""
    names, capacities = racks.replace(" ", ""), map(int, free.replace(" ", ""))
    numbers = {host: number for number, rack in enumerate(racks.split()) for host in rack}
    near = near_hosts(group_sizes([Cluster.of(spec)]), dict(zip(names, capacities, strict=True)), numbers)
    assert "".join(chain(*(near or ()))) == chosen


def test_instances_of_phases_that_share_ranks_count_as_one() -> None:
    assert group_sizes([Cluster.of("2xpp2"), Cluster.of("2xtp2")]) == [[2], [2]]
    assert group_sizes([Cluster.of("pp4"), Cluster.of("4")]) == [[1, 1, 1, 1]]
    assert group_sizes([Cluster.of("2", "tp2")]) == [[1], [1], [2]]


def test_each_group_gets_a_bundle_of_its_size_near_its_neighbours() -> None:
    sizes = [1, 1, 1, 1, 2, 2]
    hosts = dict(enumerate("bababa"))
    order = bundles_of_groups(group_sizes([Cluster.of("4", "2xtp2")]), sizes, hosts, {"a": 0, "b": 0})
    assert order == [1, 3, 0, 2, 5, 4]
    smaller = group_sizes([Cluster.of("2", "1xtp2")])
    assert bundles_of_groups(smaller, sizes, {0: "b", 2: "b", 3: "a", 4: "b"}, {"a": 0, "b": 0}) == [0, 2, 4]
    assert bundles_of_groups(smaller, sizes, {0: "b", 1: "a", 2: "b"}, {"a": 0, "b": 0}) is None


@given(ANY, st.data())
def test_all_groups_get_different_bundles_of_their_size_if_there_are_enough(
    instances: list[list[int]], data: st.DataObject
) -> None:
    needed = [*chain(*instances)]
    sizes = data.draw(st.permutations(needed + data.draw(st.lists(st.integers(1, 3), max_size=3))))
    hosts = {bundle: data.draw(st.sampled_from("abc")) for bundle in range(len(sizes))}
    bundles = bundles_of_groups(instances, sizes, hosts, {"a": 0, "b": 0, "c": 1})
    assert bundles is not None and len({*bundles}) == len(needed)
    assert [sizes[bundle] for bundle in bundles] == needed
