"""Exchanges that replace whole attention layers, in addition to the attention exchanges of `attn`.

The first step with a layerwise part hooks the model's attention modules. Tokens of other parts still use Hugging Face's
own forward.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longspan.attn.paged import on_device
from longspan.core.exchange import ALLTOALL, GATHER_HIDDEN, GATHER_HIDDEN_SPARSE
from longspan.model.adapter import Model
from longspan.model.files import ModelError
from longspan.model.sharding import attention_modules
from longspan.model.stages import LayerArguments
from longspan.runtime.batch import Channel, Packed
from longspan.runtime.layerwise.layers import Arguments, HookedAttention, StepContext
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import StepComm
from longspan.runtime.timing import Stopwatch

if TYPE_CHECKING:
    from longspan.runtime.layerwise.gather_hidden import HiddenLayers
    from longspan.runtime.layerwise.unsharded_alltoall import HostWeights, UnshardedLayers


LAYERWISE = {
    GATHER_HIDDEN.kind: ("gather_hidden", "HiddenLayers"),
    GATHER_HIDDEN_SPARSE.kind: ("gather_hidden", "SparseHiddenLayers"),
    ALLTOALL.kind: ("unsharded_alltoall", "UnshardedLayers"),
}
"""The registry of layerwise exchanges: by kind, the module and its class. Add an exchange here, and its traits in
`core/exchange.py`. The first step that needs a module imports it. All ranks of a group make the same calls."""


@cache
def _layerwise(kind: str) -> Callable[[StepContext, Sequence[Channel]], HiddenLayers | UnshardedLayers]:
    module, name = LAYERWISE[kind]
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)  # type: ignore[no-any-return]


class Layerwise:
    """Computes attention layers of a model by layerwise exchanges."""

    def __init__(self, model: Model) -> None:
        self._model = model

    @cached_property
    def _layers(self) -> dict[int, HookedAttention]:
        shard = self._model.shard
        modules = attention_modules(self._model.module, shard.roles)
        if modules.keys() != self._model.layers.keys() or not all(map(shard.has_output, modules)):
            raise ModelError("its attention is not of a known form: no matrix of it reads the outputs of its heads")
        return {layer: HookedAttention(module, self._model) for layer, module in modules.items()}

    @cached_property
    def _host_weights(self) -> HostWeights:
        from longspan.runtime.layerwise.unsharded_alltoall import HostWeights  # noqa: PLC0415 - only if a step needs it

        return HostWeights(self._model.stored_attention, self._model.module.device)

    def step(self, packed: Packed, comm: StepComm, *, pool: KvPool, watch: Stopwatch) -> LayerwiseStep:
        """Begin a step. The tokens of layerwise channels are last in its packed row, in the order of the channels."""
        context = StepContext(
            model=self._model,
            layers=self._layers,
            host_weights=lambda: self._host_weights,
            comm=comm,
            pool=pool,
            watch=watch,
        )
        return LayerwiseStep(context, packed)

    def close(self) -> None:
        """Restore the model's own attention forwards."""
        for layer in self.__dict__.pop("_layers", {}).values():  # empty unless a step has hooked them
            layer.close()


class LayerwiseStep:
    """The layerwise channels of one step, of all kinds."""

    def __init__(self, context: StepContext, packed: Packed) -> None:
        self._channels = channels = [channel for channel in packed.channels if channel.exchange.is_layerwise]
        self._model = context.model
        self._alone: LayerArguments = {}
        if packed.num_alone:
            row = packed.positions[: packed.num_alone], packed.rope_lengths[: packed.num_alone]
            self._alone = context.model.layer_arguments(*on_device(row, context.model.module.device))
        self._exchanges = {
            kind: _layerwise(kind)(context, [channel for channel in channels if channel.exchange.kind == kind])
            for kind in dict.fromkeys(channel.exchange.kind for channel in channels)
        }

    def arguments_alone(self, layer: int) -> Arguments:
        """Return a layer's arguments for the tokens outside layerwise channels."""
        return self._alone[layer]

    def output(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the output `[tokens, hidden]` of a layer's attention for all tokens of the channels."""
        for exchange in self._exchanges.values():
            exchange.begin(layer)
        outputs, start = [], 0
        for channel in self._channels:
            rows = slice(start, start + channel.num_tokens)
            outputs.append(self._exchanges[channel.exchange.kind].output(layer, channel, hidden[rows]))
            start = rows.stop
        return torch.cat(outputs)

    def without_tokens(self, layer: int, dtype: torch.dtype, device: torch.device) -> None:
        """Take part in a layer's exchanges when this rank has no token."""
        self.output(layer, torch.empty(0, self._model.info.hidden_size, dtype=dtype, device=device))
