"""Attention layers, unmodified, computed with other weights than their own: for a share of their heads over tokens that
several instances gathered, or for all heads where the layer has a share of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from longspan.attn.spec import AttnSpec
from longspan.model.joining import Weights
from longspan.model.sharding import Shard, head_counts

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Rotary = tuple[Tensor, Tensor]
"""Cosines and sines `[1, tokens, rotary_dim]`."""


class SharingAttend(Protocol):
    """An `Attend` whose last packed tokens may be computed by several instances together.

    Attributes:
        num_alone: how many tokens come before those; None when nothing is computed together.
    """

    num_alone: int | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Of the tokens before those."""

    def share(self, layer: int, hidden: Tensor) -> Tensor:
        """The layer's output `[tokens, hidden]` for those tokens; it calls `SharedLayer.compute`."""


class SharedLayer:
    """One attention module of a model, whose calls it takes over. `specs` are what its layers compute on this rank."""

    def __init__(self, module: nn.Module, specs: tuple[AttnSpec, ...]) -> None:
        self._module, self._specs = module, specs
        self._layer: int = module.layer_idx  # type: ignore[assignment]  # the probe has checked that it is an int
        self._forward: Callable[..., Any] = module.forward
        self._shares: dict[tuple[int, int], dict[str, Tensor]] = {}
        module.forward = self._call

    def compute(self, hidden: Tensor, rotary: Rotary, attend: Attend, *, index: int, size: int) -> Tensor:
        """What one of `size` shares of the heads adds to the output `[tokens, hidden]` of `hidden [tokens, hidden]`."""
        shard = Shard(index=index, size=size, specs=self._specs)
        if (index, size) not in self._shares:
            cut = {name: shard.cut(f"layers.{self._layer}.{_NAME}.{name}", weight) for name, weight in self._weights()}
            self._shares[index, size] = cut
        return self.compute_with(self._shares[index, size], shard.local_specs[self._layer], hidden, rotary, attend)

    def compute_with(self, weights: Weights, spec: AttnSpec, hidden: Tensor, rotary: Rotary, attend: Attend) -> Tensor:
        """The output `[tokens, hidden]` of other weights, with the heads of `spec`."""
        arguments = {"hidden_states": hidden[None], "position_embeddings": rotary, "attention_mask": None}
        with head_counts(self._module, spec):
            output = functional_call(self._module, dict(weights), (), {**arguments, "attend": attend})
        return output[0][0]  # type: ignore[no-any-return]

    def _weights(self) -> list[tuple[str, Tensor]]:
        return list(self._module.named_parameters())

    def _call(self, hidden_states: Tensor, **arguments: Any) -> tuple[Tensor, None]:  # noqa: ANN401
        attend: Any = arguments.get("attend")
        num_alone = getattr(attend, "num_alone", None)
        if num_alone is None:
            return self._forward(hidden_states=hidden_states, **arguments)  # type: ignore[no-any-return]
        outputs = []
        if num_alone:
            rotary = tuple(part[:, :num_alone] for part in arguments.pop("position_embeddings"))
            alone, _ = self._forward(
                hidden_states=hidden_states[:, :num_alone], position_embeddings=rotary, **arguments
            )
            outputs.append(alone[0])
        outputs.append(attend.share(self._layer, hidden_states[0, num_alone:]))
        return torch.cat(outputs)[None], None


_NAME = "self_attn"
