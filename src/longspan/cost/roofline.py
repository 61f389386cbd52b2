"""Seconds of operators and of one transformer layer on one rank, by the roofline."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.cost.architecture import Architecture
from longspan.cost.catalog import Attention, Device, Efficiency, LinearCurve
from longspan.cost.precision import BYTES, FORMATS, Format, Precision

Number = TypeVar("Number", float, NDArray[np.float64])

_TILE = 128 * 128
_ROWS = 128


@lru_cache(maxsize=65536)
def linear_s(layer: Layer, rows: float, inputs: float, outputs: float, weights: Format) -> float:
    """Return the seconds of a product of [rows, inputs] and weights [inputs, outputs] in a format."""
    if not rows:
        return 0.0
    return product_s(
        layer.curve(weights),
        rows,
        inputs,
        outputs,
        weight_bytes=BYTES[weights],
        bytes_per_element=layer.bytes_per_element,
        peak=layer.device.peak(weights),
        bytes_per_s=layer.device.bytes_per_s,
        units=layer.device.units,
    )


def product_s(
    curve: LinearCurve,
    rows: Number,
    inputs: Number,
    outputs: Number,
    *,
    weight_bytes: float,
    bytes_per_element: float,
    peak: float,
    bytes_per_s: float,
    units: float,
) -> Number:
    """Return the seconds of a product of [rows, inputs] and weights [inputs, outputs], for numbers or arrays.

    This includes the operator that rounds the inputs, if the curve has one.
    """
    waves = rows * outputs / (_TILE * units)
    filled = waves / (waves + curve.half_wave) * inputs / (inputs + curve.half_depth)
    compute_s = 2 * rows * inputs * outputs / (peak * curve.compute * filled)
    input_bytes = weight_bytes if curve.rounding else bytes_per_element
    moved = inputs * outputs * weight_bytes + rows * (inputs * input_bytes + outputs * bytes_per_element)
    memory_s = moved / (bytes_per_s * curve.memory)
    seconds: Number = (compute_s**curve.smooth + memory_s**curve.smooth) ** (1 / curve.smooth)
    if curve.rounding:
        seconds += rows * inputs * (bytes_per_element + weight_bytes) / (bytes_per_s * curve.rounding)
    return seconds + curve.start_us * 1e-6


_NORM_BYTES = 30
"""Bytes per element of a norm made of single operators: to float32, square, mean, scale, back, times the weight."""
_ROTARY_BYTES = 18
"""Bytes per element of a rotary embedding made of single operators: two products, a rotated copy in two, a sum."""


class LayerSeconds(NamedTuple):
    """Seconds of the operators before attention, or after it, for some tokens."""

    linear_s: float
    elementwise_s: float

    @property
    def total_s(self) -> float:
        return self.linear_s + self.elementwise_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Layer:
    """One layer of a model whose heads and feed-forward layers are split over `tp` devices.

    Attributes:
        attention: the constants of its attention.
    """

    model: Architecture
    device: Device
    efficiency: Efficiency
    attention: Attention
    tp: int

    @property
    def bytes_per_element(self) -> float:
        return self.model.attention.bytes_per_element

    @property
    def precision(self) -> Precision:
        return self.model.precision

    def curve(self, weights: Format) -> LinearCurve:
        """Return the curve of products with weights in a format. Unfused code of 2023 has the products of 2023."""
        return self._curves[weights]

    @cached_property
    def _curves(self) -> dict[Format, LinearCurve]:
        constants, unfused = self.efficiency, self.attention.unfused
        return {
            weights: constants.linear if unfused and BYTES[weights] >= 2 else constants.curve(self.device, weights)
            for weights in FORMATS
        }

    @cached_property
    def heads(self) -> float:
        """Query heads of a rank."""
        return self.model.attention.num_heads / self.tp

    @cached_property
    def kv_heads(self) -> float:
        """KV heads of a rank. If there are fewer heads than ranks, several ranks have a copy of a head."""
        return max(1.0, self.model.attention.num_kv_heads / self.tp)

    @cached_property
    def kv_bytes(self) -> float:
        """Bytes of keys and values of one token on one rank."""
        return self.model.attention.kv_bytes * self.kv_heads / self.model.attention.num_kv_heads

    def before(self, tokens: float) -> LayerSeconds:
        """Return the seconds of the norm, the projections to queries, keys and values, and the rotary embedding."""
        shape = self.model.attention
        outputs = (self.heads + 2 * self.kv_heads) * shape.head_dim
        elementwise_s = self._norm_s(tokens)
        if self.model.rotary and tokens:
            elements = tokens * (self.heads + self.kv_heads) * shape.head_dim
            if self.attention.unfused:
                elementwise_s += self.stream_s(elements * _ROTARY_BYTES)
            else:
                elementwise_s += self.stream_s(elements * (2 * self.bytes_per_element), self.efficiency.stream.rotary)
        return LayerSeconds(linear_s(self, tokens, shape.hidden_size, outputs, self.precision.weights), elementwise_s)

    def projections_s(self, tokens: float) -> float:
        """Return the seconds of the products before and after attention, without the feed-forward layers."""
        shape = self.model.attention
        outputs = (self.heads + 2 * self.kv_heads) * shape.head_dim
        width, weights = self.heads * shape.head_dim, self.precision.weights
        into_s = linear_s(self, tokens, shape.hidden_size, outputs, weights)
        return into_s + linear_s(self, tokens, width, shape.hidden_size, weights)

    def behind(self, tokens: float) -> LayerSeconds:
        """Return the seconds of the output projection, norm and feed-forward layers."""
        model, shape = self.model, self.model.attention
        if not tokens:
            return LayerSeconds(0.0, 0.0)
        width, wide = model.intermediate_size / self.tp, 2 if model.gated else 1
        products_s = (
            linear_s(self, tokens, self.heads * shape.head_dim, shape.hidden_size, self.precision.weights)
            + linear_s(self, tokens, shape.hidden_size, wide * width, self.precision.ffn)
            + linear_s(self, tokens, width, shape.hidden_size, self.precision.ffn)
        )
        element, unfused = self.bytes_per_element, self.attention.unfused
        # Norms are not memory-bound, and include the preceding addition.
        add_s = 2 * self.stream_s(3 * tokens * shape.hidden_size * element) if unfused else 0.0
        touched = 5 if unfused and model.gated else 1 + wide
        limit = None if unfused else self.efficiency.stream.activation
        activation_s = self.stream_s(touched * tokens * width * element, limit)
        norm_s = 0.0 if model.parallel else self._norm_s(tokens)
        return LayerSeconds(products_s, add_s + activation_s + norm_s)

    def head_s(self, tokens: float) -> float:
        """Return the seconds of the output head and the last norm."""
        shape = self.model.attention
        outputs = self.model.vocab_size / self.tp
        product_s = linear_s(self, tokens, shape.hidden_size, outputs, self.precision.activations)
        return product_s + self._norm_s(tokens)

    def host_s(self, messages: int) -> float:
        """Return the seconds in which the host launches the operators of the layer, and of `messages` to peers.

        Fewer KV heads than query heads are repeated, keys and values apart; with fused code `launch_us` is 0.
        """
        shape = self.model.attention
        repeats = 2 if shape.num_kv_heads < shape.num_heads else 0
        return 1e-6 * (self.attention.layer_us + (repeats + messages) * self.attention.launch_us)

    def _norm_s(self, tokens: float) -> float:
        if not tokens:
            return 0.0
        elements = tokens * self.model.attention.hidden_size
        if self.attention.unfused and self.model.rms_norm:
            return self.stream_s(elements * _NORM_BYTES)
        return self.stream_s(elements * (2 * self.bytes_per_element), self.efficiency.stream.norm)

    def stream_s(self, num_bytes: float, per_clock: float | None = None) -> float:
        """Return the seconds of an element-wise operator on `num_bytes`, at most `per_clock` per clock and unit."""
        byte_s = 1 / (self.efficiency.stream.add * self.device.bytes_per_s)
        if per_clock is not None:  # limits of memory and units add up
            byte_s = math.hypot(byte_s, 1 / (per_clock * self.device.units * self.device.clock_hz))
        return self.start_s + num_bytes * byte_s

    @cached_property
    def start_s(self) -> float:
        return self.efficiency.stream.start_us * 1e-6

    def attention_s(self, *, queries: float, pairs: float, keys: float, heads: float, kv_heads: float) -> float:
        """Return the seconds of fused attention.

        Args:
            queries: number of rows. Rows times heads fill the device.
            pairs: pairs of a query and a visible key.
            keys: number of keys read per KV head.
        """
        if not pairs:
            return 0.0
        memory_s = self._read_s(keys, kv_heads)
        # Few queries are packed by KV head. Long keys are split over the device, and merged by a second operator.
        if queries * heads < _ROWS * kv_heads:
            return 2 * self.start_s + memory_s
        waves = max(queries, 1) * heads / (_ROWS * self.device.units)
        filled = waves / (waves + self.efficiency.linear.half_wave)
        compute_s = 4 * pairs * heads * self.model.attention.head_dim / (self._peak * self.attention.attention * filled)
        return 2 * self.start_s + max(compute_s, memory_s)

    def scores_s(self, *, scores: float, keys: float, heads: float, kv_heads: float) -> float:
        """Return the seconds of unfused attention over `scores` per head, including masked, and `keys` per KV head."""
        if not scores:
            return 0.0
        traffic_s = scores * heads * self.attention.score_bytes / (self.device.bytes_per_s * self.attention.score_part)
        products = 4 * scores * heads * self.model.attention.head_dim
        return traffic_s + products / (self._peak * self.efficiency.linear.compute) + self._read_s(keys, kv_heads)

    def _read_s(self, keys: float, kv_heads: float) -> float:
        num_bytes = keys * kv_heads * self.model.attention.kv_bytes / self.model.attention.num_kv_heads
        return num_bytes / (self.device.bytes_per_s * self.efficiency.linear.memory)

    @cached_property
    def _peak(self) -> float:
        return self.device.peak(self.precision.attention)
