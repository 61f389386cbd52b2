"""The process of one rank: its device, its cores, its transports to other ranks, and its exit.

The fork server, which has imported this module, forks the process, see `executor.forkserver`. It exits with the server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
import zmq
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, but not in its __all__

from longspan import native
from longspan.attn import shared_memory
from longspan.attn.comm import NO_PEERS
from longspan.attn.routing import RoutedTransport
from longspan.attn.transports import TorchTransport, meet
from longspan.model.files import cache_root
from longspan.runtime.child import end_with_parent
from longspan.runtime.contact import Contact
from longspan.runtime.executor.forkserver import StartWorker
from longspan.runtime.rank import Rank
from longspan.runtime.step_comm import StepLanes
from longspan.runtime.worker import Transports, failure, send_report

_log = logging.getLogger("longspan.worker")


def main(command: StartWorker, lifeline: int) -> None:
    """Run a worker until Stop, until its controller exits, or until it fails.

    Args:
        lifeline: the file descriptor of a pipe whose other end closes when the process that started it exits.
    """
    rank = command.rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group. The controller handles it
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    )
    end_with_parent(lifeline, remove=command.run_dir)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    controller = command.contact.connect(context, rank)
    try:
        with _connected(command.contact, controller):
            is_complete = _load(command).serve(controller)
    except Exception as error:  # noqa: BLE001 - report any error to the controller, then exit
        _log.exception("the worker failed")
        send_report(controller, failure(rank, error))
        context.destroy(linger=1000)
        os._exit(1)  # immediately, so that the peers' transfers fail before their timeout
    context.destroy(linger=1000)
    if dist.is_initialized() and is_complete:  # otherwise a thread waits in it, and the process just exits
        dist.destroy_process_group()


def _connected(contact: Contact, controller: zmq.Socket[bytes]) -> AbstractContextManager[None]:
    if contact.keys is None:
        return nullcontext()
    from longspan.runtime.heartbeats import exits_without_controller  # noqa: PLC0415 - for connections over TCP

    return exits_without_controller(controller)


def _load(command: StartWorker) -> Rank:
    config, rank = command.config, command.rank
    local_rank = config.neighbours(rank, config.cluster.hosts).index(rank) if rank < config.cluster.num_ranks else rank
    device, cores = open_device(config.device, local_rank), own_cores()
    if (kernels := config.kernels or config.host_kernels) is not None:
        native.load(kernels)

    def connect(hosts: Sequence[int]) -> Transports:
        torch.set_num_threads(config.threads_among(len(hosts)))
        neighbours = config.neighbours(rank, hosts)
        keep_to_cores(config.device, neighbours.index(rank), len(neighbours), cores)
        prefix = f"{command.run_dir}/rendezvous{len(hosts)}"
        with meeting_folder(Path(command.run_dir)) if config.is_placed else nullcontext():
            return open_transports(device, rank, hosts, prefix, store=store, has_own_device=config.is_placed)

    store = None
    if command.contact.store is not None:
        from longspan.runtime.store import ControllerStore  # noqa: PLC0415 - for ranks on several hosts

        store = ControllerStore(command.contact)
    torch.set_num_threads(config.num_threads)
    probe = None
    if device.type == "cuda":
        from longspan.runtime.device_memory import CudaMemory  # noqa: PLC0415 - only on CUDA devices

        probe = CudaMemory(device, config.cluster.num_ranks if config.is_placed else None)
    return Rank(config, rank, device, connect, probe=probe)


@contextmanager
def meeting_folder(folder: Path) -> Iterator[None]:
    """Create a private folder that the ranks of a host share while they meet. The last rank removes it.

    `rmdir` fails while a rank has a socket in it, and all ranks create their sockets before any of them leaves.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    yield
    with suppress(OSError):
        folder.rmdir()


