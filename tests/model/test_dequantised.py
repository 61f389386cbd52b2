"""Quantised checkpoints are served with de-quantised weights: every tensor and token, compared with a reference."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ThreadLLM
from oracle import Oracle, assert_exact
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny, write_checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config

from longspan.core.sampling import SamplingParams
from longspan.model.dequantise import WeightFormat, weight_format
from longspan.model.files import ModelError
from longspan.model.folder import stored_types, weight_files
from longspan.model.source import own_dtype, prepare
from longspan.model.store import DTYPES, StoredTensors

Tensors = dict[str, Tensor]
CPU = torch.device("cpu")
WEIGHTS = "model.safetensors"
QUERIES = "model.layers.0.self_attn.q_proj"
MAX_FLOAT8 = 448.0
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "quantised"


def fp8(block: tuple[int, int] | None = None, **more: object) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": block, "activation_scheme": "dynamic", **more}


def compressed(strategy: str, **more: object) -> dict[str, Any]:
    weights = {**FLOAT, "strategy": strategy, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": dict(FLOAT)}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def split(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the float8 weight, the scale of each block, and the de-quantised weight by the format's definition."""
    rows, columns = weight.shape
    height, width = (size or whole for size, whole in zip(block, weight.shape, strict=True))
    padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    scales = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).abs().amax((1, 3)) / MAX_FLOAT8
    factors = torch.kron(scales, torch.ones(height, width))[:rows, :columns]
    quantised = (weight / factors).to(torch.float8_e4m3fn)
    return quantised, scales, quantised.float() * factors


def is_linear(name: str, weight: Tensor) -> bool:
    return weight.ndim == 2 and not any(part in name for part in ("embed", "lm_head", ".gate."))


def write(folder: Path, tensors: Tensors, stated: dict[str, Any] | None) -> None:
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = stated
    (folder / "config.json").write_text(json.dumps(config))


def make_float8(
    folder: Path,
    stated: dict[str, Any],
    block: tuple[int, int],
    *,
    name: str = "qwen3",
    suffix: str = "_scale_inv",
    shape: Callable[[Tensor], Tensor] = lambda scales: scales,
) -> Path:
    """Write a float8 checkpoint to `folder`, and its de-quantised reference to another folder, which is returned."""
    plain = make_tiny(name, folder.with_name("plain"))
    tensors, reference = load_file(make_tiny(name, folder) / WEIGHTS), load_file(plain / WEIGHTS)
    for key, weight in list(tensors.items()):
        if is_linear(key, weight):
            tensors[key], scales, reference[key] = split(weight, block)
            tensors[key + suffix] = shape(scales).contiguous()
            tensors[key.replace("weight", "activation_scale")] = torch.ones(())
    write(folder, tensors, stated)
    write(plain, reference, None)
    return plain


def converted(folder: Path, dtype: str) -> Tensors:
    return dict(StoredTensors(prepare(str(folder), dtype=dtype), CPU))


def assert_equal(folder: Path, model: nn.Module, dtype: str) -> None:
    """Every tensor is that of the model, bit by bit."""
    tensors = converted(folder, dtype)
    expected = model.state_dict()
    assert expected and set(expected) <= set(tensors)
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


def test_one_name_without_a_list_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    for folder, names in (("one", "lm_head"), ("several", ["lm_head"])):
        stated = {"quantization_config": fp8((16, 32), modules_to_not_convert=names)}
        (tmp_path / folder / "config.json").write_text(json.dumps(stated))
    one, several = (weight_format(tmp_path / folder) for folder in ("one", "several"))
    assert one is not None and several is not None and one.plain == several.plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "block"), [("qwen3", (16, 32)), ("mixtral", (16, 32)), ("qwen3", (0, 0))])
def test_float8_weights_are_those_of_transformers(name: str, block: tuple[int, int], dtype: str, folder: Path) -> None:
    """Also of experts, which transformers stacks. A block of (0, 0) is one scale per matrix."""
    per_matrix = block == (0, 0)
    stated = fp8(None if per_matrix else block, modules_to_not_convert=["lm_head", "gate"])
    make_float8(folder, stated, block, name=name, shape=lambda scales: scales[0, 0] if per_matrix else scales)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert_equal(folder, theirs.to(DTYPES[dtype]), dtype)


