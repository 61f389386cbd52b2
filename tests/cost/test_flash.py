"""Laws of fused attention: monotony, limits, one law from decodes to prompts, and constants of every generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from one_part import part_of

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL
from longspan.core.runs import Run
from longspan.core.steps import Forward
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.catalog import Device
from longspan.cost.channels import Share, attention_s, shares_of
from longspan.cost.flash import FlashCurve, between, flash_curve
from longspan.cost.forward import rooflines
from longspan.cost.precision import HALF, Precision
from longspan.cost.roofline import Layer
from longspan.cost.step_cost import RooflineCost
from longspan.cost.topology import Devices
from longspan.sim.spec import HardwareSpec
from longspan.simulation import read_architecture

DEVICES = tuple(map(catalog.device, catalog.names("hardware")))
MEASURED = ("a100-sxm-80g", "l40s", "h100-sxm-80g", "b200-sxm")
FP8 = Precision.of("bfloat16", kv="fp8")
SIZES = (64, 128, 192, 256)
LENGTHS = (1, 16, 100, 1_000, 10_000, 16_384, 65_536, 131_072, 1_000_000)
BATCHES = (1, 2, 3, 4, 8, 32, 128, 512)
HEADS = ((1, 1), (8, 1), (32, 8), (64, 64), (128, 8))


def curve(device: Device, head_dim: int = 128, precision: Precision = HALF, scale: float = 1.0) -> FlashCurve:
    return flash_curve(device, precision, 2 * head_dim, 2 * head_dim * precision.kv_bytes, scale)


def decode_s(of: FlashCurve, batch: int, keys: float, heads: tuple[int, int]) -> float:
    return of.seconds(batch, batch * keys, batch * keys, *heads, sequences=batch)


def prompt_s(of: FlashCurve, new: int, cached: int, heads: tuple[int, int], sequences: int = 1) -> float:
    pairs = new * cached + new * (new + 1) / 2
    return of.seconds(sequences * new, sequences * pairs, sequences * (cached + new), *heads)


def grows(values: list[float]) -> bool:
    return all(before < after for before, after in pairwise(values))


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("precision", [HALF, FP8], ids=["bfloat16", "fp8"])
def test_more_keys_queries_or_sequences_take_longer(device: Device, precision: Precision) -> None:
    of = curve(device, precision=precision)
    for heads in HEADS:
        for batch in BATCHES:
            assert grows([decode_s(of, batch, keys, heads) for keys in LENGTHS])
        for keys in LENGTHS[2:]:
            assert grows([decode_s(of, batch, keys, heads) for batch in BATCHES])
        for new in (1, 16, 500, 8_000):
            assert grows([prompt_s(of, new, cached, heads) for cached in LENGTHS])
            assert grows([prompt_s(of, new, 1_000, heads, number) for number in BATCHES])
        for cached in (0, 1_000, 100_000):
            assert grows([prompt_s(of, new, cached, heads) for new in LENGTHS[2:]])


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
@pytest.mark.parametrize("precision", [HALF, FP8], ids=["bfloat16", "fp8"])
def test_nothing_is_quicker_than_memory_and_products_at_full_speed(device: Device, precision: Precision) -> None:
    peak = device.peak(precision.attention)
    for head_dim, heads in product(SIZES, HEADS):
        of = curve(device, head_dim, precision)
        for batch, keys in product(BATCHES, LENGTHS):
            read_s = 2 * batch * keys * heads[1] * head_dim * precision.kv_bytes / device.bytes_per_s
            assert decode_s(of, batch, keys, heads) > read_s
        for new, cached in product((1_000, 100_000, 1_000_000), (0, 100_000)):
            pairs = new * cached + new * (new + 1) / 2
            assert prompt_s(of, new, cached, heads) > 4 * pairs * heads[0] * head_dim / peak


def test_long_calls_reach_the_limits_of_the_table() -> None:
    """Start and row costs vanish for long prompts, and for many long sequences."""
    device = catalog.device("h100-sxm-80g")
    constants = catalog.flash_constants(device, HALF)
    part = between(constants.head_dims, constants.compute, 128)
    pairs = 500_000 * 500_001 / 2
    ideal_s = 4 * pairs * 64 * 128 / device.flops_per_s
    assert prompt_s(curve(device), 500_000, 0, (64, 8)) == pytest.approx(ideal_s / part, rel=0.01)
    read_s = 4 * 64 * 131_072 * 8 * 128 / device.bytes_per_s
    memory = between(constants.head_dims, constants.memory, 128)
    assert decode_s(curve(device), 64, 131_072, (64, 8)) == pytest.approx(read_s / memory, rel=0.01)


def test_fewer_heads_and_sequences_than_units_read_below_the_memory_s_speed() -> None:
    """A sequence is split over the device, but one KV head less well than eight of the same bytes."""
    for name in ("a100-sxm-80g", "h100-sxm-80g", "b200-sxm"):
        of = curve(catalog.device(name))
        assert decode_s(of, 1, 8 * 65_536, (8, 1)) > 1.05 * decode_s(of, 1, 65_536, (64, 8))
        assert decode_s(of, 8, 65_536, (8, 1)) == pytest.approx(decode_s(of, 1, 65_536, (64, 8)), rel=0.15)


def test_heads_that_share_keys_cost_little_in_decode_and_all_in_prompts() -> None:
    of = curve(catalog.device("h100-sxm-80g"))
    assert decode_s(of, 8, 32_768, (64, 8)) < 1.02 * decode_s(of, 8, 32_768, (8, 8))
    assert prompt_s(of, 32_768, 0, (64, 8)) == pytest.approx(8 * prompt_s(of, 32_768, 0, (8, 8)), rel=0.1)


@pytest.mark.parametrize("name", ["l40s", "h100-sxm-80g", "b200-sxm", "h200-sxm", "rtx-4090"])
def test_keys_in_8_bits_are_read_at_least_as_fast(name: str) -> None:
    """Their start is up to 4 µs longer. Hopper's kernel for heads of 256 is as slow as in 16 bits."""
    device = catalog.device(name)
    for head_dim, batch, keys in product((64, 128), BATCHES, LENGTHS[3:]):
        wide, narrow = (decode_s(curve(device, head_dim, kv), batch, keys, (32, 8)) for kv in (HALF, FP8))
        assert narrow < wide + 4e-6
    assert decode_s(curve(device, 128, FP8), 64, 65_536, (32, 8)) < 0.7 * decode_s(curve(device), 64, 65_536, (32, 8))


