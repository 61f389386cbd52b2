"""In a container with 1.6 GB no worker is lost by default. A worker killed for lack of memory is reported as such."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from memory_group import MemoryGroup, memory_group
from server_process import ServerProcess

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
LIMIT, NUM_PROMPTS, NUM_TOKENS = 1_600_000_000, 45, 1400
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""64 KB of KV per token, so that the prompts have 4 GB of it, and the prefix cache fills up."""
FIXED = ("--dtype", "float32", "--load-format", "dummy", "--skip-tokenizer-init", "--threads-per-rank", "1")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))  # else PyTorch makes it where nothing may be
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path / "model")


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group(LIMIT) as group:
        yield group


def prompt(number: int) -> list[int]:
    return [3 + (number * 7 + place) % 990 for place in range(NUM_TOKENS)]


def run_batch(group: MemoryGroup, model: str, tmp_path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    requests = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": prompt(number), "max_tokens": 2, "ignore_eos": True}}
        for number in range(NUM_PROMPTS)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    command = [sys.executable, "-m", "longspan", "batch", model, "-i", str(source), "-o", str(target), *FIXED, *flags]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    group.add(process.pid)
    out, err = process.communicate(timeout=800)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize(
    "flags", [(), ("--parallel", "2"), ("--parallel", "tp2"), ("--host-kv-gib", "0.5")], ids=" ".join
)
def test_prompts_with_more_kv_than_memory_lose_no_worker(
    flags: tuple[str, ...], group: MemoryGroup, model: str, tmp_path: Path
) -> None:
    done = run_batch(group, model, tmp_path, *flags)
    assert (done.returncode, group.num_kills) == (0, 0), done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["response"]["status_code"] for answer in answers] == [200] * NUM_PROMPTS


def test_a_server_of_a_container_loses_no_worker(group: MemoryGroup, model: str, tmp_path: Path) -> None:
    """Eight requests run at a time. The server has two instances and KV in the memory of the host."""
    server = ServerProcess((model, *FIXED, "--parallel", "2", "--host-kv-gib", "0.3"), tmp_path / "log", {})
    try:
        group.add(server.process.pid)
        server.wait_until_healthy()

        def ask(number: int) -> int:
            body = {"prompt": prompt(number), "max_tokens": 2, "ignore_eos": True}
            return server.client.ask("POST", "/v1/completions", body, timeout_s=600).status

        with ThreadPoolExecutor(8) as clients:
            assert list(clients.map(ask, range(NUM_PROMPTS))) == [200] * NUM_PROMPTS
        assert group.num_kills == 0
        server.close()
    finally:
        server.destroy()


def test_a_worker_that_is_killed_for_lack_of_memory_says_so(group: MemoryGroup, model: str, tmp_path: Path) -> None:
    done = run_batch(group, model, tmp_path, "--kv-cache-memory-bytes", str(LIMIT - 2**24))
    assert done.returncode == 1
    assert group.num_kills >= 1
    line = done.stderr.splitlines()[-1]
    assert "was killed by SIGKILL: the memory limit of this container (1.5 GiB) was used up" in line
    assert "--kv-cache-memory-bytes" in line
