"""Who takes part in the library's exchanges: the ranks of a torch.distributed process group."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.comm import Group, TorchTransport, Transport
from longspan.attn.gather import gather_hops
from longspan.core.steps import Link

_BACKENDS = ("gloo", "nccl")
_NUM_TAGS = 2**31


class Members:
    """The members of a group as one of them sees them; made by `join`.

    A context manager: leave it before the process group is destroyed, so that whatever this member has sent arrives.

    Attributes:
        rank: this member's index in the group.
        size: the number of members.
        sent: payload bytes that this member has sent, by exchange and link (`same_host`, `other_host`).
    """

    def __init__(
        self, transport: Transport, ranks: Sequence[int], rank: int, *, hosts: Sequence[int] | None = None
    ) -> None:
        self.rank, self.size = rank, len(ranks)
        self.sent: Counter[tuple[str, Link]] = Counter()
        self._transport, self._ranks, self._hosts = transport, tuple(ranks), hosts
        self._calls = itertools.count()

    def check(self, tensor: Tensor) -> None:
        """Raises ValueError for a tensor that this group cannot send."""
        if not self._transport.tagged and tensor.device.type != "cuda":
            raise ValueError(
                f"q, k and v are on {tensor.device}, but NCCL connects CUDA devices only: move them there, or join a "
                "group with the backend gloo"
            )

    def begin(self, name: str) -> Group:
        """The group of the next call of an exchange. Its tags are new, so that no call takes another's messages."""
        hops = gather_hops(self.size)  # no exchange has more
        first_tag = next(self._calls) % (_NUM_TAGS // hops) * hops
        return Group(
            self._transport, self._ranks, self.rank, hosts=self._hosts, name=name, first_tag=first_tag, sent=self.sent
        )

    def close(self) -> None:
        """Waits until all that was sent has arrived.

        Raises:
            CommError: when a peer is gone.
        """
        self._transport.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else peers may be waiting for what will not come
            self.close()


def join(process_group: dist.ProcessGroup | None = None, *, hosts: Sequence[int] | None = None) -> Members:
    """The ranks of a process group, by default of all, as members of exchanges in the order of their ranks.

    All of them call it. Join a process group once and keep it for exchanges: other point-to-point messages could be
    mistaken for theirs. Its timeout is how long a member waits for another. Neighbours talk most, so ranks of one host
    should be neighbours.

    Args:
        process_group: with the backend gloo, for tensors on any device, or nccl.
        hosts: for each member a number of the host on which it lies: `gather_kv` sends each byte to another host once.
            By default the members tell each other their hosts' names.

    Raises:
        ValueError: when this process is not in the process group, its backend is another, or a host is missing.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group yet: call torch.distributed.init_process_group('gloo') first")
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this process group: only its members join it")
    size, backend = dist.get_world_size(process_group), dist.get_backend(process_group)
    if backend not in _BACKENDS:
        raise ValueError(
            f"the process group's backend is {backend!r}, but one of {', '.join(_BACKENDS)} is needed: "
            "join(torch.distributed.new_group(backend='gloo')), say"
        )
    if hosts is not None and len(hosts) != size:
        raise ValueError(f"hosts {tuple(hosts)} are {len(hosts)}, but the group has {size} members: one host for each")
    if backend == "nccl":  # connects ranks in its first call, which must be everybody's: exchanges leave some out
        dist.barrier(process_group)
    hosts = _hosts(process_group, size, backend) if hosts is None else hosts
    transport = TorchTransport(process_group, staged=backend != "nccl")
    return Members(transport, dist.get_process_group_ranks(process_group), rank, hosts=hosts)


def _hosts(process_group: dist.ProcessGroup | None, size: int, backend: str) -> tuple[int, ...]:
    """A number for each member's host: of its name, so that it has the same length everywhere."""
    digest = hashlib.blake2b(platform.node().encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest)], device="cuda" if backend == "nccl" else "cpu")
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, process_group)
    return tuple(int(number) for number in found)
