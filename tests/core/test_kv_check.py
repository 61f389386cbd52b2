"""Every block is accounted for: mistakes that are planted are found. And the residencies that follow each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from cluster import Cluster, Setup
from cluster_setup import Roles

from longspan.core.kv.check import violations
from longspan.core.kv.residency import WAITING
from longspan.core.request import Request
from longspan.core.steps import Content

SETUP = Setup(
    num_instances=2,
    num_blocks=24,
    block_size=4,
    policy="chunked",
    max_model_len=90,
    max_num_batched_tokens=64,
    host_blocks=(200,),
    disk_blocks=(200,),
)


def crowded(setup: Setup = SETUP) -> Cluster:
    """A cluster with running requests and preempted ones."""
    cluster = Cluster(setup)
    for index in range(24):
        cluster.add([index] * (5 + 3 * index % 11), max_tokens=35 + index % 4)
    return cluster


def running(cluster: Cluster) -> Request:
    return next(request for request in cluster.requests if request.table)


def shares_a_block(cluster: Cluster) -> None:
    ref = running(cluster).table[0]
    cluster.engine.kv.pool(ref.pool).share(ref.block)


def forgets_a_block(cluster: Cluster) -> None:
    running(cluster).table.pop()


def holds_a_block(cluster: Cluster) -> None:
    cluster.engine.kv.account.pin([running(cluster).table[0]])


def forgets_a_copy(cluster: Cluster) -> None:
    swaps = cluster.engine.kv.swaps
    assert swaps is not None
    swaps.copies.clear()


def forgets_an_offloaded_request(cluster: Cluster) -> None:
    swaps = cluster.engine.kv.swaps
    assert swaps is not None
    del cluster.executor.requests[min(swaps.offload.owners)]


def forgets_a_load(cluster: Cluster) -> None:
    swaps = cluster.engine.kv.swaps
    assert swaps is not None
    swaps.loads.regroup(cluster.engine.kv.account, cluster.engine.config.cluster)


def caches_a_block_in_use(cluster: Cluster) -> None:
    ref = running(cluster).table[0]
    pool = cluster.engine.kv.pool(ref.pool)
    pool.restore([(ref.block, Content(b"", (1,)))])
    pool.num_blocks += 1  # the sum is right


def mistakes_a_residency(cluster: Cluster) -> None:
    running(cluster).residency = WAITING


@pytest.mark.parametrize(
    "mistake",
    [
        shares_a_block,
        forgets_a_block,
        holds_a_block,
        forgets_a_copy,
        forgets_an_offloaded_request,
        forgets_a_load,
        caches_a_block_in_use,
        mistakes_a_residency,
    ],
)
def test_a_planted_mistake_is_found(mistake: Callable[[Cluster], None]) -> None:
    cluster = crowded()
    engine = cluster.engine
    assert engine.kv.swaps is not None
    while not (engine.kv.swaps.loads.numbers and engine.kv.swaps.offload.owners and running(cluster)):
        cluster.step()
    assert violations(engine.kv, cluster.requests) == []
    mistake(cluster)
    assert violations(engine.kv, cluster.requests)


ALLOWED = {
    "Waiting": {"Resident", "Loading", "Transferring"},
    "Loading": {"Resident", "Transferring", "Waiting"},
    "Resident": {"Waiting", "Offloading", "Offloaded", "Transferring"},
    "Transferring": {"Resident", "Waiting", "Offloading", "Offloaded"},
    "Offloading": {"Offloaded", "Loading", "Resident", "Transferring"},
    "Offloaded": {"Loading", "Resident", "Transferring", "Waiting"},
}


@pytest.mark.parametrize("policy", ["chunked", "context", "tetris", "auto"])
@pytest.mark.parametrize("roles", [None, Roles(num_prefill=1, num_decode=1, backends=2)], ids=["alike", "roles"])
def test_residencies_follow_each_other(policy: str, roles: Roles | None) -> None:
    """Between two turns of the loop, in which several changes may happen. All kinds occur."""
    if roles is not None and policy in ("chunked", "context"):
        pytest.skip("knows no roles")
    cluster = crowded(replace(SETUP, policy=policy, roles=roles))
    before = {request.id: "Waiting" for request in cluster.requests}
    seen = set[str]()
    while cluster.engine.has_unfinished:
        cluster.step()
        for request in cluster.requests:
            now = request.residency.name
            assert now == before[request.id] or now in ALLOWED[before[request.id]], (before[request.id], now)
            before[request.id] = now
            seen.add(now)
    wanted = {"Waiting", "Resident", "Loading"} if roles is None else {"Waiting", "Transferring", "Resident"}
    assert wanted <= seen, seen
    assert set(before.values()) == {"Waiting"}
