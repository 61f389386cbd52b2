"""The exchanges as functions of tensors, and who takes part in them: causal attention over a group."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.arguments import check_chain, new_of, paged, parts_of, spec_of
from longspan.attn.backends import backend_of
from longspan.attn.collectives import gather_hops
from longspan.attn.comm import Group, TorchTransport, Transport
from longspan.attn.exchanges import Call, attention_exchange
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_KV, RING_KV, RING_Q, Exchange
from longspan.core.runs import SpanShards
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
        """Makes the group of the next call of an exchange, with new tags, so that no call takes another's messages."""
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
        self._transport.complete_sends()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else peers may be waiting for what will not come
            self.close()


def join(process_group: dist.ProcessGroup | None = None, *, hosts: Sequence[int] | None = None) -> Members:
    """Makes the ranks of a process group, by default all, members of exchanges in the order of their ranks.

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
    """Returns a number for each member's host, made from its name so that it has the same length everywhere."""
    digest = hashlib.blake2b(platform.node().encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest)], device="cuda" if backend == "nccl" else "cpu")
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, process_group)
    return tuple(int(number) for number in found)


class Options(TypedDict, total=False):
    """The keyword arguments of every exchange; `ring_kv` says what they mean."""

    kv_runs: Sequence[SpanShards] | None
    scale: float | None
    window: int | None
    softcap: float | None


def ring_kv(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[SpanShards], **options: Unpack[Options]
) -> Tensor:
    """Keys and values travel around the ring, while those at hand are used (Context Parallelism, Algorithm 2).

    Args:
        group: what `join` returned.
        q: this member's queries.
        k: its keys.
        v: its values.
        runs: for each sequence every member's query positions: say `shard_span("zigzag", 0, length, group.size)`.
            Few long runs are quick: give a `striped` layout an `align` of 256 or so.
        kv_runs: for each sequence the positions of the keys that every member holds, cached and new ones; by default
            those of its queries. `k` and `v` have this member's.
        scale: of the scores; by default `head_dim ** -0.5`.
        window: a key is seen iff `0 <= query_position - key_position < window`; None: no limit.
        softcap: c turns a scaled score s into `c * tanh(s / c)`; None: as it is.

    Returns:
        The attention of `q`, in its shape.

    Raises:
        ValueError: when tensors, runs and options do not fit each other. It says what would; the other members wait.
        CommError: when a peer is gone.

    All members call the same, with tensors of the same type and the same options: gloo ends a process that gets more
    bytes than it expects.
    """
    return _exchange(RING_KV, group, (q, k, v), runs, **options)


def ring_q(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[SpanShards], **options: Unpack[Options]
) -> Tensor:
    """Queries visit the keys, partial outputs come back (Context Parallelism, Algorithm 3).

    The cheapest for few queries over many cached keys; see `ring_kv` for arguments, result and errors.
    """
    return _exchange(RING_Q, group, (q, k, v), runs, **options)


def alltoall(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[SpanShards], **options: Unpack[Options]
) -> Tensor:
    """Computes some heads on each member, for all tokens (SP-NTP of CSPS, §3.2.1; DeepSpeed's Ulysses).

    Heads need not be a multiple of members; see `ring_kv` for arguments, result and errors.
    """
    return _exchange(ALLTOALL, group, (q, k, v), runs, **options)


def gather_kv(
    group: Members,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Sequence[SpanShards],
    *,
    dense: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """Gathers all keys and values on every member (KV-Runahead's baseline, §4.1, Fig. 4).

    With `dense` scores that causality hides are computed and masked, as in the paper, else they are skipped. See
    `ring_kv` for the other arguments, result and errors.
    """
    return _exchange(GATHER_KV._replace(dense=dense), group, (q, k, v), runs, **options)


def chain(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[SpanShards], **options: Unpack[Options]
) -> Tensor:
    """Hands keys and values from each member to the next, which adds its own (KV-Runahead, §4.1).

    Runs must be `contiguous`, maybe with `fractions`, and everybody holds the new keys of its own queries: half of the
    bytes of `gather_kv`. See `ring_kv` for arguments, result and errors.
    """
    return _exchange(CHAIN, group, (q, k, v), runs, **options)


def _exchange(
    exchange: Exchange,
    group: Members,
    tensors: tuple[Tensor, Tensor, Tensor],
    runs: Sequence[SpanShards],
    *,
    kv_runs: Sequence[SpanShards] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    q, k, v = tensors
    group.check(q)
    spec = spec_of(q, k, v, scale=scale, window=window, softcap=softcap)
    kv_runs = runs if kv_runs is None else kv_runs
    parts = parts_of(
        runs,
        kv_runs,
        rank=group.rank,
        size=group.size,
        num_queries=q.shape[1],
        num_keys=k.shape[1],
        backend=backend_of(q.device),
    )
    new_k, new_v = k, v
    if exchange.traits.in_order:
        check_chain(parts)
        new_k, new_v = (new_of(tensor, parts, group.rank) for tensor in (k, v))
    call = Call(
        exchange=exchange,
        group=group.begin(exchange.kind),
        parts=parts,
        q=q,
        k=new_k,
        v=new_v,
        kv=paged(k, v, parts, group.rank),
        spec=spec,
        out=torch.empty_like(q),
    )
    attention_exchange(exchange).attend(call)
    return call.out
