"""One member's side of an exchange: its part of each request, and how its queries meet a set of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.backends import AttentionBackend, Partial
from longspan.attn.comm import Message
from longspan.attn.merge import merge_each
from longspan.attn.paged import PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation, Run, SpanShards, clip, relate, row_slices


@dataclass(frozen=True, kw_only=True)
class MemberPart:
    """One request as one member of its group sees it, in any layer.

    Attributes:
        rows: the place of this member's queries among all its tokens of the step, in order of position.
        q_runs: the positions of every member's queries.
        kv_runs: the positions of the keys that every member holds, this step's included.
        blocks: where this member's keys lie, in order of position; see `PagedKv.gather`.
    """

    rows: slice
    q_runs: SpanShards
    kv_runs: SpanShards
    blocks: Sequence[int]

    @property
    def span_start(self) -> int | None:
        """Returns the position of the group's first query; None without queries."""
        return min((runs[0].start for runs in self.q_runs if runs), default=None)

    def needed(self, member: int, window: int | None) -> tuple[Run, ...]:
        """Returns the runs that `member` holds and that some query of the group may still see."""
        start = self.span_start
        return () if start is None else clip(self.kv_runs[member], _in_sight(start, window))

    def cached(self, holder: int, window: int | None, asker: int | None = None) -> tuple[Run, ...]:
        """Returns the runs of `holder` before the span that some query of `asker`, or of anybody, may still see."""
        runs = self.q_runs if asker is None else self.q_runs[asker : asker + 1]
        first = min((own[0].start for own in runs if own), default=None)
        return () if first is None else clip(self.kv_runs[holder], _in_sight(first, window), self.span_start)

    @property
    def is_in_order(self) -> bool:
        """Tells whether the members' queries follow each other, as in a chain."""
        runs = [run for member_runs in self.q_runs for run in member_runs]
        return all(one.stop == following.start for one, following in itertools.pairwise(runs))


def _in_sight(query: int, window: int | None) -> int:
    """Returns the first position that a query may see."""
    return 0 if window is None else max(0, query - window + 1)


class MemberParts(Sequence[MemberPart]):
    """Parts that are exchanged together, and what is worked out for them once and used in every layer.

    Attributes:
        backend: computes their attention.
    """

    def __init__(self, parts: Sequence[MemberPart], backend: AttentionBackend) -> None:
        self._parts, self.backend = tuple(parts), backend
        self._plans: dict[tuple[tuple[int, ...], int, int, int | None], PagedPlan] = {}
        self._visits: dict[tuple[int, int, int | None], tuple[int, ...]] = {}
        self._rows: dict[tuple[int, ...], slice | Tensor] = {}

    def __getitem__(self, index: int) -> MemberPart:  # type: ignore[override]  # nobody slices them
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def visits(self, asker: int, holder: int, window: int | None) -> tuple[int, ...]:
        """Lists the parts of which `asker` has queries and `holder` has keys that are still in sight."""
        key = (asker, holder, window)
        if key not in self._visits:
            self._visits[key] = tuple(
                index for index, part in enumerate(self) if part.q_runs[asker] and part.needed(holder, window)
            )
        return self._visits[key]

    def rows(self, indices: tuple[int, ...], device: torch.device) -> slice | Tensor:
        """Finds this member's tokens that are queries of these parts: a slice if they are neighbours."""
        if indices not in self._rows:
            row_slices = [self[index].rows for index in indices if self[index].rows.start < self[index].rows.stop]
            if all(one.stop == following.start for one, following in itertools.pairwise(row_slices)):
                self._rows[indices] = slice(row_slices[0].start, row_slices[-1].stop) if row_slices else slice(0, 0)
            else:
                rows = [row for place in row_slices for row in range(place.start, place.stop)]
                self._rows[indices] = torch.tensor(rows, device=device)
        return self._rows[indices]

    def plan(self, indices: tuple[int, ...], asker: int, holder: int, kv: PagedKv, window: int | None) -> PagedPlan:
        """Plans how single queries of `asker` in these parts read the blocks of `holder`, which is this member."""
        key = (indices, asker, holder, window)
        if key not in self._plans:
            reads = [_reads(self[index], asker, holder, window) for index in indices]
            self._plans[key] = self.backend.plan(reads, kv)
        return self._plans[key]


def _reads(part: MemberPart, asker: int, holder: int, window: int | None) -> Reads:
    position = part.q_runs[asker][0].start
    runs = part.kv_runs[holder]
    below = 0 if window is None else max(0, position - window + 1)
    held = num_tokens(runs)
    start, stop = held - num_tokens(clip(runs, below)), held - num_tokens(clip(runs, position + 1))
    return Reads(blocks=part.blocks, start=start, stop=stop)


