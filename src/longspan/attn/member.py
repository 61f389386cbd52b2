"""One member's side of an exchange: its part of each request, and how its queries meet a set of keys."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attn.backends import AttentionBackend, Partial, merge_each, nothing_seen
from longspan.attn.comm import Message
from longspan.attn.paged import PagedKv, PagedPlan, Reads
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Relation, Run, SpanShards, clip, coalesce, num_tokens, relate, stretch


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
        """The position of the group's first query; None without queries."""
        return min((runs[0].start for runs in self.q_runs if runs), default=None)

    def needed(self, member: int, window: int | None) -> tuple[Run, ...]:
        """Returns the runs that `member` holds and that some query of the group may still see."""
        start = self.span_start
        return () if start is None else clip(self.kv_runs[member], _first_seen(start, window))

    def cached(self, holder: int, window: int | None, asker: int | None = None) -> tuple[Run, ...]:
        """Returns the runs of `holder` before the span that some query of `asker`, or of anybody, may still see."""
        runs = self.q_runs if asker is None else self.q_runs[asker : asker + 1]
        first = min((own[0].start for own in runs if own), default=None)
        return () if first is None else clip(self.kv_runs[holder], _first_seen(first, window), self.span_start)

    @property
    def is_in_order(self) -> bool:
        """Whether the members' queries follow each other, as in a chain."""
        runs = [run for member_runs in self.q_runs for run in member_runs]
        return all(one.stop == following.start for one, following in itertools.pairwise(runs))


def _first_seen(query: int, window: int | None) -> int:
    return 0 if window is None else max(0, query - window + 1)


class MemberParts(Sequence[MemberPart]):
    """Parts that are exchanged together, the backend that computes them, and what every layer uses again.

    Attributes:
        memory: what an exchange remembers from one layer to the next, by a key of its own.
    """

    def __init__(self, parts: Sequence[MemberPart], backend: AttentionBackend) -> None:
        self._parts, self.backend = tuple(parts), backend
        self._plans: dict[tuple[tuple[int, ...], int, int, int | None], PagedPlan] = {}
        self._visits: dict[tuple[int, int, int | None], tuple[int, ...]] = {}
        self._rows: dict[tuple[int, ...], slice | Tensor] = {}
        self.memory: dict[object, object] = {}

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
        """Returns this member's tokens that are queries of these parts: a slice if they are neighbours."""
        if indices not in self._rows:
            places = [self[index].rows for index in indices]
            if all(one.stop == following.start for one, following in itertools.pairwise(places)):
                self._rows[indices] = slice(places[0].start, places[-1].stop)
            else:
                rows = [row for place in places for row in range(place.start, place.stop)]
                self._rows[indices] = torch.tensor(rows, device=device)
        return self._rows[indices]

    def plan(self, indices: tuple[int, ...], asker: int, holder: int, kv: PagedKv, window: int | None) -> PagedPlan:
        """Plans how single queries of `asker` in these parts read the blocks of `holder`, which is this member."""
        key = (indices, asker, holder, window)
        if key not in self._plans:
            reads = []
            for part in (self[index] for index in indices):
                position, runs = part.q_runs[asker][0].start, part.kv_runs[holder]
                start, stop = num_before(runs, _first_seen(position, window)), num_before(runs, position + 1)
                reads.append(Reads(blocks=part.blocks, start=start, stop=stop))
            self._plans[key] = self.backend.plan(reads, kv)
        return self._plans[key]


def num_before(runs: Sequence[Run], position: int) -> int:
    """Counts the tokens of ascending runs before a position."""
    return num_tokens(runs) - num_tokens(clip(runs, position))


def empty_kv_message(all_runs: Sequence[Sequence[Run]], num_kv_heads: int, like: Tensor) -> Message:
    """Allocates a message for the keys, then the values, of some runs of each part, typed as `like [..., head_dim]`."""
    return Message.empty([(num_kv_heads, num_tokens(runs), like.shape[-1]) for runs in all_runs for _ in "kv"], like)


def pack_kv(parts: MemberParts, all_runs: Sequence[Sequence[Run]], member: int, kv: PagedKv) -> Message:
    """Gathers keys and values of the runs from the pool of `member`, which may hold others before and after them."""
    message = empty_kv_message(all_runs, kv.keys.shape[1], kv.keys)
    for part, runs, k, v in zip(parts, all_runs, message.tensors[::2], message.tensors[1::2], strict=True):
        gather_runs(parts.backend, part, runs, member, kv, (k, v))
    return message


