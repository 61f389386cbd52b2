"""The examples of the attention library, and those of its page, between two processes as torchrun starts them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tiny_models import make_tiny

ROOT = Path(__file__).parents[1]
PAGE_CHECK = """
wanted = AutoModelForCausalLM.from_pretrained(folder)(ids[None]).logits[:, mine]
print("largest difference", (logits - wanted).abs().max().item())
torch.distributed.destroy_process_group()
"""


def torchrun(script: Path, logs: Path) -> list[float]:
    """The differences that a script prints; each process into its own file, since torchrun does not buffer them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--redirects", "1", "--log-dir", str(logs), str(script)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    printed = [path.read_text(encoding="utf-8") for path in sorted(logs.rglob("stdout.log"))]
    assert len(printed) == 2
    return [float(found) for text in printed for found in re.findall(r"largest difference (\S+)", text)]


def test_ring_attention(tmp_path: Path) -> None:
    differences = torchrun(ROOT / "examples" / "ring_attention.py", tmp_path)
    assert len(differences) == 5
    assert max(differences) < 1e-5


def test_context_parallel_model(tmp_path: Path) -> None:
    [difference] = torchrun(ROOT / "examples" / "context_parallel_model.py", tmp_path)
    assert 0 < difference < 3e-5


def test_the_page(tmp_path: Path) -> None:
    """Its first code, with a folder and tokens before it, and a comparison after."""
    page = (ROOT / "docs" / "attention-library.md").read_text(encoding="utf-8")
    code = page.partition("```python\n")[2].partition("```")[0]
    folder = make_tiny("llama", tmp_path / "model")
    before = f"import torch\nfolder, ids = {str(folder)!r}, torch.arange(3, 150)\n"
    script = tmp_path / "script.py"
    script.write_text(before + code + PAGE_CHECK, encoding="utf-8")
    differences = torchrun(script, tmp_path)
    assert len(differences) == 2
    assert max(differences) < 3e-5
