"""`longspan generate` with a real engine, of a tiny random model without a tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_llm import run

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


def command(folder: Path, *arguments: str) -> list[str]:
    fixed = ("--dtype", "float32", "--load-format", "dummy", "--skip-tokenizer-init", "--threads-per-rank", "1")
    return ["generate", str(folder), *fixed, "--block-size", "16", *arguments]


@pytest.mark.usefixtures("thread_llm")
def test_two_processes_and_a_thread_give_the_same_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The former are two instances, and `generate` is run as a user runs it."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(folder / "cache"))
    common = ("--token-ids", PROMPT, "--max-tokens", "9", "--ignore-eos")
    assert run(*command(folder, *common)) == 0
    alone = capsys.readouterr()
    assert alone.err == ""

    sharing = ("--json", "--parallel", "2", "--policy", "context", "-o", "threshold=32", "--log-level", "warning")
    shared = subprocess.run(
        [sys.executable, "-m", "longspan", *command(folder, *common, *sharing)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LONGSPAN_HOSTS": "2"},
        check=False,
    )
    assert (shared.returncode, shared.stderr) == (0, "")
    result = json.loads(shared.stdout.splitlines()[-1])
    assert alone.out == ",".join(map(str, result["token_ids"])) + "\n"
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
        (["--token-ids", "5", "--choice", "yes", "--choice", "no"], ["tokenizer", "skip"]),
    ],
)
@pytest.mark.usefixtures("thread_llm")
def test_refusals_by_the_engine_are_one_line(
    folder: Path, arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*command(folder, *arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert all(word in err for word in words)
