"""A lost host: its KV in memory and on disk is forgotten, and KV of the other hosts is used again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from cluster import Cluster, Setup

from longspan.core.cluster import Cluster as Instances
from longspan.core.fleets import without
from longspan.core.imitated_hosts import locations_of_ranks
from longspan.core.request import Request
from longspan.policy.registry import make_policy

TWO_HOSTS = Setup(
    num_instances=4,
    num_blocks=6,
    block_size=4,
    policy="context",
    max_num_batched_tokens=8,
    locations=locations_of_ranks(4, "2"),
    host_blocks=(80, 80),
    disk_blocks=(90, 90),
)
"""96 tokens fit on all devices."""


def pools_of(cluster: Instances, host: int) -> dict[int, tuple[()]]:
    return {cluster.host_pools[host]: (), cluster.disk_pools[host]: ()}


def without_host(cluster: Instances, host: int) -> Instances:
    """Return the cluster without the instances of a host."""
    while ranks := [rank for rank, location in enumerate(cluster.locations) if location.host == host]:
        [cluster] = without((cluster,), ranks[0])
    return cluster


def shrink(cluster: Cluster, host: int) -> Instances:
    """Lose a host, and continue on the other one."""
    left = without_host(cluster.engine.config.cluster, host)
    facts = replace(cluster.setup.facts, cluster=left)
    policy = make_policy(
        cluster.setup.policy, num_instances=left.num_instances, options={}, facts=facts, is_resized=True
    )
    cluster.restart(policy, smaller=left, lost_pools=pools_of(cluster.setup.cluster, host))
    return left


@pytest.mark.parametrize("host", [0, 1])
def test_pools_keep_their_numbers_in_a_cluster_without_a_host(host: int) -> None:
    whole = TWO_HOSTS.cluster
    left = without_host(whole, host)
    assert left.host_pools == whole.host_pools and left.disk_pools == whole.disk_pools
    assert {left.host_pool(instance) for instance in left.instances} == {whole.host_pools[1 - host]}


@pytest.mark.parametrize("host", [0, 1])
def test_kv_of_a_lost_host_is_computed_again_and_the_rest_is_used(host: int) -> None:
    """One short prompt was offloaded to each host."""
    cluster = Cluster(replace(TWO_HOSTS, policy="chunked"))
    prompts = [[number] * 20 for number in range(4)]
    for _ in range(2):
        requests = [cluster.add(prompt, max_tokens=5) for prompt in prompts]
        cluster.run()
    pools = cluster.engine.kv.account
    assert all(pools.usage([pool]).num_cached for pool in cluster.setup.cluster.host_pools)
    lost = pools_of(cluster.setup.cluster, host)
    cluster.restart(lost_pools=lost)
    assert [cluster.engine.kv.account.usage([pool]).num_cached for pool in lost] == [0, 0]
    before = cluster.engine.kv.counts.num_hits
    requests = [cluster.add(prompt, max_tokens=5) for prompt in prompts]
    cluster.run()
    cluster.assert_at_rest()
    cached = [request.metrics.num_cached_tokens for request in requests]
    assert 0 in cached and max(cached) >= 16, "some KV is lost, and some is kept"
    assert cluster.engine.kv.counts.num_hits > before


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("shrinks", [False, True])
def test_a_host_resident_request_continues_after_the_loss_of_a_host(host: int, shrinks: bool) -> None:
    cluster = Cluster(TWO_HOSTS)
    request = cluster.add(range(250), max_tokens=20)
    while len(request.output) < 5:
        cluster.step()
    if shrinks:
        shrink(cluster, host)
    else:
        cluster.restart(lost_pools=pools_of(cluster.setup.cluster, host))
    cluster.run()
    cluster.assert_at_rest()
    assert request.output == cluster.expected_output(request)


def test_random_losses_of_hosts_lose_no_request() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        cluster = Cluster(replace(TWO_HOSTS, policy=draw.choice(["chunked", "context", "tetris", "auto"])))
        requests, num_losses = list[Request](), 0
        while len(requests) < 8 or cluster.engine.has_unfinished:
            if len(requests) < 8 and (draw.random() < 0.2 or not cluster.engine.has_unfinished):
                length = draw.choice([5, 20, 60, 150])
                requests.append(cluster.add([draw.randrange(9) for _ in range(length)], max_tokens=draw.randint(1, 12)))
            if draw.random() < 0.05 and num_losses < 4:
                num_losses += 1
                lost = pools_of(cluster.setup.cluster, draw.randrange(2))
                cluster.restart(lost_pools=lost if draw.random() < 0.8 else None)
            cluster.step(0.0 if draw.random() < 0.3 else None)
        cluster.assert_at_rest()
        assert all(request.output == cluster.expected_output(request) for request in requests), seed
