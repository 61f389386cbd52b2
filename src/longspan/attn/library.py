"""The exchanges as functions of tensors: causal attention over sequences that are split between the members of a group.

All members call the same function with the same runs and options, in the same order; those without tokens, too. Shapes:
`q [heads, tokens, head_dim]`, `k` and `v` `[kv_heads, tokens, head_dim]`, where heads are a multiple of kv_heads, and
tokens are this member's, of all sequences one after the other and in order of position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from longspan.attn.arguments import check_chain, new_of, paged, parts_of, spec_of
from longspan.attn.comm import Group
from longspan.attn.exchanges.alltoall import alltoall as _alltoall
from longspan.attn.exchanges.chain import chain as _chain
from longspan.attn.exchanges.gather_kv import gather_kv as _gather_kv
from longspan.attn.exchanges.ring_kv import ring_kv as _ring_kv
from longspan.attn.exchanges.ring_q import ring_q as _ring_q
from longspan.attn.member import MemberParts
from longspan.attn.members import Members
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Deal


class Options(TypedDict, total=False):
    """The keyword arguments of every exchange; `ring_kv` says what they mean."""

    kv_runs: Sequence[Deal] | None
    scale: float | None
    window: int | None
    softcap: float | None


def ring_kv(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Deal], **options: Unpack[Options]
) -> Tensor:
    """Keys and values travel around the ring, while those at hand are used (Context Parallelism, Algorithm 2).

    Args:
        group: what `join` returned.
        q: this member's queries.
        k: its keys.
        v: its values.
        runs: for each sequence the positions of every member's queries: `deal("zigzag", 0, length, group.size)`, say.
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
    return _exchange(_ring_kv, "ring_kv", group, (q, k, v), runs, **options)


def ring_q(group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Deal], **options: Unpack[Options]) -> Tensor:
    """Queries visit the keys, partial outputs come back (Context Parallelism, Algorithm 3).

    The cheapest for few queries over many cached keys; see `ring_kv` for arguments, result and errors.
    """
    return _exchange(_ring_q, "ring_q", group, (q, k, v), runs, **options)


def alltoall(
    group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Deal], **options: Unpack[Options]
) -> Tensor:
    """Every member computes some heads for all tokens (SP-NTP of CSPS, §3.2.1; DeepSpeed's Ulysses).

    Heads need not be a multiple of members; see `ring_kv` for arguments, result and errors.
    """
    return _exchange(_alltoall, "alltoall", group, (q, k, v), runs, **options)


def gather_kv(
    group: Members,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: Sequence[Deal],
    *,
    dense: bool = False,
    **options: Unpack[Options],
) -> Tensor:
    """Every member gathers all keys and values (KV-Runahead's baseline, §4.1, Fig. 4).

    With `dense` scores that causality hides are computed and masked, as in the paper, else they are skipped. See
    `ring_kv` for the other arguments, result and errors.
    """
    return _exchange(partial(_gather_kv, dense=dense), "gather_kv", group, (q, k, v), runs, **options)


def chain(group: Members, q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Deal], **options: Unpack[Options]) -> Tensor:
    """Keys and values run from each member to the next, which adds its own (KV-Runahead, §4.1).

    Runs must be `contiguous`, maybe with `fractions`, and everybody holds the new keys of its own queries: half of the
    bytes of `gather_kv`. See `ring_kv` for arguments, result and errors.
    """
    return _exchange(partial(_in_chain, k, v), "chain", group, (q, k, v), runs, **options)


def _exchange(
    exchange: Callable[[Group, MemberParts, Tensor, PagedKv, AttnSpec, Tensor], object],
    name: str,
    group: Members,
    tensors: tuple[Tensor, Tensor, Tensor],
    runs: Sequence[Deal],
    *,
    kv_runs: Sequence[Deal] | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    q, k, v = tensors
    group.check(q)
    spec = spec_of(q, k, v, scale=scale, window=window, softcap=softcap)
    kv_runs = runs if kv_runs is None else kv_runs
    parts = parts_of(runs, kv_runs, rank=group.rank, size=group.size, num_queries=q.shape[1], num_keys=k.shape[1])
    out = torch.empty_like(q)
    exchange(group.begin(name), parts, q, paged(k, v, parts, group.rank), spec, out)
    return out


def _in_chain(  # noqa: PLR0917 - those of the other exchanges, after all keys and values
    k: Tensor, v: Tensor, group: Group, parts: MemberParts, q: Tensor, kv: PagedKv, spec: AttnSpec, out: Tensor
) -> None:
    check_chain(parts)
    new_k, new_v = (new_of(tensor, parts, group.rank) for tensor in (k, v))
    _chain(group, parts, q, new_k, new_v, kv, spec, out)
