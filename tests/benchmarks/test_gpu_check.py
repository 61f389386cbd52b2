"""The commands of a GPU check, run without a GPU: with tiny shapes, and with a card that does not exist."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import msgspec
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import gpu_8b
import gpu_page
import gpu_versions
import gpu_wheels
import twin
from gpu_ceilings import COPY, PRODUCT
from thread_launcher import ThreadLauncher

from longspan.args import EngineArgs
from longspan.cost.architecture import from_config
from longspan.errors import WorkerLostError
from longspan.runtime.messages import WorkerConfig
from longspan.service import Service


def executable(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


def test_versions_include_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ", ".join(["Card 9", "580.1", *map(str, range(7)), "Disabled"])
    executable(tmp_path / "nvidia-smi", f"echo {told}")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        sys, "argv", ["gpu_versions.py", "--json", str(tmp_path / "found.json"), "--carried", "elsewhere"]
    )
    assert gpu_versions.main() == 2, "there is no device"
    found = json.loads((tmp_path / "found.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    assert found["installed"]["torch"] == torch.__version__ and found["unmet"] == []
    assert torch.__version__.startswith(found["packages"]["torch"]) and found["device"] is None
    assert found["cards"][0]["driver_version"] == "580.1" and found["cards"][0]["mig.mode.current"] == "Disabled"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(torch.backends.cudnn, "version", mismatch)
    without_driver = gpu_versions.versions()
    assert (without_driver["cards"], without_driver["cudnn"]) == (None, "another cuDNN")


def mismatch() -> int:
    raise RuntimeError("another cuDNN")


def test_an_8b_shape_is_measured_by_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape is tiny here, and the workers are threads."""
    monkeypatch.setattr(gpu_8b, "ProcessLauncher", ThreadLauncher)
    monkeypatch.setenv("LONGSPAN_CACHE", "restored afterwards")
    (tmp_path / "ceilings.json").write_text(json.dumps({PRODUCT: 0.5, COPY: 100.0}))
    sizes = ["--device", "cpu", "--shape", "tiny", "--lengths", "3000", "200", "--batches", "1", "2"]
    sizes += ["--peer-lengths", "200", "--limit-s", "0"]
    monkeypatch.setattr(sys, "argv", ["gpu_8b.py", str(tmp_path), *sizes])
    assert gpu_8b.main() == 0
    chosen = json.loads((tmp_path / "8b_chosen.json").read_text())
    short, long = chosen["prompts"]
    assert (short["length"], short["num_computed"], long["length"]) == (200, 200, 3000)
    assert 0 < long["num_computed"] < 3000, "there is no time for all of it"
    assert long["first_s"] > 0 and long["warm_s"] == []
    flops = from_config(gpu_8b.TINY, name="tiny").prefill_flops(200)
    assert short["mfu"] == pytest.approx(flops / short["first_s"] / 0.5e12)
    assert [(one["context"], one["batch"]) for one in chosen["steps"]] == [(200, 1), (200, 2)]
    assert all(one["share"] > 0 for one in chosen["steps"])
    reads = json.loads((tmp_path / "8b_reads.json").read_text())["reads"]
    assert [(one["context"], one["batch"]) for one in reads] == [(200, 1), (200, 2), (3000, 1), (3000, 2)]
    assert all(one["share"] == pytest.approx(one["gb_per_s"] / 100) for one in reads)
    [theirs] = json.loads((tmp_path / "8b_transformers.json").read_text())["prompts"]
    assert theirs["length"] == 200 and theirs["mfu"] > 0
    mixed = json.loads((tmp_path / "8b_mixed.json").read_text())["mixed"]
    assert [(one["length"], one["num_chats"]) for one in mixed] == [(3000, 0), (3000, 1), (3000, 2)]
    assert all(0 < one["tbt_p50_s"] <= one["tbt_p99_s"] < one["ttft_s"] for one in mixed[1:])
    parts = ("8b_chosen", "8b_reads", "8b_mixed", "8b_transformers")
    checks = [{"name": name, "status": "passed", "seconds": 1.0, "results": results(tmp_path, name)} for name in parts]
    report = {"mode": "full", "state": "complete", "started": "2026-11-26T", "seconds": 9, "checks": checks, "aims": []}
    lines = [*gpu_page.page([report])]
    assert "**Date** 2026-11-26." in lines and "| length | 8b_chosen | 8b_transformers |" in lines
    [row] = [line for line in lines if line.startswith("| 3,000 | ~")]
    assert row.endswith("| — |")
    assert len([line for line in lines if line.startswith("| 3,000 | 2 |") and line.count("|") == 6]) == 1


def results(folder: Path, part: str) -> dict[str, object]:
    return {part: json.loads((folder / f"{part}.json").read_text())}


