"""The attention of one Forward on one rank. Each layer writes the new KV, then runs the exchange of each channel."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.exchanges import Call, attention_exchange
from longspan.attn.paged import PagedPlan
from longspan.attn.spec import AttnSpec
from longspan.core.exchange import LOCAL
from longspan.model.files import ModelError
from longspan.model.step import KvSlots, SingleTokens
from longspan.runtime.batch import Channel, Packed
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import StepComm
from longspan.runtime.timing import Stopwatch

if TYPE_CHECKING:
    from longspan.attn.hosted import HostPieces, HostSource
    from longspan.runtime.host_pool import HostPool
    from longspan.runtime.layerwise import Layerwise, LayerwiseStep
    from longspan.runtime.layerwise.layers import Arguments
    from longspan.runtime.moves import StepMoves


_LAYERS_AHEAD = 2
"""Layers that start to receive before the first is computed. A message waits until its receiver has started, so it is
hidden behind a whole layer. More layers need more memory, of all new keys and values of a layer each."""


class StepAttention:
    """Compute attention for the model: `(layer, q, k, v) -> out`, all `[heads, tokens, head_dim]`.

    Attributes:
        num_alone: the number of packed tokens before the tokens of layerwise exchanges. None without such exchanges.
    """

    def __init__(
        self,
        packed: Packed,
        comm: StepComm,
        *,
        pool: KvPool,
        specs: Sequence[AttnSpec],
        first_kv_heads: Sequence[int] = (),
        sinks: Mapping[int, Tensor] | None = None,
        watch: Stopwatch,
        layerwise: Layerwise | None = None,
        moves: StepMoves | None = None,
        host: HostPool | None = None,
    ) -> None:
        self._packed, self._comm, self._pool, self._specs, self._watch = packed, comm, pool, specs, watch
        self._first_kv_heads, self._sinks = first_kv_heads, sinks or {}
        self._moves, self._host = moves, host
        self._stores_late = any(channel.exchange.stores_after for channel in packed.channels)
        self.num_alone = packed.num_alone
        self._channels = [(c, attention_exchange(c.exchange)) for c in packed.channels if not c.exchange.is_layerwise]
        self._layerwise: LayerwiseStep | None = None
        if any(channel.exchange.is_layerwise for channel in packed.channels):
            assert layerwise is not None, "layerwise exchanges need a model"
            self._layerwise = layerwise.step(packed, comm, pool=pool, watch=watch)
        self._started: defaultdict[int, deque[object]] = defaultdict(deque)
        self._to_start = iter(pool.layers)
        self._pieces: HostPieces | None = None
        self._hosted = self._host_sources(pool.layers[0])
        for _ in range(_LAYERS_AHEAD if comm.tagged else 1):
            self._start_next()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of this rank's packed tokens, or of the first `num_alone` of them."""
        with self._watch.during("attention"):
            if self._moves is not None:
                self._moves.complete(layer)
            self._packed.slots.write(self._pool, layer, k, v)
        return self.attend_stored(layer, q, k, v)

    def slots(self, layer: int) -> KvSlots | None:
        """Return the slots of all packed tokens, see `AttendStored`. None if exchanges store some of them."""
        slots = self._packed.slots
        if len(slots.rows) != len(self._packed.tokens):
            return None
        if self._moves is not None:
            self._moves.complete(layer)
        _, blocks, offsets = slots.on_device
        return KvSlots(kv=self._pool.layer(layer), blocks=blocks, offsets=offsets)

    def attend_stored(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the attention of the packed tokens, whose KV is in `slots`."""
        spec = self._specs[layer]
        if len(q) != spec.num_heads:  # the model's own code reshapes to all heads
            raise ModelError(f"layer {layer} computes {len(q)} query heads instead of {spec.num_heads}")
        with self._watch.during("attention"):
            self._stream(layer - 1 if self._stores_late else layer)
            out = torch.empty_like(q)
            kv = self._pool.layer(layer)
            for (channel, exchange), host in zip(self._channels, self._hosted, strict=True):
                call = Call(
                    exchange=channel.exchange,
                    group=self._comm.channel(layer, channel),
                    parts=channel.parts,
                    q=q,
                    k=k,
                    v=v,
                    kv=kv,
                    spec=spec,
                    out=out,
                    layer=layer,
                    num_layers=len(self._specs),
                    layers=self._pool.layers,
                    first_kv_head=self._first_kv_heads[layer] if self._first_kv_heads else 0,
                    started=self._started[channel.number].popleft() if exchange.start else None,
                    host=host,
                    sinks=self._sinks.get(layer),
                )
                for (keys, values), slots in zip(exchange.attend(call) or (), channel.slots, strict=True):
                    slots.write(self._pool, layer, keys, values)
                if channel.ratings is not None:
                    channel.ratings.add(call)
            if (following := self._pool.after(layer)) is not None:
                self._hosted = self._host_sources(following)
            self._start_next()
            return out

    def single_tokens(self) -> SingleTokens | None:
        """Return the step's KV reads and writes if every token is the only one of its request, else None.

        The model may then compute the step as a whole, without calls of this object if there are plans. Return None
        while the stopwatch records times per layer. Every token must be sampled, so that none lies inside a prompt.
        """
        packed, num_tokens = self._packed, len(self._packed.tokens)
        if self._watch.enabled or self.num_alone is not None or packed.prompts or len(packed.keep) != num_tokens:
            return None
        kv, slots, sent, sums = self._pool.kv, packed.slots, self._comm.sent, self._comm.recorded_sums()
        return SingleTokens(
            blocks=slots.blocks, offsets=slots.offsets, kv=kv, plans=self._plans(), sent=sent, sums=sums
        )

    def _plans(self) -> Sequence[PagedPlan] | None:
        """Return the reads of each layer for one query per token. None with messages, or with keys on hosts."""
        packed, num_tokens = self._packed, len(self._packed.tokens)
        if len(packed.channels) != 1 or self._moves is not None:
            return None
        (channel,) = packed.channels
        parts = channel.parts
        if channel.exchange != LOCAL or channel.hosted is not None or channel.ratings is not None:
            return None
        if not len(parts) == len(packed.slots.rows) == num_tokens:
            return None
        rows, specs = tuple(range(num_tokens)), [self._specs[layer] for layer in self._pool.layers]
        return [parts.plan(rows, 0, 0, kv, spec.visibility) for kv, spec in zip(self._pool.kv, specs, strict=True)]

    def arguments_alone(self, layer: int) -> Arguments:
        """Return a layer's arguments for the first `num_alone` packed tokens, without the tokens of layerwise parts."""
        assert self._layerwise is not None, "only steps with layerwise parts have two kinds of tokens"
        return self._layerwise.arguments_alone(layer)

    def layerwise(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the output of a layer's attention `[tokens, hidden]` for the tokens of layerwise exchanges."""
        assert self._layerwise is not None, "called only in steps with layerwise parts"
        if not self.num_alone:  # the model has not called `__call__`, which runs the other exchanges
            self._attend_nothing(layer, hidden.dtype, hidden.device)
        return self._layerwise.output(layer, hidden)

    def without_tokens(self, dtype: torch.dtype, device: torch.device) -> None:
        """Take part in every layer's exchanges when this rank has no token. The model cannot run on zero tokens."""
        for layer in self._pool.layers:
            self._attend_nothing(layer, dtype, device)
            if self._layerwise is not None:
                self._layerwise.without_tokens(layer, dtype, device)

    def finish(self) -> None:
        """Stream the KV of the last layer, which no later layer triggers."""
        self._stream(self._pool.layers[-1])

    def _attend_nothing(self, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        spec = self._specs[layer]
        q = torch.empty(spec.num_heads, 0, spec.head_dim, dtype=dtype, device=device)
        kv = torch.empty(spec.num_kv_heads, 0, spec.head_dim, dtype=dtype, device=device)
        self(layer, q, kv, kv)

    def _host_sources(self, layer: int) -> list[HostSource | None]:
        return [self._host_source(channel, layer) for channel, _ in self._channels]

    def _host_source(self, channel: Channel, layer: int) -> HostSource | None:
        """Start to copy host-resident keys of a layer to the device."""
        if channel.hosted is None:
            return None
        from longspan.attn.hosted import HostPieces, HostSource  # noqa: PLC0415 - only with a host tier

        assert self._host is not None, "host-resident keys need a host pool"
        if self._pieces is None:
            self._pieces = HostPieces(self._host.staging)
        kv, pieces = self._host.layer(layer), self._pieces
        source = HostSource(parts=channel.hosted, member=channel.rank, kv=kv, pieces=pieces)
        source.prefetch(self._specs[layer].visibility)
        return source

    def _start_next(self) -> None:
        """Start the sends and receives of the next layer that need no result of that layer."""
        layer = next(self._to_start, None)
        if layer is None:
            return
        for channel, exchange in self._channels:
            if exchange.start is not None:
                if self._moves is not None:
                    self._moves.complete(layer)
                group, kv = self._comm.channel(layer, channel), self._pool.layer(layer)
                self._started[channel.number].append(exchange.start(group, channel.parts, kv, self._specs[layer]))

    def _stream(self, layer: int) -> None:
        if self._moves is not None:
            self._moves.stream(layer)
