"""What an import may not load. `make lint` holds the layers of docs/architecture/index.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = (
    "longspan",
    "longspan.core",
    "longspan.core.engine",
    "longspan.cost.roofline",
    "longspan.cost.step_cost",
    "longspan.policy",
    "longspan.sim",
    "longspan.attn",
    "longspan.cli.app",
    *(f"longspan.cli.{verb}" for verb in ("generate", "chat", "serve", "batch", "profile", "eval", "tune")),
    *(f"longspan.cli.{verb}" for verb in ("simulate", "estimate")),
    "longspan.simulation",
)
LOADED = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sorted({"torch", "transformers", "zmq", "safetensors", "accelerate", "gguf"} & set(sys.modules)))
"""


def test_importing_loads_nothing_heavy() -> None:
    """One after the other in a process of their own: the first that does is named."""
    result = subprocess.run([sys.executable, "-c", LOADED, *MODULES], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == list(MODULES)


def test_exports_are_listed_and_unknown_names_refused() -> None:
    import longspan

    assert set(longspan.__all__) <= set(dir(longspan))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        longspan.nope  # noqa: B018
