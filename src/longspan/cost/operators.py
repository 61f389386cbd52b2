"""Seconds of single operators on one device: the roofline, with what part of it they reach.

Element counts are of one rank. Sums of several operators are in `layer.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from longspan.cost.catalog import Device
from longspan.cost.efficiency import Attention, Efficiency, LinearCurve

Number = TypeVar("Number", float, NDArray[np.float64])

_TILE = 128 * 128
_ROWS = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Chip:
    """A device that computes in one precision.

    Attributes:
        attention: how it computes attention.
        bytes_per_element: of activations, keys and values.
    """

    device: Device
    efficiency: Efficiency
    attention: Attention
    bytes_per_element: float

    def linear_s(self, rows: float, inputs: float, outputs: float, weight_bytes: float) -> float:
        """A product of [rows, inputs] and weights [inputs, outputs], of `weight_bytes` per element."""
        return _linear_s(self, rows, inputs, outputs, weight_bytes)

    def stream_s(self, num_bytes: float, per_clock: float | None = None) -> float:
        """An element-wise operator that reads and writes so many bytes, of which a unit does `per_clock` at most."""
        limit = None if per_clock is None else per_clock * self.device.units * self.device.clock_hz
        part = self.efficiency.stream.add
        return self.start_s + num_bytes * stream_byte_s(part * self.device.bytes_per_s, limit)

    @cached_property
    def start_s(self) -> float:
        """Of the smallest operator."""
        return self.efficiency.stream.start_us * 1e-6

    def attention_s(
        self, *, queries: float, pairs: float, keys: float, heads: float, kv_heads: float, head_dim: int
    ) -> float:
        """Fused attention.

        Args:
            queries: rows, which fill the device together with the heads.
            pairs: of queries and keys that see each other.
            keys: that are read, of each KV head.
        """
        if not pairs:
            return 0.0
        memory_s = self._read_s(keys, kv_heads, head_dim)
        # Few queries are packed by KV head, and long keys cut for the whole device, and joined by a second operator.
        if queries * heads < _ROWS * kv_heads:
            return 2 * self.start_s + memory_s
        waves = max(queries, 1) * heads / (_ROWS * self.device.units)
        filled = waves / (waves + self.efficiency.linear.half_wave)
        compute_s = 4 * pairs * heads * head_dim / (self._peak * self.attention.attention * filled)
        return 2 * self.start_s + max(compute_s, memory_s)

    def scores_s(self, *, scores: float, keys: float, heads: float, kv_heads: float, head_dim: int) -> float:
        """Attention without fusion over so many scores of each head, hidden ones included, and keys of each KV head."""
        if not scores:
            return 0.0
        traffic_s = scores * heads * self.attention.score_bytes / (self.device.bytes_per_s * self.attention.score_part)
        products = 4 * scores * heads * head_dim
        return (
            traffic_s
            + products / (self._peak * self.efficiency.linear.compute)
            + self._read_s(keys, kv_heads, head_dim)
        )

    def _read_s(self, keys: float, kv_heads: float, head_dim: int) -> float:
        """Of reading keys and values once."""
        num_bytes = 2 * keys * kv_heads * head_dim * self.bytes_per_element
        return num_bytes / (self.device.bytes_per_s * self.efficiency.linear.memory)

    @cached_property
    def _peak(self) -> float:
        return self.device.peak(self.bytes_per_element)


def stream_byte_s(memory: float, limit: float | None) -> float:
    """Seconds per byte where the memory, and maybe the units, have such speeds: both slow each other down."""
    return 1 / memory if limit is None else math.hypot(1 / memory, 1 / limit)


@lru_cache(maxsize=65536)
def _linear_s(chip: Chip, rows: float, inputs: float, outputs: float, weight_bytes: float) -> float:
    if not rows:
        return 0.0
    device = chip.device
    return product_s(
        chip.efficiency.linear,
        rows,
        inputs,
        outputs,
        weight_bytes=weight_bytes,
        bytes_per_element=chip.bytes_per_element,
        peak=device.peak(weight_bytes),
        bytes_per_s=device.bytes_per_s,
        units=device.units,
    )


def product_s(
    curve: LinearCurve,
    rows: Number,
    inputs: Number,
    outputs: Number,
    *,
    weight_bytes: float,
    bytes_per_element: float,
    peak: Number,
    bytes_per_s: Number,
    units: Number,
) -> Number:
    """Seconds of a product of [rows, inputs] and weights [inputs, outputs], of numbers or arrays of them."""
    waves = rows * outputs / (_TILE * units)
    filled = waves / (waves + curve.half_wave) * inputs / (inputs + curve.half_depth)
    compute_s = 2 * rows * inputs * outputs / (peak * curve.compute * filled)
    moved = inputs * outputs * weight_bytes + rows * (inputs + outputs) * bytes_per_element
    memory_s = moved / (bytes_per_s * curve.memory)
    joined: Number = (compute_s**curve.smooth + memory_s**curve.smooth) ** (1 / curve.smooth)
    return joined + curve.start_us * 1e-6
