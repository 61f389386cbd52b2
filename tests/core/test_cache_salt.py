"""Requests share KV if they have the same cache salt, and only then: on devices, hosts and disks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster import Cluster, Setup

PROMPT = [1, 2, 3, 4, 5] * 8
PAIRS = [("", ""), ("a", "a"), ("", "a"), ("a", ""), ("a", "b"), ("a", "A"), ("a", "a "), ("\ud800", "?"), ("é", "é")]
ONE = Setup(num_blocks=24, block_size=4, max_model_len=90, max_num_batched_tokens=64)
TWO = replace(ONE, num_instances=2, policy="context", options={"threshold": "20"})
SETUPS = {
    "one instance": ONE,
    "context parallel": TWO,
    "rotary embeddings pinned": replace(ONE, rope_switch_length=20),
    "sparse attention": replace(TWO, policy="csps", options={"threshold": "20", "csa": '{"levels": 2, "drop": 0.5}'}),
}


def ask(cluster: Cluster, salt: str) -> int:
    """Returns how many tokens of the prompt were cached."""
    request = cluster.add(PROMPT, max_tokens=4, cache_salt=salt)
    cluster.run()
    return request.metrics.num_cached_tokens


def overwrite_device(cluster: Cluster) -> None:
    """Needs every block of the device, so that nothing else stays cached there."""
    for number in range(2):
        cluster.add([9 + number] * 80, max_tokens=4)
        cluster.run()


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_devices_share_within_a_salt_only(setup: Setup, first: str, second: str) -> None:
    cluster = Cluster(setup)
    assert ask(cluster, first) == 0
    assert (ask(cluster, second) > 0) == (first == second)
    assert ask(cluster, first) > 0


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_hosts_share_within_a_salt_only(first: str, second: str) -> None:
    cluster = Cluster(replace(ONE, host_blocks=(200,)))
    assert ask(cluster, first) == 0
    overwrite_device(cluster)
    assert ask(cluster, second) == (39 if first == second else 0)
    assert (cluster.engine.kv.counts.num_hits > 0) == (first == second)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_disks_share_within_a_salt_only(first: str, second: str) -> None:
    before = Cluster(replace(ONE, host_blocks=(200,), disk_blocks=(200,)))
    assert ask(before, first) == 0
    after = Cluster(before.setup, before=before)
    assert ask(after, second) == (39 if first == second else 0)
    assert (after.engine.kv.counts.num_disk_hits > 0) == (first == second)


def test_no_salt_is_stored_with_kv() -> None:
    before = Cluster(replace(ONE, host_blocks=(200,), disk_blocks=(200,)))
    ask(before, "a secret of one tenant")
    contents = [content for blocks in before.saved for _, content in blocks]
    assert contents
    assert not any(b"secret" in content.parent for content in contents)


def test_choices_of_a_prompt_share_its_salt() -> None:
    cluster = Cluster(ONE)
    leader = cluster.add(PROMPT, max_tokens=4, cache_salt="a")
    choices = [cluster.follow(leader, number) for number in (1, 2)]
    cluster.run()
    assert [choice.metrics.num_cached_tokens for choice in choices] == [39, 39]


@pytest.mark.parametrize("make", [lambda: Cluster(ONE), lambda: Cluster(replace(ONE, host_blocks=(200,)))])
def test_restarted_workers_keep_salts_apart(make: Callable[[], Cluster]) -> None:
    """Requests that lost their KV are looked up again."""
    cluster = make()
    first = cluster.add(PROMPT, max_tokens=8, cache_salt="a")
    for _ in range(3):
        cluster.step()
    cluster.restart()
    cluster.run()
    assert first.finish_reason == "length"
    assert ask(cluster, "b") == 0
    assert ask(cluster, "a") == 39
