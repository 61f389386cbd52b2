"""Lost hosts of a Ray cluster, each in a network namespace: requests continue exactly, and a returned host is used.

`make test-hosts` runs each loss twice, and `make attack` five times (`LONGSPAN_LOSSES`).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import hosts_client
import psutil
import pytest
from hosts import Host, network_hosts, why_not
from oracle import Oracle
from ray_nodes import RayNodes, ray_nodes, why_no_ray

pytestmark = pytest.mark.hosts
NUM_LOSSES = int(os.environ.get("LONGSPAN_LOSSES", "2"))
MAX_END_S, MAX_RETURN_S = 60.0, 90.0
MAX_TOKENS, NUM_REQUESTS = 900, 6
_ADDRESS = re.compile(r"serving \S+ on http://127\.0\.0\.1:(\d+)$", re.MULTILINE)
PROMPTS = [[5 + (7 * number + 11 * at) % 190 for at in range(60 + 40 * number)] for number in range(NUM_REQUESTS)]


class HostsServer:
    """A server on the first of three hosts, with an instance on each."""

    def __init__(self, hosts: Sequence[Host], nodes: RayNodes, model: Path, log: Path, oracle: Oracle) -> None:
        self.hosts, self.nodes, self._log, self._oracle = hosts, nodes, log, oracle
        options = {"--executor": "ray", "--ray-address": nodes.address, "--parallel": "3", "--threads-per-rank": "1"}
        options |= {"--policy": "context", "--block-size": "16", "--dtype": "float32", "--port": "0"}
        arguments = ["--skip-tokenizer-init", *(text for option in options.items() for text in option)]
        with log.open("wb") as file:
            command = (sys.executable, "-m", "longspan", "serve", str(model), *arguments)
            self.process = hosts[0].popen(*command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        self.port = int(self.wait_for(_ADDRESS, 120.0)[1])

    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float, start: int = 0) -> re.Match[str]:
        """Wait for a line of the log after `start` characters."""
        deadline_s = time.monotonic() + timeout_s
        while (found := pattern.search(self.text(), start)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, f"no {pattern}:\n{self.text()}"
            time.sleep(0.1)
        return found

    def wait_for_return(self, number: int, start: int) -> None:
        """Wait until the host is used again. A Ray node that was cut off may end, and starts again as by systemd."""
        deadline_s = time.monotonic() + MAX_RETURN_S
        while "continuing as 3" not in self.text()[start:]:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.text()
            if self.nodes.processes[number].poll() is not None:
                self.nodes.kill(number)
                self.nodes.start(number)
                deadline_s = time.monotonic() + MAX_RETURN_S
            time.sleep(0.1)
        self.send(lambda: None)
        assert any(map(is_actor, processes(self.hosts[number])))

    def send(self, act: Callable[[], None]) -> float:
        """Send all requests, act while they stream, and check their tokens. Return the seconds after the act."""
        requests = [{"prompt": prompt, "max_tokens": MAX_TOKENS} for prompt in PROMPTS]
        command = (sys.executable, hosts_client.__file__, str(self.port), json.dumps(requests))
        with self.hosts[0].popen(*command, stdout=subprocess.PIPE) as client:
            output: IO[bytes] | None = client.stdout
            assert output is not None and output.readline() == b"started\n", self.text()
            act()
            start_s = time.monotonic()
            answers = json.loads(output.read() or b"null")
        assert answers is not None, self.text()
        for prompt, tokens in zip(PROMPTS, answers, strict=True):
            assert tokens == self._oracle.complete(prompt, MAX_TOKENS).token_ids
        return time.monotonic() - start_s

    def close(self) -> None:
        """End it, and check that no process of longspan is left on any host."""
        family = [process for host in self.hosts for process in processes(host) if is_ours(process)]
        self.process.terminate()
        assert self.process.wait(60) == 0, self.text()
        _, left = psutil.wait_procs(family, timeout=30)
        assert not left, left


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


def run_folders() -> set[Path]:
    """Return the folders in which ranks of a host meet, and the sessions of Ray."""
    return {*Path("/tmp").glob(f"longspan-{'?' * 16}-?"), *Path("/tmp").glob("lsr-*"), *Path("/dev/shm").iterdir()}


@contextmanager
def serving(model: Path, log: Path, oracle: Oracle) -> Iterator[HostsServer]:
    before = run_folders()
    with network_hosts(3) as hosts:
        with ray_nodes(hosts, num_cpus=1) as nodes:
            server = HostsServer(hosts, nodes, model, log, oracle)
            try:
                yield server
                server.close()
            finally:
                if server.process.poll() is None:
                    server.process.kill()
        left = [process for host in hosts for process in processes(host)]
        _, left = psutil.wait_procs(left, timeout=30)
        assert not left, left
    assert not run_folders() - before


@pytest.fixture(scope="module")
def server(tiny: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsServer]:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    for prompt in PROMPTS:
        oracle.complete(prompt, MAX_TOKENS)
    with serving(tiny, tmp_path_factory.mktemp("hosts") / "log", oracle) as running:
        yield running


def test_an_actor_is_killed(server: HostsServer) -> None:
    for loss in range(NUM_LOSSES):
        victim = server.hosts[1 + loss % 2]

        def kill(host: Host = victim) -> None:
            for process in filter(is_actor, processes(host)):
                process.kill()

        start = len(server.text())
        seconds = server.send(kill)
        print(f"actor: all requests ended {seconds:.1f} s after the loss")
        assert seconds < MAX_END_S
        server.wait_for(re.compile(r"rank \d was lost"), 1.0, start)


def test_a_node_is_killed_and_returns(server: HostsServer) -> None:
    for loss in range(NUM_LOSSES):
        number = 1 + loss % 2
        start = len(server.text())
        seconds = server.send(lambda number=number: server.nodes.kill(number))  # type: ignore[misc]
        print(f"node: all requests ended {seconds:.1f} s after the loss")
        assert seconds < MAX_END_S
        server.wait_for(re.compile("continuing as 2"), 1.0, start)
        server.wait_for_return(number, len(server.text()))


def test_a_link_is_cut_and_mended(server: HostsServer) -> None:
    for loss in range(NUM_LOSSES):
        number = 1 + loss % 2
        start = len(server.text())
        seconds = server.send(server.hosts[number].cut)
        print(f"link: all requests ended {seconds:.1f} s after the loss")
        assert seconds < MAX_END_S
        server.wait_for(re.compile("continuing as 2"), 1.0, start)
        start = len(server.text())
        server.hosts[number].mend()
        server.wait_for_return(number, start)
