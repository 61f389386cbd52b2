"""The device of a rank, its links to the other ranks, and what carries its messages: a lane per kind of work."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import suppress

import torch
import torch.distributed as dist

from longspan.attn.comm import TorchTransport, meet
from longspan.core.steps import Forward, Link
from longspan.runtime.kv.block_messages import BlockMessages
from longspan.runtime.kv.moves import Moves, MoveTransport, StepMoves
from longspan.runtime.messages import WorkerConfig
from longspan.runtime.worker.step_comm import MoveComm
from longspan.runtime.worker.timing import Stopwatch, TimedTransport


def open_device(kind: str, rank: int) -> torch.device:
    """The device of a rank; several ranks share one when there are fewer."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def keep_to_cores(kind: str, rank: int, num_ranks: int) -> None:
    """Where ranks that compute on one CPU thread each fill the machine, a rank's threads from now on stay on its core.

    So gloo's thread, which interrupts nobody (`polite_threads`), never waits for another rank to stop computing. Linux
    only, and where the system allows it.
    """
    if kind == "cpu" and torch.get_num_threads() == 1 and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if num_ranks == len(cores):
            with suppress(OSError):
                os.sched_setaffinity(0, {cores[rank]})


def connect(kind: str, store: str, rank: int, world_size: int, *, timeout_s: float | None = None) -> TorchTransport:
    """Meets the other ranks through the file `store`.

    NCCL needs a device of its own per rank; ranks that share one are connected by gloo through host memory.
    """
    nccl = kind == "cuda" and torch.cuda.device_count() >= world_size
    meet(store, rank, world_size, backend="nccl" if nccl else "gloo", timeout_s=timeout_s)
    return TorchTransport(staged=kind == "cuda" and not nccl)


class Network:
    """Meets the other ranks.

    Attributes:
        exchange: what the exchanges of a Forward send, and the ranks of an instance; peers receive it in the same step.
        moves: the KV that moves between ranks in different steps.
    """

    def __init__(self, config: WorkerConfig, device: torch.device, messages: BlockMessages, watch: Stopwatch) -> None:
        exchange = connect(config.device, f"{config.run_dir}/rendezvous", config.rank, config.fleet.num_ranks)
        groups = [open_lane(own=not exchange.tagged, device=device) for _ in range(2)]
        staged, rank, hosts = exchange.staged, config.rank, config.hosts
        self.exchange = TimedTransport(exchange, watch)
        self._rebalance = TimedTransport(TorchTransport(groups[0], staged=staged), watch)
        self._rebalances = MoveComm(
            self._rebalance, "kv_balance", rank=rank, hosts=hosts, num_layers=messages.num_layers
        )
        moves = MoveTransport(groups[1], staged=staged, device=device)
        self.moves = Moves(messages, moves, rank=rank, hosts=hosts)
        self._messages = messages

    def step_moves(self, forward: Forward, sent: Counter[tuple[str, Link]]) -> StepMoves:
        """This rank's end of what a Forward moves; counts what it sends in `sent`."""
        return StepMoves(forward, self._messages, balance=self._rebalances, moves=self.moves, sent=sent)

    def flush(self) -> None:
        """Waits until what a Forward has sent to its members has left, since they receive it in the same step."""
        self.exchange.flush()
        self._rebalance.flush()


def open_lane(*, own: bool, device: torch.device) -> dist.ProcessGroup | None:
    """A process group of all ranks, or None for the one they have, after a call in which all took part.

    NCCL makes a communicator in the first call. PyTorch leaves open what happens when only some ranks take part in that
    (`batch_isend_irecv`). All ranks open the same lanes in the same order.
    """
    group = dist.new_group() if own else None
    present = torch.ones(1, device=device if dist.get_backend(group) == "nccl" else "cpu")
    dist.all_reduce(present, group=group)
    assert present.item() == dist.get_world_size(group), "all ranks take part"
    return group