def gather_runs(
    backend: AttentionBackend,
    part: MemberPart,
    runs: Sequence[Run],
    member: int,
    kv: PagedKv,
    rooms: tuple[Tensor, Tensor],
) -> None:
    """Copies keys and values of neighbouring `runs` out of the pool of `member`."""
    if runs:
        start = num_before(part.kv_runs[member], runs[0].start)
        backend.gather(kv, part.blocks, start, start + num_tokens(runs), rooms)


def by_position(all_runs: Sequence[Sequence[Run]], tensors: Sequence[Tensor]) -> Tensor:
    """Joins tensors `[heads, tokens, head_dim]` of disjoint runs in order of position; the runs leave no gap."""
    filled = [(runs, tensor) for runs, tensor in zip(all_runs, tensors, strict=True) if runs]
    if len(filled) == 1:
        return filled[0][1]
    num_heads, _, dim = tensors[0].shape
    joined = tensors[0].new_empty(num_heads, sum(num_tokens(runs) for runs, _ in filled), dim)
    for own_places, (runs, tensor) in zip(row_slices([runs for runs, _ in filled]), filled, strict=True):
        for place, (_, piece) in zip(own_places, split_runs(tensor, runs), strict=True):
            joined[:, place] = piece
    return joined


def split_runs(tensor: Tensor, runs: Sequence[Run]) -> Iterator[tuple[Run, Tensor]]:
    """Yields the slice `[heads, len(run), head_dim]` of each run."""
    offset = 0
    for run in runs:
        yield run, tensor[:, offset : offset + len(run)]
        offset += len(run)


def attend_all(  # noqa: PLR0917 - queries, keys and values, and whose they are
    backend: AttentionBackend,
    q_runs: SpanShards,
    q: Sequence[Tensor],
    held: Sequence[Sequence[Run]],
    k: Sequence[Tensor],
    v: Sequence[Tensor],
    spec: AttnSpec,
    results: Sequence[Tensor],
) -> None:
    """Attends the queries of all members to the keys of all, and fills `results`, shaped as `q`.

    Queries together leave no gap, nor do keys. `held` says which keys `k` and `v` are.
    """
    runs = coalesce(run for member_runs in q_runs for run in member_runs)
    if not runs:
        return
    queries, keys, values = by_position(q_runs, q), by_position(held, k), by_position(held, v)
    seen = stretch(run for member_runs in held for run in member_runs)
    out, _ = attend_runs(backend, queries, runs, keys, values, (seen,), spec)
    for result, own, places in zip(results, q_runs, row_slices(q_runs), strict=True):
        for (_, rows), place in zip(split_runs(result, own), places, strict=True):
            rows.copy_(out[:, place])


def attend_held(  # noqa: PLR0917 - those of a part, and who reads it
    backend: AttentionBackend, part: MemberPart, q: Tensor, asker: int, holder: int, kv: PagedKv, spec: AttnSpec
) -> Partial:
    needed = part.needed(holder, spec.window)
    k = q.new_empty(spec.num_kv_heads, num_tokens(needed), spec.head_dim)
    v = k.new_empty(k.shape)
    gather_runs(backend, part, needed, holder, kv, (k, v))
    return attend_runs(backend, q, part.q_runs[asker], k, v, needed, spec)


def attend_runs(  # noqa: PLR0917 - what, of which positions, over what
    backend: AttentionBackend,
    q: Tensor,
    q_runs: Sequence[Run],
    k: Tensor,
    v: Tensor,
    kv_runs: Sequence[Run],
    spec: AttnSpec,
) -> Partial:
    """Attends queries to keys `[kv_heads, tokens, head_dim]`, both at the positions of their runs."""
    results = []
    for q_run, rows in split_runs(q, q_runs):
        partials = [
            backend.attend(rows, k[:, start:stop], v[:, start:stop], relation, spec)
            for start, stop, relation in _visible(q_run, kv_runs, spec.window)
        ]
        if len(partials) > 1:
            out, lse = merge_each(partials)
            partials = [(out.to(q.dtype), lse)]
        results.append(partials[0] if partials else nothing_seen(rows))
    if len(results) == 1:
        return results[0]
    return torch.cat([out for out, _ in results], dim=1), torch.cat([lse for _, lse in results], dim=1)


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


def row_slices(shards: Sequence[Sequence[Run]]) -> list[list[slice]]:
    """Returns the slice of each run among the tokens of all, which have no gap and are in order of position."""
    first = stretch(run for runs in shards for run in runs).start
    return [[slice(run.start - first, run.stop - first, run.step) for run in runs] for runs in shards]
