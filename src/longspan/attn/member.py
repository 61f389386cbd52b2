"""The view of one member of a group: its part of each request, its messages, and attention of queries over keys.

`q_rank` is the member whose queries are meant, `kv_rank` the member that holds the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each, nothing_seen
from longspan.attn.comm import Message
from longspan.attn.paged import KeysAndValues, PagedKv, PagedPlan, Reads, on_device
from longspan.attn.spec import AttnSpec, Visibility
from longspan.core.runs import Relation, Run, SpanShards, clip, num_tokens, relate

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend
    from longspan.attn.sparse.kept import KeptKeys

Value = TypeVar("Value")
PartRuns = Sequence[tuple[Run, ...]]
"""The runs of each part, in the order of the parts."""


@dataclass(frozen=True, kw_only=True)
class MemberPart:
    """One request as one member of its group sees it, in any layer.

    Attributes:
        rows: this member's queries among all its tokens of the step, in order of position.
        q_runs: the positions of the queries of every member.
        kv_runs: the positions of the keys that every member holds, with the keys of this step.
        blocks: the blocks of this member's keys, in order of position. See `PagedKv.gather`.
        kept: by layer, the keys that remain for decodes after a prompt with drops. It lasts as long as the request.
    """

    rows: slice
    q_runs: SpanShards
    kv_runs: SpanShards
    blocks: Sequence[int]
    kept: dict[int, KeptKeys] = field(default_factory=dict, compare=False)

    @property
    def span_start(self) -> int | None:
        """The position of the group's first query. None without queries."""
        return min((runs[0].start for runs in self.q_runs if runs), default=None)

    def visible(self, kv_rank: int, visibility: Visibility, q_rank: int | None, stop: int | None) -> tuple[Run, ...]:
        """Return the runs of `kv_rank` before `stop` that some query of `q_rank`, or of any member, can still see."""
        q_runs = self.q_runs if q_rank is None else self.q_runs[q_rank : q_rank + 1]
        first = min((runs[0].start for runs in q_runs if runs), default=None)
        return () if first is None else clip(self.kv_runs[kv_rank], visibility.first(first), stop)

    @property
    def is_in_order(self) -> bool:
        """Whether the queries of each member follow the queries of the member before it, as in a chain."""
        runs = [run for member_runs in self.q_runs for run in member_runs]
        return all(run.stop == following.start for run, following in itertools.pairwise(runs))


