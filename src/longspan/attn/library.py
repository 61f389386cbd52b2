"""The exchanges as functions of tensors, and the group of their members. Arguments of callers are checked here."""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from collections.abc import Sequence
from typing import Self, TypedDict, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.attn.backends import backend_of
from longspan.attn.comm import Group, Transport, gather_hops
from longspan.attn.exchanges import Call, attention_exchange
from longspan.attn.member import MemberPart, MemberParts
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.attn.transports import TorchTransport
from longspan.core.exchange import ALLTOALL, CHAIN, GATHER_KV, RING_KV, RING_Q, Exchange
from longspan.core.runs import Run, SpanShards, clip, coalesce, num_tokens
from longspan.core.steps import Link

_BACKENDS = ("gloo", "nccl")
_NUM_TAGS = 2**31
_BLOCK = 256
"""Tokens per block, if there are several sequences."""
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Runs = Sequence[SpanShards]
"""The positions of every member's tokens, for each sequence."""


class Members:
    """The members of a group as one of them sees them, made by `join`.

    It is a context manager. Leave it before the process group is destroyed, so that all sent messages arrive.

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
        """Raise ValueError for a tensor that this group cannot send."""
        if not self._transport.tagged and tensor.device.type != "cuda":
            raise ValueError(
                f"q, k and v are on {tensor.device}, but NCCL connects CUDA devices only: move them there, or join a "
                "group with the backend gloo"
            )

    def begin(self, name: str) -> Group:
        """Return the group of the next call, with new tags, so that calls do not receive messages of each other."""
        hops = gather_hops(self.size)  # no exchange has more
        first_tag = next(self._calls) % (_NUM_TAGS // hops) * hops
        tags = range(first_tag, first_tag + hops)
        return Group(self._transport, self._ranks, self.rank, hosts=self._hosts, name=name, tags=tags, sent=self.sent)

    def close(self) -> None:
        """Wait until all sent messages have arrived.

        Raises:
            CommError: if a peer has exited.
        """
        self._transport.complete_sends()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:  # after an error peers may wait for messages that are never sent
            self.close()


def join(process_group: dist.ProcessGroup | None = None, *, hosts: Sequence[int] | None = None) -> Members:
    """Make the ranks of a process group members of exchanges, in the order of their ranks. The default is all ranks.

    All ranks call it. Join a process group once and use it for exchanges only, since other point-to-point messages
    could be mistaken for theirs. Members wait for each other up to the timeout of the process group. Neighbours send
    each other the most, so ranks of one host should be neighbours.

    Args:
        process_group: with the backend gloo, for tensors on any device, or nccl.
        hosts: the index of the host of each member. `gather_kv` sends each byte to another host once. By default the
            members exchange the names of their hosts.

    Raises:
        ValueError: if this process is not in the process group, the backend is not supported, or a host is missing.
    """
    if not dist.is_initialized():
        raise ValueError("there is no process group yet: call torch.distributed.init_process_group('gloo') first")
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in this process group: call join() on its members only")
    size, backend = dist.get_world_size(process_group), dist.get_backend(process_group)
    if backend not in _BACKENDS:
        raise ValueError(
            f"the process group's backend is {backend!r}, but one of {', '.join(_BACKENDS)} is needed: "
            "for example join(torch.distributed.new_group(backend='gloo'))"
        )
    if hosts is not None and len(hosts) != size:
        raise ValueError(
            f"hosts {tuple(hosts)} are {len(hosts)}, but the group has {size} members: give one host for each"
        )
    if backend == "nccl":  # connects ranks in its first call, in which all must take part
        dist.barrier(process_group)
    if hosts is None:
        names = [""] * size
        dist.all_gather_object(names, platform.node(), process_group)
        hosts = [names.index(name) for name in names]
    transport = TorchTransport(process_group, staged=backend != "nccl")
    return Members(transport, dist.get_process_group_ranks(process_group), rank, hosts=hosts)


class Options(TypedDict, total=False):
    """The keyword arguments of every exchange, see `ring_kv`."""

    kv_runs: Runs | None
    scale: float | None
    window: int | None
    softcap: float | None
    chunk: int | None
    sinks: Tensor | None


def ring_kv(group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **options: Unpack[Options]) -> Tensor:
    """Pass keys and values around the ring, while the previous ones are used (Context Parallelism, Algorithm 2).

    Args:
        group: the result of `join`.
        q: this member's queries.
        k: its keys.
        v: its values.
        runs: for each sequence the query positions of every member, such as `shard_span("zigzag", 0, n, group.size)`.
            Few long runs are fast: with a `striped` layout use an `align` of about 256.
        kv_runs: for each sequence the positions of the keys that every member holds, cached and new ones. `k` and `v`
            are this member's. By default members hold the keys of their queries.
        scale: multiplies the scores. The default is `head_dim ** -0.5`.
        window: a key is visible iff `0 <= query_position - key_position < window`. None: no limit.
        softcap: c turns a scaled score s into `c * tanh(s / c)`. None: no cap.
        chunk: a key is visible iff it is not after the query and `position // chunk` of both is equal. None: no limit.
        sinks: `[heads]`, learned scores without keys, one more in the softmax of each query head. None: no sinks.

    Returns:
        The attention of `q`, with its shape.

    Raises:
        ValueError: if tensors, runs and options do not match. The message has the remedy. The other members wait.
        CommError: if a peer has exited.

    All members call the same exchange, with tensors of the same type and the same options. A process that receives
    more bytes than it expects is ended by gloo.
    """
    return _exchange(RING_KV, group, (q, k, v), runs, **options)


def ring_q(group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **options: Unpack[Options]) -> Tensor:
    """Send queries to the keys, and partial outputs back (Context Parallelism, Algorithm 3).

    This sends the fewest bytes for few queries over many cached keys. See `ring_kv` for arguments, result and errors.
    """
    return _exchange(RING_Q, group, (q, k, v), runs, **options)


def alltoall(group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **options: Unpack[Options]) -> Tensor:
    """Compute some heads on each member, for all tokens (SP-NTP of CSPS, §3.2.1, also DeepSpeed's Ulysses).

    The number of heads need not be a multiple of the members. See `ring_kv` for arguments, result and errors.
    """
    return _exchange(ALLTOALL, group, (q, k, v), runs, **options)


def gather_kv(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Runs, *, dense: bool = False, **options: Unpack[Options]
) -> Tensor:
    """Gather all keys and values on every member (KV-Runahead's baseline, §4.1, Fig. 4).

    With `dense`, scores that causality hides are computed and masked, as in the paper, instead of skipped. See
    `ring_kv` for the other arguments, result and errors.
    """
    return _exchange(GATHER_KV._replace(dense=dense), group, (q, k, v), runs, **options)


def chain(group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Runs, **options: Unpack[Options]) -> Tensor:
    """Send keys and values from each member to the next, which adds its own (KV-Runahead, §4.1).

    Runs must be `contiguous`, with or without `fractions`, and each member holds the new keys of its own queries. This
    sends half of the bytes of `gather_kv`. See `ring_kv` for arguments, result and errors.
    """
    return _exchange(CHAIN, group, (q, k, v), runs, **options)


def _exchange(
    exchange: Exchange,
    group: Members,
    tensors: tuple[Tensor, Tensor, Tensor],
    runs: Runs,
    *,
    kv_runs: Runs | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    q, k, v = tensors
    group.check(q)
    spec = _spec(q, k, v, scale=scale, window=window, softcap=softcap, chunk=chunk, sinks=sinks)
    sharded = checked_runs(runs, runs if kv_runs is None else kv_runs, group.size)
    own = [(num_tokens(queries[group.rank]), num_tokens(keys[group.rank])) for queries, keys in sharded]
    counts = [num_keys for _, num_keys in own]
    _check_count("q", "runs", q.shape[1], [num_queries for num_queries, _ in own])
    _check_count("k", "kv_runs", k.shape[1], counts)
    parts, row, block = [], 0, 0
    for (queries, keys), (num_queries, num_keys) in zip(sharded, own, strict=True):
        num_blocks = -(-num_keys // _BLOCK) if len(runs) > 1 else 1
        rows, blocks = slice(row, row + num_queries), range(block, block + num_blocks)
        parts.append(MemberPart(rows=rows, q_runs=queries, kv_runs=keys, blocks=blocks))
        row, block = rows.stop, blocks.stop
    new_k, new_v = k, v
    if exchange.traits.in_order:
        _check_chain(parts)
        new_k, new_v = (_new(tensor, own) for tensor in (k, v))
    call = Call(
        exchange=exchange,
        group=group.begin(exchange.kind),
        parts=MemberParts(parts, backend_of(q.device)),
        q=q,
        k=new_k,
        v=new_v,
        kv=PagedKv(keys=_blocks(k, counts), values=_blocks(v, counts)),
        spec=spec,
        sinks=None if sinks is None else sinks.float(),
        out=torch.empty_like(q),
    )
    attention_exchange(exchange).attend(call)
    return call.out


def _new(tensor: Tensor, counts: Sequence[tuple[int, int]]) -> Tensor:
    """Return the keys or values of the queries. `counts` are the queries and keys of each sequence."""
    pieces = tensor.split([num_keys for _, num_keys in counts], dim=1)
    last = [piece[:, num_keys - num :] for piece, (num, num_keys) in zip(pieces, counts, strict=True)]
    return torch.cat(last, dim=1)


def _blocks(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    """Cut packed sequences `[kv_heads, tokens, head_dim]` into blocks. A single sequence is one block, not copied."""
    if len(counts) == 1:
        return tensor.contiguous()[None]
    num_heads, _, dim = tensor.shape
    nums = [-(-count // _BLOCK) for count in counts]
    pool = tensor.new_zeros(sum(nums), num_heads, _BLOCK, dim)
    for piece, blocks in zip(tensor.split(list(counts), dim=1), pool.split(nums), strict=True):
        whole = piece.shape[1] // _BLOCK
        blocks[:whole] = piece[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).transpose(0, 1)
        if piece.shape[1] % _BLOCK:
            blocks[whole, :, : piece.shape[1] % _BLOCK] = piece[:, whole * _BLOCK :]
    return pool


def _spec(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    sinks: Tensor | None,
) -> AttnSpec:
    """Return the spec of the attention. Raises ValueError for invalid arguments, and if gradients are required."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"{shapes}: each must be [heads, tokens, head_dim], of this member's tokens and no batch")
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"{shapes}: k and v must have one shape, and all three one head_dim")
    if not k.shape[0] or q.shape[0] % k.shape[0] or not q.shape[0]:
        raise ValueError(f"{shapes}: {q.shape[0]} query heads are no multiple of {k.shape[0]} KV heads")
    kinds = {(tensor.dtype, tensor.device) for tensor in (q, k, v)}
    if len(kinds) > 1 or q.dtype not in _DTYPES or q.device.type not in _DEVICES:
        types = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"q, k and v are {types}: they must all be float32, bfloat16 or float16, on one CPU or GPU")
    if sinks is not None and (sinks.shape != q.shape[:1] or sinks.device != q.device):
        given = f"{tuple(sinks.shape)} on {sinks.device}"
        raise ValueError(f"sinks {given}: give one for each of the {len(q)} query heads, on {q.device}, or None")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise ValueError("exchanges have no gradients: call them under torch.no_grad()")
    if window is not None and chunk is not None:
        raise ValueError(f"window {window}, chunk {chunk}: give one of them, since a layer has a window or chunks")
    for name, limit in (("window", window), ("chunk", chunk)):
        if limit is not None and limit < 1:
            raise ValueError(
                f"{name} {limit}: a query sees at least itself, so it must be 1 or more, or None for no limit"
            )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap {softcap} must be above 0, or None for no cap")
    return AttnSpec(
        num_heads=q.shape[0],
        num_kv_heads=k.shape[0],
        head_dim=q.shape[2],
        scale=q.shape[2] ** -0.5 if scale is None else scale,
        window=window,
        softcap=softcap,
        chunk=chunk,
        has_sinks=sinks is not None,
    )


