"""`gather_hidden` for the layers of a model: wraps each layer's projections in `attn.gather_hidden`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor

from longspan.attn.gather_hidden import AttendPiece, GatherHidden, micro_partitions, pieces_of
from longspan.runtime.batch import Channel
from longspan.runtime.layerwise.layers import StepContext


class HiddenLayers:
    """The `gather_hidden` channels of one step."""

    def __init__(self, context: StepContext, channels: Sequence[Channel]) -> None:
        self._context = context
        self._arguments = {
            channel.number: [
                context.arguments(channel, range(len(channel.members)), all_q_runs=piece)
                for piece in micro_partitions(channel.parts, pieces_of(channel.exchange))
            ]
            for channel in channels
        }

    def begin(self, layer: int) -> None: ...

    def output(self, layer: int, channel: Channel, hidden: Tensor) -> Tensor:
        """Gather hidden states, compute this member's heads, and reduce-scatter the outputs."""
        context, gathered = self._context, self._gather_hidden(layer, channel)
        gathered.observe = None if channel.ratings is None else channel.ratings.add_gathered
        arguments, share = self._arguments[channel.number], {"index": channel.rank, "size": len(channel.members)}

        def project(number: int, hidden: Tensor, attend_piece: AttendPiece) -> Tensor:
            def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                with context.watch.during("attention"):
                    return attend_piece(q, k, v)

            norms = itertools.count()
            return context.layers[layer].compute(
                hidden,
                arguments[number][layer],
                attend,
                lambda term: gathered.sum(number, next(norms), term),
                **share,
            )

        own, keys, values = gathered.compute(hidden, project)
        channel.store(context.pool, layer, keys, values)
        return own

    def _gather_hidden(self, layer: int, channel: Channel) -> GatherHidden:
        context, num_pieces = self._context, pieces_of(channel.exchange)
        group, kv, model = context.comm.channel(layer, channel), context.pool.layer(layer), context.model
        sinks = model.sinks.get(layer)
        return GatherHidden(group, channel.parts, kv, model.specs[layer], sinks=sinks, num_pieces=num_pieces)


class SparseHiddenLayers(HiddenLayers):
    """The `gather_hidden_sparse` channels of one step."""

    def _gather_hidden(self, layer: int, channel: Channel) -> GatherHidden:
        from longspan.attn.sparse.gather_hidden import SparseGatherHidden  # noqa: PLC0415 - only with sparse attention

        context = self._context
        group, kv, model = context.comm.channel(layer, channel), context.pool.layer(layer), context.model
        return SparseGatherHidden(
            *(group, channel.parts, kv, model.specs[layer]),
            sinks=model.sinks.get(layer),
            exchange=channel.exchange,
            layer=layer,
            num_layers=model.info.num_layers,
            layers=context.pool.layers,
            first_kv_head=model.first_kv_heads[layer],
        )
