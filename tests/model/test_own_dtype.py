"""The dtype auto: the precision of the checkpoint, and bfloat16 where options require kernels of our own."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ThreadLLM
from safetensors.torch import save_file
from tiny_models import BASE
from transformers import AutoModelForCausalLM, LlamaConfig

from longspan import native, resolve
from longspan.args import EngineArgs
from longspan.core.sampling import SamplingParams
from longspan.model.source import own_dtype, prepare
from longspan.resolve import EngineModel

PRECISIONS = {
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "bfloat16",
    "float64": "float32",
    "float8_e4m3fn": "bfloat16",
}
"""By the dtype of the checkpoint."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint in bfloat16."""
    folder = tmp_path_factory.mktemp("half")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**BASE), dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that kernels of our own cannot be built for."""

    def build(_: Path) -> Path:
        raise native.UnavailableError("this CPU has no AVX512_BF16")

    monkeypatch.setattr(native, "build", build)


def write_config(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **fields}))
    return folder


@pytest.mark.parametrize(("stated", "dtype"), PRECISIONS.items())
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_states_the_precision(tmp_path: Path, key: str, stated: str, dtype: str) -> None:
    assert own_dtype(write_config(tmp_path, **{key: stated})) == dtype
    assert own_dtype(write_config(tmp_path, **{key: f"torch.{stated}"})) == dtype
    assert own_dtype(write_config(tmp_path, text_config={key: stated})) == dtype


@pytest.mark.parametrize(
    "fields", [{}, {"dtype": None}, {"torch_dtype": "auto"}, {"dtype": {}, "text_config": 3}], ids=str
)
@pytest.mark.parametrize(("stored", "dtype"), PRECISIONS.items())
def test_without_a_stated_dtype_most_weights_decide(
    tmp_path: Path, fields: dict[str, Any], stored: str, dtype: str
) -> None:
    """A norm in float32 and integers do not."""
    tensors = {name: torch.zeros(2).to(getattr(torch, stored)) for name in "abc"}
    tensors |= {"norm": torch.zeros(2), **{f"ids{i}": torch.zeros(2, dtype=torch.int64) for i in range(9)}}
    save_file(tensors, write_config(tmp_path, **fields) / "model.safetensors")
    assert own_dtype(tmp_path) == dtype
    assert own_dtype(tmp_path, with_weights=False) == "float32"


def test_a_checkpoint_that_states_no_precision_is_float32(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2, dtype=torch.bfloat16)}, write_config(tmp_path) / "pytorch_model.bin")
    assert own_dtype(tmp_path) == "float32"


def test_rounded_float16_weights_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(tmp_path, dtype="float16")
    assert [own_dtype(tmp_path) for _ in range(3)] == ["bfloat16"] * 3
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{tmp_path} is a checkpoint in float16" in record.message and "dtype float32 keeps them" in record.message


def test_auto_and_the_name_of_the_precision_are_the_same_model(tiny: Path, half: Path) -> None:
    """The same file of weights, and the same profile."""
    for folder, name in ((tiny, "float32"), (half, "bfloat16")):
        assert prepare(str(folder), dtype="auto") == prepare(str(folder), dtype=name)
        auto, named = (EngineModel.of(EngineArgs(str(folder), dtype=dtype)) for dtype in ("auto", name))  # type: ignore[arg-type]
        assert auto == named and auto.files.dtype == name
        keys = [model.profile_key("cpu", tp=1, threads=1) for model in (auto, named)]
        assert keys[0] == keys[1] and keys[0].dtype == name


def test_an_engine_computes_and_keeps_kv_in_the_precision_of_the_checkpoint(half: Path) -> None:
    given = {"skip_tokenizer_init": True, "block_size": 16, "threads_per_rank": 1, "num_gpu_blocks_override": 16}
    block_bytes, tokens = [], []
    for dtype in ("auto", "bfloat16", "float32"):
        with ThreadLLM(str(half), dtype=dtype, **given) as llm:
            block_bytes.append(llm.service.block_bytes)
            [output] = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
            tokens.append(output.outputs[0].token_ids)
    assert block_bytes[0] == block_bytes[1] == block_bytes[2] // 2
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, "auto"),
        ({"device": "cuda"}, "auto"),
        ({"attention_backend": "torch"}, "auto"),
        ({"attention_backend": "native"}, "bfloat16"),
        ({"quantization": "int8"}, "bfloat16"),
        ({"quantization": "int4", "dtype": "float32"}, "float32"),
    ],
    ids=str,
)
def test_kernels_of_our_own_require_bfloat16(given: dict[str, Any], dtype: str) -> None:
    assert EngineArgs("m", **given).required_dtype == dtype


@pytest.mark.parametrize("given", [{"quantization": "int8"}, {"attention_backend": "native"}], ids=str)
def test_auto_is_bfloat16_for_a_float32_checkpoint_if_kernels_of_our_own_are_required(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(native, "build", lambda _: tmp_path / "kernels")
    model = EngineModel.of(EngineArgs(str(tiny), **given))
    assert (model.files.dtype, model.kernels) == ("bfloat16", tmp_path / "kernels")


@pytest.mark.usefixtures("no_kernels")
def test_auto_is_bfloat16_without_kernels_of_our_own_and_its_cost_is_logged_once(
    half: Path, caplog: pytest.LogCaptureFixture
) -> None:
    resolve.warn_of_slow_bfloat16.cache_clear()
    for _ in range(2):
        model = EngineModel.of(EngineArgs(str(half)))
        assert (model.files.dtype, model.kernels) == ("bfloat16", None)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "of dtype float32, which needs twice the memory" in record.message
    with pytest.raises(ValueError, match="quantization int8 needs longspan's own kernels"):
        EngineModel.of(EngineArgs(str(half), quantization="int8"))
