"""Laws of matrix products: monotony, formats of weights, and constants for all devices."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.core.cluster import Cluster
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.catalog import Kernels
from longspan.cost.forward import rooflines
from longspan.cost.precision import BYTES, FORMATS, Format, Precision
from longspan.cost.roofline import Layer, linear_s
from longspan.cost.topology import Devices

HARDWARE = catalog.names("hardware")
NARROW: tuple[Format, ...] = tuple(weights for weights in FORMATS if BYTES[weights] < 2)
SIZES = st.integers(min_value=1, max_value=70_000)


def layer_on(hardware: str, weights: Format = "bfloat16", kernels: Kernels = "flash", tp: int = 1) -> Layer:
    model = from_config(catalog.model_config("llama-3-70b"), name="70b", precision=Precision.of(weights))
    devices = Devices(hardware=hardware, gpus_per_host=8)
    return rooflines(model, devices, Cluster.of(f"tp{tp}"), kernels)[0].layer


@settings(max_examples=200, deadline=None)
@given(
    hardware=st.sampled_from(HARDWARE),
    weights=st.sampled_from(FORMATS),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    more=st.tuples(SIZES, SIZES, SIZES),
)
def test_larger_products_are_never_faster(
    hardware: str, weights: Format, sizes: tuple[int, int, int], more: tuple[int, int, int]
) -> None:
    layer = layer_on(hardware)
    rows, inputs, outputs = (max(pair) for pair in zip(sizes, more, strict=True))
    assert 0 < linear_s(layer, *sizes, weights) <= linear_s(layer, rows, inputs, outputs, weights)


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("weights", FORMATS)
def test_devices_have_constants_for_each_format_and_stay_below_their_peaks(hardware: str, weights: Format) -> None:
    layer = layer_on(hardware)
    rows, inputs, outputs = 32_768, 8192, 28_672
    compute_s = 2 * rows * inputs * outputs / layer.device.peak(weights)
    assert compute_s < linear_s(layer, rows, inputs, outputs, weights) < 5 * compute_s
    read_s = inputs * outputs * BYTES[weights] / layer.device.bytes_per_s
    assert read_s < linear_s(layer, 1, inputs, outputs, weights)


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("weights", NARROW)
@pytest.mark.parametrize("rows", [1, 16])
def test_narrow_weights_are_faster_where_weights_are_read(hardware: str, weights: Format, rows: int) -> None:
    layer = layer_on(hardware)
    wide_s = linear_s(layer, rows, 8192, 28_672, "bfloat16")
    assert linear_s(layer, rows, 8192, 28_672, weights) < wide_s


@pytest.mark.parametrize(
    ("hardware", "multiplied"),
    [
        ("a100-sxm-80g", {"w8a8"}),
        ("l40s", {"fp8", "fp8_block", "w8a8"}),
        ("h100-sxm-80g", {"fp8", "fp8_block", "w8a8"}),
        ("b200-sxm", {"fp8", "fp8_block", "w8a8", "nvfp4"}),
        ("rtx-5090", {"fp8", "fp8_block", "w8a8", "nvfp4"}),
    ],
)
def test_formats_that_a_device_cannot_multiply_are_widened(hardware: str, multiplied: set[Format]) -> None:
    """They read less than 16 bits, but are multiplied as fast as int8 or int4, and their inputs are not rounded."""
    layer = layer_on(hardware)
    for weights in NARROW:
        curve = layer.curve(weights)
        assert bool(curve.rounding) == layer.device.multiplies_narrow(weights) == (weights in multiplied)
        if weights not in multiplied:
            stored: Format = "int8" if BYTES[weights] >= 1 else "int4"
            assert curve == layer.curve(stored)
            assert layer.device.peak(weights) == layer.device.flops_per_s


@pytest.mark.parametrize("weights", ["fp8", "w8a8"])
def test_products_in_narrow_formats_are_faster_for_prompts_and_only_products_change(weights: Format) -> None:
    wide, narrow = layer_on("h100-sxm-80g"), layer_on("h100-sxm-80g", weights)
    for part in ("before", "behind"):
        of_wide, of_narrow = getattr(wide, part)(8192), getattr(narrow, part)(8192)
        assert of_narrow.linear_s < 0.8 * of_wide.linear_s
        assert of_narrow.elementwise_s == of_wide.elementwise_s
    assert narrow.head_s(64) == wide.head_s(64)


def test_weights_that_are_only_stored_narrow_help_decodes_and_not_prompts() -> None:
    wide, narrow = layer_on("a100-sxm-80g"), layer_on("a100-sxm-80g", "int4")
    assert narrow.behind(1).linear_s < 0.5 * wide.behind(1).linear_s
    assert narrow.behind(8192).linear_s > 0.9 * wide.behind(8192).linear_s


def test_unfused_code_has_the_products_of_its_time_on_all_devices() -> None:
    for hardware in ("a100-sxm-80g", "h100-sxm-80g"):
        layer = layer_on(hardware, kernels="eager")
        assert layer.curve("bfloat16") == catalog.efficiency().linear != layer_on(hardware).curve("bfloat16")
