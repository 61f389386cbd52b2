"""Weights in fewer bits: groups of 32 numbers of a row have a step and a base, and each number is one of their levels.

This is the affine, weight-only quantisation of torchao and of GGUF's `Q4_1`, rounded to nearest. The weights that a
level stands for are bfloat16, and are stored beside the levels. So whatever does not read levels (prompts through
another exchange, a share of tensor parallelism) computes with the very same weights, and so does the model that
transformers would make of the stored file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 32
NUMBERS, GRID = ".numbers", ".grid"
"""The names of levels in a file end so, behind the name of the weight."""
_QUANTISED = re.compile(r"(_proj|\blm_head)\.weight$")
_HEAD_BITS = 8
"""An output head has at least so many: its errors are those of the logits."""

Quantization = Literal["int8", "int4"]
BITS: dict[str, int] = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class Levels:
    """A matrix `[outputs, inputs]` is stored as the levels of its numbers.

    Attributes:
        numbers: `[outputs, inputs]` uint8; with 4 bits `[outputs, inputs / 2]`, where the 16 bytes of a group hold its
            first 16 numbers in their low halves and the others in their high halves.
        grid: `[outputs, inputs / 32, 2]` bfloat16, of each group the step between levels and the base.
    """

    numbers: Tensor
    grid: Tensor

    @property
    def bits(self) -> int:
        return 8 * self.numbers.shape[1] // (self.grid.shape[1] * GROUP)

    def weights(self) -> Tensor:
        """Returns the weights `[outputs, inputs]` that they stand for, bfloat16."""
        groups = self.numbers.unflatten(1, (self.grid.shape[1], -1))
        if self.bits == 4:
            groups = torch.cat([groups & 15, groups >> 4], dim=2)
        step, base = self.grid.float().unbind(2)
        # The products of a level and a step are exact in float32, so this is one rounding, as that of the kernels.
        weights: Tensor = groups * step[..., None] + base[..., None]
        return weights.to(torch.bfloat16).flatten(1)


def is_quantised(name: str, weight: Tensor) -> bool:
    """Tells whether a parameter is one whose levels are stored: of a projection, or of the output head."""
    return bool(_QUANTISED.search(name)) and weight.ndim == 2 and weight.shape[1] % GROUP == 0


def quantise(name: str, weight: Tensor, quantization: Quantization) -> Levels:
    """Rounds each number to the nearest of evenly spaced levels from the least to the greatest of its group."""
    bits = max(BITS[quantization], _HEAD_BITS) if "lm_head" in name else BITS[quantization]
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    step = ((high - low) / (2**bits - 1)).to(torch.bfloat16)
    base = low.to(torch.bfloat16)
    spacing = step.float().clamp(min=torch.finfo(torch.bfloat16).tiny)
    numbers = ((groups - base.float()[..., None]) / spacing[..., None]).round().clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        numbers = numbers[..., : GROUP // 2] | numbers[..., GROUP // 2 :] << 4
    return Levels(numbers=numbers.flatten(1), grid=torch.stack([step, base], dim=2))
