"""Fused attention: measured calls, the fit of attention.toml to vLLM's, and errors, also on TensorRT-LLM's.

    python benchmarks/measured_kernels/attention.py DATA

prints the tables of attention.toml. DATA is the folder of kernel_errors.py. TensorRT-LLM is held out: no constant is
fitted to it. Some decodes are left out of the fit, see `unusable`, and their errors are printed on lines of their own.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from longspan.cost import catalog, flash
from longspan.cost.catalog import FlashConstants
from longspan.cost.precision import Format, Precision
from measured_kernels.frame import Array, KernelErrors, held_out, read_rows

_DEVICES = {"a100_sxm": "a100-sxm-80g", "l40s": "l40s", "h100_sxm": "h100-sxm-80g", "b200_sxm": "b200-sxm"}
_CACHE_BYTES = {"a100_sxm": 40e6, "l40s": 96e6, "h100_sxm": 50e6, "b200_sxm": 126e6}
_FAR = {"ampere": 1.12}
"""`far` is not fitted here: it is the speed that 64K and 256K tokens on A100 leave for attention (Tetris)."""
_RAISED = {"ampere": 1.05}
"""Factor of `compute`: A100's is between its calls (0.60) and Tetris' prompts (0.68)."""
_LARGEST_TRTLLM_BYTES = 2**27
_LONG, _LONG_COUNT = 32768, 5.0
"""Decodes behind this many tokens, of which there are few, count several times."""
_SPLIT_US = (0.5, 1, 2, 4, 6, 8, 12, 16, 20, 25, 30, 40)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A measured call of fused attention, with the new tokens and keys of each sequence."""

    device: str
    framework: str
    version: str
    decode: bool
    kv: Format
    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int
    kernel: str
    seconds: float

    @property
    def keys(self) -> int:
        """Keys of a sequence that are read, with its new tokens."""
        return min(self.tokens, self.window) if self.window and self.decode else self.tokens

    @property
    def queries(self) -> int:
        return self.sequences if self.decode else self.sequences * self.tokens

    @property
    def pairs(self) -> float:
        if self.decode:
            return self.sequences * self.keys
        hidden = max(0, self.tokens - self.window) if self.window else 0
        return self.sequences * (self.tokens * (self.tokens + 1) - hidden * (hidden + 1)) / 2

    @property
    def read_bytes(self) -> float:
        return self.sequences * self.keys * self.kv_heads * self.key_bytes

    @property
    def key_bytes(self) -> float:
        return 2 * self.head_dim * (1 if self.kv == "fp8" else 2)


def read_calls(folder: Path, file: str) -> list[Call]:
    calls = []
    for row in read_rows(folder / "kernels" / f"{file}_attention.csv.gz"):
        decode = file == "generation"
        calls.append(
            Call(
                device=row["device"],
                framework=row["framework"],
                version=row["version"],
                decode=decode,
                kv="fp8" if row["kv_cache_dtype"] == "fp8" else "bfloat16",
                sequences=int(row["batch_size"]),
                tokens=int(row["step"]) + int(row["isl"]),
                heads=int(row["num_heads"]),
                kv_heads=int(row["num_key_value_heads"]),
                head_dim=int(row["head_dim"]),
                window=int(float(row["window_size"] or 0)),
                kernel=row["kernel_source"],
                seconds=float(row["latency"]) / 1e3,
            )
        )
    return calls


