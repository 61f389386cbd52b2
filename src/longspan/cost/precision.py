"""Number formats of tensors: their bytes, with scales, and the formats in which their products are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Format = Literal[
    "float32", "float16", "bfloat16", "fp8", "fp8_block", "int8", "int4", "w8a8", "nvfp4", "mxfp4"
]  # fmt: skip
FORMATS: tuple[Format, ...] = get_args(Format)
Products = Literal["fp32", "fp16", "fp8", "int8", "fp4"]

BYTES: dict[Format, float] = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_block": 1 + 4 / 128**2,
    "int8": 1,
    "int4": 0.5 + 2 / 128,
    "w8a8": 1,
    "nvfp4": 0.5 + 1 / 16,
    "mxfp4": 0.5 + 1 / 32,
}
"""Bytes per element with scales.

As DeepSeek V3, fp8_block has a float32 scale per block of 128 * 128. As GPTQ and AWQ, int4 has a 16-bit scale per group
of 128. An 8-bit scale is for 16 elements in nvfp4, and for 32 in mxfp4. Scales per tensor or channel are neglected.
"""
_PRODUCTS: dict[Format, Products] = {
    "float32": "fp32",
    "fp8": "fp8",
    "fp8_block": "fp8",
    "w8a8": "int8",
    "nvfp4": "fp4",
}
"""Formats in which both inputs of a product are. Weights in other formats are converted to 16 bits."""


def products_of(weights: Format) -> Products:
    """Return the format that products with these weights are computed in, where the device supports it."""
    return _PRODUCTS.get(weights, "fp16")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The format of each kind of tensor.

    Attributes:
        weights: projections of attention.
        ffn: feed-forward weights, with experts.
        kv: stored keys and values.
        attention: inputs of the products of attention.
        activations: hidden states, norms, embedding and output head, which quantised checkpoints keep in 16 bits.
    """

    weights: Format
    ffn: Format
    kv: Format
    attention: Format
    activations: Format

    @classmethod
    def of(cls, dtype: Format, *, ffn: Format | None = None, kv: Format | None = None) -> Precision:
        """Return the precision of a model with weights in `dtype`. With fewer than 16 bits, the rest is bfloat16.

        Args:
            ffn: of feed-forward weights, if it differs.
            kv: of stored keys and values, if it differs from activations. Attention computes with it where it is fp8.
        """
        rest: Format = dtype if BYTES[dtype] >= 2 else "bfloat16"
        kept = rest if kv is None else kv
        attention: Format = "fp8" if kept == "fp8" else rest
        return cls(weights=dtype, ffn=ffn or dtype, kv=kept, attention=attention, activations=rest)

    @property
    def weight_bytes(self) -> float:
        return BYTES[self.weights]

    @property
    def ffn_bytes(self) -> float:
        return BYTES[self.ffn]

    @property
    def kv_bytes(self) -> float:
        return BYTES[self.kv]

    @property
    def activation_bytes(self) -> float:
        return BYTES[self.activations]

    def __str__(self) -> str:
        """Name the formats, such as `bfloat16, fp8 FFN, fp8 KV`."""
        ffn = [f"{self.ffn} FFN"] if self.ffn != self.weights else []
        kv = [f"{self.kv} KV"] if self.kv != self.activations else []
        return ", ".join([self.weights, *ffn, *kv])


HALF = Precision.of("bfloat16")