def test_devices_without_8_bits_read_half_the_bytes_at_the_speed_of_16() -> None:
    device = catalog.device("a100-sxm-80g")
    assert catalog.flash_constants(device, FP8) == catalog.flash_constants(device, HALF)
    assert curve(device, precision=FP8).key_s == curve(device).key_s / 2
    assert curve(device, precision=FP8).pair_s == curve(device).pair_s


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_one_new_token_behind_a_cache_is_a_decode(device: Device) -> None:
    of = curve(device)
    for cached, heads in product(LENGTHS[2:], HEADS):
        assert prompt_s(of, 1, cached, heads) == pytest.approx(decode_s(of, 1, cached + 1, heads))


@pytest.mark.parametrize("name", MEASURED)
def test_few_new_tokens_behind_a_long_cache_are_between_a_decode_and_their_part_of_a_prompt(name: str) -> None:
    """Their tiles do not fill the device evenly: 512 tokens of 32 heads are slower per pair than a whole prompt."""
    of, cached, heads = curve(catalog.device(name)), 120_000, (32, 8)
    whole_s = prompt_s(of, cached, 0, heads) / (cached * (cached + 1) / 2)
    for new in (64, 128, 256, 512):
        pairs = new * cached + new * (new + 1) / 2
        assert prompt_s(of, new, cached, heads) > prompt_s(of, 1, cached, heads)
        assert prompt_s(of, new, cached, heads) > 1.2 * pairs * whole_s
    assert prompt_s(of, 8_192, cached, heads) < 1.2 * (8_192 * cached + 8_192**2 / 2) * whole_s
    assert prompt_s(of, 4, cached, heads) < 1.1 * prompt_s(of, 1, cached, heads)


def test_a_slower_factor_scales_products_only() -> None:
    device = catalog.device("a100-sxm-80g")
    full, half = curve(device), curve(device, scale=0.5)
    assert half.pair_s == 2 * full.pair_s
    assert replace(half, pair_s=0, far_pair_s=0, row_s=0) == replace(full, pair_s=0, far_pair_s=0, row_s=0)


