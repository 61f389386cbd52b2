"""Mixtures of experts: parameters, expected experts of a batch, bytes and operations by hand, expert parallelism."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.config_fields import stored_formats, stored_kv
from longspan.cost.estimate import estimate_decode, estimate_prefill, full_step
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.layer_kinds import Experts
from longspan.cost.links import collective_s
from longspan.cost.precision import Precision
from longspan.cost.roofline import linear_s
from longspan.cost.step_cost import missing_weights
from longspan.cost.topology import Devices
from longspan.errors import ParameterError
from longspan.sim.spec import HardwareSpec
from longspan.simulation import read_architecture

ACTIVE = {
    "qwen3-30b-a3b": ("3.3", 2),
    "qwen3-235b-a22b": ("22", 2),
    "mixtral-8x7b": ("12.9", 2),
    "gpt-oss-20b": ("3.61", 1),
    "gpt-oss-120b": ("5.13", 1),
    "deepseek-v3": ("37", 1),
    "glm-4.5": ("32", 0),
    "glm-4.6": ("32", 0),
    "glm-4.5-air": ("12", 0),
}
"""Billions of active parameters as published, and how many of the embedding and the output head they include.

Sources: model cards of Qwen, arXiv 2401.04088, 2508.10925 (table 1), 2412.19437 and 2508.06471 (table 1).
"""
TINY: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 1000,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
}
ATTENTION, EXPERT, DENSE, ROUTER, HEAD = 2 * 10 * 8 * 64, 3 * 64 * 32, 3 * 64 * 192, 64 * 16, 64 * 1000
H100S = Devices(hardware="h100-sxm-80g", gpus_per_host=8)


def on(model: Architecture, spec: str, devices: Devices = H100S) -> Roofline:
    return rooflines(model, devices, Cluster.of(spec))[0]


def whole(model: Architecture) -> Architecture:
    assert model.experts is not None
    return replace(model, experts=replace(model.experts, are_whole=True))


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    """Within 1 %, or less than one of the last digit of figures published with two digits."""
    model = from_config(catalog.model_config(name), name=name)
    text, num_heads = ACTIVE[name]
    found, published = (model.active_parameters - (2 - num_heads) * model.head_weights) / 1e9, float(text)
    digit = 10 ** -len(text.partition(".")[2])
    assert abs(found - published) <= max(0.01 * published, digit if len(text.replace(".", "")) == 2 else 0)


def test_every_model_with_experts_has_a_published_count() -> None:
    sparse = {name for name in catalog.names("models") if from_config(catalog.model_config(name), name=name).experts}
    assert sparse == ACTIVE.keys()


@pytest.mark.parametrize(
    ("change", "sparse", "shared", "size"),
    [
        ({}, [0, 1, 2, 3, 4, 5], 0, 32),
        ({"decoder_sparse_step": 2}, [1, 3, 5], 0, 32),
        ({"decoder_sparse_step": 1, "mlp_only_layers": [0, 5]}, [1, 2, 3, 4], 0, 32),
        ({"first_k_dense_replace": 2, "moe_layer_freq": 1, "n_shared_experts": 2}, [2, 3, 4, 5], 64, 32),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 0]}, [1, 2, 4], 0, 32),
        ({"moe_layer_freq": 2}, [0, 2, 4], 0, 32),
        ({"shared_expert_intermediate_size": 48}, [0, 1, 2, 3, 4, 5], 48, 32),
        ({"moe_intermediate_size": None}, [0, 1, 2, 3, 4, 5], 0, 192),
        ({"moe_intermediate_size": None, "expert_ffn_hidden_size": 48}, [0, 1, 2, 3, 4, 5], 0, 48),
        ({"shared_intermediate_size": 48}, [0, 1, 2, 3, 4, 5], 48, 32),
        ({"num_shared_expert": 2}, [0, 1, 2, 3, 4, 5], 64, 32),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 4}, [1, 3], 0, 32),
        ({"moe_layer_interval": 1, "moe_layer_start_index": 2, "moe_layer_end_index": -1}, [2, 3, 4, 5], 0, 32),
        ({"interleave_moe_layer_step": 3}, [2, 5], 0, 32),
        ({"moe_capacity": [64, 64], "num_expert_group": 8, "moe_gate": "topk", "use_moe": True}, list(range(6)), 0, 32),
        ({"router_aux_loss_coef": 0.1, "zero_expert_num": 0, "moe_layers": None}, list(range(6)), 0, 32),
    ],
)
def test_layers_with_experts_follow_from_the_config(
    change: dict[str, Any], sparse: list[int], shared: int, size: int
) -> None:
    experts = from_config(TINY | change, name="tiny").experts
    assert experts == Experts(number=16, per_token=4, intermediate_size=size, shared_size=shared, layers=tuple(sparse))
    renamed = {key: value for key, value in TINY.items() if not key.startswith("num_experts")}
    for number, chosen in (("num_local_experts", "experts_per_token"), ("n_routed_experts", "num_experts_per_tok")):
        other = from_config(renamed | change | {number: 16, chosen: 4}, name="tiny")
        assert other.experts == experts
    assert from_config({"text_config": TINY | change}, name="tiny").experts == experts


def test_bytes_and_operations_by_hand() -> None:
    """Two of six layers are dense, experts are in fp8, and a shared expert is twice as wide."""
    config = TINY | {"first_k_dense_replace": 2, "shared_expert_intermediate_size": 64}
    model = from_config(config, name="tiny", precision=Precision.of("bfloat16", ffn="fp8"))
    layer = 16 * EXPERT + 2 * EXPERT + ROUTER
    assert model.num_parameters == 6 * ATTENTION + 2 * DENSE + 4 * layer + 2 * HEAD
    assert model.active_parameters == 6 * ATTENTION + 2 * DENSE + 4 * (6 * EXPERT + ROUTER) + 2 * HEAD
    assert model.stage_bytes(range(3)) == 2 * 3 * ATTENTION + 2 * DENSE + 18 * EXPERT + 2 * ROUTER + 2 * HEAD
    assert model.stage_bytes(range(3, 6)) == 2 * 3 * ATTENTION + 3 * (18 * EXPERT + 2 * ROUTER) + 2 * HEAD
    assert model.weight_bytes == model.stage_bytes(range(3)) + model.stage_bytes(range(3, 6))
    # One token reads four experts of each sparse layer, and no embedding.
    assert model.read_bytes(1) == pytest.approx(model.weight_bytes - 2 * HEAD - 4 * 12 * EXPERT)
    assert model.read_bytes(10**6) == pytest.approx(model.weight_bytes - 2 * HEAD)
    pairs = 100 * 100 / 2
    active = model.active_parameters - 2 * HEAD
    assert model.prefill_flops(100) == 2 * active * 100 + 6 * 4 * 8 * 8 * pairs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("zero_expert_num", 256),
        ("moe_layers", [1, 3]),
        ("moe_layer_frequency", 2),
        ("share_expert_dim", 64),
        ("num_kv_shared_layers", 2),
        ("moe_shared_expert_intermediate_size", 64),
        ("num_moe_experts", 8),
        ("intermediate_size_mlp", 64),
    ],
)
@pytest.mark.parametrize("dense", [True, False])
def test_unknown_sizes_of_experts_are_refused_by_name(field: str, value: Any, dense: bool) -> None:
    config = {key: number for key, number in TINY.items() if not (dense and "experts" in key)}
    with pytest.raises(ValueError, match=rf"tiny has .*{field}"):
        from_config(config | {field: value}, name="tiny")


@pytest.mark.parametrize(("number", "per_token"), [(8, 2), (16, 4), (128, 8), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_distinct_experts_are_those_of_random_routing(number: int, per_token: int, tokens: int) -> None:
    draw, ranks = random.Random(0), 4
    experts = Experts(number=number, per_token=per_token, intermediate_size=1, shared_size=0, layers=(0,))
    distinct, busiest = [], []
    for _ in range(2000):
        chosen = {expert for _ in range(tokens) for expert in draw.sample(range(number), per_token)}
        distinct.append(len(chosen))
        busiest.append(max(Counter(expert * ranks // number for expert in chosen).values()))
    assert experts.active(tokens) == pytest.approx(sum(distinct) / 2000, rel=0.02)
    assert experts.busiest_rank(tokens, ranks) == pytest.approx(sum(busiest) / 2000, rel=0.2)
    assert experts.busiest_rank(tokens, 1) == pytest.approx(experts.active(tokens))


def test_grouped_products_read_each_weight_once_and_fill_the_device_together() -> None:
    layer = on(from_config(TINY, name="tiny"), "1").layer
    one_s, many_s = (linear_s(layer, 1, 4096, 4096, "bfloat16", groups) for groups in (1, 64))
    start_s = layer.efficiency.linear.start_us * 1e-6
    assert many_s - start_s == pytest.approx(64 * (one_s - start_s), rel=0.3)
    # 64 products of 128 rows fill the device like one product of 8192 rows, but read 64 times the weights.
    grouped_s, joined_s = (
        linear_s(layer, 1024, 4096, 4096, "bfloat16", 64),
        linear_s(layer, 65536, 4096, 4096, "bfloat16"),
    )
    assert joined_s < grouped_s < 1.2 * joined_s
    alone_s = linear_s(layer, 64, 4096, 4096, "bfloat16")
    assert linear_s(layer, 64, 4096, 4096, "bfloat16", 64) < 64 * alone_s


def test_decode_reads_more_experts_with_more_requests_until_all_are_read() -> None:
    model = read_architecture("gpt-oss-120b")
    line = on(model, "tp2")
    steps = [estimate_decode(line, 1, LOCAL, 1024, batch) for batch in (1, 8, 64, 512)]
    linear = [step.breakdown.linear_s for step in steps]
    assert linear == sorted(linear)
    more = 36 * (line.layer.model.experts.active(8) - 4) * 3 * 2880 * 1440 * (0.5 + 1 / 32)  # type: ignore[union-attr]
    assert linear[1] - linear[0] == pytest.approx(more / line.layer.device.bytes_per_s, rel=0.35)
    assert linear[3] < 1.5 * linear[2]  # all 128 are read
    bound_s = [step.lower_bound_s * 2 * line.layer.device.bytes_per_s for step in steps]
    head, projections = 2 * model.head_weights, 36 * 2 * (model.attention.attention_weights + 2880 * 128)
    expert = 3 * 2880 * 2880 * (0.5 + 1 / 32)
    keys = (18 * 1024 + 18 * 128) * 2 * 8 * 64 * 2
    assert bound_s[0] == pytest.approx(head + projections + 36 * 4 * expert + keys)
    assert all(step.seconds > step.lower_bound_s for step in steps)


def test_experts_take_the_memory_of_all_and_the_time_of_the_active() -> None:
    sparse = from_config(catalog.model_config("qwen3-30b-a3b"), name="sparse")
    dense = replace(sparse, experts=None, intermediate_size=8 * 768)  # as many active weights
    lines = [on(model, "1") for model in (sparse, dense)]
    of_sparse, of_dense = (estimate_prefill(line, 1, LOCAL, 8192) for line in lines)
    assert of_sparse.memory.weights == pytest.approx(2 * 30.53e9, rel=0.001)
    assert of_dense.breakdown.linear_s < of_sparse.breakdown.linear_s < 2 * of_dense.breakdown.linear_s
    assert of_sparse.flops_per_gpu_s * of_sparse.seconds == pytest.approx(
        of_dense.flops_per_gpu_s * of_dense.seconds + 2 * 8192 * 48 * 2048 * 128
    )
    assert full_step(lines[0], 8192).activations > full_step(lines[1], 8192).activations


def test_ranks_have_a_copy_of_the_router_and_missing_weights_count_it_once() -> None:
    model = from_config(TINY, name="tiny")
    for tp in (1, 2, 4):
        shared = model.weight_bytes - 6 * 2 * ROUTER
        assert model.rank_bytes(range(6), tp) == pytest.approx(shared / tp + 6 * 2 * ROUTER)
    before, after = (Cluster.of(spec).with_layers(6, model.head_layers) for spec in ("tp2", "tp4"))
    assert missing_weights(model, before, before) == pytest.approx([0.0, 0.0])
    rest = (model.weight_bytes - 6 * 2 * ROUTER) / 4
    # Rank 0 has its half, and rank 1 has its second quarter only after the third: a new place.
    assert missing_weights(model, before, after) == pytest.approx(
        [0.0, rest, rest + 6 * 2 * ROUTER, rest + 6 * 2 * ROUTER]
    )


def test_expert_parallelism_computes_fewer_wider_products_and_sends_each_token_to_its_experts() -> None:
    model = read_architecture("deepseek-v3")
    sliced, placed = on(model, "tp8"), on(whole(model), "tp8")
    long = [estimate_prefill(line, 1, LOCAL, 16384).breakdown for line in (sliced, placed)]
    assert long[1].linear_s < long[0].linear_s
    assert long[1].all_reduce_s < long[0].all_reduce_s
    short = [estimate_decode(line, 1, LOCAL, 1024, 1).breakdown for line in (sliced, placed)]
    assert short[1].all_reduce_s == short[0].all_reduce_s  # few tokens are computed on all ranks, and summed
    assert short[1].linear_s > short[0].linear_s  # the busiest of 8 ranks has 3 of 8 experts
    assert placed.layer.model.rank_bytes(range(61), 8) == sliced.layer.model.rank_bytes(range(61), 8)
    with pytest.raises(ParameterError, match=r"expert_parallel needs tp 2 or more"):
        on(whole(model), "1")


def test_the_bytes_of_the_all_to_all_by_hand() -> None:
    """A token with 4 of 16 experts on 4 ranks needs 4 * (1 - (3/4)^4) ranks, and is on one of them."""
    model = whole(from_config(TINY | {"hidden_size": 8192, "num_attention_heads": 64}, name="tiny"))
    line, tokens = on(model, "tp4"), 65536
    sent = tokens / 4 * 4 * (1 - 0.75**4) * 0.75 * 8192 * 2
    both_s = 2 * collective_s(line.topology.inside.alltoall, sent, 4)
    plain_s = line.topology.all_reduce_s(tokens * 8192 * 2)
    assert both_s < plain_s
    found = estimate_prefill(line, 1, LOCAL, tokens).breakdown.all_reduce_s
    assert found == pytest.approx(6 * (plain_s + both_s))
    hosts = on(model, "tp16", Devices(hardware="h100-sxm-80g", gpus_per_host=8, hosts=2))
    outside = 1e9 * 8 / 15 / hosts.topology.between.flow(8)
    assert hosts.topology.scatter_s(1e9) == pytest.approx(hosts.topology.between.collective_s + outside)


def test_expert_parallelism_of_a_dense_model_is_refused() -> None:
    assert read_architecture("mixtral-8x7b", HardwareSpec(expert_parallel=True)).experts.are_whole  # type: ignore[union-attr]
    with pytest.raises(ParameterError, match=r"expert_parallel.*llama-3-8b has none"):
        read_architecture("llama-3-8b", HardwareSpec(expert_parallel=True))


@pytest.mark.parametrize(
    ("stored", "formats"),
    [
        (None, None),
        ({"quant_method": "mxfp4"}, ("bfloat16", "mxfp4")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ("fp8_block", "fp8_block")),
        ({"quant_method": "fp8"}, ("fp8", "fp8")),
        ({"quant_method": "awq", "bits": 4}, ("int4", "int4")),
        ({"quant_method": "gptq", "bits": 8}, ("int8", "int8")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ("nvfp4", "nvfp4")),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ("fp8", "fp8")),
        (("float", 8, None), ("fp8", "fp8")),
        (("float", 8, {"num_bits": 8}, "block"), ("fp8_block", "fp8_block")),
        (("float", 8, None, "channel"), ("fp8", "fp8")),
        (("int", 8, {"num_bits": 8}), ("w8a8", "w8a8")),
        (("int", 8, None), ("int8", "int8")),
        (("int", 4, None), ("int4", "int4")),
        (("float", 4, {"num_bits": 4}), ("nvfp4", "nvfp4")),
    ],
)
def test_the_precision_of_a_quantised_checkpoint_is_that_of_its_config(stored: Any, formats: Any) -> None:
    if isinstance(stored, tuple):
        kind, bits, inputs, *strategy = stored
        weights = {"type": kind, "num_bits": bits, "strategy": strategy[0] if strategy else None}
        group = {"weights": weights, "input_activations": inputs}
        stored = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    assert stored_formats(TINY | {"quantization_config": stored}) == formats
    assert stored_formats({"text_config": {"quantization_config": stored}}) == formats


def test_a_quantisation_that_is_not_modelled_is_named() -> None:
    with pytest.raises(ParameterError, match=r"dtype.* weights stored by bitsandbytes are not modelled"):
        stored_formats({"quantization_config": {"quant_method": "bitsandbytes"}})


@pytest.mark.parametrize(
    ("stored", "kv"),
    [
        ({}, None),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, None),
        ({"kv_cache_scheme": {"type": "float", "num_bits": 8, "strategy": "tensor"}}, "fp8"),
        ({"kv_cache_quant_algo": "FP8"}, "fp8"),
    ],
)
def test_auto_keys_and_values_have_the_format_of_the_checkpoint(stored: Any, kv: Any, tmp_path: Path) -> None:
    config = TINY | {"quantization_config": {"quant_method": "fp8", **stored}}
    assert stored_kv(config) == kv
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    for given in ("auto", "bfloat16", "fp8"):
        expected = (kv or "bfloat16") if given == "auto" else given
        assert read_architecture(str(file), HardwareSpec(kv_cache_dtype=given)).precision.kv == expected


@pytest.mark.parametrize(
    "stored", [{"kv_cache_scheme": {"type": "int", "num_bits": 8}}, {"kv_cache_quant_algo": "NVFP4"}]
)
def test_stored_keys_and_values_that_are_not_modelled_are_named(stored: Any) -> None:
    with pytest.raises(ParameterError, match=r"kv_cache_dtype auto: .*kv_cache_(scheme|quant_algo)\) are not modelled"):
        stored_kv({"quantization_config": stored})
