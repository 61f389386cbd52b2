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
from pathlib import Path
from typing import IO

import hosts_client
import pytest
from hosts import Host, why_not
from hosts_server import HostsServer, is_actor, processes, serving
from oracle import Oracle
from ray_nodes import RayNodes, why_no_ray

pytestmark = pytest.mark.hosts
NUM_LOSSES = int(os.environ.get("LONGSPAN_LOSSES", "2"))
MAX_END_S, MAX_RETURN_S = 60.0, 90.0
MAX_TOKENS, NUM_REQUESTS = 900, 6
PROMPTS = [[5 + (7 * number + 11 * at) % 190 for at in range(60 + 40 * number)] for number in range(NUM_REQUESTS)]


class LosingServer(HostsServer):
    """A server on the first of three hosts, with an instance on each."""

    def __init__(self, hosts: Sequence[Host], nodes: RayNodes, model: Path, log: Path, oracle: Oracle) -> None:
        options = {"--parallel": "3", "--policy": "context", "--skip-tokenizer-init": ""}
        super().__init__(hosts, nodes, model, log, options)
        self._oracle = oracle

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
        command = (sys.executable, hosts_client.__file__, str(self.client.port), json.dumps(requests))
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


@pytest.fixture(scope="module")
def server(tiny: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LosingServer]:
    if (reason := why_not() or why_no_ray()) is not None:
        pytest.skip(reason)
    for prompt in PROMPTS:
        oracle.complete(prompt, MAX_TOKENS)
    log = tmp_path_factory.mktemp("hosts") / "log"
    with serving(3, 1, lambda hosts, nodes: LosingServer(hosts, nodes, tiny, log, oracle)) as running:
        yield running


def test_an_actor_is_killed(server: LosingServer) -> None:
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


def test_a_node_is_killed_and_returns(server: LosingServer) -> None:
    for loss in range(NUM_LOSSES):
        number = 1 + loss % 2
        start = len(server.text())
        seconds = server.send(lambda number=number: server.nodes.kill(number))  # type: ignore[misc]
        print(f"node: all requests ended {seconds:.1f} s after the loss")
        assert seconds < MAX_END_S
        server.wait_for(re.compile("continuing as 2"), 1.0, start)
        server.wait_for_return(number, len(server.text()))


def test_a_link_is_cut_and_mended(server: LosingServer) -> None:
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