def unusable(call: Call) -> str:
    """Return why a call is left out of fits, or an empty text."""
    if call.kernel == "vllm_triton_attn":
        return "fallback in Triton"  # heads of 192 on B200 with keys in 8 bits: a third of the speed of 128 and 256
    if not call.decode:
        return ""
    if call.framework == "trtllm" and call.version == "1.0.0" and call.read_bytes > _LARGEST_TRTLLM_BYTES:
        return "above 128 MiB"  # a third of them is quicker than the memory, up to 1.7 times
    device = catalog.device(_DEVICES[call.device])
    if call.device == "l40s" and 2e-6 * device.bytes_per_s < call.read_bytes < 1.2 * _CACHE_BYTES["l40s"]:
        return "in the L2 cache"  # repeated calls are up to 4 times as quick as the memory. Engines read other keys.
    unsplit = call.heads == call.kv_heads and call.keys > 512 and call.sequences * call.kv_heads < device.units
    if unsplit and call.framework == "vllm" and call.device in ("a100_sxm", "l40s"):
        return "not split"  # vLLM's FlashAttention 2 reads a sequence on one unit per head, at 22 GB/s
    return ""


def fit(calls: Sequence[Call], device: str) -> FlashConstants:
    """Fit the constants to calls of one device and precision. Sums of absolute relative errors are minimized."""
    usable = [call for call in calls if not unusable(call)]
    decodes = [call for call in usable if call.decode]
    start_us, split_us, sequence_us, few, memory = _fit_decode(decodes, catalog.device(device))
    begun = FlashConstants(
        start_us=start_us,
        head_dims=tuple(sorted({float(call.head_dim) for call in usable})),
        compute=(),
        far=_FAR.get(catalog.device(device).generation, 1.0),
        ragged=0.0,
        row_keys=0.0,
        stores=0.0,
        memory=(),
        few=few,
        sequence_us=sequence_us,
        split_us=split_us,
    )
    begun = replace(begun, memory=tuple(memory[size] for size in begun.head_dims))
    return _fit_prefill([call for call in usable if not call.decode], catalog.device(device), begun)


def _fit_decode(calls: Sequence[Call], device: catalog.Device) -> tuple[float, float, float, float, dict[float, float]]:
    """Return start, split and sequence in microseconds, `few`, and the part of the memory's speed by head size."""
    seconds = np.array([call.seconds for call in calls])
    keys, tasks = (np.array([getattr(call, name) for call in calls], float) for name in ("keys", "sequences"))
    tasks *= np.array([call.kv_heads for call in calls])
    read_s = np.array([call.read_bytes for call in calls]) / device.bytes_per_s
    sizes = np.array([call.head_dim for call in calls], float)
    counts = np.where(keys >= _LONG, _LONG_COUNT, 1.0)
    best: tuple[float, float, Array] | None = None
    by_size = [np.where(sizes == size, read_s, 0.0) for size in np.unique(sizes)]
    lone_s = read_s * device.bytes_per_s / tasks / (device.units * device.clock_hz)
    for split_us in _SPLIT_US:
        split_s = 1e-6 * split_us * keys / (keys + flash.SPLIT_KEYS)
        busy_s = sum(by_size)
        for _ in range(3):
            exposed_s = split_s**2 / (split_s + busy_s)
            terms = np.stack([exposed_s, np.ones_like(seconds), tasks / device.units, lone_s, *by_size], axis=1)
            found = _least(terms, seconds, counts, fixed=1)
            busy_s = terms[:, 3:] @ found[3:]
        error = float((counts * np.abs(terms @ found / seconds - 1)).mean())
        if best is None or error < best[0]:
            best = error, split_us, found
    assert best is not None
    _, split_us, found = best
    memory = {size: min(1.0, 1 / slope) for size, slope in zip(np.unique(sizes), found[4:], strict=True)}
    return 1e6 * found[1], split_us, 1e6 * found[2], found[3], memory


