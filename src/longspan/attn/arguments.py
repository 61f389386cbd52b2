"""Checks what callers of the library give, and brings it into the form that exchanges take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attn.backends import AttentionBackend
from longspan.attn.member import MemberPart, MemberParts, num_tokens
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, SpanShards, clip, coalesce

_BLOCK = 256
"""Tokens per block when several sequences have to be laid out in blocks."""
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def spec_of(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, window: int | None, softcap: float | None
) -> AttnSpec:
    """Reads off what is to be computed of `q [heads, tokens, head_dim]` and `k, v [kv_heads, tokens, head_dim]`.

    Raises:
        ValueError: when shapes, types, devices or options do not make sense together, or gradients are wanted.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"{shapes}: each must be [heads, tokens, head_dim], of this member's tokens and no batch")
    if k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"{shapes}: k and v must have one shape, and all three one head_dim")
    if not k.shape[0] or q.shape[0] % k.shape[0] or not q.shape[0]:
        raise ValueError(f"{shapes}: {q.shape[0]} query heads are no multiple of {k.shape[0]} KV heads")
    kinds = {(tensor.dtype, tensor.device) for tensor in (q, k, v)}
    if len(kinds) > 1 or q.dtype not in _DTYPES or q.device.type not in _DEVICES:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"q, k and v are {found}: they must all be float32, bfloat16 or float16, on one CPU or GPU")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (q, k, v)):
        raise ValueError("exchanges have no gradients: call them under torch.no_grad()")
    if window is not None and window < 1:
        raise ValueError(
            f"window {window}: a query sees at least itself, so it must be 1 or more, or None for no limit"
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
    )


def checked_runs(
    runs: Sequence[SpanShards], kv_runs: Sequence[SpanShards], size: int
) -> list[tuple[SpanShards, SpanShards]]:
    """Returns the queries and keys of each sequence, in as few runs as can be.

    Raises:
        ValueError: when the runs are not those of `size` members, or do not cover a sequence exactly once.
    """
    if any(isinstance(item, Run) for shard_span in (*runs, *kv_runs) for item in shard_span) or not runs:
        raise ValueError(
            "runs and kv_runs are lists with what shard_span() gives for each sequence, also for one: [shard_span(...)]"
        )
    if len(runs) != len(kv_runs):
        raise ValueError(f"runs are of {len(runs)} sequences, but kv_runs of {len(kv_runs)}: one for each")
    asked = [_checked(f"runs[{index}]", shard_span, size) for index, shard_span in enumerate(runs)]
    held = [_checked(f"kv_runs[{index}]", shard_span, size) for index, shard_span in enumerate(kv_runs)]
    for index, (queries, keys) in enumerate(zip(asked, held, strict=True)):
        _check_cover(index, queries, keys)
    return list(zip(asked, held, strict=True))


