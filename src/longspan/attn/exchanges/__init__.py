"""Attention exchanges, one file each. All members of a group call the same exchange, layer by layer.

An exchange is a function of a `Call`. It sends messages by the operations of the call, which also keep and merge
partial results. The module `<kind>.py` registers its exchange and is imported on first use, as is that of a plug-in.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from longspan.attn.backends import Partial, merge_each, nothing_seen, with_sinks
from longspan.attn.comm import Group, Message, Pending
from longspan.attn.member import (
    MemberParts,
    PartRuns,
    QueryBatch,
    attend_runs,
    concatenated,
    empty_kv_message,
    empty_partials,
    gather_runs,
    pack_kv,
    partials_of,
)
from longspan.attn.paged import KeysAndValues, PagedKv
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import BUILT_IN, LOCAL, Exchange
from longspan.core.runs import Run, num_tokens

if TYPE_CHECKING:
    from longspan.attn.hosted import HostSource
    from longspan.attn.member import MemberPart


class Incoming(NamedTuple):
    """A message that is being received."""

    message: Message
    pending: Pending | None

    def wait(self) -> Message:
        """Return the message when it has arrived."""
        if self.pending is not None:
            self.pending.wait()
        return self.message


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """The arguments of one member for one layer, and the operations of exchanges on them.

    Attributes:
        parts: the same on every member. Members without queries call, too.
        q: this member's queries `[heads, tokens, head_dim]`. `rows` of a part selects its own queries.
        k, v: the new keys and values `[kv_heads, tokens, head_dim]`, packed like `q`.
        kv: this layer of the pool. It contains the new keys and values unless the exchange stores them afterwards.
        out: the results, with q's shape. The rows of the parts are written.
        started: the result of `start` for this layer. None if `start` was not called.
        layer, num_layers: the index of the layer in the model, and the number of layers.
        layers: the layers that this member computes, in order.
        first_kv_head: the index, in the whole layer, of the first KV head of this member's rank.
        host: keys and values in the host pools of the members. None if there are none.
        sinks: `[heads]` float32 if the layer has sinks, see `with_sinks`. `finish` adds them to merged results. An
            exchange that writes `out` itself adds them, once.
    """

    exchange: Exchange
    group: Group
    parts: MemberParts
    q: Tensor
    k: Tensor
    v: Tensor
    kv: PagedKv
    spec: AttnSpec
    out: Tensor
    started: object = None
    layer: int = 0
    num_layers: int = 1
    layers: Sequence[int] = range(1)
    first_kv_head: int = 0
    host: HostSource | None = None
    sinks: Tensor | None = None
    _partials: dict[tuple[int, ...], Partial] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.spec.has_sinks == (self.sinks is not None), "exactly the layers with sinks have sinks"

    # ---------------------------------------------------------------- keys and values that are sent

    def needed(self, kv_rank: int) -> PartRuns:
        """Return the runs of each part that a member holds and some query of the group can still see."""
        return self.parts.needed(kv_rank, self.spec.visibility)

    def own_kv(self) -> Message:
        return pack_kv(self.parts, self.needed(self.group.rank), self.group.rank, self.kv)

    def empty_kv(self, source: int) -> Message:
        return empty_kv_message(self.needed(source), self.spec.num_kv_heads, self.q)

    def all_kv(self) -> list[Message]:
        """Return one message per member, for `all_gather`. Only this member's own is filled."""
        return [self.own_kv() if m == self.group.rank else self.empty_kv(m) for m in range(self.group.size)]

    def ring(self) -> Iterator[int]:
        """Yield this member, the member before it, and so on: the source of the keys in each hop around the ring."""
        return ((self.group.rank - hop) % self.group.size for hop in range(self.group.size))

    def pass_on(self, message: Message, source: int) -> Incoming:
        """Send the message of `source` to the next member, and start to receive the next message of the ring.

        In the last hop nothing is sent, and `wait` returns the same message.
        """
        rank, size = self.group.rank, self.group.size
        hop = (rank - source) % size
        if hop + 1 == size:
            return Incoming(message, None)
        incoming = self.empty_kv((source - 1) % size)
        sends, receives = {(rank + 1) % size: message}, {(rank - 1) % size: incoming}
        return Incoming(incoming, self.group.start(sends=sends, receives=receives, hop=hop))

    def attend(self, source: int, message: Message) -> None:
        """Attend this member's queries to the keys of `source`, and merge the partial results."""
        rank, tensors = self.group.rank, message.tensors
        each = zip(self.parts, self.needed(source), tensors[::2], tensors[1::2], strict=True)
        for index, (part, runs, k, v) in enumerate(each):
            if part.q_runs[rank] and runs:
                q = self.q[:, part.rows]
                self.merge((index,), attend_runs(self.parts.backend, q, part.q_runs[rank], k, v, runs, self.spec))

    # ---------------------------------------------------------------- queries that are sent

    def visible(self, q_rank: int, kv_rank: int) -> tuple[int, ...]:
        """Return the indices of the parts in which queries of `q_rank` may see keys of `kv_rank` or of its host."""
        on_device = self.parts.visible(q_rank, kv_rank, self.spec.visibility)
        if self.host is None:
            return on_device
        return tuple(sorted({*on_device, *self.host.parts.visible(q_rank, kv_rank, self.spec.visibility)}))

    def own_queries(self, indices: tuple[int, ...]) -> QueryBatch:
        return QueryBatch(self.group.rank, indices, self.q[:, self.parts.rows(indices, self.q.device)])

    def queries_for(self, kv_rank: int) -> Message:
        """Copy the queries that may see keys of `kv_rank` into a message."""
        message = self.empty_queries(self.group.rank, kv_rank)
        if indices := self.visible(self.group.rank, kv_rank):
            torch.cat([self.q[:, self.parts[index].rows] for index in indices], dim=1, out=message.tensors[0])
        return message

    def empty_queries(self, q_rank: int, kv_rank: int) -> Message:
        return Message.empty([(*self._rows_shape(q_rank, kv_rank), self.spec.head_dim)], self.q)

    def empty_results(self, q_rank: int, kv_rank: int) -> Message:
        """Allocate a message for the partial results of queries of `q_rank` over keys of `kv_rank`."""
        return empty_partials([self._rows_shape(q_rank, kv_rank)], self.spec, self.q)

    def results_for(self, q_rank: int, partial: Partial) -> Message:
        message = self.empty_results(q_rank, self.group.rank)
        for target, tensor in zip(*partials_of(message), partial, strict=True) if message.payload_bytes else ():
            target.copy_(tensor)
        return message

    def _rows_shape(self, q_rank: int, kv_rank: int) -> tuple[int, int]:
        return self.spec.num_heads, sum(self.parts.num_queries(q_rank, self.visible(q_rank, kv_rank)))

    def attend_batch(self, batch: QueryBatch) -> Partial:
        """Attend queries to this member's keys on its device.

        Single queries read their keys in place, in one kernel call. More queries of a part read a contiguous copy,
        which is cheap compared to their attention, or in `local` the new keys if the part has no cached keys.
        """
        (q_rank, indices, q), parts, rank = batch, self.parts, self.group.rank
        counts = parts.num_queries(q_rank, indices)
        if not indices:
            return q, q[..., 0]  # without rows
        if max(counts) == 1:
            plan = parts.plan(indices, q_rank, rank, self.kv, self.spec.visibility)
            return parts.backend.attend_paged(q, self.kv, plan, self.spec)
        if len(indices) > 1 and self.exchange == LOCAL and parts.backend.max_grouped(q, self.spec):
            return self._attend_prompts(batch, counts)
        partials = []
        for index, queries in zip(indices, q.split(counts, dim=1), strict=True):
            part, runs = parts[index], self.needed(rank)[index]
            if part.span_start == 0 and self.exchange == LOCAL:
                k, v, runs = self.k[:, part.rows], self.v[:, part.rows], part.q_runs[rank]
            else:
                k, v = self.gathered(part, runs)
            partials.append(attend_runs(parts.backend, queries, part.q_runs[q_rank], k, v, runs, self.spec))
        return concatenated(partials)

    def _attend_prompts(self, batch: QueryBatch, counts: Sequence[int]) -> Partial:
        """Attend the queries of several parts to their keys in one kernel call.

        Keys are copied unless they are all new and adjacent.
        """
        (_, indices, q), parts, rank = batch, self.parts, self.group.rank
        own = [self.needed(rank)[index] for index in indices]
        lengths = tuple(zip(counts, map(num_tokens, own), strict=True))
        rows = parts.rows(indices, q.device)
        if isinstance(rows, slice) and all(parts[index].span_start == 0 for index in indices):
            return parts.backend.attend_prompts(q, self.k[:, rows], self.v[:, rows], lengths, self.spec)
        shape = (self.spec.num_kv_heads, sum(num_keys for _, num_keys in lengths), self.spec.head_dim)
        k, v = q.new_empty(shape), q.new_empty(shape)
        start = 0
        for index, runs, (_, num_keys) in zip(indices, own, lengths, strict=True):
            each = slice(start, start + num_keys)
            gather_runs(parts.backend, parts[index], runs, rank, self.kv, (k[:, each], v[:, each]))
            start += num_keys
        return parts.backend.attend_prompts(q, k, v, lengths, self.spec)

    def gathered(self, part: MemberPart, runs: Sequence[Run]) -> KeysAndValues:
        """Return a contiguous copy of this member's keys and values of consecutive runs."""
        shape = (self.spec.num_kv_heads, num_tokens(runs), self.spec.head_dim)
        k, v = self.q.new_empty(shape), self.q.new_empty(shape)
        gather_runs(self.parts.backend, part, runs, self.group.rank, self.kv, (k, v))
        return k, v

    # ---------------------------------------------------------------- partial results

    def merge(self, indices: tuple[int, ...], partial: Partial) -> None:
        """Merge a partial result of this member's queries in some parts with earlier ones of the same parts."""
        if indices:
            earlier = self._partials.get(indices)
            self._partials[indices] = partial if earlier is None else merge_each([earlier, partial])

    def finish(self) -> None:
        """Write the merged results to `out`. It is called when an exchange returns."""
        if len(self._partials) > 1:
            self._merge_overlapping()
        if self.sinks is not None and not self._partials and self.q.shape[1] and self.exchange.kind not in BUILT_IN:
            from longspan.errors import PluginError  # noqa: PLC0415 - plug-ins alone

            problem = "writes results without the model's attention sinks: pass partial results to Call.merge"
            raise PluginError(f"exchange {self.exchange.kind} {problem}")
        for indices, (out, lse) in self._partials.items():
            if self.sinks is not None:
                out = with_sinks(out, lse, self.sinks)  # noqa: PLW2901 - the written result
            self.out[:, self.parts.rows(indices, self.q.device)] = out.to(self.out.dtype)  # an index tensor needs it
        self._partials.clear()

    def _merge_overlapping(self) -> None:
        """Merge results of different sets of parts if a part is in several. Queries that a set lacks see nothing."""
        partials, device = dict(self._partials), self.q.device
        union = tuple(sorted({index for indices in partials for index in indices}))
        if len(union) == sum(map(len, partials)):
            return
        for indices, partial in self._partials.items():
            if indices != union:
                out, lse = nothing_seen(self.q if partial[0].dtype == self.q.dtype else self.q.float())
                rows = self.parts.rows(indices, device)
                out[:, rows], lse[:, rows] = partial
                rows = self.parts.rows(union, device)
                partials[indices] = out[:, rows], lse[:, rows]
        self._partials.clear()
        self._partials[union] = merge_each([*partials.values()])


