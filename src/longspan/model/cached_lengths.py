"""Layers that derive positions from the length of their KV cache instead of `position_ids`.

Llama 4 scales the queries of layers without RoPE by their positions: the index in the call, plus the cached tokens. A
step of longspan has no cache of transformers, and its tokens are of several requests, or some tokens of one request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from longspan.attn.spec import reads_cached_length


class CachedLengths:
    """Replaces the KV cache of transformers in a call. Its length is `position - index` for each token, `[tokens]`."""

    def __init__(self, positions: Tensor) -> None:
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, _layer: int = 0) -> Tensor:
        return self._lengths

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        """Return the new keys and values: the KV pool keeps them."""
        return keys, values


def give_cached_lengths(layers: Iterable[nn.Module]) -> None:
    """Pass `CachedLengths` to the layers that read the length of their cache."""
    for layer in layers:
        if any(reads_cached_length(module) for module in layer.modules()):
            layer.register_forward_pre_hook(_with_lengths, with_kwargs=True)


def _with_lengths(
    _layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {**kwargs, "past_key_values": CachedLengths(kwargs["position_ids"][0])}
