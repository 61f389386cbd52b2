"""Ranks of an engine on the hosts of `hosts.network_hosts`, without Ray.

    with network_hosts(2) as hosts, llm_on(hosts)(parallel="2") as llm:
        llm.generate("A prompt.")

`placed` takes racks from a topology file, and `start_on` starts the processes of `longspan.profiling.links`. Ranks of
different hosts send messages by the links between the hosts. The controller is a process outside, but its sockets are
on the first host: encrypted, over TCP, as with Ray. This module is also the program of a rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec
from hosts import INTERFACE, Host

from longspan.core.placement import PlacedHost, Racks
from longspan.profiling.links import StartRank
from longspan.remote_ranks import read_racks
from longspan.runtime.executor.channel import Channel
from longspan.runtime.executor.forkserver import StartWorker
from longspan.runtime.executor.processes import ProcessLauncher
from longspan.runtime.messages import WorkerConfig

if TYPE_CHECKING:
    from longspan import LLM


def llm_on(hosts: Sequence[Host], locations: str = "", script: Path = Path(__file__)) -> type[LLM]:
    """Return an `LLM` whose ranks are on these hosts.

    It sets `LONGSPAN_HOSTS`, which further engines of this process use, too.

    Args:
        locations: the value of `LONGSPAN_HOSTS`. By default the hosts split the ranks evenly, in order.
        script: see `HostLauncher`.
    """
    from longspan import LLM  # noqa: PLC0415 - a rank needs none
    from longspan.service import Service  # noqa: PLC0415

    class HostsLLM(LLM):
        make_service = partial(Service, launcher=partial(HostLauncher, hosts=hosts, script=script))

    os.environ["LONGSPAN_HOSTS"] = locations or str(len(hosts))
    return HostsLLM


def placed(hosts: Sequence[Host], num_ranks: int, topology: Path | None = None) -> tuple[str, list[Host]]:
    """Return the text of LONGSPAN_HOSTS for ranks split evenly over hosts, and the hosts in order of proximity."""
    racks = Racks(None if topology is None else read_racks(str(topology)))
    by_address = {host.address: host for host in hosts}
    places = {address: PlacedHost(address=address) for address in by_address}
    racks.check(places.values())
    order = racks.in_order(places, hosts[0].address)
    texts = [f"{rack}-{number}" for number, rack in enumerate(order.values())]
    text = ",".join(texts[rank * len(hosts) // num_ranks] for rank in range(num_ranks))
    return text, [by_address[address] for address in order]


def start_on(hosts: Sequence[Host]) -> StartRank:
    """Return a function that starts a process of `time_links` on the host of its rank. There is one host per rank."""

    def start(module: str, *arguments: str, stdout: int | None, stderr: IO[bytes] | None) -> subprocess.Popen[bytes]:
        return hosts[int(arguments[0])].popen(
            *(sys.executable, "-P", "-m", module, *arguments),
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE},
        )

    return start


class HostLauncher(ProcessLauncher):
    """Starts each rank on the host of its location.

    Args:
        script: the program of a rank. It calls `run_rank`.
    """

    def __init__(self, config: WorkerConfig, hosts: Sequence[Host], script: Path = Path(__file__)) -> None:
        self._hosts, self._script = hosts, script
        super().__init__(config, listen=hosts[0].address)

    def start(self, rank: int) -> _Worker:  # type: ignore[override]  # not forked, but with the same interface
        return _Worker(self.command(rank), self._hosts[self.cluster.hosts[rank]], self._script)

    def _open_channel(self, listen: str | None) -> Channel:
        with self._hosts[0].inside():
            return super()._open_channel(listen)


class _Worker:
    """A rank's process on its host, with the interface that the controller uses."""

    def __init__(self, command: StartWorker, host: Host, script: Path) -> None:
        end, self._lifeline = os.pipe()
        with command.log.open("wb") as log:
            self._process = host.popen(
                *(sys.executable, script, str(end)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(end,),
                env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"},
            )
        os.close(end)
        assert self._process.stdin is not None, "a pipe was requested"
        self._process.stdin.write(msgspec.json.encode(command, enc_hook=os.fspath))
        self._process.stdin.close()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error

    def kill(self) -> None:
        self._process.kill()

    def destroy(self) -> None:
        self._process.kill()
        self._process.wait()


def run_rank() -> StartWorker:
    """Run the rank that standard input describes, and return its description at the end.

    The only argument is the descriptor of the pipe that ends with the controller.
    """
    from longspan.runtime import worker_process  # noqa: PLC0415 - imports transformers

    command = msgspec.json.decode(sys.stdin.buffer.read(), type=StartWorker, dec_hook=lambda kind, text: kind(text))
    worker_process.main(command, int(sys.argv[1]))
    return command


if __name__ == "__main__":
    run_rank()
