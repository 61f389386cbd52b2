"""Attention over keys and values in a host pool, whose partial results are merged with the device's.

Single queries are copied to the host, and its processor attends them to the keys in place. It reads each key once, from
memory that is faster than the bus. If a request has several queries, they stay on the device, and keys are copied to it
in pieces. There are two buffers, so the queries attend to one piece while the next is copied. In a group the queries of
all members go to the member whose host has the keys. Then each key is copied to one device, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each
from longspan.attn.member import MemberPart, MemberParts, QueryBatch, attend_runs, num_before
from longspan.attn.paged import KeysAndValues, PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

PIECE_TOKENS = 8192
"""Keys that are copied at once. The device has memory for two such pieces."""

Shape = tuple[int, int, int]
"""The shape of keys, and of values: `[kv_heads, tokens, head_dim]`."""


class Staging(Protocol):
    """Two buffers, 0 and 1, through which keys and values are copied to the device of the queries."""

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        """Start to copy tensors that `fill` writes in host memory.

        Kernels that were launched before may still read this buffer. The copy waits for them.
        """

    def end(self, buffer: int) -> KeysAndValues:
        """Return the copied tensors, which stay in the buffer until the next `begin`."""


class HostStaging:
    """Buffers for queries on a CPU, where keys are only gathered."""

    def __init__(self) -> None:
        self._buffers = [_Buffer(), _Buffer()]

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        fill(self._buffers[buffer].take(shape, dtype))

    def end(self, buffer: int) -> KeysAndValues:
        return self._buffers[buffer].taken


class PinnedStaging:
    """Buffers on a CUDA device, each filled from one in pinned memory on a separate stream.

    The device computes while a piece is copied, and the host gathers the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pinned = [_Buffer(pin_memory=True), _Buffer(pin_memory=True)]
        self._buffers = [_Buffer(device=device), _Buffer(device=device)]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        self._copied[buffer].synchronize()  # the pinned memory has been read
        pinned = self._pinned[buffer].take(shape, dtype)
        fill(pinned)
        targets = self._buffers[buffer].take(shape, dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in zip(targets, pinned, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied[buffer].record()

    def end(self, buffer: int) -> KeysAndValues:
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])
        return self._buffers[buffer].taken


class _Buffer:
    """Memory for keys and values, which grows on demand. `taken` is the result of the latest `take`."""

    taken: KeysAndValues

    def __init__(self, device: torch.device | None = None, *, pin_memory: bool = False) -> None:
        self._device, self._pin_memory = device, pin_memory
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Shape, dtype: torch.dtype) -> KeysAndValues:
        num_bytes = 2 * torch.Size(shape).numel() * dtype.itemsize
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._pin_memory)
        k, v = self._bytes[:num_bytes].view(dtype).view(2, *shape)
        self.taken = k, v
        return self.taken