def parts_of(
    runs: Sequence[SpanShards],
    kv_runs: Sequence[SpanShards],
    *,
    rank: int,
    size: int,
    num_queries: int,
    num_keys: int,
    backend: AttentionBackend,
) -> MemberParts:
    """Makes one part per sequence, for a member that gave so many queries and keys. `paged` lays out their blocks.

    Raises:
        ValueError: by `checked_runs`, and when the runs are of other numbers of tokens.
    """
    sharded = checked_runs(runs, kv_runs, size)
    _check_count("q", "runs", num_queries, [queries[rank] for queries, _ in sharded])
    _check_count("k", "kv_runs", num_keys, [keys[rank] for _, keys in sharded])
    parts, row, block = [], 0, 0
    for queries, keys in sharded:
        rows = slice(row, row + num_tokens(queries[rank]))
        num_blocks = -(-num_tokens(keys[rank]) // _BLOCK) if len(runs) > 1 else 1
        parts.append(MemberPart(rows=rows, q_runs=queries, kv_runs=keys, blocks=range(block, block + num_blocks)))
        row, block = rows.stop, block + num_blocks
    return MemberParts(parts, backend)


def paged(k: Tensor, v: Tensor, parts: MemberParts, rank: int) -> PagedKv:
    """Packs keys and values `[kv_heads, tokens, head_dim]` of packed sequences in blocks.

    A single sequence is one block and not copied, unless it is strided.
    """
    counts = _num_held(parts, rank)
    return PagedKv(keys=_blocks(k, counts), values=_blocks(v, counts))


def check_chain(parts: MemberParts) -> None:
    """Checks the runs of a chain.

    Raises:
        ValueError: when members do not have neighbouring runs in their order, or do not hold the keys of their queries.
    """
    for index, part in enumerate(parts):
        if not part.is_in_order:
            raise ValueError(
                f"runs[{index}] {_text(part.q_runs)}: in a chain each member goes on where the one before ends, "
                "as in shard_span('contiguous', ...)"
            )
        start = part.span_start
        new = [() if start is None else clip(runs, start) for runs in part.kv_runs]
        if new != list(part.q_runs):
            raise ValueError(
                f"kv_runs[{index}]: members hold the new keys {_text(new)}, but in a chain those of their own queries, "
                f"{_text(part.q_runs)}"
            )


def new_of(tensor: Tensor, parts: MemberParts, rank: int) -> Tensor:
    """Returns keys or values `[kv_heads, tokens, head_dim]` of the spans alone, out of all that a member has."""
    pieces = tensor.split(_num_held(parts, rank), dim=1)
    new = [num_tokens(part.q_runs[rank]) for part in parts]
    return torch.cat([piece[:, piece.shape[1] - num :] for piece, num in zip(pieces, new, strict=True)], dim=1)


def _num_held(parts: MemberParts, rank: int) -> list[int]:
    """Counts a member's keys of each sequence."""
    return [num_tokens(part.kv_runs[rank]) for part in parts]


def _blocks(tensor: Tensor, counts: Sequence[int]) -> Tensor:
    if len(counts) == 1:
        return tensor.contiguous()[None]
    num_heads, _, dim = tensor.shape
    nums = [-(-count // _BLOCK) for count in counts]
    room = tensor.new_zeros(sum(nums), num_heads, _BLOCK, dim)
    for piece, blocks in zip(tensor.split(list(counts), dim=1), room.split(nums), strict=True):
        whole = piece.shape[1] // _BLOCK
        blocks[:whole] = piece[:, : whole * _BLOCK].unflatten(1, (whole, _BLOCK)).transpose(0, 1)
        if piece.shape[1] % _BLOCK:
            blocks[whole, :, : piece.shape[1] % _BLOCK] = piece[:, whole * _BLOCK :]
    return room


def _checked(name: str, sharded: SpanShards, size: int) -> SpanShards:
    """Returns the same runs, joined where they touch."""
    if len(sharded) != size:
        raise ValueError(
            f"{name} shards over {len(sharded)} members, but the group has {size}: shard_span(layout, 0, n, group.size)"
        )
    for member, runs in enumerate(sharded):
        stepped = [run for run in runs if run.step != 1]
        unordered = [(one, other) for one, other in itertools.pairwise(runs) if other.start < one.stop]
        if stepped or unordered:
            raise ValueError(f"{name}: the runs of member {member} must ascend in steps of 1, but are {_text([runs])}")
    return tuple(coalesce(runs) for runs in sharded)


def _check_cover(index: int, queries: SpanShards, keys: SpanShards) -> None:
    """Queries are one span, and keys everything up to its end, each with one member."""
    span, held = _union(queries), _union(keys)
    if len(span) > 1 or num_tokens(span) != sum(map(num_tokens, queries)):
        raise ValueError(f"runs[{index}] {_text(queries)}: members must have all queries of one span, each once")
    if span and (held != (Run(0, span[0].stop),) or num_tokens(held) != sum(map(num_tokens, keys))):
        raise ValueError(
            f"kv_runs[{index}] {_text(keys)}: members must hold all keys of [0, {span[0].stop}), each once; for "
            "queries that do not begin at 0, give kv_runs with the cached tokens, too, which k and v then have"
        )


def _union(sharded: SpanShards) -> tuple[Run, ...]:
    """Joins the positions of all members into as few runs as can be."""
    found: list[Run] = []
    for run in sorted((run for runs in sharded for run in runs), key=lambda run: run.start):
        if found and run.start <= found[-1].stop:
            found[-1] = Run(found[-1].start, max(run.stop, found[-1].stop))
        else:
            found.append(run)
    return tuple(found)


def _check_count(tensor: str, name: str, given: int, mine: Sequence[Sequence[Run]]) -> None:
    wanted = [num_tokens(runs) for runs in mine]
    if given != sum(wanted):
        raise ValueError(
            f"{tensor} has {given} tokens, but by {name} this member has {' + '.join(map(str, wanted))}: give those of "
            f"positions({name}[i][group.rank]) of every sequence i, one after the other"
        )


def _text(sharded: Sequence[Sequence[Run]]) -> str:
    """Writes the runs of members for people, and leaves out some of very many."""
    members = ["+".join(f"[{run.start}, {run.stop})" for run in runs) or "none" for runs in sharded]
    text = "; ".join(members)
    return text if len(text) <= 200 else f"{text[:200]} ..."
