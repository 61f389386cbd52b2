"""Policy `csps` with a partition: the length of a prompt determines the number and the choice of its instances."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from hypothesis import strategies as st
from workloads import finishes_lawfully, setups_of

from longspan.core.locations import Location
from longspan.core.request import Request
from longspan.errors import ParameterError
from longspan.policy.registry import make_policy

CSA = json.dumps({"levels": 3, "drop": 0.2})
TWO_HOSTS = tuple(Location(host=i // 4, device=i) for i in range(8))


def cluster(num_instances: int = 8, partition: str = "64", **wishes: object) -> Cluster:
    options = {"partition": partition, "long_share": "1"}
    setup = Setup(num_instances=num_instances, policy="csps", options=options)
    return Cluster(replace(setup, **wishes))  # type: ignore[arg-type]


def tokens(length: int, first: int = 0) -> list[int]:
    return [(first + position * position) % 61 for position in range(length)]


def group(served: Cluster, request: Request) -> tuple[int, ...]:
    return served.parts_of(request)[0].group


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    partition = draw(st.sampled_from(["memory", "1", "7", "20", "200"]))
    options = {"partition": partition, "csa": draw(st.sampled_from(["off", CSA]))}
    setup = draw(setups_of("csps", draw(st.integers(2, 4)), options))
    locations = TWO_HOSTS[2 : 2 + setup.num_instances]
    num_hosts = len({location.host for location in locations})
    return replace(setup, locations=locations, host_blocks=(draw(st.sampled_from([0, 0, 5, 60])),) * num_hosts)


test_any_workload_finishes_lawfully = finishes_lawfully(setups())


@pytest.mark.parametrize(
    ("length", "sizes"), [(64, [64]), (65, [64, 1]), (200, [64, 64, 64, 8]), (600, [80] * 7 + [40])]
)
def test_the_prompt_length_determines_the_number_of_instances(length: int, sizes: list[int]) -> None:
    """Each instance has a partition, and the last has the rest. A prompt longer than all partitions has larger ones."""
    served = cluster()
    request = served.add(tokens(length), max_tokens=3)
    served.run()
    [part, *_] = served.parts_of(request)
    assert (part.start, part.stop) == (0, length)
    assert [sum(map(len, runs)) for runs in part.runs] == sizes
    assert [runs[0].start for runs in part.runs] == sorted(runs[0].start for runs in part.runs)


def test_prompts_are_prefilled_side_by_side_each_on_one_host() -> None:
    """Of a host that has too few idle instances none is taken while another one has enough."""
    served = cluster(locations=TWO_HOSTS)
    requests = [served.add(tokens(length, length), max_tokens=9) for length in (190, 180, 70)]
    served.step()
    assert [group(served, one) for one in requests[:2]] == [(0, 1, 2), (4, 5, 6)]
    assert len({*group(served, requests[2])} - {3, 7}) == 0, "one on each host is left"
    served.run()


def test_hosts_with_most_idle_instances_come_first() -> None:
    served = cluster(locations=TWO_HOSTS, max_num_batched_tokens=64)
    short = [served.add(tokens(20, number), max_tokens=30) for number in range(3)]
    served.step()
    assert len({group(served, one) for one in short}) == 3
    busy = {instance for one in short for instance in group(served, one)}
    long = served.add(tokens(120, 9), max_tokens=2)
    served.run()
    assert not busy & {*group(served, long)}
    assert len({instance // 4 for instance in group(served, long)}) == 1


def test_the_short_last_partition_is_computed_with_short_prompts() -> None:
    served = cluster(2, "128", max_num_batched_tokens=128)
    long = served.add(tokens(150), max_tokens=2)
    short = [served.add(tokens(40, number), max_tokens=2) for number in range(2)]
    served.step()
    forward = served.forwards[0]
    assert [part.request_id for part in forward.parts] == [long.id, *(one.id for one in short)]
    assert [part.group for part in forward.parts] == [(0, 1), (1,), (1,)], "instance 0 has a whole partition"
    served.run()


def test_a_prompt_waits_for_blocks_for_its_partitions() -> None:
    """Partitions of 8 blocks, on pools of 10: short requests hold four of one, so that it starts after them."""
    served = cluster(2, "128", num_blocks=10)
    short = served.add(tokens(55), max_tokens=9)
    served.step()
    long = served.add(tokens(250, 1), max_tokens=2)
    served.run()
    [part, *_] = served.parts_of(long)
    assert part.stop == 250 and [sum(map(len, runs)) for runs in part.runs] == [128, 122]
    last = served.parts_of(short)[-1]
    order = [part for forward in served.forwards for part in forward.parts]
    assert order.index(part) > order.index(last)


def test_steps_that_also_decode_are_shorter_with_a_target() -> None:
    """The bound changes while the policy serves. Without decodes it has no effect."""
    options = {"threshold": "100", "target_tbt": "0.05"}
    setup = Setup(num_instances=2, num_blocks=1000, policy="csps", options=options, max_num_batched_tokens=8192)
    mixed, idle = Cluster(setup), Cluster(setup)
    answer = mixed.add([1] * 10, max_tokens=200)
    while len(answer.output) < 5:
        mixed.engine.step()

    def longest(served: Cluster, first: int) -> int:
        request = served.add(tokens(6000, first), max_tokens=2)
        while not request.output:
            served.engine.step()
        return max(part.stop - part.start for part in served.parts_of(request))

    whole, bounded = longest(idle, 5), longest(mixed, 5)
    assert bounded < 0.3 * whole
    mixed.policy.update({"target_tbt": "1"})
    assert bounded < longest(mixed, 9) <= whole
    mixed.run()
    with pytest.raises(ParameterError, match="target_tbt must be above 0 seconds, but 0 given"):
        make_policy("csps", num_instances=2, options={"target_tbt": "0"})


def test_levels_that_groups_do_not_have_are_named() -> None:
    def hint(num_instances: int, levels: int) -> str | None:
        options = {"csa": json.dumps({"levels": levels, "drop": 0.1})}
        return make_policy("csps", num_instances=num_instances, options=options).hint

    assert hint(2, 3) == "csa has 3 levels, but groups of 2 instances have 2: the ratios of further levels are not used"
    assert hint(4, 4) is not None and "groups of 4 instances have 3" in str(hint(4, 4))
    assert hint(2, 2) is hint(4, 3) is hint(8, 4) is hint(4, 1) is None


def test_memory_is_half_of_a_pool() -> None:
    served = cluster(4, "memory", num_blocks=20)
    sizes = {length: served.add(tokens(length, length), max_tokens=2) for length in (160, 161, 400)}
    served.run()
    assert {length: len(group(served, one)) for length, one in sizes.items()} == {160: 1, 161: 2, 400: 3}
    policy = make_policy("csps", num_instances=4, options={"partition": "memory", "csa": CSA})
    setting = policy.sparse(400, 16, 20)
    assert setting is not None and setting.partition == 160


def test_prompts_of_other_lengths_share_a_beginning() -> None:
    """With a fixed partition the setting is the same. With a fixed number of instances it is not."""
    found = []
    for options in ({"partition": "128"}, {"threshold": "0"}):
        served = cluster(4, options={**options, "csa": CSA})
        for length in (400, 500):
            last = served.add(tokens(length), max_tokens=2)
            served.run()
        found.append(last.metrics.num_cached_tokens)
    assert found == [400, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "0"}, "partition must be at least 1, but 0 given"),
        ({"partition": "64", "threshold": "9"}, "but threshold 9 given: leave one out"),
        ({"partition": "64", "fractions": "0.5,0.5"}, "but fractions 0.5,0.5 given"),
        (
            {"partition": "memory", "layout": "zigzag", "exchange": "ring_kv"},
            "is for layout contiguous, but layout zigzag",
        ),
    ],
)
def test_options_that_say_otherwise_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(ParameterError) as error:
        make_policy("csps", num_instances=2, options=options)
    assert words in str(error.value)
