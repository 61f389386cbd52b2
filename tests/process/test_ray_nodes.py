"""Ray clusters on hosts of a test, and the ports of an engine there."""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hosts import Listener, namespaces, network_hosts, why_not
from port_scan import refuses
from ray_nodes import ray_nodes, why_no_ray

pytestmark = pytest.mark.hosts
ALIVE = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(*sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
"""

ENGINE = """
import json, sys
from longspan import LLM, SamplingParams
shared = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 16, "threads_per_rank": 1}
with LLM(sys.argv[1], executor="ray", ray_address=sys.argv[2], parallel="2", **shared) as llm:
    llm.generate([list(range(5, 100))], SamplingParams(max_tokens=2), use_tqdm=False)
    print(json.dumps(llm.service.executor.pids), flush=True)
    sys.stdin.read()
"""

PLACES = """
import json, sys
from contextlib import closing
from longspan.args import EngineArgs
from longspan.remote_ranks import reserve_hosts
address, topology, *specs = sys.argv[1:]
for spec in specs:
    given = EngineArgs("m", parallel=spec, executor="ray", ray_address=address, topology=topology, threads_per_rank=1)
    with closing(reserve_hosts(given)) as hosts:
        cluster = hosts.placement.of(given.resolve().cluster)
        print(json.dumps([hosts.names(cluster), [location.host_id for location in cluster.locations]]))
"""


def program(listener: Listener) -> str:
    """Return the name of the program of Ray that has a port."""
    [pid] = listener.pids
    names = ("raylet", "gcs_server", "RuntimeEnvAgent", "RankActor", "client.server", "monitor.py")
    line = " ".join(psutil.Process(pid).cmdline())
    return next((name for name in names if re.search(rf"(/|::|\.){re.escape(name)}\b", line)), line)


def test_each_host_has_a_ray_node_with_its_address() -> None:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    with network_hosts(2) as hosts, ray_nodes(hosts, num_cpus=1) as nodes:
        assert hosts[0].run(sys.executable, "-c", ALIVE, nodes.address).stdout.split() == ["10.99.0.1", "10.99.0.2"]
        names = {host.namespace for host in hosts}
    assert not names & set(namespaces())
    assert all(process.poll() is not None for process in nodes.processes)


def test_ports_are_those_of_the_docs_and_none_of_ours_takes_a_command_without_the_key(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """See the ports in docs/hosts.md. Ray's own programs are told apart by their names."""
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(16))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with network_hosts(2) as hosts, ray_nodes(hosts, num_cpus=1) as nodes:
        command = (sys.executable, "-c", ENGINE, tiny, nodes.address)
        with hosts[0].popen(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
            assert engine.stdout is not None
            workers = json.loads(engine.stdout.readline())
            listeners = [(host, listener) for host in hosts for listener in host.listeners()]
            assert {listener.kind for _, listener in listeners} == {"tcp"}
            ours = [(host, listener) for host, listener in listeners if {engine.pid, *workers} & {*listener.pids}]
            inside = [(host, listener) for host, listener in ours if listener.address == host.address]
            owners = Counter(listener.pids for _, listener in inside)
            assert owners == {(engine.pid,): 2, **{(pid,): 1 for pid in workers}}
            assert len(ours) == len(inside) + 1, "the engine has a port of Ray, too"
            assert all(refuses(client, listener) for client in hosts for _, listener in inside)
            theirs = Counter(
                program(listener) for _, listener in listeners if not {engine.pid, *workers} & {*listener.pids}
            )
            of_nodes = {"raylet": 2 * 2, "RuntimeEnvAgent": 2, "RankActor": 2}
            assert theirs == {"gcs_server": 1, "client.server": 2, "monitor.py": 1, **of_nodes}
            engine.communicate(timeout=60)
        assert engine.returncode == 0


def test_ranks_are_in_one_rack_if_it_has_the_places(tmp_path: Path) -> None:
    """The engine's host is alone in its rack. It has a rank only if the other rack is too small."""
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    (tmp_path / "racks.toml").write_text('[racks]\na = ["10.99.0.1"]\nb = ["10.99.0.2", "10.99.0.3"]\n')
    with network_hosts(3) as hosts, ray_nodes(hosts, num_cpus=1) as nodes:
        specs = ("1", "2", "pp2", "3")
        done = hosts[0].run(sys.executable, "-c", PLACES, nodes.address, tmp_path / "racks.toml", *specs, timeout_s=200)
    places = dict(zip(specs, map(json.loads, done.stdout.splitlines()), strict=True))
    addresses = {spec: re.findall(r"\((.*?)\)", names) for spec, (names, _) in places.items()}
    assert addresses["1"] == ["10.99.0.1"], "the nearest host"
    assert addresses["2"] == addresses["pp2"] == ["10.99.0.2", "10.99.0.3"]
    assert addresses["3"] == ["10.99.0.1", "10.99.0.2", "10.99.0.3"]
    assert [rack for rack, _ in places["2"][1]] == [1, 1]
    assert [rack for rack, _ in places["3"][1]] == [0, 1, 1]


def test_a_profile_has_links_inside_hosts_and_between_hosts(tiny: Path, tmp_path: Path) -> None:
    """Three instances are on two hosts: two are on the first. The link between the hosts has 200 Mb/s."""
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    options = {"--executor": "ray", "--threads-per-rank": "1", "--parallel": "3", "--lengths": "32,64"}
    options |= {"--repeats": "1", "--block-size": "16", "--dtype": "float32"}
    env = {**os.environ, "LONGSPAN_CACHE": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with network_hosts(2, gigabits=0.2) as hosts, ray_nodes(hosts, num_cpus=2) as nodes:
        arguments = [*(text for option in options.items() for text in option), "--ray-address", nodes.address, "--json"]
        command = (sys.executable, "-m", "longspan", "profile", tiny, *arguments)
        with hosts[0].popen(*command, stdout=subprocess.PIPE, env=env) as profiler:
            output, _ = profiler.communicate(timeout=500)
        assert profiler.returncode == 0
        assert not [*nodes.folder.glob("longspan-*")]
    profile = json.loads(output)
    speeds = {(link["kind"], link["members"], link["link_class"]): link["bytes_per_s"] for link in profile["links"]}
    pairs = {link_class: speed for (kind, _, link_class), speed in speeds.items() if kind == "point_to_point"}
    assert pairs.keys() == {"same_host", "other_host"}
    assert speeds.keys() >= {("alltoall", 3, "other_host"), ("all_gather", 3, "other_host")}
    assert pairs["other_host"] < 1.2 * 0.2e9 / 8 < pairs["same_host"]
    classes = {(prefill["members"], prefill["link_class"]) for prefill in profile["prefills"]}
    assert classes == {(1, "same_host"), (2, "same_host"), (3, "other_host")}
