"""Ranks on the hosts of a Ray cluster. Two logical nodes of this machine are the hosts."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from fake_llm import run
from leftovers import left_names, wait_until_gone
from oracle import Oracle

from longspan import LLM, SamplingParams
from longspan.args import EngineArgs
from longspan.errors import ParameterError, WorkerLostError
from longspan.remote_ranks import reserve_hosts
from longspan.service import Service

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray then listens on the loopback interface
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16)}
ray: Any = pytest.importorskip("ray", reason="pip install 'longspan[ray]'")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = [5 + token for token in np.random.default_rng(3).integers(0, 190, 120).tolist()]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Yield a cluster of two nodes with two CPUs each, in two racks by their labels."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ls-ray-", dir="/tmp")  # a longer path is too long for Ray's sockets
    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False, "temp_dir": folder}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    Path(folder, "ray").mkdir()  # Ray writes the address of its latest cluster there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.setenv("TMPDIR", folder)
        cluster = Cluster(initialize_head=True, head_node_args={**node, "labels": {"rack": "left"}})
        cluster.node_options = {**node, "labels": {"rack": "right"}}
        cluster.add_node(**cluster.node_options)
        yield cluster
        ray.shutdown()
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def services() -> Iterator[list[Service]]:
    """Yield a list whose services are closed at the end, also after a failure."""
    started: list[Service] = []
    yield started
    for service in started:
        service.close()


@pytest.fixture
def two_hosts(ray_cluster: Any) -> str:
    """Return the address of the cluster, whose lost node is replaced."""
    if len(ray_cluster.list_all_nodes()) == 1:
        ray_cluster.add_node(**ray_cluster.node_options)
    return str(ray_cluster.address)


def run_folders(ray_cluster: Any) -> set[Path]:
    """Return the folders in which ranks on this cluster meet."""
    return {*Path(ray_cluster.node_options["temp_dir"]).glob(f"longspan-{'?' * 16}-?")}


def options(address: str, **given: Any) -> dict[str, Any]:
    shared: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16}
    return {**shared, "executor": "ray", "ray_address": address, **given}


@pytest.mark.parametrize(
    ("given", "hosts"),
    [
        ({"pp": 2}, (0, 1)),
        ({"parallel": "2xtp2", "policy_options": {"threshold": "0"}}, (0, 0, 1, 1)),
    ],
    ids=["pp2", "2xtp2"],
)
def test_ranks_on_several_hosts_answer_exactly_and_end(
    given: dict[str, Any], hosts: tuple[int, ...], ray_cluster: Any, two_hosts: str, tiny: Path, oracle: Oracle
) -> None:
    """The shards of a stage share a host. Without `threads_per_rank`, ranks get all CPUs in equal shares."""
    with LLM(str(tiny), **options(two_hosts, **given)) as llm:
        cluster = llm.engine.config.cluster
        assert cluster.hosts == hosts
        assert tuple(location.rack for location in cluster.locations) == hosts, "each host has a rack of its own"
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == oracle.complete(PROMPT, 12).token_ids
        pids = llm.service.executor.pids
        assert len({*pids}) == len(hosts) and all(map(psutil.pid_exists, pids))
        ips = {connection.laddr.ip for pid in pids for connection in psutil.Process(pid).net_connections("tcp")}
        assert ips == {"127.0.0.1"}
    assert not ray.is_initialized()
    wait_until_gone(pids, left_names())
    assert not run_folders(ray_cluster)


def actors_of(pids: tuple[int, ...]) -> list[psutil.Process]:
    """Return the processes of the actors: each has a fork server, whose child is the worker."""
    found = []
    for pid in pids:
        server = psutil.Process(pid).parent()
        actor = None if server is None else server.parent()
        assert actor is not None
        found.append(actor)
    return found


def finish(service: Service) -> None:
    while service.engine.has_unfinished:
        service.engine.step()


def lose_a_host(ray_cluster: Any, service: Service) -> None:
    """Lose the host of the second of two instances during steps. The first one serves on."""
    for _ in range(4):
        service.engine.step()
    ray_cluster.remove_node(ray_cluster.worker_nodes.copy().pop())
    with pytest.raises(WorkerLostError, match="rank 1 was lost"):
        finish(service)
    service.restart()
    assert service.engine.config.cluster.num_instances == 1


@pytest.mark.parametrize("what", [pytest.param("worker", marks=pytest.mark.full), "actor"])
def test_a_lost_worker_is_named_with_its_host_and_requests_continue_on_new_workers(
    what: str, ray_cluster: Any, two_hosts: str, tiny: Path, oracle: Oracle, services: list[Service]
) -> None:
    given = EngineArgs(str(tiny), **options(two_hosts, parallel="2", policy="chunked", threads_per_rank=2))
    service = Service(given)
    services.append(service)
    # Many tokens: a worker computes on for some milliseconds after its actor was killed.
    request = service.engine.add(PROMPT, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
    for _ in range(4):
        service.engine.step()
    pids = service.executor.pids
    for process in (psutil.Process(pids[0]),) if what == "worker" else actors_of(pids)[:1]:
        process.kill()
    with pytest.raises(WorkerLostError, match=r"rank 0 was lost: .* on host \w+"):
        finish(service)
    assert service.engine.has_unfinished
    service.restart()
    finish(service)
    assert request.output == oracle.complete(PROMPT, 400).token_ids
    with pytest.raises(ParameterError, match="whose hosts are not known"):
        service.reshard("3")
    service.close()
    assert not ray.is_initialized()
    wait_until_gone(pids, left_names())
    assert not run_folders(ray_cluster)


def test_a_cluster_that_is_too_small_is_named_with_its_resources(
    two_hosts: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longspan.runtime.executor import ray_hosts

    monkeypatch.setattr(ray_hosts, "_PLACE_TIMEOUT_S", 1.0)
    with pytest.raises(ParameterError, match=r"executor is ray, but .* 3 ranks with 2 CPU each.*2 CPU; 2 CPU"):
        LLM(str(tiny), **options(two_hosts, instances=3, threads_per_rank=2))
    assert not ray.is_initialized()


def test_an_address_of_another_cluster_than_the_connected_one_is_named(
    two_hosts: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process has one connection to Ray."""
    with closing(reserve_hosts(EngineArgs("m", **options(two_hosts, threads_per_rank=1)))):
        for address in (two_hosts, "auto", "127.0.0.1:1"):
            reserve_hosts(EngineArgs("m", **options(address, threads_per_rank=1))).close()
    warning = f"ray_address 127.0.0.1:1 is not used, since this process has a connection to Ray at {two_hosts}"
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [warning]
    assert not ray.is_initialized()


