"""Formats of tensors: their bytes, the peaks of their products, and the predictions of each option that names one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from fake_llm import run

from longspan.core.cluster import Cluster
from longspan.core.exchange import LOCAL
from longspan.cost import catalog
from longspan.cost.architecture import from_config
from longspan.cost.estimate import estimate_decode
from longspan.cost.forward import rooflines
from longspan.cost.precision import BYTES, FORMATS, Format, Precision
from longspan.cost.topology import Devices
from longspan.sim.resolve import kv_record
from longspan.sim.spec import HardwareSpec
from longspan.simulation import read_architecture

H100, A100 = catalog.device("h100-sxm-80g"), catalog.device("a100-sxm-80g")
SIZES = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "fp8": 8,
    "fp8_block": 8 + 32 / 16384,
    "int8": 8,
    "int4": 4 + 16 / 128,
    "w8a8": 8,
    "nvfp4": 4 + 8 / 16,
    "mxfp4": 4 + 8 / 32,
}


def test_every_format_has_the_bits_of_its_elements_and_scales() -> None:
    assert set(FORMATS) == set(SIZES)
    assert {name: 8 * BYTES[name] for name in FORMATS} == pytest.approx(SIZES)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_the_device_cannot_multiply_are_multiplied_in_16_bits(name: Format) -> None:
    narrow = {"fp8", "fp8_block", "w8a8"}
    peak = {"float32": 66.9e12}.get(name, 1978.9e12 if name in narrow else 989.4e12)
    assert H100.peak(name) == pytest.approx(peak, rel=1e-4)
    assert A100.peak(name) == {"float32": 19.5e12, "w8a8": 624e12}.get(name, 312e12)
    assert H100.multiplies_narrow(name) == (name in narrow)
    assert A100.multiplies_narrow(name) == (name == "w8a8")
    four_bits = replace(H100, fp4_flops_per_s=9e15)
    assert four_bits.multiplies_narrow(name) == (name in narrow | {"nvfp4"})


@pytest.mark.parametrize("name", FORMATS)
def test_weights_take_the_bytes_of_their_format_and_the_rest_at_least_16_bits(name: Format) -> None:
    wide = from_config(catalog.model_config("llama-3-70b"), name="70b")
    model = from_config(catalog.model_config("llama-3-70b"), name="70b", precision=Precision.of(name))
    matrices = wide.num_parameters - 2 * wide.head_weights
    assert model.weight_bytes == pytest.approx(matrices * BYTES[name] + 2 * wide.head_weights * max(2, BYTES[name]))
    assert model.attention.kv_bytes == 2 * 8 * 128 * max(2, BYTES[name])


def test_keys_and_values_in_fp8_halve_the_blocks_and_the_reads() -> None:
    wide, narrow = (read_architecture("llama-3-8b", HardwareSpec(kv_cache_dtype=kv)) for kv in ("auto", "fp8"))
    assert narrow.attention.kv_bytes == wide.attention.kv_bytes / 2 == 2 * 8 * 128
    assert kv_record(narrow, 16).block_bytes == kv_record(wide, 16).block_bytes / 2 == 16 * 32 * 2 * 8 * 128
    devices = Devices(hardware="h100-sxm-80g", gpus_per_host=1)
    lines = (rooflines(model, devices, Cluster.of("1"))[0] for model in (wide, narrow))
    of_wide, of_narrow = (estimate_decode(line, 1, LOCAL, 131_072, 4) for line in lines)
    assert of_narrow.memory.kv == of_wide.memory.kv / 2
    assert of_wide.breakdown.attention_s / 2 < of_narrow.breakdown.attention_s < 0.7 * of_wide.breakdown.attention_s
    assert of_narrow.breakdown.linear_s == of_wide.breakdown.linear_s


@pytest.mark.parametrize("verb", ["estimate", "simulate"])
def test_both_verbs_show_the_precision_they_used(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    requests = ("--num-requests", "2", "--rate", "1", "--gpus-per-host", "1")
    few = {"estimate": ("--context", "8k"), "simulate": requests}[verb]
    precise = ("--dtype", "fp8", "--ffn-dtype", "int4", "--kv-cache-dtype", "fp8")
    assert run(verb, "llama-3-8b", "--hardware", "h100-sxm-80g", *few, *precise, "--json") == 0
    found = json.loads(capsys.readouterr().out)["cluster"]
    assert (found["dtype"], found["ffn_dtype"], found["kv_cache_dtype"]) == ("fp8", "int4", "fp8")
    assert str(Precision.of("fp8", ffn="int4", kv="fp8")) == "fp8, int4 FFN, fp8 KV"


@pytest.mark.parametrize("verb", ["serve", "generate"])
def test_the_engine_refuses_formats_that_it_cannot_compute(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--dtype", "fp8") == 2
    assert "dtype" in capsys.readouterr().err
