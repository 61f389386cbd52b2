"""Layers of CUDA devices in Triton's interpreter: kernels against float64, models against transformers, launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import Run
from launches import Launches
from test_graph_step import Decodes, triton_backend
from test_triton_compiled import ARCHITECTURES, compiled, stack_bytes
from tiny_models import BASE, SINKS, TINY, write_checkpoint
from tiny_types import tiny_config
from torch import Tensor, nn
from transformers import Gemma3TextConfig, GemmaConfig, PreTrainedConfig, SeedOssConfig, SmolLM3Config

from longspan.attn.backends import NOWHERE
from longspan.attn.paged import PagedKv
from longspan.attn.spec import AttnSpec
from longspan.model.adapter import Model
from longspan.model.fused import ReplacedForward
from longspan.model.recording import Replay
from longspan.model.source import prepare
from longspan.model.step import KvSlots, Rows

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
FURTHER: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma": lambda: GemmaConfig(**BASE),
    **{f"{name} of a multimodal model": partial(tiny_config, name) for name in ("gemma3", "mistral3")},
    "gemma3": lambda: Gemma3TextConfig(**BASE, sliding_window=32, sliding_window_pattern=2),
    "smollm3": lambda: SmolLM3Config(**BASE, no_rope_layer_interval=2),
    "seed_oss": lambda: SeedOssConfig(**BASE, attention_bias=True, attention_out_bias=True),
}
FAMILIES = {name: config for name, config in {**TINY, **FURTHER}.items() if name not in ("llama4", *SINKS)}
"""The models that the kernels know: not Llama 4, whose RoPE multiplies complex numbers."""
MAX_LAUNCHES = 12


# ---------------------------------------------------------------- kernels


def assert_close(found: Tensor, wanted: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), wanted, atol=tolerance, rtol=tolerance)


def rms_norm(x: Tensor, weight: Tensor, adds_one: bool) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * (weight.double() + adds_one)


def compare_add_norm(
    shape: tuple[int, int],
    flags: tuple[bool, bool, bool],
    adds_one: bool,
    dtype: torch.dtype,
    seed: int,
    *,
    device: str = "cpu",
) -> None:
    from longspan.model.triton_layers import Norm, add_norm

    numbers = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, shape[0], shape[1] + 3, generator=numbers).to(device, dtype)[..., : shape[1]]
    weights = torch.randn(2, shape[1], generator=numbers).to(device, dtype)
    before, after = (
        Norm(weight=weight, epsilon=1e-5, adds_one=adds_one) if flag else None
        for weight, flag in zip(weights, flags[:2], strict=True)
    )
    hidden, normed = add_norm(x, residual=residual if flags[2] else None, before=before, after=after)
    wanted = x.double() if before is None else rms_norm(x.double(), weights[0], adds_one)
    wanted = wanted + residual.double() if flags[2] else wanted
    assert_close(hidden, wanted)
    assert_close(normed, hidden.double() if after is None else rms_norm(hidden.double(), weights[1], adds_one))


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 9), st.sampled_from((1, 16, 96, 100, 576, 2048, 2500))),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
    st.sampled_from([*TOLERANCE]),
    st.integers(0, 9),
)
def test_norms_and_residuals_are_those_of_float64(
    assert_interpreted: Run,
    shape: tuple[int, int],
    flags: tuple[bool, bool, bool],
    adds_one: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    assert_interpreted(compare_add_norm, shape, flags, adds_one, dtype, seed)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, adjacent: bool) -> Tensor:
    """Rotate the first elements of `x [tokens, heads, head_dim]`."""
    dim = cos.shape[-1]
    cos, sin = (one.double()[:, None] for one in (cos, sin))
    own, rest = x[..., :dim], x[..., dim:]
    if adjacent:
        cos, sin = (one[..., : dim // 2].repeat_interleave(2, -1) for one in (cos, sin))
        half = torch.stack((-own[..., 1::2], own[..., ::2]), -1).flatten(-2)
    else:
        half = torch.cat([-own[..., dim // 2 :], own[..., : dim // 2]], dim=-1)
    return torch.cat([own * cos + half * sin, rest], dim=-1)


def compare_rotate(
    num_tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    flags: tuple[bool, bool, bool, bool],
    dtype: torch.dtype,
    seed: int,
    *,
    device: str = "cpu",
) -> None:
    from longspan.model.triton_layers import Norm, Rotation, rotate

    (num_heads, num_kv_heads), (dim, rotary_dim), (has_norms, adds_one, adjacent, stores) = heads, dims, flags
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers).to(device, dtype)

    qkv, cos, sin = draw(num_tokens, (num_heads + 2 * num_kv_heads) * dim), *draw(2, num_tokens, max(1, rotary_dim))
    weights = draw(2, dim)
    norms = [Norm(weight=one, epsilon=1e-5, adds_one=adds_one) if has_norms else None for one in weights]
    pools = draw(2, num_tokens + 1, num_kv_heads, 4, dim)
    pools[:, -1] = 7.0
    blocks, offsets = torch.randperm(num_tokens, generator=numbers), torch.arange(num_tokens) % 4
    blocks[num_tokens // 2] = NOWHERE
    before = pools.clone()
    kv = PagedKv(keys=pools[0], values=pools[1])
    slots = KvSlots(kv=kv, blocks=blocks.to(device), offsets=offsets.to(device))
    rotation = Rotation(cos=cos[None], sin=sin[None], pairs_adjacent=adjacent) if rotary_dim else None
    found = rotate(qkv, num_heads, num_kv_heads, rotation, norms=(norms[0], norms[1]), slots=slots if stores else None)

    parts = qkv.double().view(num_tokens, -1, dim).split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    q, k, v = parts
    if has_norms:
        q, k = rms_norm(q, weights[0], adds_one), rms_norm(k, weights[1], adds_one)
    if rotary_dim:
        q, k = (rotated(one, cos, sin, adjacent) for one in (q, k))
    for own, wanted in zip(found, (q, k, v), strict=True):
        assert_close(own, wanted.transpose(0, 1))
    if stores:
        for token, (block, offset) in enumerate(zip(blocks.tolist(), offsets.tolist(), strict=True)):
            if block != NOWHERE:
                before[:, block, :, offset] = torch.stack([found[1][:, token], found[2][:, token]])
    assert torch.equal(pools, before), "the slots of the tokens are written, and no other slot"


@settings(max_examples=80)
@given(
    num_tokens=st.integers(1, 37),
    heads=st.sampled_from(((1, 1), (6, 3), (5, 1), (8, 2))),
    dims=st.sampled_from(((16, 16), (16, 0), (80, 80), (128, 64), (100, 60), (256, 256))),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    dtype=st.sampled_from([*TOLERANCE]),
    seed=st.integers(0, 9),
)
def test_rotated_and_stored_heads_are_those_of_float64(
    assert_interpreted: Run,
    num_tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    flags: tuple[bool, bool, bool, bool],
    *,
    dtype: torch.dtype,
    seed: int,
) -> None:
    assert_interpreted(compare_rotate, num_tokens, heads, dims, flags, dtype, seed)


def compare_gated(
    num_tokens: int, inner: int, activation: Any, dtype: torch.dtype, seed: int, *, device: str = "cpu"
) -> None:
    from longspan.model.triton_layers import gated

    numbers = torch.Generator().manual_seed(seed)
    gate_up = (3 * torch.randn(num_tokens, 2 * inner, generator=numbers)).to(device, dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    active = nn.functional.silu(gate) if activation == "silu" else nn.functional.gelu(gate, approximate="tanh")
    assert_close(gated(gate_up, activation), active * up)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.sampled_from((1, 16, 100, 1024, 1500, 2048)),
    st.sampled_from(("silu", "gelu_tanh")),
    st.sampled_from([*TOLERANCE]),
    st.integers(0, 9),
)
def test_gates_are_those_of_float64(
    assert_interpreted: Run, num_tokens: int, inner: int, activation: str, dtype: torch.dtype, seed: int
) -> None:
    assert_interpreted(compare_gated, num_tokens, inner, activation, dtype, seed)


# ---------------------------------------------------------------- compilation


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("width", [96, 4096, 8192])
def test_kernels_compile_and_fit_into_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: int, width: int
) -> None:
    """With all parts, and with none that may be left out."""
    import triton

    from longspan.model import triton_layers as ours

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    names = ("x", "residual", "hidden", "normed", "before", "after", "qkv", "rotated", "cos", "sin", "keys", "values")
    types = dict.fromkeys((*names, "q_weight", "k_weight", "gate_up", "out"), "*bf16")
    types |= dict.fromkeys(("blocks", "offsets"), "*i64")
    types |= dict.fromkeys(("before_epsilon", "after_epsilon", "q_epsilon", "k_epsilon"), "fp32")
    dim, flags = (128 if width > 96 else 16), {"adds_one": True, "pairs_adjacent": width == 96, "is_silu": width > 96}
    sizes = {"dim": dim, "rotary_dim": dim, "width": dim, "tile": 16, "columns": 1024, **flags}
    sizes["padded_width"] = ours.padded(width)
    optional = ("residual", "hidden", "before", "cos", "sin", "keys", "values", "blocks", "offsets")
    without = dict.fromkeys((*optional, "q_weight", "k_weight"))
    for left_out in ({}, without | {"rotary_dim": 0}):
        kinds = {name: kind for name, kind in types.items() if name not in left_out}
        for kernel in (ours.norm_kernel, ours.rotate_kernel, ours.gate_kernel):
            constants = {name: value for name, value in (sizes | left_out).items() if name in kernel.arg_names}
            own = {name: kind for name, kind in kinds.items() if name in kernel.arg_names}
            num_warps = ours.num_warps(width) if kernel is ours.norm_kernel else 4
            assert stack_bytes(compiled(kernel, own, constants, arch, num_warps=num_warps), tmp_path) == 0


# ---------------------------------------------------------------- models


def checkpoint(name: str, folders: dict[str, Path], folder: Path) -> Path:
    return folders[name] if name in folders else write_checkpoint(FURTHER[name](), folder)


def count_launches(folder: Path, maximum: int | None) -> None:
    """Compute a decode step of three requests, which equals that of transformers' layers, and count its launches."""
    from longspan.model.cuda_layers import CudaLayer

    computed = list[Callable[[], Tensor]]()

    def record(compute: Callable[[], Tensor]) -> Replay:
        computed.append(compute)
        return lambda _: compute()

    plain = Decodes(folder, record, triton_backend())
    fused = Decodes(folder, record, triton_backend(), triton=True)
    logits = fused.step(40, 3, 17)
    torch.testing.assert_close(logits, plain.step(40, 3, 17), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(fused.pairs, plain.pairs, atol=1e-4, rtol=1e-4)
    layers = fused.model.layers
    assert all(isinstance(layer.forward, CudaLayer) for layer in layers.values()), fused.model.fallbacks
    with torch.no_grad(), Launches(layers) as launches:
        computed[0]()
    for names in launches.names.values():
        assert names.count("rotate_kernel") == 1 and "copy_kernel" not in names, "rotation and stores are one launch"
        assert names.count("norm_kernel") <= 3, names
        if maximum is not None:
            assert len(names) <= maximum, names


@pytest.mark.parametrize("name", [name for name in FAMILIES if "longrope" not in name and "yarn" not in name])
def test_a_decode_layer_is_exact_in_few_launches(
    assert_interpreted: Run, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Experts are computed by their own module, whose launches follow from their number."""
    maximum = None if name == "mixtral" else MAX_LAUNCHES
    assert_interpreted(count_launches, checkpoint(name, folders, tmp_path), maximum)


def compare_shares(folder: Path) -> None:
    """Compute shares of the heads and of the layers by kernels and by transformers' layers."""
    files, device = prepare(str(folder), dtype="float32"), torch.device("cpu")
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 199, (5,), generator=numbers)
    positions = torch.tensor([0, 40, 3, 17, 2000])
    rows = Rows(tokens=tokens, positions=positions, keep=torch.arange(5), rope_lengths=positions + 1)

    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        num_readers = len(q) // len(k)
        return q + (k * v).repeat_interleave(num_readers, 0)[: len(q)]

    splits: tuple[dict[str, Any], ...] = ({"tp": 3, "tp_index": 2}, {"layers": range(2)}, {"layers": range(2, 3)})
    for split in splits:
        results = []
        for triton in (False, True):
            model = Model(files, device, triton=triton, **split)
            hidden = None
            if model.stage is not None and not model.stage.is_first:
                hidden = torch.randn(1, 5, model.stage.width, generator=numbers.manual_seed(1))
            reduce = (lambda partial: 1.5 * partial) if "tp" in split else None
            results.append(model.trunk.run(rows, attend, hidden=hidden, reduce=reduce).result)
        replaced = [isinstance(layer.forward, ReplacedForward) for layer in model.layers.values()]
        assert all(replaced), model.fallbacks
        torch.testing.assert_close(results[0], results[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "seed_oss", "mixtral"])
def test_shares_are_those_of_transformers(
    assert_interpreted: Run, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    assert_interpreted(compare_shares, checkpoint(name, folders, tmp_path))


# ---------------------------------------------------------------- prompts

H200_PRODUCT, H200_COPY = 780e12, 4.3e12
"""FLOP/s of products and bytes/s of copies that an H200 was measured to make."""
MAX_SHARE = 0.02


def share_of_small_operators() -> None:
    """Count the bytes of everything between the products of a layer of the 8B shape, for 8K tokens without memory."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from longspan.model.cuda_layers import CudaLayer

    chunk, length, inner, heads, kv_heads, dim = 8192, 1 << 17, 14336, 32, 8, 128
    width = heads * dim
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    config._attn_implementation = "eager"
    spec = AttnSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=dim**-0.5, window=None, softcap=None)
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, 0).bfloat16()
        layer.forward = CudaLayer(layer, spec, None)  # type: ignore[method-assign, assignment]
        hidden, cos, sin = (torch.empty(1, chunk, size, dtype=torch.bfloat16) for size in (width, dim, dim))
    with torch.no_grad(), Launches({0: layer}, run_kernels=False) as launches:
        layer(hidden, position_embeddings=(cos, sin), attend=lambda _layer, q, _k, _v: torch.empty_like(q))
    assert [name for name in launches.names[0] if "kernel" not in name] == ["mm.default"] * 3 + ["addmm_.default"]
    copy_s = length // chunk * launches.num_bytes[0] / H200_COPY
    weights = sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim == 2)
    floor_s = (2 * weights * length + 2 * length**2 * width) / H200_PRODUCT
    assert 0.01 < copy_s / floor_s <= MAX_SHARE, copy_s / floor_s


def test_small_operators_take_two_percent_of_a_prompt(assert_interpreted: Run) -> None:
    """Of 128K tokens, at measured speeds of an H200."""
    assert_interpreted(share_of_small_operators)
