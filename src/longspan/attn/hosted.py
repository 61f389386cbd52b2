"""Keys and values in the pool of a host: one more source, whose partial results are merged with those of the device.

Single queries go to the host, and its processor attends them to keys where these lie: that reads each key once, from
memory that is faster than the bus. Many queries of a request stay where they are, and keys come to them piece by piece:
each through one of two buffers, while the queries meet the piece before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspan.attn.backends import AttentionBackend, Partial, merge_each
from longspan.attn.member import MemberPart, MemberParts, attend_runs, num_before
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.runs import Run, num_tokens

PIECE_TOKENS = 8192
"""Keys that come at once; two such pieces take memory on the device."""

KeysAndValues = tuple[Tensor, Tensor]
Shape = tuple[int, int, int]
"""The shape of keys, and that of values: `[kv_heads, tokens, head_dim]`."""


class Staging(Protocol):
    """Two buffers, 0 and 1, through which keys and values come to the device of the queries."""

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        """Begins to bring what `fill` writes into tensors in the memory of the host.

        What the device has been given to compute may still read this buffer, and is done with it first.
        """

    def end(self, buffer: int) -> KeysAndValues:
        """Returns what has come, which the buffer holds until it is begun anew."""


class HostStaging:
    """Buffers for queries on a CPU, where nothing has to travel."""

    def __init__(self) -> None:
        self._rooms = [_Room(), _Room()]

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        fill(self._rooms[buffer].take(shape, dtype))

    def end(self, buffer: int) -> KeysAndValues:
        return self._rooms[buffer].taken


class PinnedStaging:
    """Buffers on a CUDA device, each behind one in pinned memory, which a stream of their own copies.

    So the device computes while a piece comes, and the host gathers the one after it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pinned = [_Room(pin_memory=True), _Room(pin_memory=True)]
        self._rooms = [_Room(device=device), _Room(device=device)]
        self._copied = [torch.cuda.Event(), torch.cuda.Event()]

    def begin(self, buffer: int, shape: Shape, dtype: torch.dtype, fill: Callable[[KeysAndValues], None]) -> None:
        self._copied[buffer].synchronize()  # the pinned memory has been read
        pinned = self._pinned[buffer].take(shape, dtype)
        fill(pinned)
        rooms = self._rooms[buffer].take(shape, dtype)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for room, source in zip(rooms, pinned, strict=True):
                room.copy_(source, non_blocking=True)
            self._copied[buffer].record()

    def end(self, buffer: int) -> KeysAndValues:
        torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])
        return self._rooms[buffer].taken


class _Room:
    """Memory for keys and values, which grows as it must; `taken` is what was taken last."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSource:
    """One layer's keys and values that a host has of some parts.

    Attributes:
        parts: with this member's queries, and with the host as the only holder of keys: `kv_runs` and `blocks` are
            those in its pool. Their backend computes on the host.
        kv: of the host's pool, with the KV heads of this member.
    """

    parts: MemberParts
    kv: PagedKv
    staging: Staging

    def ask(self, q: Tensor, spec: AttnSpec) -> Tensor | None:
        """Copies single queries to the host; to be called before the device gets more to compute of this layer."""
        single = self._single(spec)
        return q[:, self.parts.rows(single, q.device)].to(self.kv.keys.device) if single else None

    def attend(
        self, backend: AttentionBackend, q: Tensor, asked: Tensor | None, spec: AttnSpec
    ) -> Iterator[tuple[slice | Tensor, Partial]]:
        """Yields partial results of queries `q [heads, tokens, head_dim]` over keys of the host, and their rows.

        Args:
            backend: of the device of the queries.
            asked: what `ask` has returned.
        """
        if asked is not None:
            single = self._single(spec)
            plan = self.parts.plan(single, 0, 0, self.kv, spec.window)
            out, lse = self.parts.backend.attend_paged(asked, self.kv, plan, spec)
            yield self.parts.rows(single, q.device), (out.to(q.device), lse.to(q.device))
        for index in self.parts.visits(0, 0, spec.window):
            part = self.parts[index]
            if num_tokens(part.q_runs[0]) > 1:
                rows, found = q[:, part.rows], list[Partial]()
                for run, (k, v) in self._pieces(part, spec):
                    found.append(attend_runs(backend, rows, part.q_runs[0], k, v, (run,), spec))
                    found = [merge_each(found)]
                yield part.rows, found[0]

    def _single(self, spec: AttnSpec) -> tuple[int, ...]:
        """Lists the parts with one query that sees anything here."""
        parts = self.parts
        return tuple(index for index in parts.visits(0, 0, spec.window) if num_tokens(parts[index].q_runs[0]) == 1)

    def _pieces(self, part: MemberPart, spec: AttnSpec) -> Iterator[tuple[Run, KeysAndValues]]:
        """Brings the keys that a part needs, one piece ahead; each may be used until the next one is asked for."""
        runs = [
            Run(start, min(start + PIECE_TOKENS, run.stop))
            for run in part.needed(0, spec.window)
            for start in range(run.start, run.stop, PIECE_TOKENS)
        ]
        self._begin(part, runs, 0)
        for number, run in enumerate(runs):
            self._begin(part, runs, number + 1)
            yield run, self.staging.end(number % 2)

    def _begin(self, part: MemberPart, runs: list[Run], number: int) -> None:
        if number < len(runs):
            start, kv = num_before(part.kv_runs[0], runs[number].start), self.kv
            stop, shape = start + len(runs[number]), (kv.keys.shape[1], len(runs[number]), kv.keys.shape[3])
            gather = self.parts.backend.gather
            self.staging.begin(
                number % 2, shape, kv.keys.dtype, lambda rooms: gather(kv, part.blocks, start, stop, rooms)
            )