def checked_runs(runs: Runs, kv_runs: Runs, size: int) -> list[tuple[SpanShards, SpanShards]]:
    """Return the queries and keys of each sequence, with adjacent runs joined."""
    if any(isinstance(item, Run) for sharded in (*runs, *kv_runs) for item in sharded) or not runs:
        raise ValueError(
            "runs and kv_runs must be lists of the results of shard_span(), one per sequence: [shard_span(...)]"
        )
    if len(runs) != len(kv_runs):
        raise ValueError(f"runs are of {len(runs)} sequences, but kv_runs of {len(kv_runs)}: one for each")
    queries = [_checked(f"runs[{index}]", sharded, size) for index, sharded in enumerate(runs)]
    keys = [_checked(f"kv_runs[{index}]", sharded, size) for index, sharded in enumerate(kv_runs)]
    pairs = list(zip(queries, keys, strict=True))
    for index, pair in enumerate(pairs):
        _check_cover(index, *pair)
    return pairs


def _checked(name: str, sharded: SpanShards, size: int) -> SpanShards:
    if len(sharded) != size:
        raise ValueError(
            f"{name} shards over {len(sharded)} members, but the group has {size}: shard_span(layout, 0, n, group.size)"
        )
    for member, runs in enumerate(sharded):
        stepped = [run for run in runs if run.step != 1]
        unordered = [run for run, following in itertools.pairwise(runs) if following.start < run.stop]
        if stepped or unordered:
            raise ValueError(f"{name}: the runs of member {member} must ascend in steps of 1, but are {_text([runs])}")
    return tuple(coalesce(runs) for runs in sharded)


