"""Matrix products: measured rows by device, format and framework, the fit of their curves, and the errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from longspan.cost import catalog
from longspan.cost.catalog import Device, LinearCurve
from longspan.cost.precision import BYTES, Format
from longspan.cost.roofline import product_s
from measured_kernels.frame import Array, KernelErrors, minimise, read_rows

_DEVICES = {"a100_sxm": "a100-sxm-80g", "h100_sxm": "h100-sxm-80g", "b200_sxm": "b200-sxm", "l40s": "l40s"}
_FORMATS: dict[str, Format] = {
    "bfloat16": "bfloat16",
    "fp8": "fp8",
    "fp8_block": "fp8_block",
    "int8_wo": "int8",
    "int4_wo": "int4",
    "sq": "w8a8",
    "nvfp4": "nvfp4",
}
PROFILES = "profiles of layers"
"""Source of Vidur's products, which count as much as all kernels in a fit."""
_HOST_S = 4e-5
"""A kernel whose smallest products take longer was launched by a slow host, which graphs hide."""
_CACHES = {"l40s": 96 * 2**20}
"""Bytes of the L2 cache, where weights of measured products stayed in it. Weights of a model do not."""
_MEBIBYTE = 2**20
_COMPUTE_BOUND = 512
"""Rows from which weights in a cache do not matter."""
_HALF = 2
_WIDE = 512
"""Least numbers of inputs and outputs of products in layers of models. Smaller products count less in a fit."""
_SMALL_WEIGHT = 0.3
_SIZES = {"m <= 64": (0, 64), "64 < m <= 1024": (64, 1024), "m > 1024": (1024, np.inf)}
_OTHERS = "n or k < 512"
_MIN_ROWS = 500
"""Least number of products that a curve is fitted to. The block kernels of vLLM were launched by slow hosts."""
_PRIMES = np.array([7919.0, 104729.0, 15485863.0])
"""Factors of rows, inputs and outputs that spread shapes evenly."""
_LEAST = 1e-3
"""Smaller constants are printed as 0."""
_NAMES = ("compute", "half_wave", "half_depth", "memory", "smooth", "start_us", "rounding")
_START = (0.75, 0.1, 50.0, 0.8, 2.0, 4.0, 0.3)
_BEFORE = LinearCurve(compute=0.741, half_wave=0.0772, half_depth=22.4, memory=0.865, smooth=1.69, start_us=4.87)
"""The constants of commit 90e53d91, for all devices."""
_BEFORE_FORMATS = ("bfloat16", "fp8", "fp8_block", "int8")
_BEFORE_ROUNDING = 0.855
_BEFORE_ROUNDING_S = 3e-6
_PROFILED = {"a100": "a100-sxm-80g", "h100": "h100-sxm-80g", "a40": "a40"}
"""Devices of Vidur's profiles: products inside layers, as an engine of 2023 ran them."""
_TODAY = ("a100-sxm-80g", "a40")
"""Devices whose profile counts for today's products. On H100, products of 2023 were a third slower with few rows."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """Sizes and measured seconds of products on one device in one format.

    Attributes:
        source: the framework, or `PROFILES`.
        sizes: rows, inputs and outputs [3, products].
    """

    device: Device
    weights: Format
    source: str
    sizes: Array
    seconds: Array

    def where(self, chosen: NDArray[np.bool_]) -> Products:
        """Return the products for which `chosen` [products] is True."""
        return replace(self, sizes=self.sizes[:, chosen], seconds=self.seconds[chosen])

    @cached_property
    def wide(self) -> NDArray[np.bool_]:
        wide: NDArray[np.bool_] = self.sizes[1:].min(axis=0) >= _WIDE
        return wide

    @cached_property
    def tenth(self) -> NDArray[np.bool_]:
        """Return True for a tenth of the shapes, the same ones for all frameworks."""
        left: NDArray[np.bool_] = _PRIMES @ self.sizes % 101 < 10
        return left

    def predicted(self, curve: LinearCurve) -> Array:
        rows, inputs, outputs = self.sizes
        device = self.device
        seconds: Array = product_s(
            curve,
            rows,
            inputs,
            outputs,
            weight_bytes=BYTES[self.weights],
            bytes_per_element=_HALF,
            peak=device.peak(self.weights),
            bytes_per_s=device.bytes_per_s,
            units=device.units,
        )
        return seconds

    def error(self, curve: LinearCurve) -> Array:
        return self.predicted(curve) / self.seconds - 1

    def error_before(self) -> Array | None:
        """Return the errors of commit 90e53d91. It knew formats by their bytes, and only the peaks of 16 and 8 bits."""
        if self.weights not in _BEFORE_FORMATS:
            return None
        seconds = self.predicted(_BEFORE)
        if self.device.multiplies_narrow(self.weights):
            rounded = (_HALF + 1) * self.sizes[0] * self.sizes[1]
            seconds = seconds + rounded / (_BEFORE_ROUNDING * self.device.bytes_per_s) + _BEFORE_ROUNDING_S
        return seconds / self.seconds - 1


def read_kernels(data: Path) -> dict[tuple[str, Format], list[Products]]:
    """Return the measured products by device and format, one entry per framework."""
    lines: dict[tuple[str, Format, str], list[tuple[str, tuple[float, ...]]]] = {}
    for row in read_rows(data / "kernels" / "gemm.csv.gz"):
        key = _DEVICES[row["device"]], _FORMATS[row["gemm_dtype"]], row["framework"]
        sizes = float(row["m"]), float(row["k"]), float(row["n"]), 1e-3 * float(row["latency"])
        lines.setdefault(key, []).append((row["kernel_source"], sizes))
    found: dict[tuple[str, Format], list[Products]] = {}
    for (name, weights, framework), measured in sorted(lines.items()):
        kept = _kept(name, weights, measured)
        part = Products(device=catalog.device(name), weights=weights, source=framework, sizes=kept[:3], seconds=kept[3])
        found.setdefault((name, weights), []).append(part)
    return found


def _kept(name: str, weights: Format, measured: list[tuple[str, tuple[float, ...]]]) -> Array:
    """Return the rows that show the device: not the host's launches, nor weights that stayed in a cache."""
    values = np.array([sizes for _, sizes in measured]).T
    kernels = np.array([kernel for kernel, _ in measured])
    kept = np.ones(len(kernels), dtype=bool)
    for kernel in np.unique(kernels):
        own = kernels == kernel
        floor = np.quantile(values[3][own], 0.05)
        if floor > _HOST_S:
            kept &= ~own | (values[3] > 2 * floor)
    weight_bytes = values[1] * values[2] * BYTES[weights]
    cached = (weight_bytes >= _MEBIBYTE) & (weight_bytes <= _CACHES.get(name, 0)) & (values[0] < _COMPUTE_BOUND)
    kept &= ~cached
    return values[:, kept]


