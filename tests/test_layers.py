"""The layers of docs/architecture/index.md, as import-linter sees them, and what an import may not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = {"torch", "transformers", "zmq", "safetensors", "accelerate", "gguf"}


def test_import_contracts_hold() -> None:
    """In a process of its own: import-linter disables the loggers of the process that calls it."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "longspan",
        "longspan.cli.app",
        "longspan.core",
        "longspan.attn",
        "longspan.cost.roofline",
        "longspan.cost.step_cost",
        "longspan.policy",
        "longspan.sim",
        "longspan.core.engine",
    ],
)
def test_importing_loads_nothing_heavy(module: str) -> None:
    code = f"import {module}, sys; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_exports_are_listed_and_unknown_names_refused() -> None:
    import longspan

    assert set(longspan.__all__) <= set(dir(longspan))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        longspan.nope  # noqa: B018
