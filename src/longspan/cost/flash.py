"""Seconds of fused attention, by one law from single-token decodes to whole prompts.

A call reads keys and values, and computes pairs. The longer of both counts, plus the start, one term per sequence and
one for splitting keys. See docs/cost.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from longspan.cost.catalog import Device, FlashConstants, flash_constants
from longspan.cost.precision import Precision

TILE_ROWS = 128
"""Query rows of a tile."""
NEAR_KEYS = 16384
"""Distance of a query and a key up to which kernels were measured. `far` applies to pairs further apart."""
_EVEN_WAVE = 0.5
"""Idle part of a wave if all tiles have equally many keys: the mean unfilled part of the last wave. Modelled."""
SPLIT_KEYS = 1024
"""Keys of a query at which splitting them costs half of `split_us`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashCurve:
    """Attention of one head size and precision on one device.

    Attributes:
        pair_s, far_pair_s: seconds of a pair and query head on a full device, up to `NEAR_KEYS` apart, and beyond.
        row_s: further seconds of a query row: half for partly masked tiles, half for queries and outputs.
        ragged, even: idle part of a wave if tiles have up to twice the mean number of keys, and if all have as many.
        wave_rows: query rows that fill the device.
        key_s: seconds to read a key and value of one KV head.
        lone_key_s: seconds added to that if one tile of a KV head reads alone, so that splits do not fill the device.
        new_key_s: seconds to store a new key and value of one KV head.
        sequence_s: seconds of a sequence and KV head.
        split_s: seconds to split a long sequence over the device and to merge, which longer calls hide.
    """

    start_s: float
    pair_s: float
    far_pair_s: float
    row_s: float
    ragged: float
    even: float
    wave_rows: float
    key_s: float
    lone_key_s: float
    new_key_s: float
    sequence_s: float
    split_s: float

    def seconds(
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
        """Return the seconds of a call.

        Args:
            pairs: pairs of a query and a visible key.
            keys: number of keys read per KV head, of all sequences.
            sequences: all queries of a decode, else 1: prompts of one call fill the device together.
            evenness: (sum of keys)² / sum of keys², per sequence of a decode. It is 1 if all have as many keys, and
                less if a long sequence reads nearly alone.
            received: keys or queries of another member. They lie contiguously, and no tile is partly masked. Half of
                the start and of the row seconds remain.
        """
        seen, rows = pairs / queries, queries * heads
        start_s, idle, row_s = self.start_s, self.even, self.row_s
        if received:
            product_s, row_s, start_s = pairs * self.far_pair_s, row_s / 2, start_s / 2
        else:
            ragged = queries / (2 * seen)  # 1 in a new prompt: its longest tiles have twice the mean number of keys
            idle += (self.ragged - idle) * (ragged if ragged < 1 else 1.0)
            product_s = pairs * self.pair_s
            if seen > NEAR_KEYS:
                product_s += queries * (seen - NEAR_KEYS) * (self.far_pair_s - self.pair_s)
        if rows > self.wave_rows:
            idle *= self.wave_rows / rows
        busy_s = heads * (product_s * (1 + idle) + queries * row_s)
        tiles = rows / (TILE_ROWS * kv_heads * sequences)
        readers = sequences * evenness * (tiles if tiles > 1 else 1.0)
        read_s = keys * (kv_heads * self.key_s + self.lone_key_s / readers)
        busy_s = max(busy_s, read_s)
        split_s = self.split_s * seen / (seen + SPLIT_KEYS)
        if split_s and not received:
            busy_s += split_s * split_s / (split_s + busy_s)
        return start_s + sequences * kv_heads * self.sequence_s + busy_s

    def store_s(self, tokens: float, kv_heads: float) -> float:
        """Return the seconds to write new keys and values to the cache."""
        return tokens * kv_heads * self.new_key_s


@cache
def flash_curve(device: Device, precision: Precision, dims: float, key_bytes: float, scale: float) -> FlashCurve:
    """Return the curve of a head size.

    Args:
        dims: elements of a key and its value, together.
        key_bytes: stored bytes of a key and its value, for one KV head.
        scale: factor of the speed of products, 1 for the measured kernels.
    """
    of = flash_constants(device, precision)
    if dims / 2 > of.head_dims[-1]:  # latents: no kernel for keys in 8 bits was measured, so they are widened first
        precision = Precision.of(precision.activations)
        of = flash_constants(device, precision)
    return curve_of(of, device, precision, dims, key_bytes, scale)


def curve_of(
    of: FlashConstants, device: Device, precision: Precision, dims: float, key_bytes: float, scale: float = 1.0
) -> FlashCurve:
    peak = device.attention_peak(precision) * scale * between(of.head_dims, of.compute, dims / 2)
    bytes_per_s = device.bytes_per_s * between(of.head_dims, of.memory, dims / 2)
    return FlashCurve(
        start_s=of.start_us * 1e-6,
        pair_s=2 * dims / peak,
        far_pair_s=2 * dims / (peak * of.far),
        row_s=of.row_keys * 2 * dims / peak,
        ragged=of.ragged,
        even=max(of.ragged / 2, _EVEN_WAVE),
        wave_rows=TILE_ROWS * device.units,
        key_s=key_bytes / bytes_per_s,
        lone_key_s=of.few * key_bytes / (device.units * device.clock_hz),
        new_key_s=of.stores * 2 * dims / device.bytes_per_s,
        sequence_s=of.sequence_us * 1e-6 / device.units,
        split_s=of.split_us * 1e-6,
    )


def between(sizes: tuple[float, ...], values: tuple[float, ...], size: float) -> float:
    """Return the value at a size, by straight lines between sizes. Sizes outside have the value of the nearest."""
    if size <= sizes[0]:
        return values[0]
    for (low, high), (first, last) in zip(pairwise(sizes), pairwise(values), strict=True):
        if size <= high:
            return first + (last - first) * (size - low) / (high - low)
    return values[-1]
