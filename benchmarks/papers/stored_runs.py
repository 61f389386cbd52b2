"""Files of results that a later run uses again: stored simulations, claims and figures."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
_PACKAGE = HERE.parents[1] / "src" / "longspan"
_SIMULATED = ("core", "cost", "policy", "sim", "workload")
"""Packages that decide the results of simulations and estimates."""
_MODULES = ("simulation.py", "pool_sizes.py", "csa_file.py", "runtime/block_records.py")
"""Modules of other packages that do so, too."""


@cache
def code_version(script: str = "") -> str:
    """Return a hash of the code and the data that simulations run, without comments and docstrings.

    Args:
        script: the file of this folder that sets the simulations up, as `__file__`. Empty for estimates.
    """
    files = sorted(path for name in _SIMULATED for path in (_PACKAGE / name).rglob("*") if path.is_file())
    files += [_PACKAGE / name for name in _MODULES]
    files += [Path(script)] if script else []
    return hash_of(path for path in files if path.suffix in {".py", ".toml", ".json"})


def hash_of(files: Iterable[Path]) -> str:
    """Return a short hash of files. For Python files it is of the syntax tree without docstrings."""
    digest = hashlib.sha256()
    for path in files:
        text = path.read_text(encoding="utf-8")
        digest.update(f"{path.name}\0{_code(text) if path.suffix == '.py' else text}\0".encode())
    return digest.hexdigest()[:16]


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [line for line in node.body if not _is_text(line)]
    return ast.dump(tree)


def _is_text(node: ast.stmt) -> bool:
    """Return True for a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