def test_a_prompt_is_measured_again_as_often_as_wanted_with_the_kernel_that_is_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels, written = [], []

    def launch(config: WorkerConfig) -> ThreadLauncher:
        kernels.append(config.cuda_kernel)
        return ThreadLauncher(msgspec.structs.replace(config, cuda_kernel=None))

    encode = msgspec.json.format
    monkeypatch.setattr(msgspec.json, "format", lambda *args, **kw: written.append(args[0]) or encode(*args, **kw))
    monkeypatch.setattr(gpu_8b, "ProcessLauncher", launch)
    monkeypatch.setenv("LONGSPAN_CACHE", "restored afterwards")
    sizes = ["--device", "cpu", "--shape", "tiny", "--lengths", "200", "--batches", "1", "--warm", "2"]
    shape = tmp_path / "shape"
    given = ["gpu_8b.py", str(tmp_path), *sizes, "--parts", "flash", "--limit-s", "600", "--checkpoint", str(shape)]
    monkeypatch.setattr(sys, "argv", given)
    assert gpu_8b.main() == 0
    [prompt] = json.loads((tmp_path / "8b_flash.json").read_text())["prompts"]
    assert len(prompt["warm_s"]) == 2 and prompt["mfu"] is None, "no ceiling was measured"
    assert [len(json.loads(one)["prompts"][0]["warm_s"]) for one in written] == [0, 1, 2], "each time is kept at once"
    assert kernels == ["flash"]
    assert json.loads((shape / "config.json").read_text())["model_type"] == "llama"


def test_remaining_prompt_tokens_follow_from_computed_tokens() -> None:
    def seconds(tokens: int) -> float:
        return 1e-3 * tokens + 1e-7 * tokens**2

    known = [(tokens, seconds(tokens)) for tokens in (1000, 4000, 16000)]
    for length in (500, 4000, 128000):
        assert gpu_8b.predict_s(known, length) == pytest.approx(seconds(length))
    assert gpu_8b.affordable(known, 64000, seconds(64000) + 1) == 64000
    assert gpu_8b.affordable(known, 64000, seconds(20000) + 1e-3) == 20000
    assert gpu_8b.affordable(known, 64000, 0.0) == 1000
    assert gpu_8b.affordable(known[:1], 2000, 2 * known[0][1]) == 2000
    assert gpu_8b.affordable([], 64000, 0.0) == 64000, "the first one always runs"


def test_a_forced_kernel_reaches_the_workers(tiny: Path) -> None:
    def launch(config: WorkerConfig) -> ThreadLauncher:
        return ThreadLauncher(msgspec.structs.replace(config, cuda_kernel="flash"))

    with pytest.raises(WorkerLostError, match="CPUs have no CUDA kernels"):
        Service(EngineArgs(str(tiny), dtype="float32", skip_tokenizer_init=True), launcher=launch)


def test_the_twin_fails_when_a_percentile_is_far_off(capsys: pytest.CaptureFixture[str]) -> None:
    real = twin.Times(ttft_s=[1.0, 2.0], tbt_s=[0.1, 0.1], placements=[], busy_s=1.0)
    near = twin.Times(ttft_s=[1.08, 2.1], tbt_s=[0.1, 0.1], placements=[], busy_s=1.0)
    assert twin.report_times(real, {"before": near}, within=0.1)
    assert not twin.report_times(real, {"before": near}, within=0.05)
    assert "FAIL: TTFT and TBT within 5% wanted" in capsys.readouterr().out


def test_wheels_are_the_requirements_without_those_of_pytorch() -> None:
    roots = ["accelerate", "uvicorn[standard]; python_version > '3.0'"]
    found = gpu_wheels.closure(roots, "3.12", {"torch": None})
    assert {"accelerate", "numpy", "safetensors", "uvicorn", "h11"} <= found
    assert not found & {"torch", "sympy", "triton"}
    assert not gpu_wheels.closure(["numpy; python_version < '3.12'"], "3.12", {})


@pytest.mark.parametrize("is_report", [True, False])
def test_a_package_that_is_there_is_a_wheel_only_if_its_version_does_not_fit(tmp_path: Path, is_report: bool) -> None:
    installed = {"torch": "2.11.0+cu130", "msgspec": "0.10", "tqdm": "4.70", "accelerate": "1.15.0"}
    file = tmp_path / ("report.json" if is_report else "list.txt")
    checks = [{"name": "versions", "results": {"versions": {"installed": installed}}}]
    listed = "".join(f"{name}=={version}  # read there\n" for name, version in installed.items()) + "# a comment\n"
    file.write_text(json.dumps({"checks": checks}) if is_report else listed)
    found = gpu_wheels.closure(["accelerate", "msgspec>=0.19", "tqdm>=4"], "3.12", gpu_wheels.packages_there(file))
    assert found == {"msgspec"}


def test_nothing_that_a_machine_has_without_an_index_is_a_wheel() -> None:
    there = gpu_wheels.packages_there(gpu_wheels.ROOT / "tools" / "gpu_machine.txt")
    assert {"torch", "triton", "transformers", "numpy", "pytest-xdist"} <= {*there}
    assert gpu_wheels.closure(["torch>=2.11", "transformers>=5.0,<6", "numpy>=2.0", "pytest"], "3.12", there) == set()


def test_operators_of_pytorch_accept_our_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpu_versions.schemas()
    assert {*found} == {*gpu_versions.OPERATORS} and all(one["fits"] for one in found.values())
    swapped = {"_scaled_dot_product_flash_attention": ("key", "query"), "_no_such_operator": ("query",)}
    monkeypatch.setattr(gpu_versions, "OPERATORS", swapped)
    assert not any(one["fits"] for one in gpu_versions.schemas().values())


def test_requirements_that_are_not_met_are_named() -> None:
    assert gpu_versions.unmet_requirements() == []
    assert gpu_versions.unmet_requirements(["pytest<1", "no-such-package>=2"]) == [
        f"pytest<1, but {pytest.__version__} is installed",
        "no-such-package>=2, but nothing is installed",
    ]
