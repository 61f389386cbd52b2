"""Rotary embeddings by longrope, whose factors follow from the length of each request."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from longspan.model.step import CurrentStep


def pin_longrope(model: nn.Module, switch_length: int, current: CurrentStep) -> None:
    """Replace the model's longrope modules in place. Some models have one for each base of their layers."""
    names = [name for name, module in model.named_modules() if getattr(module, "rope_type", None) == "longrope"]
    assert names, "the model has longrope"
    for name in names:
        model.set_submodule(name, _PinnedLongRope(model.get_submodule(name), switch_length, current))


class _PinnedLongRope(nn.Module):
    """Replaces a model's longrope `rotary_emb`, and applies to each token the factors of its own request.

    transformers chooses longrope's factors by the largest position of the whole call. In a packed call one request's
    result would depend on its neighbours', and the early chunks of a request on their sizes. Here every token has the
    pinned length of its request, `StepState.rope_lengths`. The original module is called with the tokens of the short
    requests, then with those of the long ones. One sentinel position makes it choose the long factors, so the numbers
    are transformers' own.
    """

    def __init__(self, inner: Any, switch_length: int, current: CurrentStep) -> None:  # noqa: ANN401 - of any class
        super().__init__()
        self.config = inner.config  # some models look modules up by it
        self.inner, self.switch_length, self._current = inner, switch_length, current

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        lengths = self._current.state.rope_lengths
        assert lengths is not None, "longrope needs the length of each token's request"
        is_long = lengths > self.switch_length
        if not is_long.any():
            cos, sin = self.inner(x, position_ids=position_ids)
            return cos, sin
        sentinel = position_ids.new_full((1, 1), self.switch_length)
        long_ids = torch.cat((position_ids[:, is_long], sentinel), dim=1)
        cos, sin = (part[:, :-1] for part in self.inner(x, position_ids=long_ids))
        if is_long.all():
            return cos, sin
        short_cos, short_sin = self.inner(x, position_ids=position_ids[:, ~is_long])
        return _interleave(is_long, short_cos, cos), _interleave(is_long, short_sin, sin)


def _interleave(is_long: Tensor, short: Tensor, long: Tensor) -> Tensor:
    both = short.new_empty((1, is_long.shape[0], short.shape[-1]))
    both[:, ~is_long] = short
    both[:, is_long] = long
    return both
