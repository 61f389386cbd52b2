"""Sizes, closures and imports stay within `tests/limits/`, one file per package. Limits may fall and never rise."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ThreadLLM
from house import House

from longspan import SamplingParams

FOLDER = Path(__file__).parent / "limits"
PROMPT = """
import sys
from pathlib import Path
from functools import partial
from longspan import LLM, SamplingParams
from thread_launcher import ThreadLauncher
from longspan.service import Service
LLM.make_service = partial(Service, launcher=ThreadLauncher)
with LLM(sys.argv[1], dtype="float32", skip_tokenizer_init=True) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
files = {Path(one.__file__) for name, one in list(sys.modules.items()) if name.partition(".")[0] == "longspan"}
print(sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files))
"""


@pytest.fixture(scope="module")
def house() -> House:
    return House()


def limits() -> dict[str, dict[str, Any]]:
    return {file.stem: tomllib.loads(file.read_text(encoding="utf-8")) for file in sorted(FOLDER.glob("*.toml"))}


def package_of(house: House, module: str) -> str:
    """Return the package of a module, or of a class in one."""
    while module not in house.files:
        module = module.rpartition(".")[0]
    return module.split(".")[1] if module.count(".") > 1 else "root"


def test_every_package_has_a_file_of_limits_and_keeps_to_its_lines(house: House) -> None:
    assert {name: one["lines"] for name, one in limits().items()}.keys() == house.packages().keys()
    over = {name: lines for name, lines in house.packages().items() if lines > limits()[name]["lines"]}
    assert not over, "write less, or raise the line of a package for a capability that was asked for"


@pytest.mark.parametrize("kind", ["classes", "files", "closures"])
def test_known_offenders_do_not_grow_and_there_are_no_new_offenders(house: House, kind: str) -> None:
    parts = ("longspan.policy", "longspan.policy.baselines", "longspan.policy.csps", "longspan.attn.exchanges")
    measured = {
        "classes": house.long_classes(),
        "files": house.long_files(),
        "closures": {name: house.closure_lines(name) for name in house.files if name.rpartition(".")[0] in parts},
    }[kind]
    for name, lines in measured.items():
        limit = limits()[package_of(house, name)].get(kind, {}).get(name.removeprefix("longspan."), 0)
        assert lines <= limit, f"{name} has {lines} lines"


def private_names(path: Path) -> Iterator[str]:
    """Yield the private attributes that a file uses of objects other than `self`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and re.match(r"_(?!_|replace$)", node.attr):
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            if not (isinstance(owner, ast.Name) and owner.id in {"self", "cls", "super", "os"}):
                yield node.attr


def test_tests_use_few_private_attributes(house: House) -> None:
    """Only names of the sources count, and none of `os` or other packages."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in house.files.values())
    names = set(re.findall(r"(?:self\.|def |class |^ *)(_\w+)", text, re.MULTILINE))
    files = Path(__file__).parent.rglob("*.py")
    uses = {path.stem: num for path in files if (num := sum(name in names for name in private_names(path)))}
    assert sum(uses.values()) <= limits()["root"]["private_in_tests"], uses


def test_no_modules_import_each_other(house: House) -> None:
    assert not house.circles()


def test_a_dense_greedy_prompt_imports_little(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own. An engine of this process tries how layers are fused, which the first use may do."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))  # without the profiles of other tests
    with ThreadLLM(str(tiny), dtype="float32", skip_tokenizer_init=True) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, temperature=0), use_tqdm=False)
    command = [sys.executable, "-c", PROMPT, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent / "support")
    assert int(done.stdout) <= limits()["root"]["prompt_lines"]
