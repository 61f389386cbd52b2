"""Rotary embeddings that do not depend on which requests share a call.

transformers picks longrope's factors by the largest position of the whole call. In a packed call that would make
one request's result depend on its neighbours', and a request's early chunks on how it was cut. Here every token
carries the length at which its request is pinned.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from longspan.attn.spec import rope_dicts


def rope_types(config: PreTrainedConfig) -> set[str]:
    """Returns all RoPE types that the configuration names, also per layer type."""
    return {kind for rope in rope_dicts(config) if (kind := rope.get("rope_type"))}


def rope_switch_length(config: PreTrainedConfig) -> int | None:
    """Returns the request length in tokens above which longrope takes its long factors; None if it never does."""
    for rope in rope_dicts(config):
        if rope.get("rope_type") == "longrope" and _has_two_sets(rope):
            return int(rope["original_max_position_embeddings"])
    return None


class PinnedLongRope(nn.Module):
    """Stands in for a model's longrope `rotary_emb` and gives each token the factors of its own request.

    It calls the original module with the tokens of the short requests, then with those of the long ones and one
    sentinel position that makes it choose the long factors; so the numbers are transformers' own.
    """

    def __init__(self, inner: nn.Module, switch_length: int) -> None:
        super().__init__()
        self.inner = inner
        self.switch_length = switch_length
        self._is_long: Tensor | None = None

    def pin(self, lengths: Tensor) -> None:
        """Set the pinned request length of every token `[tokens]` of the next call."""
        self._is_long = lengths > self.switch_length

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, `[1, tokens, rotary_dim]`, for `position_ids` `[1, tokens]`."""
        assert self._is_long is not None, "pin() comes before every call"
        is_long, self._is_long = self._is_long, None
        if not is_long.any():
            return self._short(x, position_ids)
        if is_long.all():
            return self._long(x, position_ids)
        short_parts = self._short(x, position_ids[:, ~is_long])
        long_parts = self._long(x, position_ids[:, is_long])
        cos, sin = map(partial(_interleave, is_long), short_parts, long_parts)
        return cos, sin

    def _short(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.inner(x, position_ids=position_ids)
        return cos, sin

    def _long(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        sentinel = position_ids.new_full((1, 1), self.switch_length)
        cos, sin = self.inner(x, position_ids=torch.cat((position_ids, sentinel), dim=1))
        return cos[:, :-1], sin[:, :-1]


def pin_longrope(model: nn.Module, switch_length: int) -> PinnedLongRope:
    """Replace the model's one longrope module in place and return the replacement."""
    found = [name for name, module in model.named_modules() if getattr(module, "rope_type", None) == "longrope"]
    assert len(found) == 1, f"one rotary module expected, found {found}"
    pinned = PinnedLongRope(model.get_submodule(found[0]), switch_length)
    model.set_submodule(found[0], pinned)
    return pinned


def _interleave(is_long: Tensor, short: Tensor, long: Tensor) -> Tensor:
    both = short.new_empty((1, is_long.shape[0], short.shape[-1]))
    both[:, ~is_long] = short
    both[:, is_long] = long
    return both


def _has_two_sets(rope: Mapping[str, Any]) -> bool:
    return bool(rope["short_factor"] != rope["long_factor"] or rope.get("short_mscale") != rope.get("long_mscale"))
