"""Ray clusters on hosts of a test."""

from __future__ import annotations

import sys

import pytest
from hosts import namespaces, network_hosts, why_not
from ray_nodes import ray_nodes, why_no_ray

ALIVE = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
print(*sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
"""


@pytest.mark.full
def test_each_host_has_a_ray_node_with_its_address() -> None:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    with network_hosts(2) as hosts, ray_nodes(hosts, num_cpus=1) as nodes:
        assert hosts[0].run(sys.executable, "-c", ALIVE, nodes.address).stdout.split() == ["10.99.0.1", "10.99.0.2"]
        names = {host.namespace for host in hosts}
    assert not names & set(namespaces())
    assert all(process.poll() is not None for process in nodes.processes)
