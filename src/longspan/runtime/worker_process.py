"""A rank that is a process: its device, its cores, its links to the other ranks, and its end.

It is forked from a process that has imported this module, see `executor.forkserver`, and ends when that one does.
"""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
import zmq
from torch import Tensor

from longspan import native
from longspan.attn import shared_memory
from longspan.attn.comm import NO_PEERS
from longspan.attn.routing import DirectedTransport, RoutedTransport
from longspan.attn.transports import TorchTransport, meet, peer_errors
from longspan.runtime.child import end_with_parent
from longspan.runtime.messages import WorkerConfig, command_address, report_address
from longspan.runtime.rank import Rank
from longspan.runtime.step_comm import StepLanes
from longspan.runtime.worker import Transports, failure, send_report

_log = logging.getLogger("longspan.worker")


def main(config: WorkerConfig, rank: int, run_dir: str, lifeline: int) -> None:
    """Runs a worker until it is told to stop, its controller goes away, or it fails.

    Args:
        run_dir: the engine's private folder: sockets and the rendezvous file. It is gone after shutdown.
        lifeline: the file descriptor of a pipe that is closed at its other end when the controller is gone.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the controller decides
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s rank {rank} %(levelname)s %(message)s"
    )
    end_with_parent(lifeline, remove=run_dir)
    context, endpoint = zmq.Context(), f"ipc://{run_dir}"
    commands, reports = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.bind(command_address(endpoint, rank))
    reports.connect(report_address(endpoint))
    try:
        is_complete = _load(config, rank, run_dir).serve(commands, reports)
    except Exception as error:  # noqa: BLE001 - whatever it is, the controller must hear of it and the process end
        _log.exception("the worker fails")
        send_report(reports, failure(rank, error))
        context.destroy(linger=1000)
        os._exit(1)  # at once, so that the peers' transfers fail instead of waiting for a time-out
    context.destroy(linger=1000)
    if dist.is_initialized() and is_complete:  # otherwise a thread waits in it, and the process just ends
        dist.destroy_process_group()


def _load(config: WorkerConfig, rank: int, run_dir: str) -> Rank:
    device, cores = open_device(config.device, rank), own_cores()
    if (kernels := config.kernels or config.host_kernels) is not None:
        native.load(kernels)

    def connect(hosts: Sequence[int]) -> Transports:
        torch.set_num_threads(config.threads_among(len(hosts)))
        keep_to_cores(config.device, rank, len(hosts), cores)
        return open_transports(device, rank, hosts, f"{run_dir}/rendezvous{len(hosts)}")

    torch.set_num_threads(config.num_threads)
    probe = None
    if device.type == "cuda":
        from longspan.runtime.device_memory import CudaMemory  # noqa: PLC0415 - CUDA devices alone

        probe = CudaMemory(device)
    found = Rank(config, rank, device, connect, probe=probe)
    _log.info("ready: %s on %s, %d threads", config.files.name, config.device, torch.get_num_threads())
    return found


def open_transports(
    device: torch.device, rank: int, hosts: Sequence[int], store: str, *, timeout_s: float | None = None
) -> Transports:
    """Connects a rank with all others, whose hosts are given; they meet at files whose paths begin with `store`.

    CPU ranks talk to those of their host through shared memory, where the system has it, and to others through gloo.
    CUDA devices talk through NCCL; ranks that share one are connected by gloo through host memory.
    """
    neighbours = [other for other, host in enumerate(hosts) if host == hosts[rank] and other != rank]
    if device.type != "cpu" or not shared_memory.is_supported():
        neighbours = []
    if len(hosts) == 1:
        steps = StepLanes.one(NO_PEERS)
        return Transports(steps=steps, rebalances=NO_PEERS, moves=NO_PEERS, hidden=NO_PEERS, samples=NO_PEERS)
    if len(neighbours) + 1 == len(hosts):
        return _on_host(rank, neighbours, store, timeout_s)
    far = _by_process_groups(device, rank, len(hosts), store, timeout_s)
    return _routed(_on_host(rank, neighbours, store, timeout_s), neighbours, far) if neighbours else far


def _on_host(rank: int, neighbours: Sequence[int], prefix: str, timeout_s: float | None) -> Transports:
    """Opens links of their own for moves, whose threads wait beside steps; all else is told apart by tags."""
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


def _by_process_groups(
    device: torch.device, rank: int, num_ranks: int, store: str, timeout_s: float | None
) -> Transports:
    """Opens one process group for all of gloo's messages, told apart by tags; NCCL gets one per kind of work.

    NCCL needs a device of its own per rank.
    """
    is_nccl = device.type == "cuda" and torch.cuda.device_count() >= num_ranks
    meet(store, rank, num_ranks, backend="nccl" if is_nccl else "gloo", timeout_s=timeout_s)
    close = dist.destroy_process_group
    if is_nccl:
        sums = GroupSums(device)
        exchange, weights, rebalances, hidden, samples = (TorchTransport(open_lane(device)) for _ in range(5))
        inside = TorchTransport(open_lane(device), sums=sums)
        early, moves = (_directed(rank, device) for _ in range(2))
        return Transports(
            steps=StepLanes(exchange=exchange, early=early, inside=inside, weights=weights),
            rebalances=rebalances,
            moves=moves,
            hidden=hidden,
            samples=samples,
            close=close,
            meet=sums.meet,
        )
    staged = device.type == "cuda"
    step, later = TorchTransport(staged=staged), TorchTransport(staged=staged, waits_for_sends=True)
    return Transports(steps=StepLanes.one(step), rebalances=step, moves=later, hidden=later, samples=later, close=close)


def _directed(rank: int, device: torch.device) -> DirectedTransport:
    """Opens two lanes of NCCL's whose messages from one rank to another wait for no other pair of ranks.

    Nobody need wait for a send: PyTorch keeps its buffer until NCCL has read it.
    """
    up, down = (TorchTransport(open_lane(device, pairwise=True), waits_for_sends=True) for _ in range(2))
    return DirectedTransport(rank, up, down)


def open_device(kind: str, rank: int) -> torch.device:
    """Returns the device of a rank; ranks share one when there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def own_cores() -> list[int]:
    """Lists the cores that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def keep_to_cores(kind: str, rank: int, num_ranks: int, cores: Sequence[int]) -> None:
    """Keeps a rank's later threads on its core when ranks of one CPU thread each fill the machine, else on all `cores`.

    So a rank that wakes up, or gloo's thread, which interrupts nobody (`polite_threads`), never waits for another rank
    to stop computing. Linux only, and where the system allows it.
    """
    fills = kind == "cpu" and torch.get_num_threads() == 1 and num_ranks == len(cores)
    if (wanted := [cores[rank]] if fills else [*cores]) != own_cores():
        with suppress(OSError):
            os.sched_setaffinity(0, wanted)


class GroupSums:
    """Sums by all-reduces, over sets of ranks that have met; each has a process group.

    NCCL adds in the tensor's type, in an order that the number of ranks decides and the size of the tensor may.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def meet(self, groups: Iterable[Sequence[int]]) -> None:
        """Opens lanes for sets that have none; those of earlier clusters stay, and may come again."""
        for ranks in map(tuple, groups):
            if ranks not in self._groups:
                self._groups[ranks] = open_lane(self._device, ranks)

    def __call__(self, ranks: Sequence[int], tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        with peer_errors():
            dist.all_reduce(tensor, group=self._groups[tuple(ranks)])
        return tensor


def open_lane(
    device: torch.device, ranks: Sequence[int] | None = None, *, pairwise: bool = False
) -> dist.ProcessGroup | None:
    """Returns a process group of some ranks, by default of all, after a call in which all of them took part.

    NCCL makes a communicator in the first call. PyTorch leaves open what happens when only some ranks take part in that
    (`batch_isend_irecv`). With `pairwise`, each two ranks have exchanged a message, too: single sends have a
    communicator per pair, and its first call waits for the peer. All ranks there are open the same lanes in the same
    order: PyTorch numbers them.
    """
    group: dist.ProcessGroup | None = dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return group
    present = torch.ones(1, device=device)
    dist.all_reduce(present, group=group)
    assert present.item() == dist.get_world_size(group), "all ranks take part"
    for low, high in itertools.combinations(range(dist.get_world_size(group)), 2) if pairwise else ():
        if dist.get_rank() == low:
            dist.send(present, high, group)
        elif dist.get_rank() == high:
            dist.recv(present, low, group)
    return group
