"""Weights in fewer bits: each group of 32 weights of a row has a step and a base, and each weight is one level.

This is the affine, weight-only quantisation of torchao and of GGUF's `Q4_1`, rounded to nearest. The dequantised
weights are bfloat16 and are stored with the levels. Code that does not read levels (layerwise exchanges, shares of
tensor parallelism) computes with exactly these weights. So does transformers with the stored file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longspan.model.files import Quantization
from longspan.model.store import GRID, NUMBERS

GROUP = 32
_QUANTISED = re.compile(r"(_proj|\blm_head)\.weight$")
_HEAD_BITS = 8
"""The minimum for an output head, since its errors are errors of the logits."""

BITS: dict[str, int] = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The quantised form of a matrix `[outputs, inputs]`.

    Attributes:
        numbers: the level of each weight, `[outputs, inputs]` uint8. With 4 bits `[outputs, inputs / 2]`: the 16 bytes
            of a group hold its first 16 levels in their low halves and its last 16 levels in their high halves.
        grid: `[outputs, inputs / 32, 2]` bfloat16: the step between levels and the base of each group.
    """

    numbers: Tensor
    grid: Tensor

    @property
    def bits(self) -> int:
        return 8 * self.numbers.shape[1] // (self.grid.shape[1] * GROUP)

    def weights(self) -> Tensor:
        """Compute the dequantised weights `[outputs, inputs]` bfloat16."""
        groups = self.numbers.unflatten(1, (self.grid.shape[1], -1))
        if self.bits == 4:
            groups = torch.cat([groups & 15, groups >> 4], dim=2)
        step, base = self.grid.float().unbind(2)
        # The product of a level and a step is exact in float32, so this rounds once, as the kernels do.
        weights: Tensor = groups * step[..., None] + base[..., None]
        return weights.to(torch.bfloat16).flatten(1)


def is_quantised(name: str, weight: Tensor) -> bool:
    """Return True for the parameters with levels: matrices of projections, and of the output head."""
    return bool(_QUANTISED.search(name)) and weight.ndim == 2 and weight.shape[1] % GROUP == 0


def quantise(name: str, weight: Tensor, quantization: Quantization) -> Levels:
    """Round each weight to the nearest of evenly spaced levels between the minimum and the maximum of its group."""
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


def map_levels(stored: Mapping[str, Tensor]) -> dict[str, Levels]:
    """Return the levels of quantised weights, by the names of the weights. `stored` is `StoredTensors.levels`."""
    names = [name.removesuffix(GRID) for name in stored if name.endswith(GRID)]
    return {name: Levels(numbers=stored[name + NUMBERS], grid=stored[name + GRID]) for name in names}


def quantised_bytes(model: nn.Module, quantization: Quantization) -> int:
    """Return the bytes of a model on the meta device: levels, and bfloat16 for parameters without them.

    An output head that is tied to the embedding gets levels of its own.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    levels = [quantise(name, weight, quantization) for name, weight in named if is_quantised(name, weight)]
    others = {id(weight): weight.numel() for name, weight in named if not is_quantised(name, weight)}
    return sum(own.numbers.nbytes + own.grid.nbytes for own in levels) + 2 * sum(others.values())
