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
from longspan.cost.flash import FlashCurve, flash_curve
from longspan.cost.layer_kinds import Experts, Latent
from longspan.cost.precision import BYTES, FORMATS, Format, Precision

Number = TypeVar("Number", float, NDArray[np.float64])

_TILE = 128 * 128


@lru_cache(maxsize=65536)
def linear_s(layer: Layer, rows: float, inputs: float, outputs: float, weights: Format, groups: float = 1) -> float:
    """Return the seconds of a product of [rows, inputs] and weights [inputs, outputs] in a format.

    Several `groups` of equal products, each with its own weights, have an equal part of the device each.
    """
    if not rows:
        return 0.0
    return product_s(
        layer.curve(weights),
        rows,
        inputs,
        outputs,
        weight_bytes=BYTES[weights],
        bytes_per_element=layer.bytes_per_element,
        peak=layer.device.peak(weights) / groups,
        bytes_per_s=layer.device.bytes_per_s / groups,
        units=layer.device.units / groups,
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
        elementwise_s = self._norm_s(tokens)
        if shape.latent is not None and tokens:  # norms of compressed queries and keys
            elements = tokens * (shape.latent.q_rank + shape.latent.rank)
            elementwise_s += self.stream_s(elements * (2 * self.bytes_per_element), self.efficiency.stream.norm)
        if self.model.rotary and tokens:
            rotary_dim = shape.head_dim if shape.latent is None else shape.latent.rotary_dim
            elements = tokens * (self.heads + self.kv_heads) * rotary_dim
            if self.attention.unfused:
                elementwise_s += self.stream_s(elements * _ROTARY_BYTES)
            else:
                elementwise_s += self.stream_s(elements * (2 * self.bytes_per_element), self.efficiency.stream.rotary)
        return LayerSeconds(self._heads_s(tokens), elementwise_s)

    def projections_s(self, tokens: float) -> float:
        """Return the seconds of the products before and after attention, without the feed-forward layers."""
        return self._heads_s(tokens) + self._output_s(tokens)

    def _heads_s(self, tokens: float) -> float:
        """Return the seconds of the projections to queries, keys and values."""
        shape, weights = self.model.attention, self.precision.weights
        if (latent := shape.latent) is None:
            outputs = (self.heads + 2 * self.kv_heads) * shape.head_dim
            return linear_s(self, tokens, shape.hidden_size, outputs, weights)
        down_s = linear_s(self, tokens, shape.hidden_size, latent.q_rank + latent.stored_dim, weights)
        inputs = latent.q_rank or shape.hidden_size
        queries_s = linear_s(self, tokens, inputs, self.heads * latent.key_dim, weights)
        return down_s + queries_s + self._expanded_s(tokens, latent)

    def _expanded_s(self, tokens: float, latent: Latent) -> float:
        """Return the seconds to derive keys and values of each head, or to take queries and outputs to the latent.

        Both multiply by the same weights.
        """
        outputs = self.heads * (latent.plain_dim + latent.value_dim)
        return linear_s(self, tokens, latent.rank, outputs, self.precision.weights)

    def _output_s(self, tokens: float) -> float:
        shape = self.model.attention
        width = self.heads * (shape.head_dim if shape.latent is None else shape.latent.value_dim)
        return linear_s(self, tokens, width, shape.hidden_size, self.precision.weights)

    def behind(self, tokens: float) -> LayerSeconds:
        """Return the seconds of the output projection, norm and feed-forward layers, as the mean over layers."""
        model, shape = self.model, self.model.attention
        if not tokens:
            return LayerSeconds(0.0, 0.0)
        products_s, elementwise_s = self._mean_feed_forward(tokens)
        # Norms are not memory-bound, and include the preceding addition.
        added = 3 * tokens * shape.hidden_size * self.bytes_per_element
        add_s = 2 * self.stream_s(added) if self.attention.unfused else 0.0
        norm_s = 0.0 if model.parallel else self._norm_s(tokens)
        return LayerSeconds(self._output_s(tokens) + products_s, add_s + norm_s + elementwise_s)

    def _mean_feed_forward(self, tokens: float) -> LayerSeconds:
        model = self.model
        if model.experts is None:
            return self._feed_forward(tokens, model.intermediate_size)
        part = len(model.experts.layers) / model.attention.num_layers
        sparse = self._mixture(tokens, model.experts)
        if part == 1:
            return sparse
        dense = self._feed_forward(tokens, model.intermediate_size)
        return LayerSeconds(*(part * s + (1 - part) * d for s, d in zip(sparse, dense, strict=True)))

    def _feed_forward(self, tokens: float, size: int, groups: float = 1, ranks: int | None = None) -> LayerSeconds:
        """Return the seconds of feed-forward layers of an intermediate size, split over `ranks`.

        Args:
            tokens: tokens of each group. All groups together are one operator.
        """
        model, hidden_size, weights = self.model, self.model.attention.hidden_size, self.precision.ffn
        width, wide = size / (self.tp if ranks is None else ranks), 2 if model.gated else 1
        products_s = linear_s(self, tokens, hidden_size, wide * width, weights, groups)
        products_s += linear_s(self, tokens, width, hidden_size, weights, groups)
        unfused, rows = self.attention.unfused, groups * tokens
        touched = 5 if unfused and model.gated else 1 + wide
        limit = None if unfused else self.efficiency.stream.activation
        activation_s = self.stream_s(touched * rows * width * self.bytes_per_element, limit)
        return LayerSeconds(products_s, activation_s)

    def _mixture(self, tokens: float, experts: Experts) -> LayerSeconds:
        """Return the seconds of the router, and of the experts: with expert parallelism, of the busiest rank.

        Each active expert computes an equal number of tokens. Choosing and sorting tokens are two small operators, and
        the outputs of a token's experts are summed by one.
        """
        shape, active = self.model.attention, experts.active(tokens)
        rows = tokens * experts.per_token / active
        if experts.are_whole:
            active = experts.busiest_rank(tokens, self.tp)
        routed = self._feed_forward(rows, experts.intermediate_size, active, 1 if experts.are_whole else None)
        router_s = linear_s(self, tokens, shape.hidden_size, experts.number, self.precision.activations)
        summed = (active * rows + tokens) * shape.hidden_size * self.bytes_per_element
        products_s, elementwise_s = routed.linear_s + router_s, routed.elementwise_s + self.stream_s(summed)
        if experts.shared_size:
            shared = self._feed_forward(tokens, experts.shared_size)
            products_s, elementwise_s = products_s + shared.linear_s, elementwise_s + shared.elementwise_s
        return LayerSeconds(products_s, elementwise_s + 2 * self.start_s)

    def head_s(self, tokens: float) -> float:
        """Return the seconds of the output head and the last norm."""
        shape = self.model.attention
        outputs = self.model.vocab_size / self.tp
        product_s = linear_s(self, tokens, shape.hidden_size, outputs, self.precision.activations)
        return product_s + self._norm_s(tokens)

    def host_s(self, messages: int, *, compiled: bool = False) -> float:
        """Return the seconds in which the host launches the operators of the layer, and of `messages` to peers.

        Fewer KV heads than query heads are repeated, keys and values apart; with fused code `launch_us` is 0.
        """
        shape = self.model.attention
        repeats = 2 if shape.num_kv_heads < shape.num_heads else 0
        layer_us = self.efficiency.compiled_us if compiled else self.attention.layer_us
        return 1e-6 * (layer_us + (repeats + messages) * self.attention.launch_us)

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

    @cached_property
    def flash(self) -> FlashCurve:
        """Fused attention over the stored keys and values, or over latents with queries in their space."""
        shape = self.model.attention
        dims = 2 * shape.head_dim if shape.latent is None else shape.latent.stored_dim + shape.latent.rank
        return self._flash(dims, shape.kv_bytes / shape.num_kv_heads)

    @cached_property
    def _expanded(self) -> FlashCurve:
        """Fused attention over keys and values of each head that are derived from latents."""
        latent = self.model.attention.latent
        assert latent is not None
        dims = latent.key_dim + latent.value_dim
        return self._flash(dims, dims * self.model.attention.bytes_per_element)

    def _flash(self, dims: float, key_bytes: float) -> FlashCurve:
        """Return the curve for keys and values that have `dims` elements together."""
        return flash_curve(self.device, self.precision, dims, key_bytes, self.attention.attention)

    def attended_s(
        self,
        queries: float,
        pairs: float,
        keys: float,
        heads: float,
        kv_heads: float,
        sequences: float = 1,
        *,
        evenness: float = 1.0,
        received: bool = False,
    ) -> float:
        """Return the seconds of fused attention, by the quicker form of latent attention if the model has it.

        See `FlashCurve.seconds` for the arguments.
        """
        if not pairs:
            return 0.0
        if (latent := self.model.attention.latent) is None:
            return self.flash.seconds(
                queries, pairs, keys, heads, kv_heads, sequences, evenness=evenness, received=received
            )
        # Queries in the space of the latent: more operations, but each key is read once for all heads.
        latent_s = self.flash.seconds(queries, pairs, keys, heads, 1, sequences, evenness=evenness, received=received)
        # Keys and values of each head: earlier keys are derived from the latent again.
        heads_s = self._expanded.seconds(queries, pairs, keys, heads, heads, sequences, received=received)
        return min(latent_s, self._expanded_s(max(0.0, keys - queries), latent) + heads_s)

    def scores_s(self, *, scores: float, keys: float, heads: float, kv_heads: float) -> float:
        """Return the seconds of unfused attention over `scores` per head, including masked, and `keys` per KV head."""
        if not scores:
            return 0.0
        traffic_s = scores * heads * self.attention.score_bytes / (self.device.bytes_per_s * self.attention.score_part)
        products = scores * heads * self.model.attention.pair_flops / self.model.attention.num_heads
        return traffic_s + products / (self._peak * self.efficiency.linear.compute) + self._read_s(keys, kv_heads)

    def _read_s(self, keys: float, kv_heads: float) -> float:
        shape = self.model.attention
        num_bytes = keys * kv_heads * shape.kv_bytes / shape.num_kv_heads
        return num_bytes / (self.device.bytes_per_s * self.efficiency.linear.memory)

    @cached_property
    def _peak(self) -> float:
        return self.device.peak(self.precision.activations)