class _Rows(NamedTuple):
    """The rows of a batch whose queries see keys on the host.

    Attributes:
        single: the parts with one query. `rows` are the rows of these queries.
        several: the parts with several queries, each with its rows.
    """

    single: tuple[int, ...]
    rows: slice | Tensor
    several: tuple[tuple[int, slice], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSource:
    """One layer's keys and values in the pool of a host, over which `member` attends.

    Attributes:
        parts: the parts of the exchange, in order. `kv_runs` and `blocks` describe the keys on hosts, and the backend
            computes on the host.
        kv: the host's pool, with the KV heads of this member.
    """

    parts: MemberParts
    member: int
    kv: PagedKv
    staging: Staging

    def ask(self, batches: Sequence[QueryBatch], spec: AttnSpec) -> list[Tensor | None]:
        """Copy single queries to the host. Call it before the device gets more work of this layer."""
        copies: list[Tensor | None] = []
        for batch in batches:
            visible = self._visible(batch, spec.window)
            copies.append(batch.q[:, visible.rows].to(self.kv.keys.device) if visible.single else None)
        return copies

    def merge(
        self,
        backend: AttentionBackend,
        batches: Sequence[QueryBatch],
        single: Sequence[Tensor | None],
        partials: Sequence[Partial],
        spec: AttnSpec,
    ) -> None:
        """Merge the attention over host keys into `partials`, the results over device keys. Each key is copied once.

        Args:
            backend: computes on the device of the queries.
            single: the result of `ask`.
        """
        several: dict[int, list[tuple[int, slice]]] = {}
        for number, (batch, queries) in enumerate(zip(batches, single, strict=True)):
            visible = self._visible(batch, spec.window)
            if queries is not None:
                plan = self.parts.plan(visible.single, batch.q_rank, self.member, self.kv, spec.window)
                out, lse = self.parts.backend.attend_paged(queries, self.kv, plan, spec)
                _merge_into(partials[number], visible.rows, (out.to(batch.q.device), lse.to(batch.q.device)))
            for index, rows in visible.several:
                several.setdefault(index, []).append((number, rows))
        for index, places in several.items():
            part = self.parts[index]
            q = torch.cat([batches[number].q[:, rows] for number, rows in places], dim=1)
            q_runs = [run for number, _ in places for run in part.q_runs[batches[number].q_rank]]
            merged = list[Partial]()
            for run, (k, v) in self._pieces(part, self.parts.needed(self.member, spec.window)[index]):
                merged = [merge_each([*merged, attend_runs(backend, q, q_runs, k, v, (run,), spec)])]
            [(out, lse)], start = merged, 0
            for number, rows in places:
                own = slice(start, start + rows.stop - rows.start)
                _merge_into(partials[number], rows, (out[:, own], lse[:, own]))
                start = own.stop

    def _visible(self, batch: QueryBatch, window: int | None) -> _Rows:
        """Find the queries that see keys on the host, once for all layers with the same window."""
        key = ("hosted", batch.q_rank, batch.indices, window)
        return self.parts.once(key, lambda: self._rows(batch, window))

    def _rows(self, batch: QueryBatch, window: int | None) -> _Rows:
        visible, start = set(self.parts.visible(batch.q_rank, self.member, window)), 0
        single, rows, several = list[int](), list[int](), list[tuple[int, slice]]()
        counts = self.parts.num_queries(batch.q_rank, batch.indices)
        for index, count in zip(batch.indices, counts, strict=True):
            if index in visible and count == 1:
                single.append(index)
                rows.append(start)
            elif index in visible:
                several.append((index, slice(start, start + count)))
            start += count
        is_slice = bool(rows) and rows[-1] - rows[0] + 1 == len(rows)
        span = slice(rows[0], rows[-1] + 1) if is_slice else torch.tensor(rows, device=batch.q.device)
        return _Rows(tuple(single), span, tuple(several))

    def _pieces(self, part: MemberPart, needed: Sequence[Run]) -> Iterator[tuple[Run, KeysAndValues]]:
        """Copy the keys that a part needs, one piece ahead. Each piece is valid until the next one is requested."""
        runs = [
            Run(start, min(start + PIECE_TOKENS, run.stop))
            for run in needed
            for start in range(run.start, run.stop, PIECE_TOKENS)
        ]
        self._begin(part, runs, 0)
        for number, run in enumerate(runs):
            self._begin(part, runs, number + 1)
            yield run, self.staging.end(number % 2)

    def _begin(self, part: MemberPart, runs: list[Run], number: int) -> None:
        if number < len(runs):
            start, kv = num_before(part.kv_runs[self.member], runs[number].start), self.kv
            stop, shape = start + len(runs[number]), (kv.keys.shape[1], len(runs[number]), kv.keys.shape[3])
            gather = self.parts.backend.gather
            self.staging.begin(number % 2, shape, kv.keys.dtype, lambda out: gather(kv, part.blocks, start, stop, out))


def _merge_into(partial: Partial, rows: slice | Tensor, added: Partial) -> None:
    out, lse = partial
    out[:, rows], lse[:, rows] = merge_each([(out[:, rows], lse[:, rows]), added])
