"""Pipeline parallelism inside an instance: which modules of a model a rank keeps, and what passes between stages.

Foreign layers become modules that hand through what they get, so that the model itself runs as it is. The first layer
of a stage takes the hidden states of the stage before in place of those that the model hands it: whatever a model does
between its embedding and its first layer is done once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.model.info import ModelInfo
from longspan.model.skeleton import decoder_layers


class Stage:
    """Some consecutive layers of a model, whose module loses all others.

    Attributes:
        is_first, is_last: whether it has the embedding, and the output head.
    """

    def __init__(self, module: PreTrainedModel, info: ModelInfo, layers: range) -> None:
        self.is_first, self.is_last = layers.start == 0, layers.stop == info.num_layers
        self._module = module
        self._taken: Tensor | None = None
        self._given: Tensor | None = None
        own = decoder_layers(module)
        for number, layer in enumerate(own):
            if number not in layers:
                own[number] = PassThrough(layer, number, as_tuple=info.layers_return_tuples)
        if not self.is_first:
            module.set_input_embeddings(_NoEmbedding(info.hidden_size, module.dtype))
            own[layers.start].register_forward_pre_hook(self._take, with_kwargs=True)
        if not self.is_last:
            module.set_output_embeddings(nn.Identity())
            own[layers.stop - 1].register_forward_hook(self._give)

    def before_head(self, hidden: Tensor | None, **arguments: object) -> Tensor:
        """Returns the hidden states `[1, tokens, hidden]` behind its layers, of a stage that is not the last."""
        self.begin(hidden)
        getattr(self._module, self._module.base_model_prefix)(**arguments)
        given, self._given = self._given, None
        assert given is not None, "the model has called its last layer"
        return given

    def begin(self, hidden: Tensor | None) -> None:
        """Sets what the first layer gets in the next call: hidden states of the stage before; None for the first."""
        assert (hidden is None) == self.is_first, "all stages but the first continue another"
        self._taken = hidden

    def _take(self, _layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "hidden_states" in named:
            return given, {**named, "hidden_states": self._taken}
        return (self._taken, *given[1:]), named

    def _give(self, _layer: nn.Module, _given: object, output: Any) -> None:  # noqa: ANN401 - a tensor, or several
        self._given = output[0] if isinstance(output, tuple) else output


class PassThrough(nn.Module):
    """Stands for a layer that is not here. Models read words of their layers, such as `attention_type`."""

    def __init__(self, layer: nn.Module, number: int, *, as_tuple: bool) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(layer).items() if isinstance(value, str)})
        self.layer_idx, self._as_tuple = number, as_tuple

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self._as_tuple else hidden_states


class _NoEmbedding(nn.Module):
    """Stands for the embedding of another stage: gives hidden states that nobody reads."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self._width, dtype=self._dtype, device=tokens.device)