@pytest.mark.parametrize(("address", "refused"), [("127.0.0.1", False), ("10.1.2.3", True)])
def test_a_topology_file_replaces_labels_and_must_have_all_hosts(
    address: str, refused: bool, two_hosts: str, tmp_path: Path
) -> None:
    (tmp_path / "racks.toml").write_text(f'[racks]\nleft = ["{address}"]\n')
    given = EngineArgs("m", **options(two_hosts, parallel="2", threads_per_rank=2, topology=f"{tmp_path}/racks.toml"))
    if refused:
        with pytest.raises(ParameterError, match=r"topology lacks 127\.0\.0\.1, .*add them to a rack"):
            reserve_hosts(given)
    else:
        with closing(reserve_hosts(given)) as hosts:
            assert [location.host_id for location in hosts.placement.locations] == [(0, 0), (0, 1)]
    assert not ray.is_initialized()


@pytest.mark.full
def test_a_profile_of_two_hosts_is_of_groups_and_links_in_two_racks(
    ray_cluster: Any,
    two_hosts: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    arguments = ["--executor", "ray", "--ray-address", two_hosts, "--threads-per-rank", "2", "--parallel", "2"]
    sizes = ["--lengths", "32,64", "--repeats", "1", "--block-size", "16", "--dtype", "float32"]
    assert run("profile", str(tiny), *arguments, *sizes, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    classes = {(each["members"], each["link_class"]) for each in shown["prefills"] + shown["decodes"]}
    assert classes == {(1, "same_host"), (2, "other_rack")}
    assert {each["beside"] for each in shown["prefills"]} == {0}, "each host has one instance"
    links = {(each["kind"], each["link_class"]) for each in shown["links"]}
    between = {(kind, "other_rack") for kind in ("point_to_point", "alltoall", "all_gather")}
    assert links == {("host_copy", "same_host"), *between}
    assert not ray.is_initialized() and not run_folders(ray_cluster)


@pytest.mark.parametrize("kind", ["ConnectionError", "AuthenticationError"])
def test_an_address_without_a_cluster_is_refused(kind: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise {"ConnectionError": ConnectionError, "AuthenticationError": ray.exceptions.AuthenticationError}[kind](
            "no GCS\nmore"
        )

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ParameterError, match=r"ray_address has no Ray cluster \(no GCS\): run `ray start`"):
        LLM(str(tiny), **options("auto"))


@pytest.mark.parametrize("variable", [False, True])
def test_an_address_where_nothing_listens_is_refused_at_once(
    variable: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, given = "127.0.0.1:1", {}
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", address)
        given = {"ray_address": None}
    start_s = time.monotonic()
    with pytest.raises(ParameterError, match=r"ray_address has no Ray cluster \(.*refused.*\): run `ray start`"):
        LLM(str(tiny), **options(address, **given))
    assert time.monotonic() - start_s < 30


def test_a_lost_host_is_left_out_and_used_again_when_it_returns(
    ray_cluster: Any, two_hosts: str, tiny: Path, oracle: Oracle, services: list[Service]
) -> None:
    given = EngineArgs(str(tiny), **options(two_hosts, parallel="2", policy="chunked", threads_per_rank=2))
    service = Service(given)
    services.append(service)
    requests = [service.engine.add(prompt, GREEDY) for prompt in (PROMPT, PROMPT[::-1])]
    lose_a_host(ray_cluster, service)
    finish(service)
    assert not service.can_grow()
    ray_cluster.add_node(**ray_cluster.node_options)
    requests += [service.engine.add(prompt[5:], GREEDY) for prompt in (PROMPT, PROMPT[::-1])]
    deadline_s = time.monotonic() + 60
    while not service.can_grow():
        assert time.monotonic() < deadline_s
        if service.engine.has_unfinished:
            service.engine.step()
    service.restart()
    assert service.engine.config.cluster.hosts == (0, 1) and not service.can_grow()
    requests += [service.engine.add(prompt[9:], GREEDY) for prompt in (PROMPT, PROMPT[::-1])]
    finish(service)
    for request in requests:
        assert request.output == oracle.complete(request.prompt, 12).token_ids
    service.close()


def test_a_lost_host_is_left_out_if_no_worker_is_replaced(
    ray_cluster: Any, two_hosts: str, tiny: Path, oracle: Oracle, services: list[Service]
) -> None:
    given = EngineArgs(str(tiny), **options(two_hosts, parallel="2", policy="chunked", threads_per_rank=2))
    service = Service(given, max_worker_restarts=0)
    services.append(service)
    request = service.engine.add(PROMPT, GREEDY)
    ray_cluster.remove_node(ray_cluster.worker_nodes.copy().pop())
    with pytest.raises(WorkerLostError, match="rank 1 was lost"):
        service.executor.poll(30.0)
    service.shrink(1)
    finish(service)
    assert request.output == oracle.complete(PROMPT, 12).token_ids
    service.close()