FORMATS: dict[str, tuple[dict[str, Any], tuple[int, int], str, Callable[[Tensor], Tensor]]] = {
    "cut blocks": (fp8((40, 50)), (40, 50), "_scale_inv", lambda scales: scales),
    "blocks of the default size": ({"quant_method": "fp8"}, (128, 128), "_scale_inv", lambda scales: scales),
    "exponents": (
        fp8((32, 32), scale_fmt="ue8m0"),
        (32, 32),
        "_scale_inv",
        lambda scales: (scales.log2().ceil() + 127).to(torch.uint8),
    ),
    "older fp8": ({"quant_method": "fp8", "ignored_layers": ["lm_head"]}, (0, 0), "_scale", lambda s: s[0, 0]),
    "fp8 per row": (fp8(None), (1, 0), "_scale", lambda scales: scales),
    "compressed, per matrix": (compressed("tensor"), (0, 0), "_scale", lambda scales: scales[0]),
    "compressed, per row": (compressed("channel"), (1, 0), "_scale", lambda scales: scales.to(torch.bfloat16)),
    "compressed, per block": (compressed("block", block_structure=[40, 50]), (40, 50), "_scale", lambda s: s),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_float8_checkpoints_give_the_tokens_of_their_dequantised_weights(kind: str, folder: Path) -> None:
    """The installed transformers reads cut blocks and these formats not at all, or not without more packages."""
    stated, block, suffix, shape = FORMATS[kind]
    rounded: dict[str, Tensor] = {}
    plain = make_float8(folder, stated, block, suffix=suffix, shape=shape)
    stored, reference = load_file(folder / WEIGHTS), load_file(plain / WEIGHTS)
    for name, weight in reference.items():  # scales that were rounded when stored
        if (scale := stored.get(name + suffix)) is not None and scale.dtype != torch.float32:
            values = (scale.float() - 127).exp2() if scale.dtype == torch.uint8 else scale.float()
            height, width = (size or whole for size, whole in zip(block, weight.shape, strict=True))
            factors = torch.kron(values, torch.ones(height, width))[: weight.shape[0], : weight.shape[1]]
            rounded[name] = stored[name].float() * factors
    write(plain, reference | rounded, None)
    assert_equal(folder, AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), "float32")
    prompt = list(range(3, 60))
    options = SamplingParams(temperature=0, max_tokens=6, output_logits=True, ignore_eos=True)
    with ThreadLLM(str(folder), skip_tokenizer_init=True, block_size=16, num_gpu_blocks_override=16) as llm:
        [output] = llm.generate([prompt], options, use_tqdm=False)
    assert_exact(output, Oracle(plain).complete(prompt, 6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_weights_are_those_of_transformers(dtype: str, folder: Path) -> None:
    """All bytes, and exponents over most of their range."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 99, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    model = AutoModelForCausalLM.from_config(GptOssConfig(**sizes, **heads))
    model.save_pretrained(folder)
    tensors = load_file(folder / WEIGHTS)
    stacks = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    for name in stacks:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(20, 230, (experts, outputs, inputs // 32), dtype=torch.uint8)
    write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    stored = weight_format(folder)
    assert stored is not None
    sources = stored.sources(stored_types(weight_files(folder)))
    assert set(sources) == set(theirs) and [name for name, parts in sources.items() if len(parts) > 1] == stacks
    for name in stacks:
        ours = stored.dequantise([tensors[part] for part in sources[name]], DTYPES[dtype])
        assert ours.is_contiguous() and ours.dtype == DTYPES[dtype] and torch.equal(ours, theirs[name]), name


def test_mxfp4_checkpoints_give_the_tokens_of_transformers(folder: Path) -> None:
    """On one instance, and on two that share the prompt."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "vocab_size": 199, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    lengths = {"sliding_window": 32, "max_position_embeddings": 4096}
    write_checkpoint(GptOssConfig(**sizes, **heads, **lengths, rope_parameters=rope), folder)
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 124, (experts, outputs, inputs // 32), dtype=torch.uint8)
    write(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    prompt = list(range(3, 90))
    options = SamplingParams(temperature=0, max_tokens=6, output_logits=True, ignore_eos=True)
    given: dict[str, Any] = {"skip_tokenizer_init": True, "block_size": 16, "num_gpu_blocks_override": 16}
    for parallel in ("1", "2"):
        with ThreadLLM(str(folder), parallel=parallel, **given) as llm:
            [output] = llm.generate([prompt], options, use_tqdm=False)
        assert_exact(output, Oracle(folder).complete(prompt, 6))


def test_modules_that_are_not_converted_keep_their_stored_weights(folder: Path) -> None:
    """In full precision, and in float8 without a scale only if they are listed."""
    make_float8(folder, fp8((16, 32)), (16, 32))
    tensors = load_file(folder / WEIGHTS)
    layer, plain = "model.layers.1.mlp", torch.randn(128, 96)
    for name in ("gate_proj", "up_proj"):
        del tensors[f"{layer}.{name}.weight_scale_inv"]
    tensors[f"{layer}.gate_proj.weight"] = plain
    write(folder, tensors, fp8((16, 32), modules_to_not_convert=["model.layers.*.mlp.gate_proj"]))
    with pytest.raises(ModelError, match=rf"{layer}\.up_proj\.weight has no .*scale_inv"):
        prepare(str(folder), dtype="float32")
    for names in (["model.layers.1.mlp"], ["up_proj"], ["model.layers.*.mlp.up_proj"], ["re:.*up_proj"]):
        write(folder, tensors, fp8((16, 32), ignored_layers=names))
        ours = converted(folder, "float32")
        assert torch.equal(ours[f"{layer}.gate_proj.weight"], plain)
        assert torch.equal(ours[f"{layer}.up_proj.weight"], tensors[f"{layer}.up_proj.weight"].float())
    write(folder, tensors, fp8((16, 32), ignored_layers=["model.layers.1.mlp.up"]))
    with pytest.raises(ModelError, match=r"up_proj\.weight has no"):
        prepare(str(folder), dtype="float32")


def without(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: tensor})


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
SCALE = f"{QUERIES}.weight_scale_inv"
REFUSED: dict[str, tuple[dict[str, Any], Callable[[Tensors], object], str]] = {
    "gptq": (GPTQ, lambda _: None, r"quantised by gptq, which .*: use the unquantised checkpoint"),
    "awq": ({"quant_method": "awq"}, lambda _: None, "quantised by awq"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, lambda _: None, "by bitsandbytes"),
    "no method": ({"bits": 4}, lambda _: None, "quantised by an unnamed method"),
    "compressed int4": (compressed("group", num_bits=4, type="int"), lambda _: None, r"compressed-tensors \(.*int 4"),
    "compressed fp8 in groups": (compressed("group"), lambda _: None, r"compressed-tensors \(.*group"),
    "compressed without groups": ({"quant_method": "compressed-tensors"}, lambda _: None, "no groups"),
    "sparse": (
        compressed("tensor") | {"sparsity_config": {"format": "sparse-24"}},
        lambda _: None,
        "sparse-24",
    ),
    "fp4 experts": (fp8((16, 32), expert_dtype="fp4"), lambda _: None, "fp8 with experts in fp4"),
    "blocks of three sizes": (fp8((16, 32, 8)), lambda _: None, r"config\.json has a quantization_config"),  # type: ignore[arg-type]
    "blocks of no rows": (fp8((0, 32)), lambda _: None, r"config\.json has a quantization_config"),
    "a list of layers that is none": (fp8((16, 32), ignored_layers=3), lambda _: None, r"config\.json has a"),
    "a pattern that is none": (fp8((16, 32), ignored_layers=["("]), lambda _: None, r"config\.json has a"),
    "no scale": (fp8((16, 32)), without(SCALE), rf"{QUERIES}\.weight has no .*scale_inv"),
    "scales of another size": (fp8((16, 32)), put(SCALE, torch.ones(7, 3)), r"\(7, 3\)"),
    "blocks of another size": (fp8((32, 32)), lambda _: None, "do not fit weights of shape"),
    "scales of plain weights": (fp8((16, 32)), put(f"{QUERIES}.weight", torch.ones(96, 96)), rf"quantised \({SCALE}"),
    "mxfp4 called fp8": (fp8((16, 32)), put("model.gate_up_proj_blocks", torch.ones(2)), "has fp8, which is not their"),
    "fp8 called mxfp4": ({"quant_method": "mxfp4"}, lambda _: None, "has mxfp4, which is not their"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_quantised_checkpoints_are_refused_in_one_line(kind: str, folder: Path) -> None:
    stated, edit, reason = REFUSED[kind]
    make_float8(folder, fp8((16, 32)), (16, 32))
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    write(folder, tensors, stated)
    with pytest.raises(ModelError, match=reason) as refusal:
        prepare(str(folder), dtype="float32")
    assert "\n" not in str(refusal.value) and ": " in str(refusal.value)
    assert not list(folder.parent.glob("cache/weights/*/model.safetensors"))


@pytest.mark.parametrize(
    ("method", "shapes"),
    [("mxfp4", [(2, 8, 2, 16), (2, 8, 3)]), ("mxfp4", [(8, 2, 16), (8, 2)]), ("fp8", [(2, 8, 8), (3, 1, 1)])],
)
def test_parts_that_do_not_fit_each_other_are_errors(method: str, shapes: list[tuple[int, ...]]) -> None:
    parts = [torch.zeros(shape, dtype=torch.uint8) for shape in shapes]
    with pytest.raises(ValueError, match="do not fit"):
        WeightFormat(method=method).dequantise(parts, torch.float32)


@pytest.mark.parametrize("rows", [1, 1023, 1025, 2100])
def test_tall_and_stacked_matrices_are_scaled_part_by_part(rows: int) -> None:
    weight, scales = torch.randn(2, rows, 6).to(torch.float8_e4m3fn), torch.rand(2, -(-rows // 100), 2)
    expected = [
        part.float() * torch.kron(scale, torch.ones(100, 4))[:rows, :6]
        for part, scale in zip(weight, scales, strict=True)
    ]
    ours = WeightFormat(method="fp8", block=(100, 4)).dequantise([weight, scales], torch.float32)
    assert torch.equal(ours, torch.stack(expected))


def test_each_start_says_that_weights_are_dequantised(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_float8(folder, fp8((16, 32)), (16, 32))
    for _ in range(2):
        caplog.clear()
        prepare(str(folder), dtype="bfloat16")
        [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert "computes with de-quantised weights" in warning and "stored by fp8 are now bfloat16" in warning


@pytest.mark.parametrize("stated", [None, "float8_e4m3fn", "bfloat16", "float16", "float32"])
def test_auto_is_the_stated_dtype_of_dequantised_weights_or_bfloat16(stated: str | None, tmp_path: Path) -> None:
    content = {"model_type": "llama", "dtype": stated, "quantization_config": fp8((16, 32))}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert own_dtype(tmp_path) == ("float32" if stated == "float32" else "bfloat16")
