"""Sparse `gather_hidden` for the layers of a model."""

from __future__ import annotations

from longspan.attn.gather_hidden import GatherHidden
from longspan.attn.sparse.gather_hidden import SparseGatherHidden
from longspan.runtime.batch import Channel
from longspan.runtime.layerwise.gather_hidden import HiddenLayers


class SparseHiddenLayers(HiddenLayers):
    """The `gather_hidden_sparse` channels of one step."""

    def _gather_hidden(self, layer: int, channel: Channel) -> GatherHidden:
        context = self._context
        group, kv, model = context.comm.channel(layer, channel), context.pool.layer(layer), context.model
        return SparseGatherHidden(
            *(group, channel.parts, kv, model.specs[layer]),
            setting=channel.exchange.sparse,
            layer=layer,
            num_layers=model.info.num_layers,
            layers=context.pool.layers,
            first_kv_head=model.first_kv_heads[layer],
        )
