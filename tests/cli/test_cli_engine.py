"""`longspan generate` as a user runs it: a process of its own, real workers, a tiny random model without tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPT = ",".join(str(3 + i % 100) for i in range(100))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def generate(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "longspan", "generate", str(folder), "--load-format", "dummy"]
    command += ["--skip-tokenizer-init", "--threads-per-rank", "1", "--block-size", "16", *arguments]
    environment = {**os.environ, "LONGSPAN_CACHE": str(folder / "cache")}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_one_and_two_instances_give_the_same_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("--token-ids", PROMPT, "--max-tokens", "9", "--ignore-eos")
    alone = generate(folder, *common)
    assert (alone.returncode, alone.stderr) == (0, "")

    monkeypatch.setenv("LONGSPAN_HOSTS", "2")
    shared = generate(folder, *common, "--json", "--parallel", "2", "--policy", "context", "-o", "threshold=32")
    assert (shared.returncode, shared.stderr) == (0, "")
    result = json.loads(shared.stdout.splitlines()[-1])
    assert alone.stdout == ",".join(map(str, result["token_ids"])) + "\n"
    assert (result["prompt_tokens"], result["finish_reason"], len(result["tbt_s"])) == (100, "length", 8)
    held = result["kv_tokens_per_instance"]
    assert sum(held) == 100
    assert min(held) >= 32
    moved = result["bytes_exchanged"]
    assert moved["ring_kv"] > 0
    assert moved["total"] == sum(moved.values()) - moved["total"]
    assert result["bytes_between_hosts"] == moved


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--token-ids", ",".join(["5"] * 600)], ["600", "512"]),
        (["--prompt", "text"], ["tokenizer"]),
        (["--token-ids", "5", "--choice", "yes", "--choice", "no"], ["structured_outputs", "tokenizer"]),
    ],
)
def test_what_only_the_engine_can_refuse_is_one_line_too(folder: Path, arguments: list[str], words: list[str]) -> None:
    result = generate(folder, *arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert all(word in result.stderr for word in words)
