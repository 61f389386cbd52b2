# ruff: noqa: F811 - fixtures of another module
"""KV pools in the memory and on the disks of the hosts of a Ray cluster, which two nodes of this machine are."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from leftovers import left_names, wait_until_gone
from oracle import Oracle
from test_ray import finish, lose_a_host, options, ray, ray_cluster, run_folders, services, two_hosts  # noqa: F401 - skips without Ray

from longspan import SamplingParams
from longspan.args import EngineArgs
from longspan.core.request import Request
from longspan.errors import WorkerLostError
from longspan.service import Service

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
TIERS = {"threads_per_rank": 2, "host_kv_gib": 0.02, "num_gpu_blocks_override": 6}
"""96 tokens on a device."""


def prompts_of(*lengths: int, seed: int = 3) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [[5 + token for token in draw.integers(0, 190, length).tolist()] for length in lengths]


def pool_users(ray_cluster: Any) -> set[int]:
    """Return the processes of this cluster that have a host pool open: its owner, and workers of its host."""
    found, folder = set[int](), ray_cluster.node_options["temp_dir"]
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            if process.environ().get("TMPDIR") != folder:
                continue
            links = [link.readlink() for link in Path(f"/proc/{process.pid}/fd").iterdir()]
            found |= {process.pid for link in links if "longspan-kv" in str(link)}
    return found


@pytest.fixture
def nothing_is_left(ray_cluster: Any) -> Iterator[None]:
    """Fail if processes, memory of pools or files for runs are left by a test."""
    yield
    wait_until_gone(pool_users(ray_cluster), left_names())
    assert not run_folders(ray_cluster)


def answer(service: Service, prompts: list[list[int]]) -> tuple[list[Request], set[int]]:
    """Return the finished requests, and the pools from which their steps have read host-resident blocks."""
    requests, pools = [service.engine.add(prompt, GREEDY) for prompt in prompts], set[int]()
    while service.engine.has_unfinished:
        service.engine.step()
        pools |= {pool for request in requests for pool, number in request.hosted.items() if number}
    return requests, pools


def assert_exact(requests: list[Request], oracle: Oracle) -> None:
    for request in requests:
        assert request.output == oracle.complete(request.prompt, NUM_TOKENS).token_ids


@pytest.mark.usefixtures("nothing_is_left")
def test_a_context_larger_than_all_devices_lies_on_two_hosts(
    ray_cluster: Any,
    two_hosts: str,
    tiny: Path,
    oracle: Oracle,
    services: list[Service],
) -> None:
    service = Service(EngineArgs(str(tiny), **options(two_hosts, parallel="2", policy="context", **TIERS)))
    services.append(service)
    cluster = service.engine.config.cluster
    assert cluster.hosts == (0, 1) and len(pool_users(ray_cluster)) == 4, "two owners and two workers"
    requests, pools = answer(service, prompts_of(600, 20))
    assert_exact(requests, oracle)
    assert pools == {*cluster.host_pools}
    assert cluster.host_pools == range(64, 66)
    service.close()
    assert not ray.is_initialized()


def pool_owner(service: Service) -> psutil.Process:
    """Return the process that owns the pools of the first host."""
    return psutil.Process(int(service.tiers.memory[0].parts[2]))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("what", ["worker", "owner"])
def test_kv_of_other_hosts_is_kept_when_a_process_is_lost(
    what: str,
    two_hosts: str,
    tiny: Path,
    oracle: Oracle,
    services: list[Service],
) -> None:
    """A lost worker loses no KV of hosts. A lost owner of a host loses the KV of that host."""
    given = TIERS | {"policy": "chunked", "host_kv_gib": 0.01}
    service = Service(EngineArgs(str(tiny), **options(two_hosts, parallel="2", **given)))
    services.append(service)
    requests, _ = answer(service, prompts := prompts_of(90, 80, 70, 60))
    assert_exact(requests, oracle)
    account, cluster = service.engine.kv.account, service.engine.config.cluster
    assert all(account.usage([pool]).num_cached for pool in cluster.host_pools)
    again = [service.engine.add(prompt, GREEDY) for prompt in [*prompts, *prompts_of(200, seed=4)]]
    for _ in range(4):
        service.engine.step()
    lost = psutil.Process(service.executor.pids[0]) if what == "worker" else pool_owner(service)
    lost.kill()
    with pytest.raises(WorkerLostError, match="rank 0 was lost: " + ("" if what == "worker" else "the process of its")):
        finish(service)
    service.restart()
    has_kv = [bool(service.engine.kv.account.usage([pool]).num_cached) for pool in cluster.host_pools]
    assert has_kv == [what == "worker", True]
    finish(service)
    assert_exact(again, oracle)
    assert max(request.metrics.num_cached_tokens for request in again) > 32
    service.close()


@pytest.mark.usefixtures("nothing_is_left")
def test_preempted_requests_are_offloaded_to_their_hosts(
    two_hosts: str,
    tiny: Path,
    oracle: Oracle,
    services: list[Service],
) -> None:
    given = TIERS | {"policy": "chunked", "num_gpu_blocks_override": 8, "async_scheduling": False}
    service = Service(EngineArgs(str(tiny), **options(two_hosts, parallel="2", **given)))
    services.append(service)
    requests, _ = answer(service, prompts_of(60, 60, 60, 60, 50, 40))
    assert_exact(requests, oracle)
    assert sum(request.metrics.num_preemptions for request in requests)
    assert service.engine.kv.counts.num_offloaded
    service.close()


@pytest.mark.usefixtures("nothing_is_left")
def test_seesaw_has_a_host_tier_on_two_hosts(
    two_hosts: str,
    tiny: Path,
    oracle: Oracle,
    services: list[Service],
) -> None:
    split = {"policy": "seesaw", "prefill_parallel": "2xpp2", "decode_parallel": "2xtp2"}
    given = TIERS | split | {"num_gpu_blocks_override": 12, "threads_per_rank": 1}
    service = Service(EngineArgs(str(tiny), **options(two_hosts, **given)))
    services.append(service)
    assert service.engine.config.cluster.hosts == (0, 0, 1, 1)
    requests, _ = answer(service, prompts_of(*range(20, 90, 6)))
    assert_exact(requests, oracle)
    assert service.engine.transitions and service.engine.kv.counts.num_swapped_blocks
    service.close()


@pytest.mark.usefixtures("nothing_is_left")
def test_disks_of_hosts_keep_kv_for_the_next_engine(
    two_hosts: str,
    tiny: Path,
    oracle: Oracle,
    tmp_path: Path,
) -> None:
    disk = {"disk_kv_gib": 0.02, "disk_kv_dir": str(tmp_path)}
    given = TIERS | disk | {"policy": "chunked", "num_gpu_blocks_override": 40}
    for is_first in (True, False):
        service = Service(EngineArgs(str(tiny), **options(two_hosts, parallel="2", **given)))
        with closing(service):
            requests, _ = answer(service, prompts_of(180, 170, 160, 150))
            assert_exact(requests, oracle)
            assert (max(request.metrics.num_cached_tokens for request in requests) > 100) is not is_first
            assert bool(service.engine.kv.counts.num_disk_hits) is not is_first
        folders = sorted({path.parent.name for path in tmp_path.glob("*/host-*/*.kv")})
        assert folders == ["host-0", "host-1"]
        assert not [*tmp_path.rglob("*.unfinished")]
        for lock in tmp_path.rglob("lock"):
            with lock.open("ab") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    service = Service(EngineArgs(str(tiny), **options(two_hosts, parallel="2", **given)))
    with closing(service):
        pool_owner(service).kill()
        with pytest.raises(WorkerLostError, match="the process of its host with KV pools"):
            service.executor.poll(30.0)
        service.restart()
        requests, _ = answer(service, prompts_of(180, 170, 160, 150))
        assert_exact(requests, oracle)
        assert service.engine.kv.counts.num_disk_hits, "the disk of the lost process was opened again"
        service.reset_prefix_cache()
        assert not [*tmp_path.rglob("*.kv")]


@pytest.mark.usefixtures("nothing_is_left")
def test_the_remaining_host_keeps_its_kv_when_a_host_is_lost_and_returns(
    ray_cluster: Any, two_hosts: str, tiny: Path, oracle: Oracle, services: list[Service]
) -> None:
    given = TIERS | {"policy": "chunked", "max_model_len": 400}
    service = Service(EngineArgs(str(tiny), **options(two_hosts, parallel="2", **given)))
    services.append(service)
    requests, _ = answer(service, prompts := prompts_of(90, 80, 70, 60))
    again = [service.engine.add(prompt, GREEDY) for prompt in [*prompts, *prompts_of(200, seed=4)]]
    lose_a_host(ray_cluster, service)
    pools = service.engine.config.cluster.host_pools
    assert [bool(service.engine.kv.account.usage([pool]).num_cached) for pool in pools] == [True, False]
    finish(service)
    assert_exact([*requests, *again], oracle)
    assert max(request.metrics.num_cached_tokens for request in again) > 32
    ray_cluster.add_node(**ray_cluster.node_options)
    deadline_s = time.monotonic() + 60
    while not service.can_grow():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    service.restart()
    assert service.engine.config.cluster.hosts == (0, 1)
    requests, _ = answer(service, prompts_of(180, 170, 90, 80, seed=5))
    assert_exact(requests, oracle)
    assert all(service.engine.kv.account.usage([pool]).num_cached for pool in pools), "the host has a new pool"
    service.close()
