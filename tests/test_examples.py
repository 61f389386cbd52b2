"""The demo on two hosts, and the attention library's examples between two processes as torchrun starts them."""

from __future__ import annotations

import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from forked import Forked, free_port
from tiny_models import make_tiny

ROOT = Path(__file__).parents[1]
PAGE_CHECK = """
wanted = AutoModelForCausalLM.from_pretrained(folder)(ids[None]).logits[:, mine]
print("largest difference", (logits - wanted).abs().max().item())
torch.distributed.destroy_process_group()
"""
COMMON = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def torchrun(script: Path, logs: Path) -> list[str]:
    """Return the output of each process, from a file of its own since torchrun does not buffer lines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--redirects", "1", "--log-dir", str(logs), str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **COMMON}, check=False
    )
    assert done.returncode == 0, done.stderr
    return [path.read_text(encoding="utf-8") for path in sorted(logs.rglob("stdout.log"))]


def run_script(script: str) -> None:
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


def forked(script: Path, _: Path) -> list[str]:
    """Return the output of each process. Its environment is the same as under torchrun."""
    common = {**COMMON, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    ranks = [Forked(run_script, str(script), environment={**common, "RANK": rank}) for rank in "01"]
    ended = [rank.wait(120) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ended), ended
    return [rank.stdout for rank in ended]


@pytest.fixture(params=[forked, pytest.param(torchrun, marks=pytest.mark.full)])
def differences(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], list[float]]:
    """Return a function that runs a script in two processes and returns the differences that it prints."""

    def run(script: Path) -> list[float]:
        printed = request.param(script, tmp_path)
        assert len(printed) == 2
        return [float(found) for text in printed for found in re.findall(r"largest difference (\S+)", text)]

    return run


def test_ring_attention(differences: Callable[[Path], list[float]]) -> None:
    found = differences(ROOT / "examples" / "ring_attention.py")
    assert len(found) == 5
    assert max(found) < 1e-5


def test_context_parallel_model(differences: Callable[[Path], list[float]]) -> None:
    [difference] = differences(ROOT / "examples" / "context_parallel_model.py")
    assert 0 < difference < 3e-5


def test_the_page(differences: Callable[[Path], list[float]], tmp_path: Path) -> None:
    """Its first code, with a folder and tokens before it, and a comparison after."""
    page = (ROOT / "docs" / "attention-library.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    folder = make_tiny("llama", tmp_path / "model")
    before = f"import torch\nfolder, ids = {str(folder)!r}, torch.arange(3, 150)\n"
    script = tmp_path / "script.py"
    script.write_text(before + code + PAGE_CHECK, encoding="utf-8")
    found = differences(script)
    assert len(found) == 2
    assert max(found) < 3e-5


@pytest.fixture
def hosts_demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["hosts_demo.py", "--key", "48213"])
    return importlib.import_module("hosts_demo")


def test_the_demo_on_hosts_gives_the_reason_where_hosts_are_not_permitted(
    hosts_demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hosts_demo, "why_not", lambda: "network namespaces need root on Linux")
    assert hosts_demo.main() == 2
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "The demo cannot make hosts on this machine: network namespaces need root on Linux"
    ]
    assert not printed.out


@pytest.mark.full
def test_the_demo_on_hosts_prints_places_and_bytes(
    hosts_demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reason := hosts_demo.why_not()) is not None:
        pytest.skip(reason)
    monkeypatch.setenv("LONGSPAN_HOSTS", "")
    assert hosts_demo.main() == 0
    printed = capsys.readouterr().out
    ranges = re.findall(r"([\d,]+) to +([\d,]+)  instance (\d) on host (\S+)", printed)
    assert {place[2:] for place in ranges} == {("0", "10.99.0.1"), ("1", "10.99.0.2")}
    starts, stops = ([int(place[index].replace(",", "")) for place in ranges] for index in (0, 1))
    assert starts == [0, *(stop + 1 for stop in stops[:-1])], "each token is computed once"
    assert len(re.findall(r"payload of ring_kv|received by 10.99.0.\d", printed)) == 3
