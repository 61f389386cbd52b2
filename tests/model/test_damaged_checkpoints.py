"""Files of models that are cut, missing, replaced by something else or full of mistakes: one sentence, no traceback."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_llm import run
from safetensors.torch import load_file
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from longspan.model.files import ModelError
from longspan.model.source import prepare
from longspan.text.tokenizer import load_tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n"
NOISE = bytes(range(256)) * 20
WEIGHTS, INDEX, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
SHARD = "model-00002-of-00004.safetensors"

Damage = Callable[[Path], object]


def holds(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content)


def cut(name: str, size: int) -> Damage:
    """To a size, or by some bytes."""
    return lambda folder: os.truncate(folder / name, size if size > 0 else (folder / name).stat().st_size + size)


def gone(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def is_folder(name: str) -> Damage:
    return lambda folder: ((folder / name).unlink(), (folder / name).mkdir())


def leads_nowhere(name: str) -> Damage:
    return lambda folder: ((folder / name).unlink(), (folder / name).symlink_to("nowhere"))


def says(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def config(**values: object) -> Damage:
    return says("config.json", lambda content: content.update(values))


def pickled(content: object) -> Damage:
    return lambda folder: (gone(WEIGHTS)(folder), torch.save(content, folder / PICKLED))


def cut_pickle(folder: Path) -> None:
    pickled(load_file(folder / WEIGHTS))(folder)
    cut(PICKLED, -300)(folder)


# The kind of checkpoint, the damage, and a part of the error text.
DAMAGES: dict[str, tuple[str, Damage, str]] = {
    "cut data": ("whole", cut(WEIGHTS, -100), WEIGHTS),
    "cut header": ("whole", cut(WEIGHTS, 200), WEIGHTS),
    "cut length": ("whole", cut(WEIGHTS, 4), WEIGHTS),
    "longer": ("whole", lambda folder: (folder / WEIGHTS).open("ab").write(b"more"), WEIGHTS),
    "empty": ("whole", holds(WEIGHTS, b""), f"{WEIGHTS} is empty"),
    "pointer": ("whole", holds(WEIGHTS, POINTER), f"{WEIGHTS} is a git-lfs pointer"),
    "page": ("whole", holds(WEIGHTS, b"<html>404</html>"), WEIGHTS),
    "noise": ("whole", holds(WEIGHTS, NOISE), WEIGHTS),
    "huge header": ("whole", holds(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), WEIGHTS),
    "no header": ("whole", holds(WEIGHTS, struct.pack("<Q", 100) + bytes(200)), WEIGHTS),
    "folder": ("whole", is_folder(WEIGHTS), WEIGHTS),
    "broken link": ("whole", leads_nowhere(WEIGHTS), WEIGHTS),
    "pipe": ("whole", lambda folder: (gone(WEIGHTS)(folder), os.mkfifo(folder / WEIGHTS)), WEIGHTS),
    "no weights": ("whole", gone(WEIGHTS), "has no weights"),
    "adapter": ("whole", holds("adapter_config.json", b"{}"), "adapter_config.json"),
    "shard cut": ("shards", cut(SHARD, -50), SHARD),
    "shard pointer": ("shards", holds(SHARD, POINTER), f"{SHARD} is a git-lfs pointer"),
    "shard gone": ("shards", gone(SHARD), f"names {SHARD}, which does not exist"),
    "shard folder": ("shards", is_folder(SHARD), SHARD),
    "index cut": ("shards", cut(INDEX, 100), INDEX),
    "index pointer": ("shards", holds(INDEX, POINTER), f"{INDEX} is a git-lfs pointer"),
    "index list": ("shards", holds(INDEX, b"[]"), INDEX),
    "index empty": ("shards", says(INDEX, lambda content: content["weight_map"].clear()), INDEX),
    "index without places": ("shards", says(INDEX, lambda content: content.pop("weight_map")), INDEX),
    "index without metadata": ("shards", says(INDEX, lambda content: content.pop("metadata")), INDEX),
    "index of numbers": ("shards", says(INDEX, lambda content: content["weight_map"].update(x=5)), INDEX),
    "index of others": ("shards", says(INDEX, lambda content: content["weight_map"].update(x="y")), "names y, which"),
    "pickle cut": ("whole", cut_pickle, "cannot be loaded"),
    "pickle pointer": ("whole", lambda f: (gone(WEIGHTS)(f), holds(PICKLED, POINTER)(f)), "is a git-lfs pointer"),
    "pickle empty": ("whole", lambda f: (gone(WEIGHTS)(f), holds(PICKLED, b"")(f)), f"{PICKLED} is empty"),
    "pickle noise": ("whole", lambda f: (gone(WEIGHTS)(f), holds(PICKLED, NOISE)(f)), "cannot be loaded"),
    "pickle list": ("whole", pickled([1]), "cannot be loaded"),
    **{
        f"{name} {kind}": ("whole", holds(name, content), name)
        for name in ("config.json", "generation_config.json")
        for kind, content in (
            *(("cut", b'{"a": '), ("empty", b""), ("list", b"[]"), ("null", b"null"), ("text", b'"x"')),
            *(("pointer", POINTER), ("noise", NOISE)),
        )
    },
    "end that is no number": ("whole", holds("generation_config.json", b'{"eos_token_id": "x"}'), "eos_token_ids"),
    "no layers": ("whole", config(num_hidden_layers=0), "no layers"),
    "no heads": ("whole", config(num_attention_heads=0), "config.json"),
    "quantisation by name": ("whole", config(quantization_config="fp8"), "config.json"),
    "width in words": ("whole", config(hidden_size="wide"), "config.json"),
    "other width": ("whole", config(hidden_size=48), r"29 of its weights .* \(199, 96\) and not \(199, 48\)"),
    "more layers": ("whole", config(num_hidden_layers=4), r"lack 9 of the model's weights, e.g. model.layers.3"),
    "biases": ("whole", config(attention_bias=True), r"lack 12 of the model's weights, e.g. .*\.bias"),
    "no head": ("whole", config(tie_word_embeddings=False), r"lack 1 of the model's weights, e.g. lm_head.weight"),
    **{
        f"tokenizer {name} {kind}": ("speaking", holds(name, content), "tokenizer")
        for name in ("tokenizer.json", "tokenizer_config.json")
        for kind, content in (("cut", b'{"a": '), ("empty", b""), ("list", b"[]"), ("pointer", POINTER))
    },
    "tokenizer of nothing": ("speaking", holds("tokenizer.json", b"{}"), "tokenizer"),
    "tokenizer of another form": ("speaking", holds("tokenizer.json", b'{"added_tokens": []}'), "tokenizer"),
    "words of a pointer": ("whole", holds("vocab.txt", POINTER), "vocab.txt is a git-lfs pointer"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, speaking_model: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    whole = make_tiny("llama", root / "whole")
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(root / "shards", max_shard_size="250KB")
    return {"whole": whole, "shards": root / "shards", "speaking": speaking_model}


@pytest.fixture
def damaged(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))

    def make(name: str) -> Path:
        kind, damage, _ = DAMAGES[name]
        shutil.copytree(models[kind], tmp_path / "m")
        damage(tmp_path / "m")
        return tmp_path / "m"

    return make


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_model_is_refused_in_one_sentence_that_names_the_file(
    name: str, damaged: Callable[[str], Path], tmp_path: Path
) -> None:
    """And nothing of it stays in the cache."""
    folder = damaged(name)
    with pytest.raises(ModelError, match=DAMAGES[name][2]) as refusal:
        load_tokenizer(prepare(str(folder), dtype="float32"))
    assert "\n" not in str(refusal.value)
    if DAMAGES[name][0] != "speaking" and name != "words of a pointer":
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"] == []


@pytest.mark.parametrize("name", ["pointer", "cut data", "shard gone", "config.json cut", "biases"])
@pytest.mark.usefixtures("thread_llm")
def test_the_command_line_ends_with_one_line_and_code_2(
    name: str, damaged: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", str(damaged(name)), "--prompt", "x", "--skip-tokenizer-init") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert [line.startswith("longspan: ") for line in shown.err.splitlines() if line.strip()] == [True]


def test_all_kinds_of_models_are_served_undamaged(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    assert sorted(path.name for path in models["shards"].glob("*.safetensors"))[1] == SHARD
    for folder in models.values():
        prepare(str(folder), dtype="float32")
    pickled(load_file(models["whole"] / WEIGHTS))(shutil.copytree(models["whole"], tmp_path / "m"))
    prepare(str(tmp_path / "m"), dtype="float32")
