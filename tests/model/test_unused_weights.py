"""Tensors of a checkpoint that the model has no place for: named at each start, and an error where they are scales."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny
from torch import Tensor
from transformers import LlamaForCausalLM

from longspan.model.files import ModelError
from longspan.model.source import prepare

Tensors = dict[str, Tensor]
ATTENTION = "model.layers.0.self_attn"
QUERIES = f"{ATTENTION}.q_proj"
EXPERT = "model.layers.0.block_sparse_moe.experts.0.w1"
ONE = torch.ones(1)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "m"


def change(folder: Path, edit: Callable[[Tensors], object], name: str = "llama") -> str:
    """Edits the tensors of a tiny model."""
    tensors = load_file(make_tiny(name, folder) / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def with_more(*names: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: ONE.clone() for name in names})


def float8(tensors: Tensors) -> None:
    for name in list(tensors):
        if name.startswith((QUERIES, EXPERT)):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def float8_scaled(tensors: Tensors, scale: str = "weight_scale_inv") -> None:
    float8(tensors)
    with_more(*(name.replace("weight", scale) for name in list(tensors) if name.startswith((QUERIES, EXPERT))))(tensors)


def packed(*parts: str) -> Callable[[Tensors], object]:
    """Replace the weight by other tensors, as GPTQ does."""

    def edit(tensors: Tensors) -> None:
        del tensors[f"{QUERIES}.weight"]
        tensors.update({f"{QUERIES}.{part}": torch.ones(4, dtype=torch.int32) for part in parts})

    return edit


def integers(kind: torch.dtype, *more: str) -> Callable[[Tensors], object]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{QUERIES}.weight"] = tensors[f"{QUERIES}.weight"].to(kind)
        with_more(*more)(tensors)

    return edit


QUANTISED = {
    "fp8": float8_scaled,
    "fp8 of compressed-tensors": lambda tensors: float8_scaled(tensors, "weight_scale"),
    "inputs alone": with_more(f"{QUERIES}.input_scale"),
    "gptq": packed("qweight", "qzeros", "scales", "g_idx"),
    "awq": packed("qweight", "qzeros", "scales"),
    "packed": packed("weight_packed", "weight_scale", "weight_shape"),
    "zero points": with_more(f"{QUERIES}.weight_scale", f"{QUERIES}.weight_zero_point"),
    "nvfp4": with_more(f"{QUERIES}.weight_scale", f"{QUERIES}.weight_scale_2"),
    "mxfp4": with_more(
        "model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts.gate_up_proj_scales"
    ),
    "bitsandbytes 8": integers(torch.int8, f"{QUERIES}.SCB"),
    "bitsandbytes 4": with_more(f"{QUERIES}.weight.absmax", f"{QUERIES}.weight.quant_state.bitsandbytes__nf4"),
    "integers without scales": integers(torch.int8),
    "bytes without scales": integers(torch.uint8),
}


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_weights_without_their_configuration_are_refused(kind: str, folder: Path) -> None:
    model = change(folder, QUANTISED[kind])
    with pytest.raises(ModelError, match=r"quantised \(.*model\.layers\.0.* no quantization_config"):
        prepare(model, dtype="float32")


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_scales_of_experts_are_found_though_transformers_merges_these(scale: str, folder: Path) -> None:
    model = change(folder, lambda tensors: float8_scaled(tensors, scale), "mixtral")
    with pytest.raises(ModelError, match=rf"quantised \({EXPERT}\.{scale}"):
        prepare(model, dtype="float32")


def warnings(folder: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    prepare(folder, dtype="float32")
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


NAMED = {
    "a bias": (with_more(f"{QUERIES}.bias"), [f"{QUERIES}.bias"]),
    "layers": (
        lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2, 2)}),
        ["model.layers.3.mlp.up_proj.weight"],
    ),
    "many": (with_more(*(f"extra.{number}" for number in range(7))), ["extra.0", "extra.1", "extra.2 and 4 more"]),
    "scales of KV": (with_more(f"{ATTENTION}.k_scale", f"{QUERIES}.v_scale"), [f"{ATTENTION}.k_scale"]),
    "a scale that is the model's own affair": (with_more("model.embed_scale"), ["model.embed_scale"]),
    "float8 as plain numbers": (float8, [f"{QUERIES}.weight", "float8 without scales"]),
}


@pytest.mark.parametrize("kind", NAMED)
def test_tensors_without_a_place_are_named_at_each_start(
    kind: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not only when the weights are converted."""
    edit, named = NAMED[kind]
    model = change(folder, edit)
    [first] = warnings(model, caplog)
    assert model in first and all(name in first for name in named)
    assert warnings(model, caplog) == [first]


def test_layers_that_the_configuration_lost_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_tiny("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    [warning] = warnings(str(folder), caplog)
    assert "model.layers.2.input_layernorm.weight" in warning and "and 6 more" in warning


def ignored_by_the_class(tensors: Tensors) -> None:
    tensors.update({"mtp.layers.0.weight": ONE, "mtp.layers.0.weight_scale": ONE.clone()})


EXPECTED = {
    "nothing": lambda _: None,
    "old rotary frequencies": with_more(f"{ATTENTION}.rotary_emb.inv_freq"),
    "a tied head": lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    "what the class ignores": ignored_by_the_class,
}


@pytest.mark.parametrize("kind", EXPECTED)
def test_tensors_that_transformers_expects_cause_no_warning(
    kind: str, folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "_keys_to_ignore_on_load_unexpected", {r"^mtp\."})
    assert warnings(change(folder, EXPECTED[kind]), caplog) == []
