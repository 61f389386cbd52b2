"""Modules that an import may not load. `make lint` holds the layers of docs/architecture/index.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

from longspan.core.exchange import exchanges

MODULES = (
    "longspan",
    "longspan.core",
    "longspan.core.engine",
    "longspan.cost.roofline",
    "longspan.cost.step_cost",
    "longspan.policy",
    "longspan.sim",
    "longspan.planner.values",
    "longspan.attn",
    "longspan.cli.app",
    *(f"longspan.cli.{verb}" for verb in ("generate", "ask", "chat", "serve", "batch", "profile", "eval", "tune")),
    *(f"longspan.cli.{verb}" for verb in ("models", "simulate", "estimate", "plan", "cache", "get")),
    "longspan.simulation",
)
LOADED = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sorted({"torch", "transformers", "zmq", "safetensors", "accelerate", "gguf"} & set(sys.modules)))
"""

OF_EXACT_ATTENTION = (
    "longspan.core.engine",
    "longspan.cost.step_cost",
    "longspan.cost.fitted_cost",
    *(f"longspan.policy.{policy}" for policy in ("auto", "chunked", "context", "tetris")),
    *(f"longspan.attn.exchanges.{kind.kind}" for kind in exchanges() if kind.traits.level == "attention"),
    "longspan.runtime.layerwise.gather_hidden",
    "longspan.runtime.layerwise.unsharded_alltoall",
    "longspan.runtime.worker_process",
    "longspan.service",
)
"""Modules of the engine, the simulator and workers that requests without a sparse setting need."""
VALUE = "longspan.core.sparse"
"""The type of a field of `Exchange`, which messages to workers name."""
SPARSE = r"""
import importlib, re, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
print(*sorted(name for name in sys.modules if re.match(r"longspan\..*(sparse|csa|csps)", name)))
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


def test_exact_attention_imports_no_sparse_attention() -> None:
    """Sparse forms of exchanges, their costs and settings are loaded by name on first use."""
    command = [sys.executable, "-c", SPARSE, *OF_EXACT_ATTENTION]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [VALUE]
