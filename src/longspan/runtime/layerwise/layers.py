"""Attention layers, unmodified, computed with other weights than their own: with a share of their heads for tokens that
several instances gathered, or with all heads where the model has a share of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longspan.attn.spec import AttnSpec
from longspan.core.runs import positions
from longspan.model.adapter import Model
from longspan.model.sharding import Shard, head_counts
from longspan.model.stages import LayerArguments
from longspan.model.step import Attend
from longspan.runtime.batch import Channel
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import StepComm
from longspan.runtime.timing import Stopwatch

Arguments = Mapping[str, Any]
"""The arguments of a layer, which it hands on to its attention, by name."""
Weights = Mapping[str, Tensor]
"""The parameters of an attention module, by their names in it."""

NAME = "self_attn"
"""The name of attention in the paths of its parameters, by which they are cut."""


class UnshardedWeights(Protocol):
    """Fetches the weights of one layer after the other, one ahead: `take(layer)`, then `start(layer + 1)`."""

    def start(self, layer: int) -> None:
        """Begins to fetch a layer. The layer before it may not have been computed yet; all earlier ones have."""

    def take(self, layer: int) -> Weights:
        """Returns a layer's weights, valid for what is computed from now on until the next layer but one is started."""


class HookedAttention:
    """One attention module of a model, whose calls it takes over. `specs` are what the model's layers compute here.

    The model is called with an `Attend` that may have a method `layerwise(layer, hidden) -> output` for its last packed
    tokens, and then has `num_alone`: how many tokens come before those, or None when the step has no such tokens. Its
    method `arguments_alone(layer)` returns the arguments of a layer for the tokens before.
    """

    def __init__(self, module: nn.Module, specs: tuple[AttnSpec, ...]) -> None:
        self._module, self._specs = module, specs
        self._layer: int = module.layer_idx  # type: ignore[assignment]  # the probe has checked that it is an int
        self._forward: Callable[..., Any] = module.forward
        self._names = {*inspect.signature(type(module).forward).parameters} - {"self", "hidden_states"}
        self._shares: dict[tuple[int, int], dict[str, Tensor]] = {}
        module.forward = self._call

    def close(self) -> None:
        self._module.forward = self._forward

    def compute(self, hidden: Tensor, arguments: Arguments, attend: Attend, *, index: int, size: int) -> Tensor:
        """Returns what one of `size` shares of the heads adds to the output `[tokens, hidden]`, for `hidden` alike."""
        shard = Shard(index=index, size=size, specs=self._specs)
        if (index, size) not in self._shares:
            weights = self._module.named_parameters()
            cut = {name: shard.cut(f"layers.{self._layer}.{NAME}.{name}", weight) for name, weight in weights}
            self._shares[index, size] = cut
        spec = shard.local_specs[self._layer]
        return self.compute_with(self._shares[index, size], spec, hidden, arguments, attend)

    def compute_with(
        self, weights: Weights, spec: AttnSpec, hidden: Tensor, arguments: Arguments, attend: Attend
    ) -> Tensor:
        """Returns the output `[tokens, hidden]` of other weights, with the heads of `spec`."""
        named = {"hidden_states": hidden[None], **self._own(arguments), "attend": attend}
        with head_counts(self._module, spec):
            output = functional_call(self._module, dict(weights), (), named)
        return _first(output)[0]

    def _call(self, hidden_states: Tensor, **arguments: Any) -> Any:  # noqa: ANN401 - what its model expects
        attend: Any = arguments.get("attend")
        num_alone = getattr(attend, "num_alone", None)
        if num_alone is None:
            return self._forward(hidden_states=hidden_states, **arguments)
        outputs = []
        if num_alone:
            alone = self._own(attend.arguments_alone(self._layer))
            made = self._forward(hidden_states=hidden_states[:, :num_alone], **alone, attend=attend)
            outputs.append(_first(made)[0])
        outputs.append(attend.layerwise(self._layer, hidden_states[0, num_alone:]))
        return torch.cat(outputs)[None], None

    def _own(self, arguments: Arguments) -> dict[str, Any]:
        """Picks the arguments that the layer hands on to its attention."""
        return {name: arguments[name] for name in self._names if name in arguments}


def _first(output: Any) -> Tensor:  # noqa: ANN401 - a tensor, or several
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The rank's side of one step, which layerwise exchanges use. `host_weights` are made when they are asked for."""

    model: Model
    layers: Mapping[int, HookedAttention]
    host_weights: Callable[[], UnshardedWeights]
    comm: StepComm
    pool: KvPool
    watch: Stopwatch

    def arguments(self, channel: Channel, members: Iterable[int], rows: slice = slice(None)) -> LayerArguments:
        """Returns what layers are handed for the tokens of some members, or for some `rows` of these.

        They are ordered by member, then by part.
        """
        tokens = [
            (position, length)
            for member in members
            for part, length in zip(channel.parts, channel.rope_lengths, strict=True)
            for position in positions(part.q_runs[member])
        ]
        row = torch.tensor(tokens[rows], dtype=torch.int64, device=self.model.module.device).view(-1, 2)
        return self.model.layer_arguments(*row.unbind(1))
