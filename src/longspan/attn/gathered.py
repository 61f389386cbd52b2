"""Attention of queries over keys of several members that are gathered on one member, joined in order of position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from longspan.attn.backends import with_sinks
from longspan.attn.member import PartRuns, attend_runs, split_runs
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, SpanShards, num_tokens, stretch

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.attn.comm import Message
    from longspan.attn.exchanges import Call


class GatheredPart(NamedTuple):
    """Queries and keys of several members in one part, on one member. All tensors are `[heads, tokens, head_dim]`.

    Attributes:
        q_runs: the positions of the queries of each member. If several have queries, they leave no gap.
        q: the queries, one tensor per member.
        kv_runs: the positions of each tensor of keys. Together they leave no gap.
        k, v: keys and values, one tensor per entry of `kv_runs`.
        out: the results, one tensor per member.
        sinks: `[heads]` float32, see `with_sinks`. None if the layer has none.
    """

    q_runs: SpanShards
    q: Sequence[Tensor]
    kv_runs: Sequence[Sequence[Run]]
    k: Sequence[Tensor]
    v: Sequence[Tensor]
    out: Sequence[Tensor]
    sinks: Tensor | None = None


def attend_gathered(backend: AttentionBackend, part: GatheredPart, spec: AttnSpec) -> None:
    """Attend all queries to all keys, joined in order of position, and write `part.out`."""
    asking = [member for member, runs in enumerate(part.q_runs) if runs]
    if not asking:
        return
    k, v = by_position(part.kv_runs, part.k), by_position(part.kv_runs, part.v)
    if len(asking) == 1:
        q, runs = part.q[asking[0]], part.q_runs[asking[0]]
    else:
        q, runs = by_position(part.q_runs, part.q), (_stretch(part.q_runs),)
    out, lse = attend_runs(backend, q, runs, k, v, (_stretch(part.kv_runs),), spec)
    if part.sinks is not None:
        out = with_sinks(out, lse, part.sinks)
    if len(asking) == 1:
        part.out[asking[0]].copy_(out)
    else:
        split_by_position(out, part.q_runs, part.out)


def attend_joined(call: Call, all_runs: Sequence[PartRuns], messages: Sequence[Message]) -> None:
    """Attend this member's queries to the keys of all messages, joined in order of position, and merge the results.

    Args:
        all_runs: for each message the runs of each part. Together they leave no gap.
    """
    for index, part in enumerate(call.parts):
        if q_runs := part.q_runs[call.group.rank]:
            runs = [part_runs[index] for part_runs in all_runs]
            k, v = (by_position(runs, [message.tensors[2 * index + kind] for message in messages]) for kind in (0, 1))
            q, keys, dense = call.q[:, part.rows], (_stretch(runs),), call.exchange.dense
            call.merge((index,), attend_runs(call.parts.backend, q, q_runs, k, v, keys, call.spec, dense=dense))


def by_position(all_runs: Sequence[Sequence[Run]], tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors `[heads, tokens, head_dim]` of disjoint runs in order of position. The runs leave no gap."""
    filled = [(runs, tensor) for runs, tensor in zip(all_runs, tensors, strict=True) if runs]
    if len(filled) == 1:
        return filled[0][1]
    num_heads, _, dim = tensors[0].shape
    joined = tensors[0].new_empty(num_heads, sum(num_tokens(runs) for runs, _ in filled), dim)
    for slices, (runs, tensor) in zip(row_slices([runs for runs, _ in filled]), filled, strict=True):
        for rows, (_, piece) in zip(slices, split_runs(tensor, runs), strict=True):
            joined[:, rows] = piece
    return joined


def split_by_position(joined: Tensor, all_runs: Sequence[Sequence[Run]], out: Sequence[Tensor]) -> None:
    """Copy the tokens of each member out of a tensor in order of position. This reverses `by_position`."""
    for tensor, runs, slices in zip(out, all_runs, row_slices(all_runs), strict=True):
        for (_, piece), rows in zip(split_runs(tensor, runs), slices, strict=True):
            piece.copy_(joined[:, rows])


def row_slices(shards: Sequence[Sequence[Run]]) -> list[list[slice]]:
    """Return the slice of each run among the tokens of all members. Together they leave no gap."""
    first = _stretch(shards).start
    return [[slice(run.start - first, run.stop - first, run.step) for run in runs] for runs in shards]


def _stretch(shards: Sequence[Sequence[Run]]) -> Run:
    return stretch(run for runs in shards for run in runs)
