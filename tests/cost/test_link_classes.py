"""Times over one class of link are not used for groups over another class."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from test_fitted_cost import PREFILL, fitted, part, profile

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL, RING_KV, RING_Q
from longspan.core.group_links import link_of_group, links_by_size
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.link_classes import LinkClass
from longspan.core.steps import Forward
from longspan.cost.fitted_cost import FittedCost
from longspan.cost.partition_table import Entry, PartitionTable
from longspan.cost.profile import Prefill, Profile, Transfer
from longspan.cost.shape import Hardware, ModelShape
from longspan.errors import ParameterError
from longspan.policy.auto.estimates import group_times
from longspan.policy.choosing import Chooser
from longspan.policy.facts import Facts
from longspan.policy.group_times import unmeasured_on_hosts
from longspan.policy.sharing import SharingOptions

SHAPE = ModelShape(num_layers=10, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, bytes_per_element=2)


def placed(spec: str, places: str, decode_spec: str | None = None) -> Cluster:
    cluster = Cluster.of(spec, decode_spec)
    return replace(cluster, locations=locations_of_ranks(cluster.num_ranks, places))


def over(link_class: LinkClass, factor: float) -> Profile:
    """Return the profile with more times of its groups: over this class of link, and `factor` times as long."""
    found = profile()
    for prefill in profile().prefills:
        if prefill.members > 1:
            times = tuple(factor * seconds for seconds in prefill.seconds)
            found = found.with_measured(replaced(prefill, seconds=times, link_class=link_class))
    return found


def replaced(prefill: Prefill, **fields: Any) -> Prefill:
    return Prefill(**{name: getattr(prefill, name) for name in prefill.__struct_fields__} | fields)


@pytest.mark.parametrize(
    ("spec", "places", "group", "link_class"),
    [
        ("2", "1", (0, 1), "same_host"),
        ("2", "2", (0, 1), "other_host"),
        ("2", "0-0,1-0", (0, 1), "other_rack"),
        ("4", "2", (0, 1), "same_host"),
        ("4", "2", (1, 2), "other_host"),
        ("4", "2", (3,), "same_host"),
        ("2xpp2", "0-0,0-1,0-0,0-1", (0, 1), "same_host"),
        ("2xpp2", "0-0,0-1,0-0,1-1", (0, 1), "other_rack"),
    ],
)
def test_a_group_has_the_slowest_link_between_ranks_of_a_stage(
    spec: str, places: str, group: tuple[int, ...], link_class: LinkClass
) -> None:
    assert link_of_group(placed(spec, places), group) == link_class


@pytest.mark.parametrize(
    ("spec", "places", "classes"),
    [
        ("3", "1", "sss"),
        ("4", "2", "ssoo"),
        ("4", "0-0,0-1,1-0,1-0", "ssrr"),
        ("4", "0-0,0-1,0-2,1-0", "soor"),
        ("2xtp2", "2", "so"),
        ("2xpp2", "0-0,0-1,0-0,0-1", "ss"),
    ],
)
def test_the_nearest_group_of_a_size_lies_on_as_few_hosts_and_racks_as_possible(
    spec: str, places: str, classes: str
) -> None:
    short = {"same_host": "s", "other_host": "o", "other_rack": "r"}
    assert "".join(short[name] for name in links_by_size(placed(spec, places)).values()) == classes


def test_times_over_several_classes_are_stored_apart() -> None:
    both = over("other_host", 3.0)
    assert len(both.prefills) == len(profile().prefills) + 9 and Profile.from_json(both.to_json()) == both
    here, there = both.over("same_host").times()[2, RING_KV], both.over("other_host").times()[2, RING_KV]
    assert there.seconds(1000) == pytest.approx(3 * here.seconds(1000), rel=1e-3)
    assert both.of_sizes({1: "same_host", 2: "other_host"}).times()[2, RING_KV] == there
    with pytest.raises(AssertionError, match="several classes of links"):
        both.times()


def test_links_of_several_classes_are_stored_apart() -> None:
    found = profile()
    for link_class, speed in (("same_host", 4e9), ("other_host", 1e8)):
        for size in (2**10, 2**20):
            sizes = {"kind": "point_to_point", "members": 2, "num_bytes": size, "link_class": link_class}
            found = found.with_transfer(Transfer(seconds=(1e-4 + size / speed,), **sizes))
    for link_class, speed in (("same_host", 4e9), ("other_host", 1e8)):
        link = found.link("point_to_point", 2, link_class)
        assert link is not None and link.bytes_per_s == pytest.approx(speed)
        assert found.speeds(SHAPE, link_class).bytes_per_s == pytest.approx(speed)
    assert found.link("point_to_point", 2, "other_rack") is None


def test_a_file_without_classes_is_of_one_host() -> None:
    content = json.loads(profile().to_json())
    for measured in (*content["prefills"], *content["decodes"]):
        del measured["link_class"]
    assert Profile.from_json(json.dumps(content)) == profile()


def test_a_file_with_an_unknown_class_or_a_link_of_one_instance_is_refused() -> None:
    content = json.loads(profile().to_json())
    for index, wrong in ((-1, "nowhere"), (0, "other_host")):
        prefills = [dict(prefill) for prefill in content["prefills"]]
        prefills[index]["link_class"] = wrong
        with pytest.raises(ValueError, match="not a profile: "):
            Profile.from_json(json.dumps({**content, "prefills": prefills}))


def cost_on(measured: Profile, cluster: Cluster) -> FittedCost:
    return FittedCost(measured, SHAPE, block_size=100, cluster=cluster)


def test_a_step_costs_the_times_over_the_link_of_its_group() -> None:
    step = Forward(number=1, parts=(part(0, 0, 4000, 0, 1, exchange=RING_KV),))
    [[here_s], *_] = fitted(profile()).stage_seconds(step).values()
    both = over("other_host", 3.0)
    for places, factor in (("1", 1.0), ("2", 3.0)):
        times = cost_on(both, placed("2", places)).stage_seconds(step)
        assert times == {instance: pytest.approx((factor * here_s,), rel=1e-3) for instance in (0, 1)}


@pytest.mark.parametrize(
    ("measured", "places", "words"),
    [
        ("same_host", "2", "on several hosts"),
        ("other_host", "0-0,1-0", "in several racks"),
        ("same_host", "0-0,1-0", "racks"),
    ],
)
def test_a_step_without_times_over_its_link_is_refused_with_a_remedy(
    measured: LinkClass, places: str, words: str
) -> None:
    step = Forward(number=1, parts=(part(0, 0, 4000, 0, 1, exchange=RING_KV),))
    cost = cost_on(over(measured, 1.0), placed("2", places))
    with pytest.raises(ParameterError, match=rf"profile lacks times of 2 instances .*{words}.*measure 2"):
        cost.stage_seconds(step)


def test_a_policy_uses_times_over_the_link_of_its_group_or_else_rules() -> None:
    """On one host `ring_q` is the quickest, and between hosts `ring_kv` is, where measured."""
    found = over("other_host", 3.0)
    for prefill in profile().prefills:
        if prefill.members > 1:
            times = tuple(0.5 * seconds for seconds in prefill.seconds)
            found = found.with_measured(replaced(prefill, exchange="ring_q", seconds=times))
    slow = Hardware(flops_per_s=1e15, bytes_per_s=1e3)
    facts = Facts(profile=found, cluster=placed("4", "2"), shape=SHAPE, hardware=slow)
    chooser = Chooser(4, facts, SharingOptions())
    assert chooser.exchange(4000, 0, (0, 1)) == RING_Q
    assert chooser.exchange(4000, 0, (1, 2)) == RING_KV
    racks = replace(facts, cluster=placed("4", "0-0,0-0,1-0,1-0"))
    assert Chooser(4, racks, SharingOptions()).exchange(10, 100_000, (1, 2)) == RING_Q, "Algorithm 5"


def test_groups_on_hosts_without_times_are_named_and_not_chosen() -> None:
    for places, missing, members in (("1", [], 2), ("2", [2], None)):
        facts = Facts(profile=profile(), cluster=placed("2", places))
        assert unmeasured_on_hosts(facts) == missing
        assert Chooser(2, facts, SharingOptions()).members(100_000) == members


def test_auto_scales_unmeasured_groups_by_times_over_the_same_link() -> None:
    [here, there] = [
        group_times(Facts(profile=profile(), cluster=placed("4", places)), {RING_KV}, 4)[4].token_s for places in "12"
    ]
    alone = profile().over("same_host").fits()[1, LOCAL].token_s
    assert here == pytest.approx(PREFILL[2][1] / 2, rel=1e-3) and there == pytest.approx(alone / 4)


def test_partitions_of_one_host_are_not_used_for_several() -> None:
    table = PartitionTable()
    for link_class, fraction in (("same_host", 0.6), ("other_host", 0.7)):
        entry = Entry(model="m", members=2, length=800, fractions=(fraction, 1 - fraction), link_class=link_class)
        table = table.with_entry(entry)
    assert PartitionTable.from_json(table.to_json()) == table
    for places, fraction in (("1", 0.6), ("2", 0.7), ("0-0,1-0", None)):
        found = table.of_sizes(links_by_size(placed("2", places))).exact("m", 2, 800)
        assert (found[0] if found else None) == fraction
