"""Attention over keys and values in a host pool, whose partial results are merged with the device's.

Single queries are copied to the host, and its processor attends them to the keys in place. It reads each key once, from
memory that is faster than the bus. If a request has several queries, they stay on the device, and keys are copied to it
in pieces. Two pieces are copied ahead, also from the next layer. In a group the queries of all members go to the member
whose host has the keys. Then each key is copied to one device, once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each
from longspan.attn.member import MemberPart, MemberParts, QueryBatch, attend_runs, num_before
from longspan.attn.paged import KeysAndValues, PagedKv, on_device
from longspan.attn.spec import AttnSpec, Visibility
from longspan.core.runs import Run

if TYPE_CHECKING:
    from longspan.attn.backends.pytorch import AttentionBackend

PIECE_TOKENS = 8192
"""Keys that are copied at once. The device has memory for two such pieces, and for one without gaps."""

Staged = tuple[PagedKv, Sequence[int]]
"""Blocks that the device of the queries can read, and their numbers."""


class Staging(Protocol):
    """Two buffers, 0 and 1, through which blocks are copied to the device of the queries.

    Attributes:
        contiguous: memory on that device for the keys and values of a piece.
    """

    contiguous: Buffer

    def begin(self, buffer: int, kv: PagedKv, blocks: Sequence[int]) -> None:
        """Start to copy blocks. The copy waits for kernels that were launched before the latest `release`."""

    def end(self, buffer: int) -> Staged:
        """Return the copied blocks, which stay in the buffer until `release`."""

    def release(self, buffer: int) -> None:
        """Allow the next `begin`. All kernels that read the buffer have been launched."""


class HostStaging:
    """Hands blocks to a CPU, which reads them in place."""

    def __init__(self) -> None:
        self.contiguous = Buffer(torch.device("cpu"))
        self._begun: dict[int, Staged] = {}

    def begin(self, buffer: int, kv: PagedKv, blocks: Sequence[int]) -> None:
        self._begun[buffer] = kv, blocks

    def end(self, buffer: int) -> Staged:
        return self._begun[buffer]

    def release(self, buffer: int) -> None:
        del self._begun[buffer]


class DeviceStaging:
    """Buffers on a CUDA device, which copies blocks from page-locked memory on a separate stream.

    Neither the host nor the stream of the computation waits for a copy before its result is read.

    Args:
        cuda: replaces `torch.cuda` in tests.
    """

    def __init__(self, device: torch.device, cuda: ModuleType = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)
        self.contiguous = Buffer(device)
        self._buffers = [Buffer(device), Buffer(device)]
        self._staged: dict[int, Staged] = {}
        self._copied, self._read = ([cuda.Event(), cuda.Event()] for _ in range(2))

    def begin(self, buffer: int, kv: PagedKv, blocks: Sequence[int]) -> None:
        memory, shape = self._buffers[buffer], (len(blocks), *kv.keys.shape[1:3])
        sizes = [(*shape, kv.keys.shape[3]), (*shape, kv.values.shape[3])]
        if not memory.has(sizes, kv.keys.dtype):  # new memory may still be in use by kernels before it was freed
            self._read[buffer].record(self._cuda.current_stream(self._device))
        keys, values = memory.take(sizes, kv.keys.dtype)
        staged = PagedKv(keys=keys, values=values)
        with self._cuda.stream(self._stream):
            self._stream.wait_event(self._read[buffer])
            _copy_blocks(kv, blocks, staged)
            self._copied[buffer].record(self._stream)
        self._staged[buffer] = staged, range(len(blocks))

    def end(self, buffer: int) -> Staged:
        self._cuda.current_stream(self._device).wait_event(self._copied[buffer])
        return self._staged[buffer]

    def release(self, buffer: int) -> None:
        self._read[buffer].record(self._cuda.current_stream(self._device))


def _copy_blocks(kv: PagedKv, blocks: Sequence[int], out: PagedKv) -> None:
    """Copy whole blocks to the first blocks of `out`, with one copy per contiguous piece of memory."""
    has_all_heads, start = kv.keys[0].numel() == kv.keys.stride(0), 0
    while start < len(blocks):
        first, stop = blocks[start], start + 1
        while has_all_heads and stop < len(blocks) and blocks[stop] == first + stop - start:
            stop += 1
        for pool, copy in ((kv.keys, out.keys), (kv.values, out.values)):
            copy[start:stop].copy_(pool[first : first + stop - start], non_blocking=True)
        start = stop


class Buffer:
    """Memory on a device that grows on demand."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def has(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> bool:
        """Return whether `take` allocates nothing."""
        return sum(map(math.prod, shapes)) * dtype.itemsize <= len(self._bytes)

    def take(self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Tensor]:
        """Return tensors in this memory, which the next `take` overwrites."""
        sizes = [math.prod(shape) for shape in shapes]
        if not self.has(shapes, dtype):
            self._bytes = self._bytes.new_empty(0)  # frees the old memory
            self._bytes = self._bytes.new_empty(sum(sizes) * dtype.itemsize)
        parts = self._bytes[: sum(sizes) * dtype.itemsize].view(dtype).split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


class HostPiece(NamedTuple):
    """Consecutive keys of a request on the host: tokens `[start, start + len(run))` of `blocks`."""

    run: Run
    start: int
    kv: PagedKv
    blocks: Sequence[int]


