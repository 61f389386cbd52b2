"""What one member brings to an exchange: its share of one request, and how its queries meet a set of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspan.attn.kernel import Partial, attend, attend_pieces
from longspan.attn.merge import merge
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Deal, Relation, Run, clip, relate


class KvSource(Protocol):
    """Keys and values of one request that one member holds, in one layer; tokens count in order of position."""

    def gather(self, start: int, stop: int, k_out: Tensor, v_out: Tensor) -> None:
        """Copies held tokens `[start, stop)` into `[kv_heads, stop - start, head_dim]` tensors."""

    def pieces(self, start: int, stop: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Held tokens `[start, stop)` as views `[n, kv_heads, tokens, head_dim]`, read where they lie."""


@dataclass(frozen=True, kw_only=True)
class MemberPart:
    """One request in one layer, as one member of its group sees it.

    Attributes:
        q: `[heads, tokens, head_dim]`, this member's queries in order of position; tokens may be 0.
        q_runs: the positions of every member's queries.
        kv_runs: the positions of the keys that every member holds, this step's included.
        kv: this member's keys and values.
    """

    q: Tensor
    q_runs: Deal
    kv_runs: Deal
    kv: KvSource

    def needed(self, member: int, window: int | None) -> tuple[Run, ...]:
        """The runs that `member` holds and that some query of the group may still see."""
        if window is None:
            return self.kv_runs[member]
        first_query = min(runs[0].start for runs in self.q_runs if runs)
        return clip(self.kv_runs[member], first_query - window + 1)


def num_tokens(runs: Sequence[Run]) -> int:
    """Tokens in a set of runs."""
    return sum(len(run) for run in runs)


def gather_needed(part: MemberPart, member: int, window: int | None, k_out: Tensor, v_out: Tensor) -> None:
    """Copies this member's needed keys and values out of its pool."""
    held, needed = num_tokens(part.kv_runs[member]), num_tokens(part.needed(member, window))
    if needed:
        part.kv.gather(held - needed, held, k_out, v_out)


def split_queries(q: Tensor, runs: Sequence[Run]) -> Iterator[tuple[Run, Tensor]]:
    """The queries of each run, `[heads, len(run), head_dim]`."""
    offset = 0
    for run in runs:
        yield run, q[:, offset : offset + len(run)]
        offset += len(run)


def attend_runs(
    q: Tensor, q_runs: Sequence[Run], k: Tensor, v: Tensor, kv_runs: Sequence[Run], spec: AttnSpec
) -> Partial:
    """Attention of queries over keys `[kv_heads, tokens, head_dim]` at hand, both given with their positions."""
    results = [_attend_run(rows, run, k, v, kv_runs, spec) for run, rows in split_queries(q, q_runs)]
    return torch.cat([out for out, _ in results], dim=1), torch.cat([lse for _, lse in results], dim=1)


def attend_in_place(q: Tensor, position: int, kv: KvSource, kv_runs: Sequence[Run], spec: AttnSpec) -> Partial:
    """Attention of one query `[heads, 1, head_dim]` over the keys that `kv_runs` hold, without gathering them."""
    below = 0 if spec.window is None else max(0, position - spec.window + 1)
    held = num_tokens(kv_runs)
    start, stop = held - num_tokens(clip(kv_runs, below)), held - num_tokens(clip(kv_runs, position + 1))
    if start == stop:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    return attend_pieces(q, kv.pieces(start, stop), spec)


def merge_partials(partials: Sequence[Partial], like: Tensor) -> Tensor:
    """The output of all partial results together, in the type of `like`."""
    out, _ = merge(torch.stack([out for out, _ in partials]), torch.stack([lse for _, lse in partials]))
    return out.to(like.dtype)


def _attend_run(q: Tensor, q_run: Run, k: Tensor, v: Tensor, kv_runs: Sequence[Run], spec: AttnSpec) -> Partial:
    partials = [
        attend(q, k[:, start:stop], v[:, start:stop], relation, spec)
        for start, stop, relation in _visible(q_run, kv_runs, spec.window)
    ]
    if not partials:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if len(partials) == 1:
        return partials[0]
    out, lse = merge(torch.stack([out for out, _ in partials]), torch.stack([lse for _, lse in partials]))
    return out.to(q.dtype), lse


def _visible(q_run: Run, kv_runs: Sequence[Run], window: int | None) -> list[tuple[int, int, Relation]]:
    """Stretches of held keys that the run sees, `(start, stop, relation)`; neighbours seen in full are joined."""
    stretches: list[tuple[int, int, Relation]] = []
    offset = 0
    for run in kv_runs:
        relation = relate(q_run, run, window)
        stop = offset + len(run)
        if relation.kind == "full" and stretches and stretches[-1][1] == offset and stretches[-1][2].kind == "full":
            stretches[-1] = (stretches[-1][0], stop, relation)
        elif relation.kind != "skip":
            stretches.append((offset, stop, relation))
        offset = stop
    return stretches
