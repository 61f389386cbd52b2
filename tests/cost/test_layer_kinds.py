"""Latent attention and sliding windows: KV, pairs and products by hand, in estimates and in steps of simulations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from one_part import part_of

from longspan.core.cluster import Cluster
from longspan.core.exchange import ALLTOALL, GATHER_KV, LOCAL, RING_KV, RING_Q, Exchange
from longspan.core.layouts import shard_span
from longspan.core.runs import Run
from longspan.core.steps import Forward, Part, Sample
from longspan.cost import catalog
from longspan.cost.architecture import Architecture, from_config
from longspan.cost.channels import Channel, Share, Shares, attention_s, cost_of, shares_of
from longspan.cost.estimate import estimate_decode, estimate_prefill
from longspan.cost.forward import Roofline, rooflines
from longspan.cost.layer_kinds import Windows
from longspan.cost.memory import rank_block_bytes
from longspan.cost.precision import Precision
from longspan.cost.step_cost import RooflineCost, missing_weights
from longspan.cost.topology import Devices
from longspan.sim.resolve import kv_record

H100S = Devices(hardware="h100-sxm-80g", gpus_per_host=8)
PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
LATENT: dict[str, Any] = PLAIN | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 128,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}


def model_of(config: dict[str, Any], **change: object) -> Architecture:
    return from_config(config | change, name="tiny")


def on(model: Architecture, spec: str = "1") -> Roofline:
    return rooflines(model, H100S, Cluster.of(spec))[0]


def test_latent_attention_by_hand() -> None:
    shape = model_of(LATENT).attention
    assert shape.kv_bytes == 2 * (128 + 16)
    queries = 512 * 256 + 256 * 8 * (48 + 16)
    keys = 512 * (128 + 16) + 128 * 8 * (48 + 32)
    assert shape.attention_weights == queries + keys + 8 * 32 * 512
    assert model_of(LATENT, q_lora_rank=None).attention.attention_weights == 512 * 8 * 64 + keys + 8 * 32 * 512
    assert shape.pair_flops == 2 * 8 * (48 + 16 + 32)
    deepseek = from_config(catalog.model_config("deepseek-v3"), name="v3").attention
    assert deepseek.kv_bytes * deepseek.num_layers == 70_272  # 512 + 64 elements of 61 layers (arXiv 2405.04434)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_every_rank_stores_the_whole_latent(tp: int) -> None:
    model, cluster = model_of(LATENT), Cluster.of(f"tp{tp}").with_layers(6, 0.0)
    record = kv_record(model, 16)
    assert record.block_bytes == rank_block_bytes(record, cluster, 0) == 16 * 6 * 2 * (128 + 16)
    assert on(model, f"tp{tp}").layer.kv_bytes == 2 * (128 + 16)
    plain = kv_record(model_of(PLAIN), 16)
    assert rank_block_bytes(plain, cluster, 0) == plain.block_bytes / min(tp, 2)
    down = 512 * (256 + 128 + 16) * 2 * 6
    assert model.rank_bytes(range(6), tp) == pytest.approx((model.weight_bytes - down) / tp + down)


def test_missing_weights_count_the_compressing_projections_for_new_ranks_only() -> None:
    model = model_of(LATENT)
    before, after = (Cluster.of(spec).with_layers(6, model.head_layers) for spec in ("tp2", "tp4"))
    down = 512 * (256 + 128 + 16) * 2 * 6
    rest = (model.weight_bytes - down) / 4
    assert missing_weights(model, before, after) == pytest.approx([0.0, rest, rest + down, rest + down])


def test_latent_attention_takes_the_quicker_form() -> None:
    """Prompts derive keys and values of each head. Decodes read the latent once for all heads."""
    layer = on(from_config(catalog.model_config("deepseek-v3"), name="v3")).layer
    peak, length = layer.device.peak("bfloat16"), 16384
    pairs = length**2 / 2
    prompt_s = attention_s(layer, Share(length, pairs, pairs, length), keys=length)
    products_s = 2 * pairs * 128 * (192 + 128) / peak
    assert products_s < prompt_s < 2 * products_s
    batch = 64
    decode_s = attention_s(layer, Share(batch, batch * length, batch * length, length), keys=batch * length)
    read_s = batch * length * 576 * 2 / layer.device.bytes_per_s
    multiplied_s = 2 * batch * length * 128 * (576 + 512) / peak
    assert max(read_s, multiplied_s) < decode_s < 3 * max(read_s, multiplied_s)
    # New tokens behind a long cache derive its keys and values again, or stay in the latent's space.
    cached = 8 * length
    pairs = length * (cached + length / 2)
    behind_s = attention_s(layer, Share(length, pairs, pairs, cached + length), keys=cached + length)
    derived_s = 2 * cached * 512 * 128 * (128 + 128) / layer.device.peak("bfloat16")
    assert behind_s > 2 * pairs * 128 * (192 + 128) / peak + derived_s


def test_long_contexts_of_latent_attention_are_cheaper_than_of_plain_heads() -> None:
    latent = from_config(catalog.model_config("deepseek-v3"), name="v3")
    plain = replace(latent, attention=replace(latent.attention, latent=None, num_kv_heads=128, head_dim=192))
    of_latent, of_plain = (estimate_decode(on(model, "tp8"), 1, LOCAL, 65536, 8) for model in (latent, plain))
    assert of_latent.memory.kv == of_plain.memory.kv * 8 * 576 / (128 * 192 * 2)
    assert of_latent.breakdown.attention_s < of_plain.breakdown.attention_s / 3


@pytest.mark.parametrize(
    ("change", "number"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, 3),
        ({"sliding_window_pattern": 6}, 5),
        ({"model_type": "gemma3_text"}, 5),
        ({"model_type": "gemma2"}, 3),
        ({"model_type": "cohere2"}, 5),
        ({"model_type": "mistral"}, 6),
        ({"model_type": "qwen2", "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 4}, 2),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"layer_types": ["full_attention"] * 6}, None),
    ],
)
def test_layers_with_windows_follow_from_the_config(change: dict[str, Any], number: int | None) -> None:
    expected = None if number is None else Windows(size=100, num_layers=number)
    assert model_of(PLAIN, **{"sliding_window": 100, **change}).attention.windows == expected


@pytest.mark.parametrize("layout", ["zigzag", "striped", "contiguous"])
@pytest.mark.parametrize(("start", "stop"), [(0, 300), (40, 300), (250, 300), (99, 101), (0, 7)])
def test_pairs_and_keys_are_those_of_the_masks(layout: Any, start: int, stop: int) -> None:
    """Of six layers, five have a window of 100 tokens."""
    shape = model_of(PLAIN, sliding_window=100, sliding_window_pattern=6).attention
    for runs in shard_span(layout, start, stop, 3):
        visible = sum(position + 1 + 5 * min(position + 1, 100) for run in runs for position in run.positions) / 6
        assert sum(map(shape.pairs, runs)) == pytest.approx(visible)
        [share, *_] = shares_of(RING_KV, (runs, (), ()), start, stop, shape)
        assert share.pairs == pytest.approx(visible)
    seen = {key for query in range(start, stop) for key in range(max(0, query - 99), query + 1)}
    assert shape.seen(stop, stop - start) == pytest.approx((stop + 5 * len(seen)) / 6)


def test_windows_limit_the_time_of_attention_and_not_the_pools() -> None:
    full, windowed = model_of(PLAIN), model_of(PLAIN, sliding_window=1024, sliding_window_pattern=2)
    prompts = [estimate_prefill(on(model), 1, LOCAL, 65536) for model in (full, windowed)]
    assert prompts[1].breakdown.attention_s == pytest.approx(prompts[0].breakdown.attention_s / 2, rel=0.1)
    assert prompts[1].breakdown.linear_s == prompts[0].breakdown.linear_s
    decodes = [estimate_decode(on(model), 1, LOCAL, 65536, 64) for model in (full, windowed)]
    assert decodes[1].breakdown.attention_s == pytest.approx(decodes[0].breakdown.attention_s / 2, rel=0.1)
    assert decodes[1].memory.kv == decodes[0].memory.kv  # pools keep the tokens outside of windows
    assert kv_record(full, 16) == kv_record(windowed, 16)
    pairs = windowed.attention.pairs(Run(0, 65536))
    assert prompts[1].flops_per_gpu_s * prompts[1].seconds == pytest.approx(
        2 * (windowed.num_parameters - 2 * windowed.head_weights) * 65536
        + 2 * windowed.head_weights
        + 6 * windowed.attention.pair_flops * pairs
    )


def _part(request: int, start: int, stop: int) -> Part:
    sample = Sample(instance=0, position=stop - 1)
    return part_of((0,), request_id=request, start=start, stop=stop, runs=((Run(start, stop),),), sample=sample)


@pytest.mark.parametrize("config", [PLAIN | {"sliding_window": 512, "sliding_window_pattern": 3}, LATENT], ids=str)
def test_steps_of_a_simulation_cost_as_much_as_estimates(config: dict[str, Any]) -> None:
    model = from_config(config, name="tiny", precision=Precision.of("bfloat16", ffn="fp8"))
    cost = RooflineCost(model, H100S, Cluster.of("1"), block_size=16)
    line = on(model)
    prompt = Forward(number=0, parts=(_part(0, 0, 8192),))
    [(seconds,)] = cost.stage_seconds(prompt).values()
    assert seconds == pytest.approx(estimate_prefill(line, 1, LOCAL, 8192).seconds)
    decodes = Forward(number=1, parts=tuple(_part(n, 4095, 4096) for n in range(5)))
    [(seconds,)] = cost.stage_seconds(decodes).values()
    assert seconds == pytest.approx(estimate_decode(line, 1, LOCAL, 4096, 5).seconds)
    # Short and long decodes: windows limit the long ones only.
    mixed = Forward(number=2, parts=(_part(0, 99, 100), _part(1, 16383, 16384)))
    [(seconds,)] = cost.stage_seconds(mixed).values()
    keys = model.attention.seen(100) + model.attention.seen(16384)
    attended_s = 6 * attention_s(line.layer, Share(2, keys, keys, keys), keys=keys)
    assert seconds == pytest.approx(line.times([], {0: 2}, {0: 2})[0].total_s + attended_s, rel=0.01)


def test_messages_of_latent_attention_by_hand() -> None:
    """Two members of two ranks, 1,000 tokens each. Each rank sends the whole latent: 128 + 16 elements of 2 bytes."""
    line, shares = on(model_of(LATENT), "2xtp2"), Shares([1000, 1000], [5e5, 5e5], [5e5, 5e5], [1000.0, 1000.0])

    def num_bytes(exchange: Exchange) -> float:
        channel = Channel(exchange=exchange, group=(0, 1), shares=shares, keys=2000, decode=False)
        return cost_of(exchange).num_bytes(line.layer, channel)

    latent, queries, outputs = 2 * 2 * (128 + 16), 8 * 2 * (48 + 16), 8 * 2 * 32
    assert num_bytes(RING_KV) == num_bytes(GATHER_KV) == 2000 * latent
    assert num_bytes(RING_Q) == 2000 * (queries + outputs + 8 * 4)
    # Each token goes to one of two members with half of the heads, and its latent to the other member.
    assert num_bytes(ALLTOALL) == 2000 * (queries + outputs + 2 * latent) / 2