def read_profiles(data: Path, devices: Sequence[str] = _TODAY) -> list[Products]:
    """Return the products in Vidur's profiles of layers, one entry per device, in 16 bits."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for row in read_rows(data / "profiles" / "linear_layers.csv.gz"):
        name = _PROFILED[row["gpu"]]
        if name not in devices:
            continue
        ranks, hidden = int(row["num_tensor_parallel_workers"]), int(row["n_embd"])
        head_dim, heads = hidden // int(row["n_head"]), int(row["n_head"]) / ranks
        kv_heads, wide = max(1.0, int(row["n_kv_head"]) / ranks), int(row["n_expanded_embd"]) / ranks
        products = {
            "attn_pre_proj_ms": (hidden, (heads + 2 * kv_heads) * head_dim),
            "attn_post_proj_ms": (heads * head_dim, hidden),
            "mlp_up_proj_ms": (hidden, 2 * wide),
            "mlp_down_proj_ms": (wide, hidden),
        }
        for column, (inputs, outputs) in products.items():
            if row[column]:
                sizes = float(row["num_tokens"]), inputs, outputs, 1e-3 * float(row[column])
                found.setdefault(name, []).append(sizes)
    parts = []
    for name, lines in sorted(found.items()):
        values = np.array(lines).T
        part = Products(
            device=catalog.device(name), weights="bfloat16", source=PROFILES, sizes=values[:3], seconds=values[3]
        )
        parts.append(part)
    return parts


def fit(parts: Sequence[Products]) -> LinearCurve:
    """Fit a curve to several sources alike. Where frameworks differ, their rows count as those of the better one."""
    kernels = [part for part in parts if part.source != PROFILES]
    if len(kernels) > 1:
        curves = [_fit(kernels[i : i + 1]) for i in range(len(kernels))]
        better = [_as_better(part, own, curves) for part, own in zip(kernels, curves, strict=True)]
        parts = [*better, *(part for part in parts if part.source == PROFILES)]
    return _fit(parts)


def _as_better(part: Products, own: LinearCurve, curves: Sequence[LinearCurve]) -> Products:
    """Return the products as fast as with the best of all frameworks, by their curves."""
    best = np.min([part.predicted(curve) for curve in curves], axis=0)
    return replace(part, seconds=part.seconds * best / part.predicted(own))


def _fit(parts: Sequence[Products]) -> LinearCurve:
    shares = [np.where(part.wide, 1.0, _SMALL_WEIGHT) for part in parts]
    in_kernels, in_layers = (
        sum(share.sum() for part, share in zip(parts, shares, strict=True) if (part.source == PROFILES) == profiled)
        for profiled in (False, True)
    )
    weights = np.concatenate(
        [
            share * (in_kernels / in_layers if part.source == PROFILES and in_kernels else 1.0)
            for part, share in zip(parts, shares, strict=True)
        ]
    )
    names = _NAMES if parts[0].device.multiplies_narrow(parts[0].weights) else _NAMES[:-1]

    def errors(logs: Array) -> Array:
        curve = _curve(names, logs)
        return np.concatenate([np.log(part.predicted(curve) / part.seconds) for part in parts])

    return _curve(names, minimise(errors, np.log(_START[: len(names)]), weights))


def _curve(names: Sequence[str], logs: Array) -> LinearCurve:
    """Return a curve with shares of a peak of at most 1, and an edge that is not blunter than a sum."""
    constants = dict(zip(names, np.exp(np.clip(logs, -12, 12)).tolist(), strict=True))
    constants |= {name: min(1.0, constants[name]) for name in ("compute", "memory")}
    return LinearCurve(**constants | {"smooth": max(1.0, constants["smooth"])})


def measured_parts(data: Path) -> dict[tuple[str, Format], list[Products]]:
    """Return the products that each curve is fitted to, by generation and format."""
    parts = {(catalog.device(name).generation, weights): found for (name, weights), found in read_kernels(data).items()}
    parts["ampere", "bfloat16"] += read_profiles(data)
    return parts


def print_constants(data: Path) -> None:
    """Print the tables of products.toml, and [linear] of efficiency.toml."""
    for (generation, weights), parts in measured_parts(data).items():
        _print_table(f"{generation}.{weights}", fit(parts))
    _print_table("linear", fit(read_profiles(data, tuple(_PROFILED.values()))))
    _print_other_devices(data)


def _print_table(name: str, curve: LinearCurve) -> None:
    print(f"\n[{name}]")
    for field in _NAMES:
        value = getattr(curve, field)
        if value or field != "rounding":
            print(f"{field} = {value if value > _LEAST else 0:.3g}")


def _print_other_devices(data: Path) -> None:
    """Print the errors of 16-bit curves on devices that they are not fitted to, and on other generations."""
    parts = {
        generation: found for (generation, weights), found in measured_parts(data).items() if weights == "bfloat16"
    }
    curves = {generation: fit(found) for generation, found in parts.items()}
    print()
    for left in _TODAY:
        curve = fit([part for part in parts["ampere"] if part.device.name != left])
        missed = np.concatenate([part.error(curve) for part in parts["ampere"] if part.device.name == left])
        print(f"# ampere.bfloat16, fitted without {left}: mean error {np.abs(missed).mean():.1%} on {left}")
    print("# mean error of 16-bit products with n and k of 512 and more, with the curve of another generation")
    for other, found in parts.items():
        shown = []
        for generation, curve in curves.items():
            errors = np.concatenate([part.where(part.wide).error(curve) for part in found])
            shown.append(f"{generation} {np.abs(errors).mean():.1%}")
        print(f"# {other}: {', '.join(shown)}")


def errors(data: Path) -> Iterator[KernelErrors]:
    """Yield the errors by device, format, framework and size."""
    constants, profiles = catalog.efficiency(), read_profiles(data)
    for (name, weights), kernels in read_kernels(data).items():
        curve = constants.curve(catalog.device(name), weights)
        layers = profiles if (name, weights) == ("a100-sxm-80g", "bfloat16") else []
        left = [part.tenth for part in kernels]
        without_tenth = fit([*(part.where(~out) for part, out in zip(kernels, left, strict=True)), *layers])
        for index, part in enumerate(kernels):
            others = [*kernels[:index], *kernels[index + 1 :], *layers]
            enough = sum(len(other.seconds) for other in others) >= _MIN_ROWS
            yield from _by_size(part, curve, without_tenth, left[index], fit(others) if enough else None)
    for part in profiles:
        yield from _by_size(part, constants.curve(part.device, "bfloat16"))


def _by_size(
    part: Products,
    curve: LinearCurve,
    without_tenth: LinearCurve | None = None,
    left: NDArray[np.bool_] | None = None,
    without_source: LinearCurve | None = None,
) -> Iterator[KernelErrors]:
    """Yield the errors of products by size.

    Args:
        without_tenth: a curve that was fitted without the products `left` [products].
        without_source: a curve that was fitted to other sources.
    """
    rows = part.sizes[0]
    tenth = None if without_tenth is None or left is None else (without_tenth, left)
    sizes = {size: part.wide & (rows > low) & (rows <= high) for size, (low, high) in _SIZES.items()}
    for size, own in (sizes | {_OTHERS: ~part.wide}).items():
        if own.any():
            chosen = part.where(own)
            yield KernelErrors(
                kind="product",
                device=part.device.name + (", in layers" if part.source == PROFILES else ""),
                dtype=part.weights,
                source=part.source,
                size=size,
                before=chosen.error_before(),
                after=chosen.error(curve),
                left_rows=None if tenth is None else part.where(own & tenth[1]).error(tenth[0]),
                left_framework=None if without_source is None else chosen.error(without_source),
                minor=size == _OTHERS,
            )
