"""Measures what a CUDA device can do at most: products, copies on it, copies between it and pinned host memory.

Prints a table; `--json` writes the numbers, with versions, for comparison with what longspan reaches.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

_SIZE = 8192
"""Rows and columns of the matrices."""
_COPIED_BYTES = 1 << 30
_REPEATS = 10


def main() -> int:
    """Measures, prints, and returns the exit code: 2 without a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("PyTorch finds no CUDA device here", file=sys.stderr)
        return 2
    found = {"versions": _versions(), **_products(), **_copies()}
    for name, value in found.items():
        print(f"{name:28}{value if isinstance(value, dict) else f'{value:.1f}'}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _versions() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    return {
        "device": device.name,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "capability": torch.cuda.get_device_capability(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
    }


def _products() -> dict[str, float]:
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2, _SIZE, _SIZE, device="cuda").to(dtype)
        seconds = _seconds(partial(torch.matmul, a, b))
        found[f"product_{dtype}_tflops".replace("torch.", "")] = 2 * _SIZE**3 / seconds / 1e12
    return found


def _copies() -> dict[str, float]:
    source = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device="cuda")
    target, host = torch.empty_like(source), torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    copies: dict[str, Callable[[], object]] = {
        "read_and_written_gb_per_s": lambda: target.copy_(source),
        "host_to_device_gb_per_s": lambda: target.copy_(host, non_blocking=True),
        "device_to_host_gb_per_s": lambda: host.copy_(source, non_blocking=True),
    }
    factors = (2, 1, 1)
    return {
        name: factor * _COPIED_BYTES / _seconds(copy) / 1e9
        for (name, copy), factor in zip(copies.items(), factors, strict=True)
    }


def _seconds(work: Callable[[], object]) -> float:
    """Returns the least seconds of several runs, by the device's clock."""
    work()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return min(times)


if __name__ == "__main__":
    sys.exit(main())