def _fit_prefill(calls: Sequence[Call], device: catalog.Device, begun: FlashConstants) -> FlashConstants:
    """Fit the parts of the peak, and alternately the three terms that are multiples of their time."""
    seconds = np.array([call.seconds for call in calls])
    queries, heads, kv_heads, sizes = (
        np.array([getattr(call, name) for call in calls], float)
        for name in ("queries", "heads", "kv_heads", "head_dim")
    )
    pair_s = 4 * sizes * heads / device.peak(_precision(calls[0].kv).attention)
    whole = pair_s * np.array([call.pairs for call in calls])
    idle = whole * np.minimum(1.0, flash.TILE_ROWS * device.units / (queries * heads))
    rows = pair_s * queries
    stored = 4 * queries * kv_heads * sizes / device.bytes_per_s
    rest_s, ones = np.full_like(seconds, begun.start_us * 1e-6), np.ones_like(seconds)
    ragged, row_keys, parts = 0.5, 200.0, np.zeros(0)
    for _ in range(8):
        product_s = whole + ragged * idle + row_keys * rows
        by_size = [np.where(sizes == size, product_s, 0.0) for size in begun.head_dims]
        parts = _least(np.stack([rest_s, stored, *by_size], axis=1), seconds, ones, fixed=1)[2:]
        per = parts[np.searchsorted(begun.head_dims, sizes)]
        slope, padded, tail, stores = _least(
            np.stack([rest_s, per * whole, per * rows, per * idle, stored], axis=1), seconds, ones, fixed=1
        )[1:]
        ragged, row_keys = tail / slope, padded / slope
    compute = tuple(float(_RAISED.get(device.generation, 1.0) / part) for part in parts)
    return replace(begun, compute=compute, ragged=float(ragged), row_keys=float(row_keys), stores=float(stores))


def _least(terms: Array, seconds: Array, counts: Array, fixed: int) -> Array:
    """Return factors of the terms, none negative, with small absolute relative errors. The first `fixed` are 1.

    Args:
        counts: how often each call counts.
    """
    shares = terms / seconds[:, None]
    scales = np.abs(shares).max(axis=0)
    shares = shares / scales
    free = np.arange(terms.shape[1]) >= fixed
    target = 1 - shares[:, :fixed] @ scales[:fixed]
    factors, weights = np.where(free, 0.0, scales), counts
    for _ in range(15):
        kept = free.copy()
        while True:
            root = np.sqrt(weights)
            factors[free] = 0.0
            factors[kept] = np.linalg.lstsq(shares[:, kept] * root[:, None], target * root, rcond=None)[0]
            if not (factors < 0).any():
                break
            kept &= factors >= 0
        weights = counts / np.maximum(np.abs(shares @ factors - 1), 0.02)
    found: Array = factors / scales
    return found


def _precision(kv: Format) -> Precision:
    return Precision.of("bfloat16", kv=kv)


def after_s(call: Call, constants: FlashConstants | None = None) -> float:
    """Return the prediction of this checkout, or with other constants."""
    curve = _curve(call.device, call.kv, call.head_dim, constants)
    attended_s = curve.seconds(
        call.queries,
        call.pairs,
        call.sequences * call.keys,
        call.heads,
        call.kv_heads,
        sequences=call.sequences if call.decode else 1,
    )
    return attended_s + curve.store_s(call.queries, call.kv_heads)


@cache
def _curve(device_name: str, kv: Format, head_dim: int, constants: FlashConstants | None) -> flash.FlashCurve:
    device, precision = catalog.device(_DEVICES[device_name]), _precision(kv)
    constants = constants or catalog.flash_constants(device, precision)
    return flash.curve_of(constants, device, precision, 2 * head_dim, 2 * head_dim * precision.kv_bytes)


def before_s(call: Call) -> float:
    """Return the prediction of commit 90e53d91, which had no windows and no keys in 8 bits."""
    device = catalog.device(_DEVICES[call.device])
    read_s = 4 * call.sequences * call.tokens * call.kv_heads * call.head_dim / (device.bytes_per_s * 0.865)
    if call.queries * call.heads < 128 * call.kv_heads:
        return 6e-6 + read_s
    waves = call.queries * call.heads / (128 * device.units)
    per_query = call.tokens if call.decode else (call.tokens + 1) / 2
    products = 4 * call.queries * per_query * call.heads * call.head_dim
    return 6e-6 + max(products / (device.flops_per_s * 0.68 * waves / (waves + 0.0772)), read_s)


