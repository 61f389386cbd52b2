"""Products with quantised weights on CUDA devices, in Triton's interpreter, and models without other weights."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import Run
from launches import Launches
from test_cuda_layers import MAX_LAUNCHES
from test_triton_compiled import ARCHITECTURES, compiled, stack_bytes
from tiny_models import BASE, write_checkpoint
from torch import Tensor, nn
from transformers import AutoConfig

from longspan.attn.spec import AttnSpec
from longspan.model.adapter import Model
from longspan.model.files import Quantization
from longspan.model.quantization import quantise
from longspan.model.shard import Shard
from longspan.model.source import prepare
from longspan.model.step import Rows

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
CPU = torch.device("cpu")
BITS: dict[int, Quantization] = {8: "int8", 4: "int4"}
MAX_ERROR = 0.04
"""Of logits. Those of plain models in bfloat16 differ from float32 by 0.02."""


# ---------------------------------------------------------------- kernels


def compare_levels(shape: tuple[int, int, int], bits: int, has_bias: bool, seed: int, *, device: str = "cpu") -> None:
    """Compare with float64 products of the dequantised weights, which the kernels compute to the bit."""
    from longspan.model.triton_levels import Levels, multiply, weights

    (num_tokens, num_outputs, num_groups), numbers = shape, torch.Generator().manual_seed(seed)
    matrix = torch.randn(num_outputs, 32 * num_groups, generator=numbers)
    own = quantise("q_proj", matrix, BITS[bits])
    levels = Levels(numbers=own.numbers.to(device), grid=own.grid.to(device))
    assert torch.equal(weights(levels).cpu(), own.weights())
    x = torch.randn(num_tokens, 32 * num_groups + 3, generator=numbers).bfloat16().to(device)[:, : 32 * num_groups]
    bias = torch.randn(num_outputs, generator=numbers).bfloat16() if has_bias else None
    found = multiply(x, levels, None if bias is None else bias.to(device)).cpu().double()
    wanted = x.cpu().double() @ own.weights().double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=2**-7)


@settings(max_examples=40)
@given(
    st.tuples(st.sampled_from((1, 2, 16, 17, 40, 64, 65)), st.sampled_from((1, 16, 32, 40, 96)), st.integers(1, 9)),
    st.sampled_from([*BITS]),
    st.booleans(),
    st.integers(0, 9),
)
def test_products_are_those_of_the_dequantised_weights(
    assert_interpreted: Run,
    shape: tuple[int, int, int],
    bits: int,
    has_bias: bool,
    seed: int,
) -> None:
    assert_interpreted(compare_levels, shape, bits, has_bias, seed)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("bits", BITS)
def test_kernels_compile_and_fit_into_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: int, bits: int
) -> None:
    import triton

    from longspan.model import triton_levels as ours

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    types = dict.fromkeys(("x", "bias", "out"), "*bf16") | {"numbers": "*u8", "grid": "*i32"}
    sizes: dict[str, object] = {"bits": bits, "group_size": 32, "outputs": ours.OUTPUTS, "groups": ours.GROUPS}
    sizes |= {"widen": False}
    done = [compiled(ours.weights_kernel, {name: types[name] for name in ("numbers", "grid", "out")}, sizes, arch)]
    for tokens in (16, 32, 64):
        constants = sizes | {"tokens": tokens} | ({} if tokens == 64 else {"bias": None})
        own = {name: kind for name, kind in types.items() if name not in constants}
        done.append(compiled(ours.product_kernel, own, constants, arch, num_stages=ours.NUM_STAGES))
    for kernel in done:
        assert stack_bytes(kernel, tmp_path) == 0 and kernel.metadata.shared <= 99 * 1024


# ---------------------------------------------------------------- models


def rows(num_tokens: int) -> Rows:
    numbers = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 3000, (num_tokens,), generator=numbers)
    tokens = torch.randint(0, 199, (num_tokens,), generator=numbers)
    return Rows(tokens=tokens, positions=positions, keep=torch.arange(num_tokens), rope_lengths=positions + 1)


def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + (k * v).repeat_interleave(len(q) // len(k), 0)[: len(q)]


def matrices(model: Model) -> list[nn.Linear]:
    return [part for part in model.module.modules() if isinstance(part, nn.Linear)]


def compare_models(folder: Path, quantization: Quantization, device: str, split: dict[str, Any]) -> None:
    """Compare a model with levels, for few and for many tokens, with the model of their bfloat16 weights."""
    from longspan.model.triton_levels import LevelsLinear

    files, reduce = prepare(str(folder), dtype="bfloat16", quantization=quantization), lambda partial: 1.5 * partial
    own, plain = (Model(files, torch.device(device), triton=triton, **split) for triton in (True, False))
    assert not own.fallbacks
    for num_tokens in (3, 100):
        results = [
            model.trunk.run(rows(num_tokens), attend, reduce=reduce if "tp" in split else None).result.float().cpu()
            for model in (own, plain)
        ]
        assert (results[0] - results[1]).norm() <= MAX_ERROR * results[1].norm()
    quantised = [isinstance(part, LevelsLinear) for part in matrices(own)]
    if "tp" in split:
        assert any(quantised) and not all(quantised), "a share of 40 inputs cuts a group"
    else:
        assert all(quantised)
        assert all(part.weight is None for part in matrices(own)), "no weight takes memory twice"
    assert own.weight_bytes < plain.weight_bytes


def compare_transposed(folder: Path) -> None:
    """GPT-2 has no plain linear layer but its head. Its output projections are square and transposed."""
    files = prepare(str(folder), dtype="bfloat16", quantization="int4")
    own, plain = (Model(files, CPU, triton=triton).trunk.run(rows(3), attend).result for triton in (True, False))
    assert (own - plain).norm() <= MAX_ERROR * plain.norm()


def test_levels_of_transposed_weights_are_not_multiplied(assert_interpreted: Run, tmp_path: Path) -> None:
    folder = write_checkpoint(AutoConfig.for_model("gpt2", **BASE), tmp_path)
    assert_interpreted(compare_transposed, folder)


def count_launches(folder: Path) -> None:
    """Count the launches of a decode step without those of attention, which are two."""
    model = Model(prepare(str(folder), dtype="bfloat16", quantization="int4"), CPU, triton=True)
    with torch.no_grad(), Launches(model.layers) as launches:
        model.trunk.run(rows(3), lambda _layer, q, _k, _v: torch.empty_like(q))
    for names in launches.names.values():
        assert names.count("product_kernel") == 4, names
        assert len(names) + 2 <= MAX_LAUNCHES, names


def test_a_decode_layer_with_levels_has_few_launches(assert_interpreted: Run, folders: dict[str, Path]) -> None:
    assert_interpreted(count_launches, folders["llama"])


@pytest.mark.parametrize(
    ("name", "quantization"), [("llama", "int4"), ("phi3", "int4"), ("gemma2", "int8"), ("qwen2", "int8")]
)
def test_levels_compute_the_model_of_their_weights(
    assert_interpreted: Run, folders: dict[str, Path], name: str, quantization: Quantization
) -> None:
    assert_interpreted(compare_models, folders[name], quantization, "cpu", {})


def test_shares_of_levels_are_shares_of_the_weights(assert_interpreted: Run, folders: dict[str, Path]) -> None:
    assert_interpreted(compare_models, folders["llama"], "int4", "cpu", {"tp": 3, "tp_index": 1})


def test_a_cut_of_levels_is_the_cut_of_the_weights() -> None:
    """Rows of one or of several pieces, columns at groups, and columns inside a group."""
    from longspan.model.triton_levels import cut_levels

    spec = AttnSpec(num_heads=8, num_kv_heads=4, head_dim=32, scale=1.0, window=None, softcap=None)
    shapes = {"self_attn.q_proj": (256, 64), "self_attn.qkv_proj": (512, 64), "self_attn.o_proj": (64, 256)}
    shapes |= {"mlp.gate_up_proj": (192, 64), "mlp.down_proj": (64, 192)}
    for quantization in BITS.values():
        for name, shape in shapes.items():
            path = f"model.layers.0.{name}.weight"
            levels = quantise(path, torch.randn(shape), quantization)
            for index in range(4):
                shard = Shard(index=index, size=4, specs=(spec,))
                share = cut_levels(shard, path, levels)
                if name == "mlp.down_proj":  # shares of 48 columns
                    assert share is None
                else:
                    assert share is not None
                    assert torch.equal(share.weights(), shard.cut(path, levels.weights()))


def weights_of_attention(folder: Path) -> None:
    """Layerwise exchanges compute with other weights, and with shares of the model's own."""
    from longspan.model.sharding import all_weights, attention_modules

    files = prepare(str(folder), dtype="bfloat16", quantization="int4")
    own, plain = (Model(files, CPU, triton=triton) for triton in (True, False))
    for layer, attention in attention_modules(own.module).items():
        found, wanted = all_weights(attention), dict(attention_modules(plain.module)[layer].named_parameters())
        assert found.keys() == wanted.keys() == own.stored_attention(layer).keys()
        for name, weight in wanted.items():
            assert torch.equal(found[name], weight)
        hidden = torch.randn(5, found["q_proj.weight"].shape[1]).bfloat16()
        other = torch.randn_like(wanted["q_proj.weight"])
        result = torch.func.functional_call(attention.q_proj, {"weight": other}, (hidden,))
        assert torch.equal(result, nn.functional.linear(hidden, other, attention.q_proj.bias))
        assert attention.q_proj.weight is None


def test_layerwise_exchanges_get_dequantised_weights(assert_interpreted: Run, folders: dict[str, Path]) -> None:
    assert_interpreted(weights_of_attention, folders["qwen2"])


def break_and_load(folder: Path) -> None:
    from longspan.model import triton_levels

    files = prepare(str(folder), dtype="bfloat16", quantization="int8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_levels, "GROUPS", 2)
        patch.setattr(triton_levels, "_pairs", lambda levels: levels.grid.roll(1, 0).view(torch.int32))
        with pytest.raises(RuntimeError, match="8-bit weights are wrong on this device: leave out `quantization`"):
            Model(files, CPU, triton=True)


def test_wrong_kernels_end_the_start(assert_interpreted: Run, folders: dict[str, Path]) -> None:
    assert_interpreted(break_and_load, folders["llama"])
