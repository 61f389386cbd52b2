"""The lanes of ranks that NCCL connects: a process group per kind of work, and communicators of two ranks for KV moves.

A device has `CUDA_QUEUES` hardware queues. If streams share one, a call that waits for a peer blocks later calls.
Steps post their calls in the same order on all ranks, so they may share queues. KV moves run concurrently with steps,
so each of their communicators needs a queue of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.routing import AnnouncedTransport, DirectedTransport
from longspan.attn.transports import TorchTransport, peer_errors
from longspan.core.cluster import Cluster
from longspan.runtime.executor.forkserver import CUDA_QUEUES
from longspan.runtime.step_comm import StepLanes
from longspan.runtime.worker import Transports

_OTHER_STREAMS = 7
"""Streams of computation, graphs, swaps, host-resident keys, and three of KV moves."""
_log = logging.getLogger("longspan.worker")


def nccl_transports(device: torch.device, rank: int) -> Transports:
    """Open the lanes of a rank with a device of its own. All ranks call this at the same time, after `meet`."""
    sums, pairs = GroupSums(device), PairLanes(device, rank)
    exchange, weights, rebalances, hidden, samples = (TorchTransport(open_lane(device)) for _ in range(5))
    inside = TorchTransport(open_lane(device), sums=sums)

    def meet(cluster: Cluster) -> None:
        sums.meet(cluster.shard_groups)
        pairs.meet(cluster)
        if (num_streams := 6 + sums.num_own + pairs.num_own + _OTHER_STREAMS) > CUDA_QUEUES:
            problem = "%d streams, but its device has %d queues: KV moves may delay steps. Use fewer instances"
            _log.warning(f"rank %d has {problem}", rank, num_streams, CUDA_QUEUES)

    return Transports(
        steps=StepLanes(exchange=exchange, inside=inside, weights=weights),
        rebalances=rebalances,
        moves=pairs.transport,
        hidden=hidden,
        samples=samples,
        close=dist.destroy_process_group,
        meet=meet,
    )


def open_lane(device: torch.device, ranks: Sequence[int] | None = None) -> dist.ProcessGroup | None:
    """Return a process group of some ranks (default: all), after a first collective call of all its ranks.

    NCCL creates a communicator in the first call. PyTorch does not define a first call with only some of the ranks
    (`batch_isend_irecv`). All ranks open the same lanes in the same order, since PyTorch numbers them.
    """
    group: dist.ProcessGroup | None = dist.new_group(ranks)
    if ranks is not None and dist.get_rank() not in ranks:
        return group
    present = torch.ones(1, device=device)
    dist.all_reduce(present, group=group)
    assert present.item() == dist.get_world_size(group), "all ranks take part"
    return group


class GroupSums:
    """All-reduces over sets of ranks, each with a process group that `meet` opens.

    NCCL adds in the tensor's dtype. Its order of additions depends on the number of ranks, and may depend on the size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def meet(self, groups: Iterable[Sequence[int]]) -> None:
        """Open lanes for new sets of ranks. Lanes of earlier clusters stay for later reuse."""
        for ranks in map(tuple, groups):
            if ranks not in self._groups:
                self._groups[ranks] = open_lane(self._device, ranks)

    @property
    def num_own(self) -> int:
        """Number of sets with this rank."""
        return sum(dist.get_rank() in ranks for ranks in self._groups)

    def __call__(self, ranks: Sequence[int], tensor: Tensor) -> Tensor:
        tensor = tensor.contiguous()
        with peer_errors():
            dist.all_reduce(tensor, group=self._groups[tuple(ranks)])
        return tensor


class PairLanes:
    """KV moves between two ranks, with one communicator per pair and direction.

    A move thus waits for no other pair, and for no move in the other direction. A receive is posted when its sender has
    announced the message by gloo. Sends need no wait: PyTorch keeps the buffer until NCCL has read it.

    Attributes:
        transport: for the pairs that `meet` has opened.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._ways = [dist.new_group() for _ in ("up", "down")]
        self._opened: set[tuple[int, int]] = set()
        lanes = [TorchTransport(way, waits_for_sends=True) for way in self._ways]
        notices = TorchTransport(dist.new_group(backend="gloo"), waits_for_sends=True)
        self.transport = AnnouncedTransport(DirectedTransport(rank, *lanes), notices)

    def meet(self, cluster: Cluster) -> None:
        """Create the communicators of new pairs before the device's memory is measured.

        Their first call waits for the peer. Disjoint pairs call at the same time.
        """
        present = torch.ones(1, device=self._device)
        for pair in moving_pairs(cluster):
            if pair in self._opened:
                continue
            self._opened.add(pair)
            low, high = pair
            for way in self._ways if self._rank in pair else ():
                with peer_errors():
                    if self._rank == low:
                        dist.send(present, high, way)
                    else:
                        dist.recv(present, low, way)

    @property
    def num_own(self) -> int:
        """Number of communicators of this rank."""
        return len(self._ways) * sum(self._rank in pair for pair in self._opened)


def moving_pairs(cluster: Cluster) -> list[tuple[int, int]]:
    """Return the pairs of ranks of different instances, between which KV may move.

    They are in rounds of disjoint pairs, at most one round per rank.
    """
    instances = [cluster.at(rank).instance for rank in range(cluster.num_ranks) if not cluster.is_spare(rank)]
    pairs = [
        (low, high)
        for high, of_high in enumerate(instances)
        for low, of_low in enumerate(instances[:high])
        if of_low != of_high
    ]
    return sorted(pairs, key=lambda pair: (sum(pair) % len(instances), pair))