def _size(call: Call) -> str:
    """Name the line of the table that a call counts for."""
    if left_out := unusable(call):
        return f"{call.framework}, left out: {left_out}"
    kind = "window" if call.window and call.tokens > call.window else ""
    if not kind:
        kind = _decode_size(call) if call.decode else "prompts " + ("of 1K and more" if call.tokens >= 1024 else "< 1K")
    return f"{call.framework}, {kind}"


def _decode_size(call: Call) -> str:
    if call.sequences > 1:
        return "batches"
    return "one of 64K and more" if call.keys >= 65536 else "one of 1K to 32K" if call.keys >= 1024 else "one < 1K"


def errors(folder: Path) -> Iterator[KernelErrors]:
    """Yield the errors of prefill and decode. A tenth of vLLM's calls are predicted by a fit to the rest."""
    for file, kind in (("context", "prefill"), ("generation", "decode")):
        groups: dict[tuple[str, Format], list[Call]] = defaultdict(list)
        for call in read_calls(folder, file):
            groups[call.device, call.kv].append(call)
        for (device, kv), calls in sorted(groups.items()):
            left = _left_out_errors(folder, device, kv, calls)
            yield from _lines(kind, calls, left)


def _lines(kind: str, calls: Sequence[Call], left: dict[str, list[float]]) -> Iterator[KernelErrors]:
    sizes: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        sizes[_size(call)].append(call)
    for size, members in sorted(sizes.items()):
        seconds = np.array([call.seconds for call in members])
        after = np.array([after_s(call) for call in members]) / seconds - 1
        yield KernelErrors(
            kind=kind,
            device=_DEVICES[members[0].device],
            dtype=members[0].kv,
            size=size,
            before=np.array([before_s(call) for call in members]) / seconds - 1,
            after=after,
            left_rows=np.array(left[size]) if size in left else None,
            left_framework=after if members[0].framework == "trtllm" else None,
            minor=bool(unusable(members[0])),
        )


def _left_out_errors(folder: Path, device: str, kv: Format, calls: Sequence[Call]) -> dict[str, list[float]]:
    """Return the errors of a tenth of the calls by line of the table."""
    kept, held = _tenths(folder, device, kv)
    if not kept:
        return {}
    constants, found = _fitted(folder, device, kv), defaultdict(list)
    for call in held:
        if call.decode == calls[0].decode:
            found[_size(call)].append(after_s(call, constants) / call.seconds - 1)
    return found


@cache
def _fitted(folder: Path, device: str, kv: Format) -> FlashConstants:
    return fit(_tenths(folder, device, kv)[0], _DEVICES[device])


@cache
def _tenths(folder: Path, device: str, kv: Format) -> tuple[list[Call], list[Call]]:
    """Return vLLM's calls of a device without a tenth, and the tenth."""
    calls = [call for call in _vllm_calls(folder) if (call.device, call.kv) == (device, kv)]
    held = held_out(len(calls))
    return [call for call, out in zip(calls, held, strict=True) if not out], [
        call for call, out in zip(calls, held, strict=True) if out
    ]


@cache
def _vllm_calls(folder: Path) -> list[Call]:
    files = [read_calls(folder, file) for file in ("context", "generation")]
    return [call for calls in files for call in calls if call.framework == "vllm"]


def main(folder: Path) -> None:
    for device, name in _DEVICES.items():
        for kv in ("bfloat16", "fp8"):
            calls = [call for call in _vllm_calls(folder) if (call.device, call.kv) == (device, kv)]
            if not calls:
                continue
            print(f"\n[{catalog.device(name).generation}.{kv}]")
            for field, value in asdict(fit(calls, name)).items():
                parts = [f"{part:.3g}" for part in (value if isinstance(value, tuple) else (value,))]
                print(f"{field} = [{', '.join(parts)}]" if isinstance(value, tuple) else f"{field} = {parts[0]}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("give the folder with kernels/*.csv.gz")
    main(Path(sys.argv[1]))