def num_tokens(runs: Sequence[Run]) -> int:
    """Counts the tokens of some runs."""
    return sum(len(run) for run in runs)


def kv_room(all_runs: Sequence[Sequence[Run]], num_kv_heads: int, like: Tensor) -> Message:
    """Makes room for the keys, then the values, of some runs of each part, typed as `like [..., head_dim]`."""
    shapes = [((num_kv_heads, num_tokens(runs), like.shape[-1]), like.dtype) for runs in all_runs for _ in ("k", "v")]
    return Message(shapes, like.device)


def kv_message(parts: Sequence[MemberPart], all_runs: Sequence[Sequence[Run]], member: int, kv: PagedKv) -> Message:
    """Fills `kv_room` from the pool of `member`, which holds the runs and maybe others before and after them."""
    message = kv_room(all_runs, kv.keys.shape[1], kv.keys)
    for part, runs, k, v in zip(parts, all_runs, message.tensors[::2], message.tensors[1::2], strict=True):
        gather_runs(part, runs, member, kv, k, v)
    return message


def gather_runs(part: MemberPart, runs: Sequence[Run], member: int, kv: PagedKv, k_out: Tensor, v_out: Tensor) -> None:
    """Copies keys and values out of the pool of `member`: neighbours among those that it holds."""
    if runs:
        held = part.kv_runs[member]
        start = num_tokens(held) - num_tokens(clip(held, runs[0].start))
        kv.gather(part.blocks, start, start + num_tokens(runs), k_out, v_out)


def by_position(all_runs: Sequence[Sequence[Run]], tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors `[heads, tokens, head_dim]` of disjoint runs in order of position; the runs leave no gap."""
    filled = [(runs, tensor) for runs, tensor in zip(all_runs, tensors, strict=True) if runs]
    if len(filled) == 1:
        return filled[0][1]
    num_heads, _, dim = tensors[0].shape
    joined = tensors[0].new_empty(num_heads, sum(num_tokens(runs) for runs, _ in filled), dim)
    for own_places, (runs, tensor) in zip(row_slices([runs for runs, _ in filled]), filled, strict=True):
        offset = 0
        for place, run in zip(own_places, runs, strict=True):
            joined[:, place] = tensor[:, offset : offset + len(run)]
            offset += len(run)
    return joined


def attend_held(  # noqa: PLR0917 - those of a part, and who reads it
    backend: AttentionBackend, part: MemberPart, q: Tensor, asker: int, holder: int, kv: PagedKv, spec: AttnSpec
) -> Partial:
    """Computes queries `q` of `asker` over the keys that `holder`, which is this member, copies out of its pool."""
    needed = part.needed(holder, spec.window)
    k = q.new_empty(spec.num_kv_heads, num_tokens(needed), spec.head_dim)
    v = k.new_empty(k.shape)
    gather_runs(part, needed, holder, kv, k, v)
    return attend_runs(backend, q, part.q_runs[asker], k, v, needed, spec)


def split_queries(q: Tensor, runs: Sequence[Run]) -> Iterator[tuple[Run, Tensor]]:
    """Yields the queries of each run, `[heads, len(run), head_dim]`."""
    offset = 0
    for run in runs:
        yield run, q[:, offset : offset + len(run)]
        offset += len(run)


def attend_runs(  # noqa: PLR0917 - what, of which positions, over what
    backend: AttentionBackend,
    q: Tensor,
    q_runs: Sequence[Run],
    k: Tensor,
    v: Tensor,
    kv_runs: Sequence[Run],
    spec: AttnSpec,
) -> Partial:
    """Computes attention of queries over keys `[kv_heads, tokens, head_dim]`, both given with their positions."""
    results = [_attend_run(backend, rows, run, k, v, kv_runs, spec) for run, rows in split_queries(q, q_runs)]
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results], dim=1), torch.cat([lse for _, lse in results], dim=1)


def _attend_run(  # noqa: PLR0917 - those of `attend_runs`
    backend: AttentionBackend, q: Tensor, q_run: Run, k: Tensor, v: Tensor, kv_runs: Sequence[Run], spec: AttnSpec
) -> Partial:
    partials = [
        backend.attend(q, k[:, start:stop], v[:, start:stop], relation, spec)
        for start, stop, relation in _visible(q_run, kv_runs, spec.window)
    ]
    if not partials:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if len(partials) == 1:
        return partials[0]
    out, lse = merge_each(partials)
    return out.to(q.dtype), lse


def _visible(q_run: Run, kv_runs: Sequence[Run], window: int | None) -> list[tuple[int, int, Relation]]:
    """Lists stretches of keys that the run sees, `(start, stop, relation)`; neighbours seen in full are joined."""
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
