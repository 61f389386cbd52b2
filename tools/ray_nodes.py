"""A Ray cluster for tests, with one node on each host of `hosts.network_hosts`.

    with network_hosts(2) as hosts, ray_nodes(hosts) as cluster:
        hosts[0].run(sys.executable, "driver.py", cluster.address)

Drivers run on one of the hosts: no other process reaches the cluster.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hosts import Host, HostsError

_PORT = 6379
_STORE_BYTES = 100_000_000
"""Memory of a node's object store. Ray's default is 30 % of the machine's memory, for each node."""
_START_TIMEOUT_S, _POLL_S = 90.0, 0.1
_STARTED = "Ray runtime started"
"""The line that `ray start` prints when the node has joined the cluster."""


class RayNodes:
    """A node on each host. `ray_nodes` makes it.

    Attributes:
        address: the address of the cluster, for `ray.init` and `RAY_ADDRESS`.
        processes: `ray start` of each host. Each has its own process group, which all processes of the node belong to.
        folder: temporary files of all nodes and their actors.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, num_cpus: int) -> None:
        self.address, self.folder = f"{hosts[0].address}:{_PORT}", folder
        self.processes: list[subprocess.Popen[bytes]] = []
        self._hosts, self._num_cpus = hosts, num_cpus
        (folder / "ray").mkdir()  # Ray writes the address of its latest cluster there

    def start(self, index: int) -> None:
        """Start the node of a host, and wait until it has joined. The first host has the head."""
        host, log = self._hosts[index], self.folder / f"node{index}.log"
        head = ["--head", f"--port={_PORT}", f"--temp-dir={self.folder}", "--include-dashboard=false"]
        options = [
            *(head if index == 0 else [f"--address={self.address}"]),
            *(f"--node-ip-address={host.address}", f"--num-cpus={self._num_cpus}"),
            *(f"--object-store-memory={_STORE_BYTES}", "--disable-usage-stats", "--include-log-monitor=false"),
        ]
        command = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *options)
        env = {**os.environ, "TMPDIR": str(self.folder)}
        with log.open("wb") as output:
            process = host.popen(
                *command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0, env=env
            )
        self.processes[index : index + 1] = [process]
        deadline = time.monotonic() + _START_TIMEOUT_S
        while _STARTED not in (text := log.read_text(encoding="utf-8", errors="replace")):
            if process.poll() is not None or time.monotonic() > deadline:
                raise HostsError(f"the Ray node on {host.address} does not start: {text[-2000:]}")
            time.sleep(_POLL_S)

    def kill(self, index: int) -> None:
        """Kill the node of a host with SIGKILL, with its workers. `start` can start it again."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[index].pid, signal.SIGKILL)
        self.processes[index].wait()


def why_no_ray() -> str | None:
    """Return the reason why `ray_nodes` cannot work here, or None if Ray is installed."""
    return None if importlib.util.find_spec("ray") else "Ray is not installed"


@contextmanager
def ray_nodes(hosts: Sequence[Host], *, num_cpus: int = 2) -> Iterator[RayNodes]:
    """Start a Ray node on each host, the head on the first. At the end, kill the processes of all nodes.

    Args:
        num_cpus: CPUs that each node offers to tasks and actors.

    Raises:
        HostsError: a node does not start. The message has the end of its log.
    """
    # A short path: names of sockets have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="lsr-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        nodes = RayNodes(hosts, Path(folder), num_cpus)
        try:
            for index in range(len(hosts)):
                nodes.start(index)
            yield nodes
        finally:
            for index in reversed(range(len(nodes.processes))):
                nodes.kill(index)
