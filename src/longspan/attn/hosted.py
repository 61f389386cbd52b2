"""Keys and values in the pool of a host: one more source, whose partial results are merged with those of the device.

Single queries go to the host, and its processor attends them to keys where these lie: that reads each key once, from
memory that is faster than the bus. Many queries of a request stay where they are, and keys come to them piece by piece:
each through one of two buffers, while the queries meet the piece before. In a group the queries of all members visit
the member that has the keys on its host, so that each key comes to one device, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Visit(NamedTuple):
    """Queries `[heads, tokens, head_dim]` of a member, `asker`, in some parts, one part after the other."""

    asker: int
    indices: tuple[int, ...]
    q: Tensor


class _Met(NamedTuple):
    """The parts of a visit with visible keys on the host.

    Attributes:
        single: parts with one query; `rows` are the rows of these queries.
        many: parts with several queries, each with its rows.
    """

    single: tuple[int, ...]
    rows: slice | Tensor
    many: tuple[tuple[int, slice], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSource:
    """One layer's keys and values that `member` attends over in the pool of its host.

    Attributes:
        parts: those of the exchange, in their order, with the keys that members have on hosts: `kv_runs` and `blocks`
            are those. Their backend computes on the host.
        kv: of the host's pool, with the KV heads of this member.
    """

    parts: MemberParts
    member: int
    kv: PagedKv
    staging: Staging

    def visit(self, asker: int, indices: tuple[int, ...], q: Tensor) -> Visit:
        """Return the argument of `ask` and `merge` for the queries `q` of one member in some parts."""
        return Visit(asker, indices, q)

    def ask(self, visits: Sequence[Visit], spec: AttnSpec) -> list[Tensor | None]:
        """Copies single queries to the host; to be called before the device gets more to compute of this layer."""
        found: list[Tensor | None] = []
        for visit in visits:
            met = self._met(visit, spec.window)
            found.append(visit.q[:, met.rows].to(self.kv.keys.device) if met.single else None)
        return found

    def merge(
        self,
        backend: AttentionBackend,
        visits: Sequence[Visit],
        asked: Sequence[Tensor | None],
        partials: Sequence[Partial],
        spec: AttnSpec,
    ) -> None:
        """Merge the attention over host keys into `partials`, the results over device keys. Each key is copied once.

        Args:
            backend: of the device of the queries.
            asked: what `ask` has returned.
        """
        many: dict[int, list[tuple[int, slice]]] = {}
        for number, (visit, queries) in enumerate(zip(visits, asked, strict=True)):
            met = self._met(visit, spec.window)
            if queries is not None:
                plan = self.parts.plan(met.single, visit.asker, self.member, self.kv, spec.window)
                out, lse = self.parts.backend.attend_paged(queries, self.kv, plan, spec)
                _merge_into(partials[number], met.rows, (out.to(visit.q.device), lse.to(visit.q.device)))
            for index, rows in met.many:
                many.setdefault(index, []).append((number, rows))
        for index, places in many.items():
            part = self.parts[index]
            q = torch.cat([visits[number].q[:, rows] for number, rows in places], dim=1)
            q_runs = [run for number, _ in places for run in part.q_runs[visits[number].asker]]
            found = list[Partial]()
            for run, (k, v) in self._pieces(part, spec):
                found.append(attend_runs(backend, q, q_runs, k, v, (run,), spec))
                found = [merge_each(found)]
            [(out, lse)], start = found, 0
            for number, rows in places:
                own = slice(start, start + rows.stop - rows.start)
                _merge_into(partials[number], rows, (out[:, own], lse[:, own]))
                start = own.stop

    def _met(self, visit: Visit, window: int | None) -> _Met:
        """Return the visible parts of a visit. The result is cached for all layers with the same window."""
        key = ("hosted", visit.asker, visit.indices, window)
        known = self.parts.memory.get(key)
        if isinstance(known, _Met):
            return known
        seen, single, rows, many, start = set(self.parts.visits(visit.asker, self.member, window)), [], [], [], 0
        for index in visit.indices:
            stop = start + num_tokens(self.parts[index].q_runs[visit.asker])
            if index in seen and stop - start == 1:
                single.append(index)
                rows.append(start)
            elif index in seen:
                many.append((index, slice(start, stop)))
            start = stop
        are_neighbours = not rows or rows[-1] - rows[0] + 1 == len(rows)
        span = slice(rows[0], rows[-1] + 1) if rows and are_neighbours else torch.tensor(rows, device=visit.q.device)
        met = self.parts.memory[key] = _Met(tuple(single), span, tuple(many))
        return met

    def _pieces(self, part: MemberPart, spec: AttnSpec) -> Iterator[tuple[Run, KeysAndValues]]:
        """Brings the keys that a part needs, one piece ahead; each may be used until the next one is asked for."""
        runs = [
            Run(start, min(start + PIECE_TOKENS, run.stop))
            for run in part.needed(self.member, spec.window)
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
            self.staging.begin(
                number % 2, shape, kv.keys.dtype, lambda rooms: gather(kv, part.blocks, start, stop, rooms)
            )


def _merge_into(partial: Partial, rows: slice | Tensor, found: Partial) -> None:
    out, lse = partial
    out[:, rows], lse[:, rows] = merge_each([(out[:, rows], lse[:, rows]), found])