def _check_cover(index: int, queries: SpanShards, keys: SpanShards) -> None:
    """Check that the queries are one span, and the keys are all up to its end, each on one member."""
    span, all_keys = _union(queries), _union(keys)
    if len(span) > 1 or num_tokens(span) != sum(map(num_tokens, queries)):
        raise ValueError(f"runs[{index}] {_text(queries)}: members must have all queries of one span, each once")
    if span and (all_keys != (Run(0, span[0].stop),) or num_tokens(all_keys) != sum(map(num_tokens, keys))):
        raise ValueError(
            f"kv_runs[{index}] {_text(keys)}: members must hold all keys of [0, {span[0].stop}), each once; for "
            "queries that do not begin at 0, give kv_runs with the cached tokens, which k and v then also contain"
        )


def _union(sharded: SpanShards) -> tuple[Run, ...]:
    union: list[Run] = []
    for run in sorted((run for runs in sharded for run in runs), key=lambda run: run.start):
        if union and run.start <= union[-1].stop:
            union[-1] = Run(union[-1].start, max(run.stop, union[-1].stop))
        else:
            union.append(run)
    return tuple(union)


def _check_count(tensor: str, name: str, given: int, expected: Sequence[int]) -> None:
    if given != sum(expected):
        raise ValueError(
            f"{tensor} has {given} tokens, but by {name} this member has {' + '.join(map(str, expected))}: give "
            f"the tokens of positions({name}[i][group.rank]) of every sequence i, one after the other"
        )


def _check_chain(parts: Sequence[MemberPart]) -> None:
    """Check that members have consecutive runs in order, and hold the keys of their queries."""
    for index, part in enumerate(parts):
        if not part.is_in_order:
            raise ValueError(
                f"runs[{index}] {_text(part.q_runs)}: in a chain the runs of each member begin where the previous "
                "member's end, as in shard_span('contiguous', ...)"
            )
        start = part.span_start
        new = [() if start is None else clip(runs, start) for runs in part.kv_runs]
        if new != list(part.q_runs):
            raise ValueError(
                f"kv_runs[{index}]: members hold the new keys {_text(new)}, but a chain needs "
                f"the keys of their own queries, {_text(part.q_runs)}"
            )


def _text(sharded: Sequence[Sequence[Run]]) -> str:
    """Format the runs of members for a message, at most 200 characters."""
    members = ["+".join(f"[{run.start}, {run.stop})" for run in runs) or "none" for runs in sharded]
    text = "; ".join(members)
    return text if len(text) <= 200 else f"{text[:200]} ..."
