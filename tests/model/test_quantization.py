"""Weight files with levels, and the engines that may use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan import LLM
from longspan.model.files import Quantization
from longspan.model.quantization import map_levels
from longspan.model.source import prepare
from longspan.model.store import StoredTensors

CPU = torch.device("cpu")


def stored(folder: Path, quantization: Quantization | None = None) -> StoredTensors:
    return StoredTensors(prepare(str(folder), dtype="bfloat16", quantization=quantization), CPU)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_file_has_levels_and_the_dequantised_weights(tiny: Path, quantization: Quantization) -> None:
    plain, tensors = stored(tiny), stored(tiny, quantization)
    levels = map_levels(tensors.levels)
    assert tensors.keys() == plain.keys()
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in levels} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    }
    for name, tensor in tensors.items():
        if name in levels:
            assert torch.equal(tensor, levels[name].weights())
            assert 0 < (tensor.float() - plain[name].float()).norm() < 0.2 * plain[name].float().norm()
        else:
            assert torch.equal(tensor, plain[name])


def test_a_file_without_levels_is_another_one(tiny: Path) -> None:
    plain, quantised = (prepare(str(tiny), dtype="bfloat16", quantization=kind) for kind in (None, "int8"))
    assert not StoredTensors(plain, CPU).levels and plain.weights != quantised.weights


@pytest.mark.parametrize("given", [{"dtype": "float32"}, {"dtype": "bfloat16", "attention_backend": "torch"}])
def test_levels_need_kernels_that_read_them(tiny: Path, given: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="quantization int4 needs longspan's own kernels"):
        LLM(str(tiny), quantization="int4", **given)  # type: ignore[arg-type]