def open_transports(
    device: torch.device,
    rank: int,
    hosts: Sequence[int],
    prefix: str,
    *,
    store: Store | None = None,
    has_own_device: bool = False,
    timeout_s: float | None = None,
) -> Transports:
    """Connect a rank with all ranks, whose `hosts` are given.

    Ranks of a host meet by files whose paths begin with `prefix`. Ranks of several hosts meet by `store`, or by such a
    file if the hosts are imitated on one machine. With `has_own_device`, each rank has a device that no other rank
    sees. Otherwise a process sees all devices.

    CPU ranks use shared memory within a host, where the system supports it, and gloo between hosts. CUDA ranks use
    NCCL, or gloo through host memory if ranks share a device.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank] and other != rank]
    if device.type != "cpu" or not shared_memory.is_supported():
        neighbours = []
    if len(hosts) == 1:
        steps = StepLanes.one(NO_PEERS)
        return Transports(steps=steps, rebalances=NO_PEERS, moves=NO_PEERS, hidden=NO_PEERS, samples=NO_PEERS)
    if len(neighbours) + 1 == len(hosts):
        return _on_host(rank, neighbours, prefix, timeout_s)
    meeting = prefix if store is None else PrefixStore(str(len(hosts)), store)
    is_nccl = device.type == "cuda" and (has_own_device or torch.cuda.device_count() >= len(hosts))
    meet(meeting, rank, len(hosts), backend="nccl" if is_nccl else "gloo", timeout_s=timeout_s)
    if is_nccl:
        from longspan.runtime.nccl_lanes import nccl_transports  # noqa: PLC0415 - only with NCCL

        return nccl_transports(device, rank)
    far = _by_gloo(staged=device.type == "cuda")
    return _routed(_on_host(rank, neighbours, prefix, timeout_s), neighbours, far) if neighbours else far


def _on_host(rank: int, neighbours: Sequence[int], prefix: str, timeout_s: float | None) -> Transports:
    """Open one link for moves, whose threads wait concurrently with steps, and one tagged link for all other work."""
    steps = shared_memory.meet_on_host(f"{prefix}-steps", rank, neighbours, timeout_s=timeout_s)
    moves = shared_memory.meet_on_host(f"{prefix}-moves", rank, neighbours, timeout_s=timeout_s, waits_for_sends=True)

    def close() -> None:
        steps.close()
        moves.close()

    lanes = StepLanes.one(steps)
    return Transports(steps=lanes, rebalances=steps, moves=moves, hidden=steps, samples=steps, close=close)


def _routed(near: Transports, neighbours: Sequence[int], far: Transports) -> Transports:
    def close() -> None:
        near.close()
        far.close()

    return Transports(
        steps=StepLanes.one(RoutedTransport(near.steps.exchange, neighbours, far.steps.exchange)),
        rebalances=RoutedTransport(near.rebalances, neighbours, far.rebalances),
        moves=RoutedTransport(near.moves, neighbours, far.moves),
        hidden=RoutedTransport(near.hidden, neighbours, far.hidden),
        samples=RoutedTransport(near.samples, neighbours, far.samples),
        close=close,
    )


def _by_gloo(*, staged: bool) -> Transports:
    """Use one tagged process group, through host memory if `staged`."""
    step, later = TorchTransport(staged=staged), TorchTransport(staged=staged, waits_for_sends=True)
    return Transports(
        steps=StepLanes.one(step),
        rebalances=step,
        moves=later,
        hidden=later,
        samples=later,
        close=dist.destroy_process_group,
    )


def open_device(kind: str, rank: int) -> torch.device:
    """Return the device of a rank, numbered among the ranks of its host, and select it. Ranks may share devices.

    Triton keeps compiled kernels in longspan's cache, next to the weights.
    """
    if kind == "cpu":
        return torch.device("cpu")
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_root() / "triton"))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def own_cores() -> list[int]:
    """List the cores that this process may use. Empty on systems without this information."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_to_cores(kind: str, rank: int, num_ranks: int, cores: Sequence[int]) -> None:
    """Keep the rank's later threads on one core if single-threaded ranks fill the machine, else on `cores`.

    `rank` and `num_ranks` count the ranks of this host.
    A rank that wakes up then never waits for a core on which another rank computes. The same holds for gloo's thread,
    which does not preempt (`polite_threads`). Linux only. Ignores errors of the system call.
    """
    fills = kind == "cpu" and torch.get_num_threads() == 1 and num_ranks == len(cores)
    if (pinned := [cores[rank]] if fills else [*cores]) != own_cores():
        with suppress(OSError):
            os.sched_setaffinity(0, pinned)
