"""GGUF files as models: the tokens of the checkpoint they were made from, or an error with a remedy."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engines import ThreadLLM
from fake_llm import run
from gguf_files import TEMPLATE, write_gguf
from oracle import Oracle, assert_exact
from safetensors.torch import load_file
from tiny_models import BASE, TINY, make_tiny, write_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma2Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from longspan.core.sampling import SamplingParams
from longspan.model.files import ModelError
from longspan.model.gguf_file import split_digits
from longspan.model.gguf_folder import gguf_folder
from longspan.model.source import local_folder, own_dtype, prepare

PROMPT = list(range(3, 120))
WIDE = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
MODELS = {
    "llama": TINY["llama"],
    "qwen2": TINY["qwen2"],
    "qwen3": TINY["qwen3"],
    "gemma2": lambda: Gemma2Config(**BASE | WIDE, sliding_window=32, attn_logit_softcapping=20.0),
    "untied": lambda: Qwen2Config(**BASE | {"tie_word_embeddings": False, "rms_norm_eps": 1e-5}),
    "other base of rope": lambda: Qwen3Config(**BASE, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny("llama", tmp_path / "llama")


@pytest.mark.parametrize("name", MODELS)
def test_a_file_gives_the_tokens_of_its_checkpoint(name: str, tmp_path: Path) -> None:
    """Also with a head size, a window and soft caps that transformers does not take from the file."""
    checkpoint = write_checkpoint(MODELS[name](), tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    options = SamplingParams(temperature=0, max_tokens=6, output_logits=True, ignore_eos=True)
    with ThreadLLM(str(file), block_size=16, num_gpu_blocks_override=16) as llm:
        [output] = llm.generate([PROMPT], options, use_tqdm=False)
    assert_exact(output, Oracle(checkpoint).complete(PROMPT, 6))


def test_an_attention_scale_that_no_file_has_is_refused(tmp_path: Path) -> None:
    """As of Gemma 2 27B. The scale of transformers is that of a head size of 256."""
    file = write_gguf(make_tiny("gemma2", tmp_path / "checkpoint"), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match="it ignores the scale of attention"):
        prepare(str(file), dtype="float32")


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Q8_0", "float32"), ("Q4_0", "float32"), ("Q4_1", "float32"), ("F16", "float16"), ("BF16", "bfloat16")],
)
def test_quantised_files_are_dequantised_as_transformers_does(kind: str, dtype: str, llama: Path) -> None:
    """Halves stay halves. The dtype auto is then that of any checkpoint in them."""
    file = write_gguf(llama, llama / "model.gguf", kind=kind)
    folder = gguf_folder(file)
    theirs = AutoModelForCausalLM.from_pretrained(llama, gguf_file=file.name, dtype=getattr(torch, dtype)).state_dict()
    ours = load_file(folder / "model.safetensors")
    assert set(theirs) - set(ours) == {"lm_head.weight"}, "it is tied"
    for name, weight in ours.items():
        assert weight.dtype == theirs[name].dtype and torch.equal(weight, theirs[name]), name
    assert own_dtype(folder) == ("float32" if dtype == "float32" else "bfloat16")


def test_the_tokenizer_and_the_chat_template_are_those_of_the_file(llama: Path) -> None:
    file = write_gguf(llama, llama / "model.gguf")
    ours = AutoTokenizer.from_pretrained(gguf_folder(file))
    theirs = AutoTokenizer.from_pretrained(llama, gguf_file=file.name)
    assert ours.get_vocab() == theirs.get_vocab() and ours.chat_template == theirs.chat_template == TEMPLATE
    assert ours("ab c").input_ids == theirs("ab c").input_ids
    assert ours.tokenize("12") == ["1", "2"] and theirs.tokenize("12") == ["12"], "smollm splits digits off"
    assert (ours.bos_token, ours.eos_token, ours.model_max_length) == ("<bos>", "<eos>", 4096)


def test_the_repaired_tokenizer_splits_digits_before_anything_else() -> None:
    words = ["<unk>", "a", "1", "2", "12", "Ġ", "ĠĠ"]
    merges = [("1", "2"), ("Ġ", "Ġ")]
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)
    assert "12" in tokenizer.tokenize("a  12")
    split_digits(tokenizer)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]


def test_a_way_to_split_text_that_transformers_does_not_read_is_named(
    llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gguf_folder(write_gguf(llama, llama / "model.gguf", facts={"tokenizer.ggml.pre": "viking"}))
    assert any("and not as viking: tokens may differ" in record.getMessage() for record in caplog.records)


def test_a_folder_with_one_file_is_that_file(llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        local_folder(str(folder), with_weights=True)
    file = write_gguf(llama, folder / "a.gguf")
    expected = local_folder(str(file), with_weights=True)
    assert local_folder(str(folder), with_weights=True) == expected
    file.rename(tmp_path / "moved.gguf")
    assert local_folder(str(tmp_path / "moved.gguf"), with_weights=True) == expected, "its contents decide"
    for name in ("a", "b"):
        write_gguf(llama, folder / f"{name}.gguf", facts={"general.name": name})
    with pytest.raises(ModelError, match=r"has 2 GGUF files .*: give one of the files, e\.g\. .*a\.gguf"):
        local_folder(str(folder), with_weights=True)
    assert run("serve", str(folder)) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("longspan: ") and "2 GGUF files" in line
    (folder / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert local_folder(str(folder), with_weights=True) == folder, "a folder in Hugging Face's format"


SQUARE = np.ones((96, 96), np.float32)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a part by its name": ({"name": "m-00001-of-00003.gguf"}, "one of 3 parts of a model: merge them by llama-gguf"),
    "a part by its content": ({"facts": {"split.count": 2}}, "one of 2 parts of a model"),
    "an adapter": ({"facts": {"general.type": "adapter"}}, "it is of type adapter"),
    "an unknown kind of model": ({"facts": {"general.architecture": "clip"}}, "does not read this model .*clip"),
    "rope scaling": ({"facts": {"llama.rope.scaling.type": "yarn"}}, r"it ignores rope\.scaling\.type"),
    "a factor of rope scaling": ({"facts": {"llama.rope.scaling.factor": 8.0}}, r"it ignores rope\.scaling\.factor"),
    "factors of rope": ({"tensors": {"rope_freqs.weight": np.ones(8, np.float32)}}, r"it ignores rope_freqs\.weight"),
    "rope of some dimensions": ({"facts": {"llama.rope.dimension_count": 8}}, r"it ignores rope\.dimension_count"),
    "a value of unknown meaning": ({"facts": {"llama.residual_scale": 0.5}}, "it ignores residual_scale"),
    "experts": ({"facts": {"llama.expert_count": 4}}, "it ignores expert_count"),
    "a missing weight": ({"tensors": {"blk.1.attn_k.weight": None}}, r"1 missing keys, e\.g\. .*layers\.1.*k_proj"),
    "a bias": ({"tensors": {"blk.0.attn_q.bias": np.ones(96, np.float32)}}, "it has [0-9]+ weights, and the model"),
    "a weight of another shape": ({"tensors": {"blk.0.ffn_up.weight": SQUARE}}, "mismatched keys, e"),
    "an unknown tokenizer": ({"facts": {"tokenizer.ggml.model": "rwkv"}}, "does not read its tokenizer"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_transformers_reads_only_in_part_are_refused(kind: str, llama: Path) -> None:
    changes, reason = REFUSED[kind]
    given = dict(changes)
    file = write_gguf(llama, llama / given.pop("name", "model.gguf"), **given)
    with pytest.raises(ModelError, match=reason) as refusal:
        prepare(str(file), dtype="float32")
    assert "\n" not in str(refusal.value) and str(file) in str(refusal.value)
    assert not list(llama.parent.glob("cache/models/*"))[1:], "only the lock is left"


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut data": (lambda file: os.truncate(file, file.stat().st_size - 3000), "is damaged"),
    "cut header": (lambda file: os.truncate(file, 900), "is damaged"),
    "cut counts": (lambda file: os.truncate(file, 10), "is damaged"),
    "empty": (lambda file: file.write_bytes(b""), "is empty"),
    "noise": (lambda file: file.write_bytes(bytes(range(256)) * 20), "is damaged, or no GGUF file"),
    "page": (lambda file: file.write_bytes(b"<html>404</html>"), "is damaged, or no GGUF file"),
    "pointer": (lambda file: file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git-lfs pointer"),
    "gone": (lambda file: file.unlink(), "does not exist: give .* a .gguf file"),
    "folder": (lambda file: (file.unlink(), file.mkdir()), r"has no config\.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_named_in_one_line(damage: str, llama: Path) -> None:
    spoil, reason = DAMAGES[damage]
    file = write_gguf(llama, llama / "model.gguf")
    spoil(file)
    with pytest.raises(ModelError, match=reason) as refusal:
        prepare(str(file), dtype="float32")
    assert "\n" not in str(refusal.value) and str(file) in str(refusal.value)


@pytest.mark.parametrize("missing", ["accelerate", "gguf"])
def test_a_file_without_the_extra_names_the_extra(missing: str, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, find_spec = write_gguf(llama, llama / "model.gguf"), importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec(name))
    with pytest.raises(ModelError, match=re.escape(f"needs {missing}; run: pip install 'longspan[gguf]'")):
        prepare(str(file), dtype="float32")