class MemberParts(Sequence[MemberPart]):
    """Parts that are exchanged together, the backend that computes them, and values that all layers of a step share.

    Attributes:
        memory: state that an exchange keeps from one layer to the next, by a key of its own.
    """

    def __init__(self, parts: Sequence[MemberPart], backend: AttentionBackend) -> None:
        self._parts, self.backend = tuple(parts), backend
        self._cache: dict[object, object] = {}
        self.memory: dict[object, object] = {}

    def __getitem__(self, index: int) -> MemberPart:  # type: ignore[override]  # slices are not used
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def once(self, key: object, make: Callable[[], Value]) -> Value:
        """Return the value that `make` gave the first time that this key was used."""
        if key not in self._cache:
            self._cache[key] = make()
        return cast("Value", self._cache[key])

    def needed(self, kv_rank: int, visibility: Visibility) -> PartRuns:
        """Return the runs of each part that `kv_rank` holds and some query of the group can still see."""
        return self.once(
            ("needed", kv_rank, visibility), lambda: [p.visible(kv_rank, visibility, None, None) for p in self]
        )

    def cached(self, kv_rank: int, visibility: Visibility, q_rank: int | None = None) -> PartRuns:
        """Return the runs before the span that `kv_rank` holds and some query of `q_rank`, or any, can still see."""
        key = ("cached", kv_rank, visibility, q_rank)
        return self.once(key, lambda: [part.visible(kv_rank, visibility, q_rank, part.span_start) for part in self])

    def visible(self, q_rank: int, kv_rank: int, visibility: Visibility) -> tuple[int, ...]:
        """Return the indices of the parts in which queries of `q_rank` may see keys of `kv_rank`."""
        return self.once(("visible", q_rank, kv_rank, visibility), lambda: self._visible(q_rank, kv_rank, visibility))

    def _visible(self, q_rank: int, kv_rank: int, visibility: Visibility) -> tuple[int, ...]:
        needed = self.needed(kv_rank, visibility)
        return tuple(index for index, part in enumerate(self) if part.q_runs[q_rank] and needed[index])

    def num_queries(self, q_rank: int, indices: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of queries of `q_rank` in each of these parts."""
        key = ("num_queries", q_rank, indices)
        return self.once(key, lambda: tuple(num_tokens(self[index].q_runs[q_rank]) for index in indices))

    def rows(self, indices: tuple[int, ...], device: torch.device) -> slice | Tensor:
        """Return this member's rows of the queries of these parts: a slice if the rows are consecutive."""
        return self.once(("rows", indices), lambda: self._rows(indices, device))

    def _rows(self, indices: tuple[int, ...], device: torch.device) -> slice | Tensor:
        slices = [self[index].rows for index in indices] or [slice(0, 0)]
        if all(rows.stop == following.start for rows, following in itertools.pairwise(slices)):
            return slice(slices[0].start, slices[-1].stop)
        return on_device([torch.tensor([row for rows in slices for row in range(rows.start, rows.stop)])], device)[0]

    def plan(
        self, indices: tuple[int, ...], q_rank: int, kv_rank: int, kv: PagedKv, visibility: Visibility
    ) -> PagedPlan:
        """Plan the reads of single queries of `q_rank` in these parts. `kv_rank` is this member."""
        key = ("plan", indices, q_rank, kv_rank, visibility)
        return self.once(key, lambda: self._plan(indices, q_rank, kv_rank, kv, visibility))

    def _plan(
        self, indices: tuple[int, ...], q_rank: int, kv_rank: int, kv: PagedKv, visibility: Visibility
    ) -> PagedPlan:
        reads = []
        for part in (self[index] for index in indices):
            position, runs = part.q_runs[q_rank][0].start, part.kv_runs[kv_rank]
            start, stop = num_before(runs, visibility.first(position)), num_before(runs, position + 1)
            reads.append(Reads(blocks=part.blocks, start=start, stop=stop))
        return self.backend.plan(reads, kv)


class QueryBatch(NamedTuple):
    """The queries `[heads, tokens, head_dim]` of `q_rank` in some parts, in the order of `indices`."""

    q_rank: int
    indices: tuple[int, ...]
    q: Tensor


def num_before(runs: Sequence[Run], position: int) -> int:
    """Count the tokens of ascending runs before a position."""
    return num_tokens(runs) - num_tokens(clip(runs, position))


# ---------------------------------------------------------------- messages


def empty_kv_message(all_runs: PartRuns, num_kv_heads: int, like: Tensor) -> Message:
    """Allocate a message for the keys and the values of each part, with the type of `like [..., head_dim]`."""
    return Message.empty([(num_kv_heads, num_tokens(runs), like.shape[-1]) for runs in all_runs for _ in "kv"], like)


def pack_kv(parts: MemberParts, all_runs: PartRuns, kv_rank: int, kv: PagedKv) -> Message:
    """Copy keys and values of consecutive runs out of the pool of `kv_rank`, which is this member."""
    message = empty_kv_message(all_runs, kv.keys.shape[1], kv.keys)
    for part, runs, k, v in zip(parts, all_runs, message.tensors[::2], message.tensors[1::2], strict=True):
        gather_runs(parts.backend, part, runs, kv_rank, kv, (k, v))
    return message


def empty_partials(counts: Sequence[tuple[int, int]], spec: AttnSpec, like: Tensor) -> Message:
    """Allocate a message for partial results of `(heads, tokens)` each: all log-sum-exps, then all outputs."""
    shapes = [(shape, torch.float32) for shape in counts]
    return Message([*shapes, *(((*shape, spec.head_dim), like.dtype) for shape in counts)], like.device)


def partials_of(message: Message) -> Iterator[Partial]:
    half = len(message.tensors) // 2
    return zip(message.tensors[half:], message.tensors[:half], strict=True)


def gather_runs(
    backend: AttentionBackend, part: MemberPart, runs: Sequence[Run], kv_rank: int, kv: PagedKv, out: KeysAndValues
) -> None:
    """Copy keys and values of consecutive `runs` out of the pool of `kv_rank`."""
    if runs:
        start = num_before(part.kv_runs[kv_rank], runs[0].start)
        backend.gather(kv, part.blocks, start, start + num_tokens(runs), out)


def split_runs(tensor: Tensor, runs: Sequence[Run]) -> Iterator[tuple[Run, Tensor]]:
    """Yield the slice `[heads, len(run), head_dim]` of each run."""
    offset = 0
    for run in runs:
        yield run, tensor[:, offset : offset + len(run)]
        offset += len(run)


# ---------------------------------------------------------------- attention


def attend_runs(  # noqa: PLR0917 - queries and keys, each with positions
    backend: AttentionBackend,
    q: Tensor,
    q_runs: Sequence[Run],
    k: Tensor,
    v: Tensor,
    kv_runs: Sequence[Run],
    spec: AttnSpec,
    *,
    dense: bool = False,
) -> Partial:
    """Attend queries to keys `[kv_heads, tokens, head_dim]`, both at the positions of their runs.

    With `dense` the scores that causality hides are computed and masked, and every query then sees some key.
    """
    results = []
    pieces = [piece for run in q_runs for piece in spec.visibility.pieces(run)]
    for q_run, rows in split_runs(q, pieces):
        partials = [
            backend.attend(rows, k[:, start:stop], v[:, start:stop], relation, spec, dense=dense)
            for start, stop, relation in _visible(q_run, kv_runs, spec.visibility)
        ]
        if len(partials) > 1:
            out, lse = merge_each(partials)
            partials = [(out.to(q.dtype), lse)]
        results.append(partials[0] if partials else nothing_seen(rows))
    return concatenated(results)


def concatenated(partials: Sequence[Partial]) -> Partial:
    if len(partials) == 1:
        return partials[0]
    return torch.cat([out for out, _ in partials], dim=1), torch.cat([lse for _, lse in partials], dim=1)


def _visible(q_run: Run, kv_runs: Sequence[Run], visibility: Visibility) -> list[tuple[int, int, Relation]]:
    """List stretches of keys that a piece of a run sees, `(start, stop, relation)`.

    Adjacent stretches that all its queries see in full are joined.
    """
    stretches: list[tuple[int, int, Relation]] = []
    first, stop = visibility.first(q_run.start), 0
    for run in kv_runs:
        stop += len(run)
        for keys in clip((run,), first):
            start, relation = stop - len(keys), relate(q_run, keys, visibility.window)
            if relation.kind == "full" and stretches and stretches[-1][1] == start and stretches[-1][2].kind == "full":
                stretches[-1] = (stretches[-1][0], stop, relation)
            elif relation.kind != "skip":
                stretches.append((start, stop, relation))
    return stretches
