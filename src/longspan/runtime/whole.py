"""`alltoall` with whole weights on one rank of an instance that is split by tensor parallelism, layer by layer.

Each rank of an instance makes the queries, keys and values of all heads for a slice of its tokens. They are swapped
inside the instance, so that each rank has its heads for all of them, as ever; `alltoall` between the instances follows.
Then outputs are swapped back, each rank finishes its slice, and all ranks get all tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from longspan.attn.exchanges.alltoall import alltoall
from longspan.attn.exchanges.inside import Inside
from longspan.attn.member import MemberParts
from longspan.attn.spec import AttnSpec
from longspan.core.steps import WHOLE
from longspan.kv.pool import KvPool
from longspan.model.adapter import Model
from longspan.model.joining import Weights
from longspan.model.shared_layers import Rotary
from longspan.runtime.batch import Channel, Packed
from longspan.runtime.step_comm import StepComm
from longspan.runtime.timing import Stopwatch

Store = Callable[[int, Channel, Tensor, Tensor], None]
"""Writes a layer's keys and values of this instance's tokens of a channel to the pool."""


class WholeStep:
    """The channels of one step that need whole weights. All ranks of an instance call it alike, without tokens too."""

    def __init__(
        self, packed: Packed, comm: StepComm, *, model: Model, pool: KvPool, store: Store, watch: Stopwatch
    ) -> None:
        self._comm, self._model, self._pool, self._store, self._watch = comm, model, pool, store, watch
        channels = [channel for channel in packed.channels if channel.exchange in WHOLE]
        self._parts = {channel.number: _from_zero(channel.parts) for channel in channels}
        self._rotary = {c.number: _rotary(c, packed, model) for c in channels if c.num_tokens}
        used = dict.fromkeys(channel.exchange for channel in channels if channel.num_tokens)
        self._sources = {one: model.whole_weights(one, partial(comm.inside, "weights")) for one in used}
        self._weights: dict[str, Weights] = {}
        self._start(0)

    def begin(self, layer: int) -> None:
        """Before the outputs of a layer's channels: waits for its weights, and sends for those of the next."""
        self._weights = {exchange: source.take(layer) for exchange, source in self._sources.items()}
        self._start(layer + 1)

    def output(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        """The output `[tokens, hidden]` of a layer's attention for this instance's tokens of a channel."""
        spec = self._model.info.specs[layer]
        inside = Inside(self._comm.inside("alltoall"), spec, len(hidden))
        mine = hidden[inside.mine]

        def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with self._watch.during("attention"):
                q, k, v = inside.to_heads(q, k, v)
                self._store(layer, channel, k, v)
                out, kv = torch.empty_like(q), self._pool.layer(layer)
                group, parts = self._comm.channel(layer, channel), self._parts[channel.number]
                alltoall(group, parts, q, kv, self._model.specs[layer], out)
                return inside.to_tokens(out)

        if not len(mine):  # the module cannot run on none
            attend(layer, *_nothing(spec, hidden))
            return inside.gather(mine)
        rotary = self._rotary[channel.number]
        own = rotary[0][:, inside.mine], rotary[1][:, inside.mine]
        weights = self._weights[channel.exchange]
        with self._model.without_sums():
            made = self._model.shared_layers[layer].compute_with(weights, spec, mine, own, attend)
        return inside.gather(made)

    def _start(self, layer: int) -> None:
        if layer < self._model.info.num_layers:
            for source in self._sources.values():
                source.start(layer)


def _from_zero(parts: MemberParts) -> MemberParts:
    """With rows that count from the first of them, which follow each other."""
    first = parts[0].rows.start
    return MemberParts([replace(p, rows=slice(p.rows.start - first, p.rows.stop - first)) for p in parts])


def _rotary(channel: Channel, packed: Packed, model: Model) -> Rotary:
    rows = slice(channel.parts[0].rows.start, channel.parts[-1].rows.stop)
    return model.rotary(packed.positions[rows], packed.rope_lengths[rows])


def _nothing(spec: AttnSpec, like: Tensor) -> Sequence[Tensor]:
    """Queries, keys and values of no token."""
    return [like.new_empty(heads, 0, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
