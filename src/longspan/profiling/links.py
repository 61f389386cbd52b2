"""Measure the speed of links between ranks, and between a device and its host, in separate processes.

`time_links` starts one process per rank, `python -m longspan.profiling.links`, connected like workers. Rank 0 reports.
The processes meet by files, which hosts of a test share.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Protocol

import msgspec
import torch
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in its __all__

from longspan.attn.collectives import all_gather
from longspan.attn.comm import Group, Message, Transport, gather_hops
from longspan.core.imitated_hosts import locations_of_ranks, text_of
from longspan.core.link_classes import LinkClass, slowest_link
from longspan.core.locations import Location, hosts_of
from longspan.cost.profile import Transfer, TransferKind
from longspan.errors import WorkerLostError
from longspan.profiling.plan import peers_of_first
from longspan.runtime.child import end_with_parent, make_run_dir, start_child
from longspan.runtime.worker_process import keep_to_cores, meeting_folder, open_device, open_transports, own_cores

_SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)
"""Bytes that a rank sends. Links are as fast as they can be from about 64 MiB on, so the last size gives their rate."""
_MAX_CALL_S = 1.0
"""The largest size is left out if a call would take longer: a slow link reaches its rate with less."""
_REPEATS = 7
_TIMEOUT_S = 60.0


class StartRank(Protocol):
    """Starts `python -m module` for a rank on its host, like `start_child`. The first argument is the rank."""

    def __call__(
        self, module: str, *arguments: str, stdout: int | None, stderr: IO[bytes] | None
    ) -> subprocess.Popen[bytes]: ...


def time_links(locations: Sequence[Location], device: str, start: StartRank = start_child) -> list[Transfer]:
    """Return timed transfers of every kind and several sizes between ranks at these locations.

    Args:
        start: starts the process of a rank. By default on this machine, where ranks of several hosts use TCP.
    """
    num_ranks, places = len(locations), text_of(locations)
    processes: list[subprocess.Popen[bytes]] = []
    folder = make_run_dir()
    logs = [Path(folder, f"log{rank}") for rank in range(num_ranks)]
    try:
        for rank, log in enumerate(logs):
            arguments = [str(rank), places, f"{folder}/store", device]
            with log.open("wb") as stderr:
                processes.append(start(__name__, *arguments, stdout=subprocess.PIPE, stderr=stderr))
        stdout = processes[0].stdout
        assert stdout is not None, "the child has a pipe"
        output = stdout.read()
        for rank, process in enumerate(processes):
            if process.wait(_TIMEOUT_S) != 0:
                log_lines = logs[rank].read_text(errors="replace").strip().split("\n")
                raise WorkerLostError(rank, log_lines[-1].strip() or "its log is empty")
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes the pipes
        shutil.rmtree(folder, ignore_errors=True)
    return msgspec.json.decode(output, type=list[Transfer])


def main(rank: int, places: str, prefix: str, device_kind: str, *, store: Store | None = None) -> list[Transfer]:
    """Time transfers as one rank. All ranks run the same transfers in the same order.

    Args:
        places: rack and host of each rank, such as `0-0,0-1`.
        prefix: of the paths of files by which ranks of a host meet.
        store: by which ranks of several hosts meet. None: all hosts are this machine.
    """
    locations = locations_of_ranks(places.count(",") + 1, places)
    hosts = hosts_of(locations)
    neighbours = [other for other, host in enumerate(hosts) if store is None or host == hosts[rank]]
    torch.set_num_threads(1)
    keep_to_cores(device_kind, neighbours.index(rank), len(neighbours), own_cores())
    device = open_device(device_kind, neighbours.index(rank))
    transfers = [*_copies(device)] if rank == 0 else []
    if len(hosts) > 1:
        with nullcontext() if store is None else meeting_folder(Path(prefix).parent):
            transports = open_transports(
                device, rank, hosts, prefix, store=store, has_own_device=store is not None, timeout_s=_TIMEOUT_S
            )
        links = Links(transports.steps.exchange, rank, len(hosts), device)
        transfers += _between(links, locations)
        links.meet()
        transports.close()
    return transfers


def _between(links: Links, locations: Sequence[Location]) -> Iterator[Transfer]:
    slowest = slowest_link(locations)
    calls: list[tuple[TransferKind, int, LinkClass, Callable[[int], float]]] = [
        ("point_to_point", 2, link_class, partial(links.there_and_back, peer=peer))
        for link_class, peer in peers_of_first(locations).items()
    ]
    calls += [("alltoall", links.size, slowest, links.alltoall), ("all_gather", links.size, slowest, links.all_gather)]
    for kind, members, link_class, call in calls:
        receivers = 1 if kind == "point_to_point" else links.size - 1
        for size in _SIZES:
            share = size // receivers
            num_bytes, seconds = share * receivers, [call(share) for _ in range(_REPEATS + 1)]
            yield Transfer(
                kind=kind, members=members, num_bytes=num_bytes, seconds=tuple(seconds[1:]), link_class=link_class
            )
            if size == _SIZES[-2] and links.first(is_slow(size, seconds[1:])):
                break


class Links:
    """The links of one rank. Every timing method sends messages of `num_bytes` and returns seconds."""

    def __init__(self, transport: Transport, rank: int, size: int, device: torch.device) -> None:
        self.size, self._rank, self._device, self._transport = size, rank, device, transport
        self._next_tag = 0

    def there_and_back(self, num_bytes: int, peer: int) -> float:
        """Return half of the round-trip time between rank 0 and a peer."""
        group = self._group()
        if self._rank not in (0, peer):
            return self._timed(lambda: None)
        other = peer - self._rank

        def round_trip() -> None:
            message = {other: self._message(num_bytes)}
            for hop in range(2):
                sends, receives = (message, {}) if (hop == 0) == (self._rank == 0) else ({}, message)
                group.start(sends=sends, receives=receives, hop=hop).wait()

        return self._timed(round_trip) / 2

    def alltoall(self, num_bytes: int) -> float:
        """Send a separate message from every rank to every other rank."""
        return self._timed(self._alltoall(num_bytes))

    def all_gather(self, num_bytes: int) -> float:
        """Send one message from every rank to all other ranks."""
        group, blocks = self._group(), [self._message(num_bytes) for _ in range(self.size)]
        return self._timed(lambda: all_gather(group, blocks))

    def first(self, value: bool) -> bool:
        """Return the value of rank 0 on every rank."""
        message = self._message(1)
        message.tensors[0].fill_(value)
        sends, receives = (dict.fromkeys(range(1, self.size), message), {}) if self._rank == 0 else ({}, {0: message})
        self._group().start(sends=sends, receives=receives, hop=0).wait()
        self._transport.complete_sends()
        return bool(message.tensors[0])

    def meet(self) -> None:
        """Wait for all other ranks, by exchanging small messages."""
        _seconds(self._alltoall(1), self._device)

    def _alltoall(self, num_bytes: int) -> Callable[[], None]:
        """Return a call that sends and receives preallocated messages."""
        group = self._group()
        leaving = {rank: self._message(num_bytes) for rank in group.peers}
        coming = {rank: self._message(num_bytes) for rank in group.peers}
        return lambda: group.start(sends=leaving, receives=coming, hop=0).wait()

    def _group(self) -> Group:
        first = self._next_tag
        self._next_tag += gather_hops(self.size) + 1
        return Group(self._transport, range(self.size), self._rank, tags=range(first, self._next_tag))

    def _message(self, num_bytes: int) -> Message:
        return Message([((num_bytes,), torch.uint8)], self._device)

    def _timed(self, call: Callable[[], object]) -> float:
        self.meet()
        seconds = _seconds(call, self._device)
        self._transport.complete_sends()
        return seconds


def is_slow(num_bytes: int, seconds: Sequence[float]) -> bool:
    """Return True if calls of the largest size would take too long, at the rate of calls with `num_bytes`."""
    return statistics.median(seconds) * _SIZES[-1] / num_bytes > _MAX_CALL_S


def _copies(device: torch.device) -> Iterator[Transfer]:
    """Time copies from the device to host memory. On CPUs both are the same memory."""
    for num_bytes in _SIZES:
        source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        target = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        copy = partial(target.copy_, source)
        seconds = [_seconds(copy, device) for _ in range(_REPEATS + 1)]
        yield Transfer(kind="host_copy", members=1, num_bytes=num_bytes, seconds=tuple(seconds[1:]))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


if __name__ == "__main__":
    end_with_parent(sys.stdin.fileno())
    timed = main(int(sys.argv[1]), *sys.argv[2:])
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(msgspec.json.encode(timed))
