"""What carries the messages of a rank: one lane per kind of work, on which everything is first in, first out.

gloo matches messages by tag, and its lanes share one process group. NCCL has no tags: each lane is a communicator.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from longspan.attn.comm import TorchTransport
from longspan.core.steps import Forward, Link
from longspan.runtime.block_messages import BlockMessages
from longspan.runtime.devices import connect
from longspan.runtime.messages import WorkerConfig
from longspan.runtime.move_transport import MoveTransport
from longspan.runtime.moves import Moves
from longspan.runtime.step_comm import MoveComm
from longspan.runtime.step_moves import StepMoves
from longspan.runtime.timing import Stopwatch, TimedTransport


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
        self._balance = TimedTransport(TorchTransport(groups[0], staged=staged), watch)
        self._balances = MoveComm(self._balance, "kv_balance", rank=rank, hosts=hosts, num_layers=messages.num_layers)
        moves = MoveTransport(groups[1], staged=staged, device=device)
        self.moves = Moves(messages, moves, rank=rank, hosts=hosts)
        self._messages = messages

    def step_moves(self, forward: Forward, sent: Counter[tuple[str, Link]]) -> StepMoves:
        """This rank's end of what a Forward moves; counts what it sends in `sent`."""
        return StepMoves(forward, self._messages, balance=self._balances, moves=self.moves, sent=sent)

    def flush(self) -> None:
        """Waits until what a Forward has sent to its members has left, since they receive it in the same step."""
        self.exchange.flush()
        self._balance.flush()


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
