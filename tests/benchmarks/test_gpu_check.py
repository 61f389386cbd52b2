"""What `scripts/gpu_check.sh` runs on a machine with a GPU, run without one: with tiny shapes, and with a card that is
not there.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gpu_8b
import gpu_versions
import gpu_wheels
import twin
from gpu_ceilings import COPY, PRODUCT

from longspan.args import EngineArgs
from longspan.cost.architecture import from_config
from longspan.errors import WorkerLostError
from longspan.runtime.executor.threads import ThreadLauncher
from longspan.runtime.messages import WorkerConfig
from longspan.service import Service

ROOT = Path(__file__).parents[2]


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


# ---------------------------------------------------------------- the script


def run_checks(folder: Path, script: str, **environment: str) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
    python = executable(folder / "python", script)
    command = ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(folder / "out")]
    settings = os.environ | {"PYTHON": str(python)} | environment
    result = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    return result, [json.loads(line) for line in (folder / "out" / "steps.jsonl").read_text().splitlines()]


def test_checks_go_on_after_one_that_fails_and_all_together_have_ten_minutes(tmp_path: Path) -> None:
    result, steps = run_checks(tmp_path, 'echo "$@"; case "$1" in *ceilings.py) exit 3;; esac')
    assert result.returncode == 1, result.stderr
    assert [one["exit_code"] for one in steps] == [3 if one["check"] == "ceilings" else 0 for one in steps]
    names = [one["check"] for one in steps]
    assert names[:2] == ["versions", "ceilings"] and names[-2:] == ["profile", "twin"]
    assert {"tests", "exchanges_2", "exchanges_4", "generate", "8b_cudnn", "8b_flash", "8b_transformers"} < {*names}
    assert "-m gpu and not full tests/gpu" in (tmp_path / "out" / "tests.log").read_text()


def test_checks_that_together_have_more_than_ten_minutes_do_not_begin(tmp_path: Path) -> None:
    script = (ROOT / "scripts" / "gpu_check.sh").read_text()
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_check.sh").write_text(script.replace("check twin 60", "check twin 600"))
    command = ["bash", str(tmp_path / "scripts" / "gpu_check.sh"), str(tmp_path / "out")]
    result = subprocess.run(command, env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "more than 590" in result.stderr
    assert not (tmp_path / "out" / "steps.jsonl").read_text()


def test_checks_find_what_is_in_wheels(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "print('found')")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    script = f'if [ "$2" = pip ]; then exec {sys.executable} "$@"; else exec {sys.executable} -m carried; fi'
    result, steps = run_checks(tmp_path, script, WHEELS=str(tmp_path))
    assert result.returncode == 0, (tmp_path / "out" / "wheels.log").read_text()
    assert [one["check"] for one in steps][:2] == ["wheels", "versions"]
    assert (tmp_path / "out" / "twin.log").read_text() == "found\n"


# ---------------------------------------------------------------- its parts


def test_versions_are_told_with_what_the_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ", ".join(["Card 9", "580.1", *map(str, range(7)), "Disabled"])
    executable(tmp_path / "nvidia-smi", f"echo {told}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_versions.py", "--json", str(tmp_path / "found.json")])
    assert gpu_versions.main() == 2, "there is no device"
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert torch.__version__.startswith(found["packages"]["torch"]) and found["device"] is None
    assert found["cards"][0]["driver_version"] == "580.1" and found["cards"][0]["mig.mode.current"] == "Disabled"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(torch.backends.cudnn, "version", mismatch)
    without_driver = gpu_versions.versions()
    assert (without_driver["cards"], without_driver["cudnn"]) == (None, "another cuDNN")


def mismatch() -> int:
    raise RuntimeError("another cuDNN")


def test_an_8b_shape_is_measured_by_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a tiny shape here, with workers that are threads."""
    kernels = []

    def launch(config: WorkerConfig) -> ThreadLauncher:
        kernels.append(config.cuda_kernel)
        return ThreadLauncher(msgspec.structs.replace(config, cuda_kernel=None))

    monkeypatch.setattr(gpu_8b, "ProcessLauncher", launch)
    monkeypatch.setenv("LONGSPAN_CACHE", "restored afterwards")
    (tmp_path / "ceilings.json").write_text(json.dumps({PRODUCT: 0.5, COPY: 100.0}))
    sizes = ["--device", "cpu", "--shape", "tiny", "--lengths", "3000", "200", "--batches", "1", "2"]
    sizes += ["--peer-lengths", "200", "--limit-s", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu_8b.py", str(tmp_path), *sizes])
    assert gpu_8b.main() == 0
    lines = capsys.readouterr().out.splitlines()
    chosen = json.loads((tmp_path / "8b_chosen.json").read_text())
    short, long = chosen["prompts"]
    assert (short["length"], short["num_computed"], long["length"]) == (200, 200, 3000)
    assert 0 < long["num_computed"] < 3000, "there is no time for all of it"
    assert long["first_s"] > 0 and long["again_s"] is None
    flops = from_config(gpu_8b.TINY, name="tiny").prefill_flops(200)
    assert short["mfu"] == pytest.approx(flops / short["first_s"] / 0.5e12)
    assert [(one["context"], one["batch"]) for one in chosen["steps"]] == [(200, 1), (200, 2)]
    reads = json.loads((tmp_path / "8b_reads.json").read_text())["reads"]
    assert [(one["context"], one["batch"]) for one in reads] == [(200, 1), (200, 2), (3000, 1), (3000, 2)]
    assert all(one["share"] == pytest.approx(one["gb_per_s"] / 100) for one in reads)
    [theirs] = json.loads((tmp_path / "8b_transformers.json").read_text())["prompts"]
    assert theirs["length"] == 200 and theirs["mfu"] > 0
    assert "| tokens | chosen | transformers |" in lines
    [row] = [line for line in lines if line.startswith("| 3,000 | ~")]
    assert row.endswith("| — |")
    monkeypatch.setattr(sys, "argv", ["gpu_8b.py", str(tmp_path), "--parts", "table"])
    assert gpu_8b.main() == 0
    assert capsys.readouterr().out.splitlines() == lines, "what others have found needs no device"
    monkeypatch.setattr(sys, "argv", ["gpu_8b.py", str(tmp_path), *sizes, "--parts", "flash"])
    assert gpu_8b.main() == 0
    assert kernels == [None, "flash"]
    assert (tmp_path / "8b_flash.json").exists()


def test_what_is_left_of_a_prompt_goes_by_what_was_computed() -> None:
    def seconds(tokens: int) -> float:
        return 1e-3 * tokens + 1e-7 * tokens**2

    known = [(tokens, seconds(tokens)) for tokens in (1000, 4000, 16000)]
    for length in (500, 4000, 128000):
        assert gpu_8b.predict_s(known, length) == pytest.approx(seconds(length))
    assert gpu_8b.affordable(known, 64000, seconds(64000) + 1) == 64000
    assert gpu_8b.affordable(known, 64000, seconds(20000) + 1e-3) == 20000
    assert gpu_8b.affordable(known, 64000, 0.0) == 1000
    assert gpu_8b.affordable(known[:1], 2000, 2 * known[0][1]) == 2000
    assert gpu_8b.affordable([], 64000, 0.0) == 64000, "somebody must be first"


def test_a_forced_kernel_reaches_the_workers(tiny: Path) -> None:
    def launch(config: WorkerConfig) -> ThreadLauncher:
        return ThreadLauncher(msgspec.structs.replace(config, cuda_kernel="flash"))

    with pytest.raises(WorkerLostError, match="CPUs have no kernels of CUDA devices"):
        Service(EngineArgs(str(tiny), skip_tokenizer_init=True), launcher=launch)


def test_the_twin_fails_when_a_percentile_is_far_off(capsys: pytest.CaptureFixture[str]) -> None:
    real = twin.Times(ttft_s=[1.0, 2.0], tbt_s=[0.1, 0.1], placements=[], busy_s=1.0)
    near = twin.Times(ttft_s=[1.08, 2.1], tbt_s=[0.1, 0.1], placements=[], busy_s=1.0)
    assert twin.report_times(real, {"before": near}, within=0.1)
    assert not twin.report_times(real, {"before": near}, within=0.05)
    assert "FAIL: TTFT and TBT within 5% wanted" in capsys.readouterr().out


def test_wheels_are_all_that_is_required_there_but_what_pytorch_brings() -> None:
    found = gpu_wheels.closure(["accelerate", "uvicorn[standard]; python_version > '3.0'"], "3.12", {"torch"})
    assert {"accelerate", "numpy", "safetensors", "uvicorn", "h11"} <= found
    assert not found & {"torch", "sympy", "triton"}
    assert not gpu_wheels.closure(["numpy; python_version < '3.12'"], "3.12", set())