class HostPieces:
    """The pieces of a step in the order of their use. Two pieces are copied ahead, also pieces of the next layer."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self._waiting, self._begun = deque[HostPiece](), deque[tuple[int, HostPiece]]()
        self._free = deque([0, 1])

    def put(self, pieces: Iterable[HostPiece]) -> None:
        """Append pieces, and start their copies into free buffers."""
        self._waiting.extend(pieces)
        self._begin()

    def take(self, backend: AttentionBackend) -> tuple[Run, KeysAndValues]:
        """Return the keys and values of the next piece, which the next `take` overwrites."""
        buffer, piece = self._begun.popleft()
        kv, blocks = self.staging.end(buffer)
        shape = kv.keys.shape[1], len(piece.run)
        dims = kv.keys.shape[3], kv.values.shape[3]
        k, v = self.staging.contiguous.take([(*shape, dim) for dim in dims], kv.keys.dtype)
        backend.gather(kv, blocks, piece.start, piece.start + len(piece.run), (k, v))
        self.staging.release(buffer)
        self._free.append(buffer)
        self._begin()
        return piece.run, (k, v)

    def _begin(self) -> None:
        while self._waiting and self._free:
            buffer, piece = self._free.popleft(), self._waiting.popleft()
            self.staging.begin(buffer, piece.kv, piece.blocks)
            self._begun.append((buffer, piece))


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
        pieces: the keys for several queries, in all layers of the step.
    """

    parts: MemberParts
    member: int
    kv: PagedKv
    pieces: HostPieces

    def prefetch(self, visibility: Visibility) -> None:
        """Start to copy the keys for parts with several queries. Call it once, before `merge`, in the same order."""
        needed = self.parts.needed(self.member, visibility)
        for index in self._several(visibility):
            self.pieces.put(self._pieces(self.parts[index], needed[index]))

    def ask(self, batches: Sequence[QueryBatch], spec: AttnSpec) -> list[Tensor | None]:
        """Copy single queries to the host. Call it before the device gets more work of this layer."""
        copies: list[Tensor | None] = []
        for batch in batches:
            visible = self._visible(batch, spec.visibility)
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
        several: dict[int, list[tuple[int, slice]]] = {index: [] for index in self._several(spec.visibility)}
        for number, (batch, queries) in enumerate(zip(batches, single, strict=True)):
            visible = self._visible(batch, spec.visibility)
            if queries is not None:
                plan = self.parts.plan(visible.single, batch.q_rank, self.member, self.kv, spec.visibility)
                added = self.parts.backend.attend_paged(queries, self.kv, plan, spec)
                _merge_into(partials[number], visible.rows, added)
            for index, rows in visible.several:
                several[index].append((number, rows))
        for index, places in several.items():
            part = self.parts[index]
            q = torch.cat([batches[number].q[:, rows] for number, rows in places], dim=1)
            q_runs = [run for number, _ in places for run in part.q_runs[batches[number].q_rank]]
            merged = list[Partial]()
            for _ in self._pieces(part, self.parts.needed(self.member, spec.visibility)[index]):
                run, (k, v) = self.pieces.take(backend)
                merged = [merge_each([*merged, attend_runs(backend, q, q_runs, k, v, (run,), spec)])]
            [(out, lse)], start = merged, 0
            for number, rows in places:
                own = slice(start, start + rows.stop - rows.start)
                _merge_into(partials[number], rows, (out[:, own], lse[:, own]))
                start = own.stop

    def _visible(self, batch: QueryBatch, visibility: Visibility) -> _Rows:
        """Find the queries that see keys on the host, once for all layers with the same visibility."""
        key = ("hosted", batch.q_rank, batch.indices, visibility)
        return self.parts.once(key, lambda: self._rows(batch, visibility))

    def _rows(self, batch: QueryBatch, visibility: Visibility) -> _Rows:
        visible, start = set(self.parts.visible(batch.q_rank, self.member, visibility)), 0
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
        span = slice(rows[0], rows[-1] + 1) if is_slice else on_device([torch.tensor(rows)], batch.q.device)[0]
        return _Rows(tuple(single), span, tuple(several))

    def _several(self, visibility: Visibility) -> tuple[int, ...]:
        """Return the indices of the parts in which some member has several queries that see keys on the host."""
        return self.parts.once(("hosted several", visibility), lambda: tuple(sorted(self._indices(visibility))))

    def _indices(self, visibility: Visibility) -> set[int]:
        found = set[int]()
        for q_rank in range(len(self.parts[0].q_runs)):
            visible = self.parts.visible(q_rank, self.member, visibility)
            counts = self.parts.num_queries(q_rank, visible)
            found.update(index for index, count in zip(visible, counts, strict=True) if count > 1)
        return found

    def _pieces(self, part: MemberPart, needed: Sequence[Run]) -> list[HostPiece]:
        """Cut the keys that a part needs."""
        runs = [
            Run(start, min(start + PIECE_TOKENS, run.stop))
            for run in needed
            for start in range(run.start, run.stop, PIECE_TOKENS)
        ]
        size, pieces = self.kv.block_size, []
        for run in runs:
            start = num_before(part.kv_runs[self.member], run.start)
            first, last = start // size, -(-(start + len(run)) // size)
            pieces.append(HostPiece(run, start - first * size, self.kv, part.blocks[first:last]))
        return pieces


def _merge_into(partial: Partial, rows: slice | Tensor, added: Partial) -> None:
    out, lse = partial
    own, own_lse = (part.to(out.device, non_blocking=True) for part in added)
    out[:, rows], lse[:, rows] = merge_each([(out[:, rows], lse[:, rows]), (own, own_lse)])
