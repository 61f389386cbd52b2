"""Modules that starting does not import, each in a process of its own. benchmarks/startup.py measures times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tiny_models import make_tiny

from longspan.model.source import prepare

PARENT = """
import sys
from longspan.args import EngineArgs
from longspan.resolve import EngineModel
from longspan.text.tokenizer import load_tokenizer
model = EngineModel.of(EngineArgs(model=sys.argv[1], dtype="float32"))
assert "transformers" not in sys.modules
if model.files.tokenizer_dir is not None:
    load_tokenizer(model.files)
print(*sorted({"transformers.modeling_utils", "torch._dynamo", "sympy"} & set(sys.modules)))
"""


def lines_of(code: str, *arguments: Path) -> list[str]:
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_model_in_the_cache_is_found_without_transformers_models(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama")
    prepare(str(folder), dtype="float32")
    assert lines_of(PARENT, folder) == [""]


def test_the_default_model_brings_a_tokenizer_that_needs_no_model() -> None:
    prepare("smollm2-135m", dtype="float32")
    assert lines_of(PARENT, Path("smollm2-135m")) == [""]
