"""Data sheets and model sizes: required names, their values, and errors."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.catalog import Attention
from longspan.cost.config_fields import stored_formats, stored_kv
from longspan.cost.precision import Precision

PARAMETERS = {
    "llama-7b": 6_738_415_616,
    "llama-7b-gqa8": 6_738_415_616 - 32 * 2 * 24 * 128 * 4096,  # keys and values of 24 heads of 32 layers
    "llama-7b-mqa": 6_738_415_616 - 32 * 2 * 31 * 128 * 4096,
    "llama-13b": 13_015_864_320,
    "llama-30b": 32_528_943_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-15b": 8_030_261_248 + 32 * 218_112_000,  # 32 layers more than llama-3-8b
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "codellama-34b": 33_743_970_304,
    "falcon-1b": 1_311_625_216,
    "falcon-7b": 7_217_189_760 - 65_024 * 4544,  # its files store the output head in addition to the embedding
    "glm-4-9b": 9_399_951_360,
    "glm-4-9b-1m": 9_399_951_360 + 40 * 2 * 2 * 128 * 4097,  # two more KV heads in each of 40 layers, with biases
    "internlm2.5-7b": 7_737_708_544,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v3": 684_531_386_000 - 41_555_600,  # without the scales of blocks
    "glm-4.5": 358_337_791_296,
    "glm-4.6": 356_785_898_816,
    "glm-4.5-air": 110_468_824_832,
    "smollm2-135m": 134_515_008,
}
"""Number of parameters of the published weights, as recorded by Hugging Face, llama.cpp or Keras Hub.