Attend = Callable[[Call], Sequence[KeysAndValues] | None]
"""Compute attention. Return for each part the keys and values to be stored, or None if they were stored before."""
Start = Callable[[Group, MemberParts, PagedKv, AttnSpec], object]
"""Start the transfers of a layer that do not depend on its projections, before these are computed."""


@dataclass(frozen=True, kw_only=True)
class AttentionExchange:
    """The tensor operations of one kind of exchange. `attend` also writes the partial results that the call keeps."""

    attend: Attend
    start: Start | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "attend", _finishing(self.attend))


def _finishing(attend: Attend) -> Attend:
    @functools.wraps(attend)
    def attend_and_write(call: Call) -> Sequence[KeysAndValues] | None:
        stored = attend(call)
        call.finish()
        return stored

    return attend_and_write


_REGISTERED: dict[str, AttentionExchange] = {}


def exchange(kind: Exchange, *, start: Start | None = None) -> Callable[[Attend], Attend]:
    """Register the decorated function for a kind of exchange, with any parameters."""

    def register(attend: Attend) -> Attend:
        added = _REGISTERED[kind.kind] = AttentionExchange(attend=attend, start=start)
        return added.attend

    return register


def attention_exchange(kind: Exchange) -> AttentionExchange:
    """Return the registered operations of a kind."""
    if kind.kind not in _REGISTERED:
        added = None
        if kind.kind not in BUILT_IN:
            from longspan.core.exchange_plugins import plugin_part  # noqa: PLC0415 - plug-ins alone

            added = plugin_part(kind.kind, "attention")
        if added is None:
            importlib.import_module(f"{__name__}.{kind.kind}")
        elif isinstance(added, AttentionExchange):
            _REGISTERED[kind.kind] = added
        else:
            exchange(kind)(cast("Attend", added))
    return _REGISTERED[kind.kind]
