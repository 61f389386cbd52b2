"""Pipeline parallelism inside an instance: the modules that a rank keeps, and the hidden states between stages.

Layers of other stages are replaced by modules that return their input, so the model itself runs unmodified. A hook
replaces the input of a stage's first layer by the hidden states from the stage before. So operations between the
embedding and the first layer take effect once. If a model hands tokens to later layers, every stage keeps embeddings.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attn.spec import AttnSpec
from longspan.model.info import ModelInfo
from longspan.model.skeleton import decoder_layers
from longspan.model.step import CurrentStep

LayerArguments = Mapping[int, Mapping[str, Any]]
"""The arguments of each layer, by name, without hidden states."""
_SHARED = "shared_kv_states"
"""The argument in which layers share keys and values."""
_VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD
_signature = cache(inspect.signature)


class Stage:
    """Consecutive layers of a model. The module loses all other layers.

    Args:
        specs: the attention of all layers, with this rank's share of the heads.

    Attributes:
        is_first, is_last: whether the stage has the embedding, and the output head.
        width: elements per token from the stage before; 0 for the first stage.
    """

    def __init__(
        self, module: PreTrainedModel, info: ModelInfo, layers: range, specs: Sequence[AttnSpec], current: CurrentStep
    ) -> None:
        self.is_first, self.is_last = layers.start == 0, layers.stop == info.num_layers
        self._passed_width, self._current = info.passed_width, current
        own = decoder_layers(module)
        self._received_kv, self._sent_kv = (_SharedKv(own, specs, cut) for cut in (layers.start, layers.stop))
        self.width = 0 if self.is_first else self._passed_width + self._received_kv.width
        for number, layer in enumerate(own):
            if number not in layers:
                own[number] = PassThrough(layer, number, as_tuple=info.layers_return_tuples)
        if not self.is_first:
            if not info.reads_tokens:
                width = module.get_input_embeddings().weight.shape[1]
                module.set_input_embeddings(_NoEmbedding(width, module.dtype, own[layers.start]))
            own[layers.start].register_forward_pre_hook(self._replace_input, with_kwargs=True)
        if not self.is_last:
            module.set_output_embeddings(_NoHead())
            own[layers.stop - 1].register_forward_hook(self._keep_output, with_kwargs=True)

    def _replace_input(
        self, _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Replace the input of the first layer by the hidden states from the stage before."""
        passed = self._current.state.hidden
        if passed is None:  # `Model.layer_arguments`
            return args, kwargs
        hidden, shared = passed.split([self._passed_width, self._received_kv.width], dim=-1)
        self._received_kv.put(shared, kwargs)
        replaced = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        *before, num_tokens, width = replaced.shape  # some models have several hidden states of a token
        hidden = hidden.view(num_tokens, *before, width).movedim(0, -2)
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": hidden}
        return (hidden, *args[1:]), kwargs

    def _keep_output(self, _layer: nn.Module, _args: object, kwargs: Mapping[str, Any], output: Any) -> None:  # noqa: ANN401
        """Keep the hidden states of the last layer for the next stage."""
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        hidden = hidden.movedim(-2, 0).reshape(1, -1, self._passed_width)
        shared = self._sent_kv.get(kwargs) if self._sent_kv.width else []
        self._current.state.passed = torch.cat((hidden, *shared), dim=-1) if shared else hidden


class _SharedKv:
    """Keys and values of layers before a cut between stages, to which layers after the cut attend as well.

    Such models hand a dictionary from layer to layer. Some layers store their KV in it, by the type of the layer.

    Attributes:
        width: elements per token.
    """

    def __init__(self, layers: nn.ModuleList, specs: Sequence[AttnSpec], cut: int) -> None:
        attention: list[Any] = [
            next((part for part in layer.modules() if hasattr(part, "is_kv_shared_layer")), None) for layer in layers
        ]
        read = {module.layer_type for module in attention[cut:] if module is not None and module.is_kv_shared_layer}
        stored = {
            module.layer_type: specs[number]
            for number, module in enumerate(attention[:cut])
            if module is not None and module.store_full_length_kv and module.layer_type in read
        }
        self._shapes = {name: (spec.num_kv_heads, spec.head_dim) for name, spec in sorted(stored.items())}
        self.width = sum(2 * heads * dim for heads, dim in self._shapes.values())

    def get(self, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the shared keys and values from a layer's arguments, as tensors `[1, tokens, elements]`."""
        pairs = [kwargs[_SHARED][name] for name in self._shapes]
        return [tensor.transpose(1, 2).flatten(2) for pair in pairs for tensor in pair]

    def put(self, packed: Tensor, kwargs: Mapping[str, Any]) -> None:
        """Put the shared keys and values of an earlier stage, `[1, tokens, width]`, into a layer's arguments."""
        sizes = [heads * dim for heads, dim in self._shapes.values() for _ in range(2)]
        pieces = iter(packed.split(sizes, dim=-1))
        for name, shape in self._shapes.items():
            kwargs[_SHARED][name] = tuple(next(pieces).unflatten(2, shape).transpose(1, 2) for _ in range(2))


class PassThrough(nn.Module):
    """Replaces a layer of another stage. It keeps the layer's strings, such as `attention_type`, which models read."""

    def __init__(self, layer: nn.Module, number: int, *, as_tuple: bool) -> None:
        super().__init__()
        vars(self).update({name: value for name, value in vars(layer).items() if isinstance(value, str)})
        self.layer_idx, self._as_tuple = number, as_tuple

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor | tuple[Tensor]:
        return (hidden_states,) if self._as_tuple else hidden_states


class _NoEmbedding(nn.Module):
    """Replaces the embedding in later stages. The first layer's hook discards these hidden states."""

    def __init__(self, width: int, dtype: torch.dtype, first_layer: nn.Module) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype
        self._first_layer = (first_layer,)  # in a tuple, so that it is not a part of this module

    @property
    def weight(self) -> Tensor:
        """A weight of the first layer: some models move tokens to the device of the embedding's weights."""
        return next(self._first_layer[0].parameters())

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.zeros(*tokens.shape, self._width, dtype=self._dtype, device=tokens.device)


class _NoHead(nn.Identity):
    """Replaces the output head in earlier stages. Some models read its bias when it is set."""

    bias = None


@contextmanager
def recorded_arguments(layers: Mapping[int, nn.Module]) -> Iterator[dict[int, dict[str, Any]]]:
    """Record the arguments of each layer instead of computing it. The call of the model ends at the last layer."""
    recorded: dict[int, dict[str, Any]] = {}

    def record(number: int, layer: nn.Module) -> Callable[..., Any]:
        signature = _signature(type(layer).forward)

        def forward(*args: object, **kwargs: object) -> Any:  # noqa: ANN401 - the hidden states
            bound = signature.bind(layer, *args, **kwargs).arguments
            extra = {name: bound.pop(name) for name in list(bound) if signature.parameters[name].kind is _VAR_KEYWORD}
            recorded[number] = {**bound, **{name: value for some in extra.values() for name, value in some.items()}}
            if number == last:
                raise _AllRecorded
            return args[0] if args else kwargs["hidden_states"]

        return forward

    last = max(layers)
    before = {number: vars(layer).get("forward") for number, layer in layers.items()}
    for number, layer in layers.items():
        vars(layer)["forward"] = record(number, layer)
    try:
        with suppress(_AllRecorded):
            yield recorded
    finally:
        for number, layer in layers.items():
            del vars(layer)["forward"]
            if before[number] is not None:
                vars(layer)["forward"] = before[number]


class _AllRecorded(Exception):  # noqa: N818 - not an error
    """The arguments of the last layer are known."""