def test_windows_take_the_time_of_their_pairs() -> None:
    """A window of 1,024 tokens: pairs of 64K tokens are 1/32.5 of all, and take at most three times that."""
    layer = layer_of("mistral-7b", sliding_window=1024)
    full = layer_of("mistral-7b", sliding_window=None)
    number = 65_536
    windowed_s, full_s = (attention_s(one, share_of(one, number), keys=keys_of(one, number)) for one in (layer, full))
    part = layer.model.attention.pairs(Run(0, number)) / full.model.attention.pairs(Run(0, number))
    assert part == pytest.approx(1 / 32, rel=0.05)
    assert part < windowed_s / full_s < 3 * part


def layer_of(name: str, **fields: int | None) -> Layer:
    model = from_config({**catalog.model_config(name), **fields}, name=name)
    return rooflines(model, Devices(hardware="h100-sxm-80g", gpus_per_host=1), Cluster.of("1"))[0].layer


def share_of(layer: Layer, number: int) -> Share:
    [share] = shares_of(LOCAL, ((Run(0, number),),), 0, number, layer.model.attention)
    return share


def keys_of(layer: Layer, number: int) -> float:
    return layer.model.attention.seen(number, number)


def test_sizes_between_those_measured_lie_between_their_values() -> None:
    sizes, values = (64.0, 128.0, 256.0), (0.4, 0.6, 0.8)
    assert [between(sizes, values, size) for size in (1, 64, 96, 128, 192, 256, 999)] == pytest.approx(
        [0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.8]
    )


def test_every_device_has_constants_of_the_same_head_sizes() -> None:
    for device, precision in product(DEVICES, (HALF, FP8)):
        constants = catalog.flash_constants(device, precision)
        assert list(constants.head_dims) == sorted(constants.head_dims)
        assert len(constants.head_dims) == len(constants.compute) == len(constants.memory)
        assert all(0 < part <= 1 for part in (*constants.compute, *constants.memory))
        assert min(constants.start_us, constants.ragged, constants.row_keys, constants.stores, constants.few) >= 0


@pytest.mark.parametrize("long", [131_072, 1_000_000])
@pytest.mark.parametrize(
    ("model", "hardware", "spec"), [("llama-3.1-70b", "h100-sxm-80g", "tp8"), ("llama-3-8b", "a100-sxm-80g", "1")]
)
def test_further_requests_never_make_a_decode_step_cheaper(model: str, hardware: str, spec: str, long: int) -> None:
    cost = RooflineCost(
        read_architecture(model), Devices(hardware=hardware, gpus_per_host=8), Cluster.of(spec), block_size=256
    )

    def step_s(*lengths: int) -> float:
        parts = tuple(
            part_of((0,), request_id=number, start=length - 1, stop=length, runs=((Run(length - 1, length),),))
            for number, length in enumerate(lengths)
        )
        return cost.stage_seconds(Forward(number=1, parts=parts))[0][0]

    for more in (1_000, 16_384, long):
        times_s = [step_s(long, *[more] * number) for number in (0, 1, 2, 7, 15)]
        assert times_s == sorted(times_s)
    # A few new tokens behind the cache are at least as much work as one.
    layer = cost.lines[0].layer
    behind_s = [
        layer.attended_s(new, new * long, long + new, layer.heads, layer.kv_heads) for new in (1, 2, 8, 16, 128)
    ]
    assert behind_s == sorted(behind_s)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_narrow_keys_are_multiplied_in_the_format_of_activations_without_fp8(device: Device) -> None:
    for wide in ("float32", "bfloat16"):
        narrow, own = Precision.of(wide, kv="fp8"), Precision.of(wide)
        is_fp8 = device.multiplies_narrow("fp8")
        assert device.attention_peak(narrow) == device.peak("fp8" if is_fp8 else wide)
        assert device.attention_peak(own) == device.peak(wide)


@pytest.mark.parametrize("length", [1_000, 32_768, 131_072])
@pytest.mark.parametrize("batch", [1, 64])
def test_latents_in_8_bits_are_not_slower(length: int, batch: int) -> None:
    devices = Devices(hardware="h200-sxm", gpus_per_host=8)
    seconds = []
    for kv in ("auto", "fp8"):
        model = read_architecture("deepseek-v3", HardwareSpec(kv_cache_dtype=kv))
        layer = rooflines(model, devices, Cluster.of("tp8"))[0].layer
        keys = batch * length
        seconds.append(layer.attended_s(batch, keys, keys, layer.heads, layer.kv_heads, batch))
    assert seconds[1] <= seconds[0]
