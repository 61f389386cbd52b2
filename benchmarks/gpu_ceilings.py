"""Measure the limits of a CUDA device: products, copies on the device, copies between it and pinned host memory.

The script prints a table. `--json` writes the numbers, with versions, for comparison with longspan's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu_versions import versions

_CUDA = torch.device("cuda")
_SIZE = 8192
"""Rows and columns of the matrices."""
_COPIED_BYTES = 1 << 30
_REPEATS = 10
_SLEEP_CYCLES = 2_000_000
"""About a millisecond, longer than a few launches."""
PRODUCT, COPY = "product_bfloat16_tflops", "read_and_written_gb_per_s"
"""Names of numbers: products in the precision of weights, and copies on the device."""


def main() -> int:
    """Measure, print, and return the exit code: 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch finds no CUDA device here", file=sys.stderr)
        return 2
    numbers = {"versions": versions(), **_products(), **_copies()}
    for name, value in numbers.items():
        print(f"{name:28}{value if name == 'versions' else f'{value:.1f}'}")
    if options.json:
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


def _products() -> dict[str, float]:
    numbers = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2, _SIZE, _SIZE, device="cuda").to(dtype)
        seconds = least_seconds(partial(torch.matmul, a, b), _CUDA)
        numbers[f"product_{dtype}_tflops".replace("torch.", "")] = 2 * _SIZE**3 / seconds / 1e12
    return numbers


def _copies() -> dict[str, float]:
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target, host = torch.empty_like(source), torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    copies: dict[str, Callable[[], object]] = {
        COPY: lambda: target.copy_(source),
        "host_to_device_gb_per_s": lambda: target.copy_(host, non_blocking=True),
        "device_to_host_gb_per_s": lambda: host.copy_(source, non_blocking=True),
    }
    factors = (2, 1, 1)
    return {
        name: factor * _COPIED_BYTES / least_seconds(copy, _CUDA) / 1e9
        for (name, copy), factor in zip(copies.items(), factors, strict=True)
    }


def least_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the least seconds of several runs, by the clock of the device."""
    work()
    return min(_seconds(work, device) for _ in range(_REPEATS))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        started_s = time.perf_counter()
        work()
        return time.perf_counter() - started_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001 - the host launches meanwhile, so launches cost the device no time
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end)) / 1000


if __name__ == "__main__":
    sys.exit(main())
