"""A server whose ranks are on the hosts of a Ray cluster, each in a network namespace."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import psutil
from hosts import Host, network_hosts
from leftovers import left_names, wait_until_gone
from ray_nodes import RayNodes, ray_nodes
from server_client import Client

_ADDRESS = re.compile(r"serving \S+ on http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
_START_TIMEOUT_S, _STOP_TIMEOUT_S, _END_TIMEOUT_S = 120.0, 60.0, 30.0
_SHARED = {"--executor": "ray", "--threads-per-rank": "1", "--block-size": "16", "--dtype": "float32", "--port": "0"}


class HostsServer:
    """A server on the first of several hosts, with one CPU thread per rank.

    Attributes:
        client: asks the server. Its sockets must be opened in `hosts[0].inside()`.
    """

    def __init__(
        self, hosts: Sequence[Host], nodes: RayNodes, model: Path | str, log: Path, options: Mapping[str, str]
    ) -> None:
        self.hosts, self.nodes, self._log = hosts, nodes, log
        given = {**_SHARED, "--ray-address": nodes.address, **options}
        arguments = [text for option in given.items() for text in option if text]
        with log.open("wb") as file:
            command = (sys.executable, "-m", "longspan", "serve", str(model), *arguments)
            self.process = hosts[0].popen(*command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.client = Client(port=int(self.wait_for(_ADDRESS, _START_TIMEOUT_S)[1]))

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float, start: int = 0) -> re.Match[str]:
        """Wait for a line of the log after `start` characters."""
        deadline_s = time.monotonic() + timeout_s
        while (found := pattern.search(self.text(), start)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, f"no {pattern}:\n{self.text()}"
            time.sleep(0.1)
        return found

    def close(self) -> None:
        """End it, and check that no process or run folder of longspan is left on any host."""
        family = [process for host in self.hosts for process in processes(host) if is_ours(process)]
        self.process.terminate()
        assert self.process.wait(_STOP_TIMEOUT_S) == 0, self.text()
        _, left = psutil.wait_procs(family, timeout=_END_TIMEOUT_S)
        assert not left, left
        assert not [*self.nodes.folder.glob("longspan-*")]


ServerT = TypeVar("ServerT", bound=HostsServer)


@contextmanager
def serving(num_hosts: int, num_cpus: int, start: Callable[[Sequence[Host], RayNodes], ServerT]) -> Iterator[ServerT]:
    """Start hosts with a Ray node each, and a server. At the end, check that no process or Ray session is left."""
    before = left_names()
    with network_hosts(num_hosts) as hosts:
        with ray_nodes(hosts, num_cpus=num_cpus) as nodes:
            server = start(hosts, nodes)
            try:
                yield server
                server.close()
            finally:
                if server.process.poll() is None:
                    server.process.kill()
        left = [process for host in hosts for process in processes(host)]
        _, left = psutil.wait_procs(left, timeout=_END_TIMEOUT_S)
        assert not left, left
    assert not nodes.folder.exists()
    wait_until_gone((), before)


def processes(host: Host) -> list[psutil.Process]:
    pids = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    found = []
    for pid in pids.split():
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(pid)))
    return found


def is_ours(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "longspan" in " ".join(process.cmdline()) or is_actor(process)
    return False


def is_actor(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return "ray::RankActor" in " ".join(process.cmdline())
    return False