`mistral-small-24b` excludes the vision tower of versions 3.1 and 3.2.
"""
PREDICTION_LAYERS = {"deepseek-v3": 2, "glm-4.5": 2, "glm-4.6": 0, "glm-4.5-air": 2}
"""Models with weights for multi-token prediction, and the number of vocabulary matrices among these weights."""
AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "falcon-1b": {
        "model_type": "falcon",
        "alibi": True,
        "bias": True,
        "hidden_size": 2048,
        "multi_query": False,
        "new_decoder_architecture": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 24,
        "num_kv_heads": 32,
        "parallel_attn": False,
        "vocab_size": 50304,
    },
    "falcon-7b": {
        "model_type": "falcon",
        "alibi": False,
        "bias": False,
        "hidden_size": 4544,
        "multi_query": True,
        "new_decoder_architecture": False,
        "num_attention_heads": 71,
        "num_hidden_layers": 32,
        "num_kv_heads": 71,
        "parallel_attn": True,
        "vocab_size": 65024,
    },
    "glm-4-9b-1m": {
        "model_type": "chatglm",
        "add_qkv_bias": True,
        "ffn_hidden_size": 13696,
        "hidden_size": 4096,
        "kv_channels": 128,
        "multi_query_attention": True,
        "multi_query_group_num": 4,
        "num_attention_heads": 32,
        "num_layers": 40,
        "padded_vocab_size": 151552,
        "rmsnorm": True,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    },
    "qwen2.5-7b": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
}
"""Published configs with other fields than the entry, without the fields that determine no costs."""
HARDWARE = (
    "a100-sxm-80g",
    "a100-sxm-40g",
    "a100-pcie-40g",
    "h100-sxm-80g",
    "h100-96g-hbm2e-500w",
    "h200-sxm",
    "a10",
    "l4",
    "a40",
    "b200-sxm",
    "gb200",
    "h20",
    "l40s",
    "rtx-4090",
    "rtx-5090",
    "mi300x",
)
TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def test_heads_that_are_tied_by_default_are_counted_once() -> None:
    """Configs omit the defaults of their class."""
    gemma, llama = (from_config(TINY | {"model_type": kind}, name=kind) for kind in ("gemma", "llama"))
    assert (gemma.tied, llama.tied) == (True, False)
    assert from_config(TINY | {"model_type": "gemma", "tie_word_embeddings": False}, name="gemma").tied is False


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_the_parameters_of_their_published_weights(name: str) -> None:
    """Within 0.1 %: norms and biases are in the published weights, but not in `num_parameters`."""
    model = from_config(catalog.model_config(name), name=name)
    assert model.num_parameters + prediction_layer(name, model) == pytest.approx(PARAMETERS[name], rel=1e-3)
    assert model.weight_bytes == pytest.approx(2 * model.num_parameters)
    assert catalog.model_config(name)["source"]


def prediction_layer(name: str, model: Architecture) -> int:
    """Return the elements of the layer for multi-token prediction, which the catalog excludes."""
    if name not in PREDICTION_LAYERS:
        return 0
    assert model.experts is not None
    shape, experts = model.attention, model.experts
    feed_forward = model.matrices_of(experts.number * experts.intermediate_size + experts.shared_size)
    joined = 2 * shape.hidden_size**2 + PREDICTION_LAYERS[name] * model.head_weights
    return shape.attention_weights + model.router_weights + feed_forward + joined


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)])
def test_checkpoints_with_experts_in_mxfp4_have_their_published_size(name: str, gib: float) -> None:
    """Sizes in GiB of arXiv 2508.10925, table 1."""
    config = catalog.model_config(name)
    formats = stored_formats(config)
    assert formats is not None
    model = from_config(config, name=name, precision=Precision.of(formats[0], ffn=formats[1]))
    assert model.weight_bytes / 2**30 == pytest.approx(gib, rel=0.005)


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_configs_with_the_field_names_of_their_files_equal_the_entry(name: str) -> None:
    assert from_config(AS_PUBLISHED[name], name=name) == from_config(catalog.model_config(name), name=name)


def test_no_model_is_listed_without_a_check() -> None:
    assert set(catalog.names("models")) == set(PARAMETERS)


def test_devices_are_those_of_their_data_sheets() -> None:
    assert set(HARDWARE) < set(catalog.names("hardware"))
    meta = catalog.device("h100-96g-hbm2e-500w")
    assert (meta.flops_per_s, meta.peak("fp8"), meta.bytes_per_s, meta.memory_bytes) == (
        8e14,
        1.6e15,
        2.4e12,
        96 * 2**30,
    )
    a100 = catalog.device("a100-sxm-80g")
    assert a100.peak("fp8") == a100.peak("bfloat16") == 3.12e14  # weights of 8 bits are only stored so
    assert a100.peak("float32") == 1.95e13  # not TF32, which PyTorch uses only when told to


@pytest.mark.parametrize("name", catalog.names("hardware"))
def test_narrower_products_are_never_slower(name: str) -> None:
    device = catalog.device(name)
    for narrow in (device.fp8_flops_per_s, device.fp4_flops_per_s, device.int8_flops_per_s):
        assert narrow == 0 or narrow >= 1.99 * device.flops_per_s > 1.98 * device.fp32_flops_per_s


@pytest.mark.parametrize("name", catalog.names("hardware"))
def test_every_generation_uses_measured_constants(name: str) -> None:
    measured = catalog.device(name).measured_generation
    assert replace(catalog.device(name), generation=measured).measured_generation == measured
    assert not source_of("generations", measured).startswith("assumed")


def test_devices_with_measured_constants_say_so() -> None:
    measured = {name for name in catalog.names("hardware") if ". Measured: " in source_of("hardware", name)}
    assert measured == {"a100-sxm-80g", "h100-sxm-80g", "a40", "b200-sxm", "l40s"}


@pytest.mark.parametrize("name", [name for name in catalog.names("hardware") if not name.startswith("cpu")])
def test_float32_peak_is_two_operations_per_core_and_clock(name: str) -> None:
    """Of 64 cores per multiprocessor in GA100, 128 in all later ones, at most an eighth above the given clock."""
    device = catalog.device(name)
    cores = 64 if name.startswith("a100") else 128
    assert 0.99 <= device.peak("float32") / (2 * cores * device.units * device.clock_hz) <= 1.125


def source_of(file: str, name: str) -> str:
    """Return the source of an entry of a data file."""
    table = tomllib.loads((Path(catalog.__file__).parent / "data" / f"{file}.toml").read_text(encoding="utf-8"))
    return str(table[name]["source"])


@pytest.mark.parametrize("name", catalog.names("hardware"))
def test_every_device_has_a_source_and_links_for_both_places(name: str) -> None:
    device = catalog.device(name)
    assert source_of("hardware", name)
    assert device.link.where == device.bus.where == "inside"
    assert device.network.where == "between"


@pytest.mark.parametrize("name", catalog.names("links"))
def test_every_link_has_a_source_and_possible_numbers(name: str) -> None:
    link = catalog.link(name)
    assert source_of("links", name)
    assert 0 < link.bytes_per_s <= link.nominal_bytes_per_s >= link.ring_bytes_per_s > 0
    assert 0 < link.latency_s <= link.collective_s < 1e-3


def test_the_slow_links_of_the_papers() -> None:
    tcp = catalog.link("tcp-100g")
    assert tcp.bytes_per_s == pytest.approx(3e9)
    assert catalog.link("efa-400g-per-host").shared
    assert not catalog.link("infiniband-8x200g").shared


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    known = r"choose from a100-sxm-80g, .*b200-sxm is similar"
    with pytest.raises(ValueError, match=f"hardware 'b200' is unknown: {known}"):
        catalog.device("b200")
    with pytest.raises(ValueError, match=r"link 'wifi' is unknown: choose from nvlink2, "):
        catalog.link("wifi")
    with pytest.raises(ValueError, match=r"model 'gpt-5' is unknown: choose from llama-7b, "):
        catalog.model_config("gpt-5")


def test_attention_differs_by_kernels_and_by_nothing_else() -> None:
    """One set of constants for each way to attend: no model, device or length has one of its own."""
    constants = catalog.efficiency().attention
    assert set(constants) == {"flash", "eager"}
    assert all(isinstance(one, Attention) for one in constants.values())
    assert constants["eager"].score_bytes == 29


def test_configs_of_other_families() -> None:
    gpt2 = from_config(
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, name="gpt2"
    )
    assert (gpt2.intermediate_size, gpt2.gated, gpt2.rotary, gpt2.rms_norm) == (3072, False, False, False)
    nested = from_config({"model_type": "some-vlm", "text_config": {**TINY, "head_dim": 16}}, name="nested")
    assert nested.attention.head_dim == 16
    falcon = from_config(catalog.model_config("falcon-7b"), name="falcon-7b")
    assert (falcon.attention.num_kv_heads, falcon.attention.head_dim, falcon.parallel) == (1, 64, True)
    small = from_config(catalog.model_config("falcon-1b"), name="falcon-1b")
    assert (small.attention.num_kv_heads, small.rotary, small.parallel) == (32, False, False)


def test_further_keys_of_nested_objects_are_ignored() -> None:
    attention = {"alibi": True, "kv_n_heads": None}
    plain = {"attn_config": attention, "ffn_config": {"ffn_type": "mptmlp", "moe_num_experts": 1}, "num_experts": 1}
    assert from_config({**TINY, **plain}, name="tiny") == from_config(TINY, name="tiny")


def test_mixed_precision_counts_the_feed_forward_layers_apart() -> None:
    model = from_config(TINY, name="tiny", precision=Precision.of("bfloat16", ffn="fp8"))
    assert model.weight_bytes == 2 * model.num_parameters - 2 * model.ffn_weights


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "the config of tiny has no hidden_size: add it"),
        ({"num_hidden_layers": 0}, "num_hidden_layers of tiny must be a positive whole number, but 0 given"),
        ({"vocab_size": "many"}, "vocab_size of tiny must be a positive whole number, but 'many' given"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads of tiny must be a divisor of num_attention_heads, 8, but 3 given",
        ),
        ({"num_local_experts": 8}, "the config of tiny has no num_experts_per_tok: add it"),
        ({"num_experts": [4, 8]}, r"num_experts of tiny must be a positive whole number, but \[4, 8\] given"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok of tiny must be at most 4, but 5 given"),
        ({"kv_lora_rank": 512}, "the config of tiny has no qk_rope_head_dim: add it"),
        ({"ffn_config": {"moe_num_experts": 16}}, "moe_num_experts in ffn_config, .*: name it num_local_experts"),
        ({"layer_types": ["linear_attention", "full_attention"]}, r"linear attention or a state space \(layer_types\)"),
        ({"model_type": "mamba2"}, r"linear attention or a state space \(model_type\)"),
        ({"linear_num_key_heads": 16}, r"linear attention or a state space \(linear_num_key_heads\)"),
        ({"mamba_d_state": 16}, r"linear attention or a state space \(mamba_d_state\)"),
        ({"index_topk": 2048}, r"sparse attention with an indexer \(index_topk\), whose cost is not modelled"),
        ({"attention_chunk_size": 8192}, r"attention in chunks \(attention_chunk_size\)"),
        ({"attn_config": {"kv_n_heads": 1}}, "has kv_n_heads in attn_config"),
        ({"ffn_config": {"ffn_hidden_size": 10752}}, "ffn_hidden_size in ffn_config, .*: name it intermediate_size"),
        ({"attn_config": {"kv_n_heads": 8}}, "has kv_n_heads in attn_config, .*: name it num_key_value_heads"),
        ({"attn_config": 5}, "attn_config of tiny must be an object, but 5 given"),
    ],
)
def test_bad_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config({**TINY, **change}, name="tiny")


OF_ANY_TYPE: tuple[object, ...] = (5, -1, 10**400, 0.5, True, "3", "fp8", [1, 1], [1, "x"], ["x"], {"a": 1}, [], {})


@pytest.mark.parametrize(
    "field",
    [
        *("attn_config", "decoder_sparse_step", "first_k_dense_replace", "head_dim", "intermediate_size"),
        *("kv_lora_rank", "layer_types", "layers_block_type", "max_window_layers", "mlp_only_layers", "model_type"),
        *("moe_intermediate_size", "moe_layer_freq", "n_shared_experts", "num_experts", "num_key_value_heads"),
        *("shared_expert_intermediate_size", "sliding_window", "sliding_window_pattern", "text_config"),
        *("quantization_config", "moe_layer_interval", "moe_layer_end_index"),
    ],
)
def test_values_of_any_type_are_read_or_refused_by_name(field: str) -> None:
    """A wrong type raises no TypeError, ZeroDivisionError or IndexError."""
    names = {field, "dtype", "the config of tiny has no "}
    for config in ({}, {"num_experts": 4, "num_experts_per_tok": 2}, {"sliding_window": 8}):
        for value in OF_ANY_TYPE:
            given = {**TINY, "use_sliding_window": True, **config, field: value}
            try:
                from_config(given, name="tiny")
                stored_formats(given)
                stored_kv(given)
            except ValueError as error:
                assert any(name in str(error) for name in names)  # noqa: PT017 - or no error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"moe_layer_freq": [1]},
            r"moe_layer_freq of tiny must be a list with a number for each of the 2 layers, but \[1\] given",
        ),
        ({"moe_layer_freq": 0}, "moe_layer_freq of tiny must be a positive whole number, but 0 given"),
        ({"first_k_dense_replace": "3"}, "first_k_dense_replace of tiny must be a whole number from 0, but '3' given"),
        ({"n_shared_experts": "1"}, "n_shared_experts of tiny must be a whole number from 0, but '1' given"),
        ({"layer_types": 5}, "layer_types of tiny must be a list of texts, but 5 given"),
        ({"mlp_only_layers": "3"}, "mlp_only_layers of tiny must be a list of whole numbers, but '3' given"),
        ({"sliding_window": 8, "sliding_window_pattern": "LXG"}, "sliding_window_pattern .* 'LXG' given"),
        ({"text_config": "x"}, "text_config of tiny must be an object, but 'x' given"),
    ],
)
def test_wrong_types_are_refused_with_field_value_and_remedy(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config({**TINY, "num_experts": 4, "num_experts_per_tok": 2, **change}, name="tiny")


def test_null_objects_of_a_config_are_missing_ones() -> None:
    nulls = dict.fromkeys(("text_config", "attn_config", "ffn_config", "quantization_config", "layer_types"))
    assert from_config({**TINY, **nulls}, name="tiny") == from_config(TINY, name="tiny")
    assert stored_formats({**TINY, **nulls}) is None


@pytest.mark.parametrize(("pattern", "local"), [("LLLG", 6), ("LG", 4), ("L", 7), ("G", 0), (4, 6), (None, 0)])
def test_patterns_of_letters_are_windows(pattern: object, local: int) -> None:
    config = {**TINY, "num_hidden_layers": 7, "sliding_window": 8, "sliding_window_pattern": pattern}
    windows = from_config(config, name="tiny").attention.windows
    assert (windows.num_layers if windows else 0) == local
