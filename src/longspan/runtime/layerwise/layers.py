"""Unmodified attention modules, computed with replaced weights.

The weights are a share of the heads for gathered tokens, or all heads where the rank's model has only a share.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longspan.attn.spec import AttnSpec
from longspan.core.runs import SpanShards, positions
from longspan.model.adapter import Model
from longspan.model.sharding import (
    SharedNorm,
    all_weights,
    head_counts,
    read_sizes_from_weights,
    shared_norms,
    summed_norms,
)
from longspan.model.stages import LayerArguments
from longspan.model.step import Attend, Reduce
from longspan.runtime.batch import Channel
from longspan.runtime.pool import KvPool
from longspan.runtime.step_comm import StepComm
from longspan.runtime.timing import Stopwatch

if TYPE_CHECKING:
    from longspan.runtime.layerwise.unsharded_alltoall import HostWeights

Arguments = Mapping[str, Any]
"""The arguments that a layer passes to its attention, by name."""
Weights = Mapping[str, Tensor]
"""The parameters of an attention module, by their names in it."""


class HookedAttention:
    """Replaces the forward of one attention module of a model.

    The model is called with an `Attend`. With layerwise parts, its method `layerwise(layer, hidden) -> output` computes
    the last packed tokens. `num_alone` is the number of tokens before them, or None without such parts. Its method
    `arguments_alone(layer)` returns a layer's arguments for the tokens before.
    """

    def __init__(self, module: nn.Module, model: Model) -> None:
        self._layer: int = module.layer_idx  # type: ignore[assignment]  # the probe has checked that it is an int
        self._module, self._model, self._spec = module, model, model.specs[self._layer]
        self._forward: Callable[..., Any] = module.forward
        self._names = {*inspect.signature(type(module).forward).parameters} - {"self", "hidden_states"}
        self._shares: dict[tuple[int, int], tuple[Weights, AttnSpec]] = {}
        self._norms: dict[tuple[int, int], list[SharedNorm]] = {}
        module.forward = self._call
        read_sizes_from_weights(module)

    def close(self) -> None:
        self._module.forward = self._forward

    def compute(
        self, hidden: Tensor, arguments: Arguments, attend: Attend, sum_shares: Reduce, *, index: int, size: int
    ) -> Tensor:
        """Return the partial output `[tokens, hidden]` of share `index` of `size` of the heads, for equal `hidden`.

        `sum_shares` sums `[1, tokens, 1]` over all shares, for norms over all heads.
        """
        if (index, size) not in self._shares:
            shard = self._model.shard.within(self._layer, index=index, size=size)
            weights = all_weights(self._module).items()
            path = shard.attention_path(self._layer)
            cut = {name: shard.cut(f"{path}.{name}", weight) for name, weight in weights}
            own = dict(self._module.named_parameters())  # a view of a dequantised weight would keep all of it
            share = {name: part if name in own else part.clone() for name, part in cut.items()}
            self._shares[index, size] = share, shard.local_specs[self._layer]
            shapes = self._model.attention_shapes(self._layer)
            self._norms[index, size] = shared_norms(self._module, path, self._model.shard, shard, shapes)
        with summed_norms(self._norms[index, size], lambda term: self._model.reduce(sum_shares(term))):
            return self.compute_with(*self._shares[index, size], hidden, arguments, attend)

    def compute_with(
        self, weights: Weights, spec: AttnSpec, hidden: Tensor, arguments: Arguments, attend: Attend
    ) -> Tensor:
        """Return the output `[tokens, hidden]` with these weights and the heads of `spec`."""
        named = {"hidden_states": hidden[None], **self._own(arguments), "attend": attend}
        with head_counts(self._module, self._spec, spec):
            output = functional_call(self._module, dict(weights), (), named)
        return _first(output)[0]

    def _call(self, hidden_states: Tensor, **arguments: Any) -> Any:  # noqa: ANN401 - the type depends on the model
        attend: Any = arguments.get("attend", getattr(arguments.get("past_key_values"), "attend", None))
        num_alone = getattr(attend, "num_alone", None)
        if num_alone is None:
            return self._forward(hidden_states=hidden_states, **arguments)
        outputs = []
        if num_alone:
            alone = self._own(attend.arguments_alone(self._layer))
            output = self._forward(hidden_states=hidden_states[:, :num_alone], **alone, attend=attend)
            outputs.append(_first(output)[0])
        outputs.append(attend.layerwise(self._layer, hidden_states[0, num_alone:]))
        return torch.cat(outputs)[None], None

    def _own(self, arguments: Arguments) -> dict[str, Any]:
        """Select the arguments that the layer passes to its attention."""
        return {name: arguments[name] for name in self._names if name in arguments}


def _first(output: Any) -> Tensor:  # noqa: ANN401 - a tensor or a tuple
    return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """The rank's objects of one step that layerwise exchanges use. `host_weights` creates them at the first call."""

    model: Model
    layers: Mapping[int, HookedAttention]
    host_weights: Callable[[], HostWeights]
    comm: StepComm
    pool: KvPool
    watch: Stopwatch

    def arguments(
        self,
        channel: Channel,
        members: Iterable[int],
        rows: slice = slice(None),
        all_q_runs: Sequence[SpanShards] | None = None,
    ) -> LayerArguments:
        """Return the layers' arguments for the tokens of members, ordered by member, then by part.

        `rows` selects some of these tokens. `all_q_runs` has the tokens of each part, by default all.
        """
        all_q_runs = all_q_runs or [part.q_runs for part in channel.parts]
        tokens = [
            (position, length)
            for member in members
            for q_runs, length in zip(all_q_runs, channel.rope_lengths, strict=True)
            for position in positions(q_runs[member])
        ]
        row = torch.tensor(tokens[rows], dtype=torch.int64, device=self.model.module.device).view(-1, 2)
        return self.model.layer_arguments(*row.unbind(1))
