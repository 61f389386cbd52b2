"""Layers computed by our own kernels, against their definition and against the modules that they replace."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import loaded_kernels
from tiny_models import BASE, TINY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, Ministral3Config, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from longspan import native
from longspan.attn.spec import AttnSpec
from longspan.attn.spec_reader import probe_positions
from longspan.model import adapter
from longspan.model.files import Quantization
from longspan.model.fused import MAX_ERROR, FusedLayer, Matrix, Product, fuse_head, fuse_layers
from longspan.model.quantization import GROUP, Levels, quantise

SPEC = AttnSpec(num_heads=6, num_kv_heads=3, head_dim=32, scale=32**-0.5, window=None, softcap=None)


@pytest.fixture(scope="module", autouse=True, params=["as_it_is", "without_amx"])
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Loads the kernels into this process, if the machine can have them: with AMX if it has it, and without."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.param == "without_amx":
            monkeypatch.setattr(native, "has_amx", lambda: False)
        with loaded_kernels():
            yield


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * weight.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first numbers of `x [tokens, heads, head_dim]`."""
    dim = cos.shape[-1]
    own, rest = x[..., :dim], x[..., dim:]
    half = torch.cat([-own[..., dim // 2 :], own[..., : dim // 2]], dim=-1)
    return torch.cat([own * cos.double()[:, None] + half * sin.double()[:, None], rest], dim=-1)


def is_close(found: Tensor, wanted: Tensor) -> bool:
    """Some roundings to bfloat16, each of at most 1 in 256."""
    return bool((found.double() - wanted).norm() <= 0.01 * wanted.norm())


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from((1, 2, 15, 16, 17, 33, 150, 700)), st.sampled_from((32, 96, 576)), st.integers(0, 9))
def test_a_product_is_norm_matrices_and_epilogue(
    data: st.DataObject, num_tokens: int, num_inputs: int, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers).to(torch.bfloat16)

    flag = st.booleans()
    is_gated, is_rotated, has_norm, has_bias, has_residual = (data.draw(flag) for _ in range(5))
    widths = data.draw(st.lists(st.sampled_from((16, 48, 64, 240)), min_size=1, max_size=3))
    widths = [64, 192, 32] if is_rotated else [widths[0]] * 2 if is_gated else widths
    spread = data.draw(st.integers(0, 8))  # rows of `x` may lie apart
    x = draw(num_tokens, num_inputs + spread)[:, :num_inputs]
    weights = [draw(width, num_inputs + 32)[:, :num_inputs] / num_inputs**0.5 for width in widths]
    biases = [draw(width) if has_bias else None for width in widths]
    head_norm = draw(64) if is_rotated and data.draw(flag) else None
    norm, residual = draw(num_inputs) if has_norm else None, draw(num_tokens, widths[0]) if has_residual else None
    dim = data.draw(st.sampled_from((32, 64)))
    cos, sin = draw(num_tokens, dim), draw(num_tokens, dim)
    product = Product(
        [
            Matrix(weight=weight, bias=bias, is_rotated=is_rotated and i < 2, head_norm=head_norm if i == 0 else None)
            for i, (weight, bias) in enumerate(zip(weights, biases, strict=True))
        ],
        norm=norm,
        epsilon=1e-5,
        is_gated=is_gated and not is_rotated,
        head_dim=64 if is_rotated else 0,
    )
    residual = None if is_gated or is_rotated else residual
    found = product(x, residual=residual, rotary=(cos[None], sin[None]) if is_rotated else None)

    rows = x.double() if norm is None else rms_norm(x.double(), norm, 1e-5).to(torch.bfloat16).double()
    wanted = [rows @ weight.double().T for weight in weights]
    wanted = [one if bias is None else one + bias.double() for one, bias in zip(wanted, biases, strict=True)]
    if is_rotated:
        heads = [one.unflatten(1, (-1, 64)) for one in wanted[:2]]
        if head_norm is not None:
            heads[0] = rms_norm(heads[0], head_norm, 1e-5)
        wanted[:2] = [rotate(one, cos, sin).flatten(1) for one in heads]
    elif is_gated:
        wanted = [nn.functional.silu(wanted[0]) * wanted[1]]
    elif residual is not None:
        wanted[0] = wanted[0] + residual.double()
    assert all(is_close(one, other) for one, other in zip(found, wanted, strict=True))


def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Replace attention: every output depends on q, k and v."""
    num_readers = len(q) // len(k)
    return q + k.repeat_interleave(num_readers, 0) * v.repeat_interleave(num_readers, 0)


def random_model(name: str, **changes: int) -> nn.Module:
    """Makes a tiny model whose norms and biases are no constants, with heads that the kernels know."""
    config = TINY[name]()
    config.update(changes)
    config.head_dim = SPEC.head_dim
    return random_weights(config)


def random_weights(config: PreTrainedConfig) -> nn.Module:
    torch.manual_seed(1)
    module: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation=adapter.SERVE
    )
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.ndim == 1 else 0.0, std=0.1)
    return module.eval()


def fused_layers(module: Any) -> list[bool]:
    """Fuse the layers and the head. Return for each layer whether it is fused."""
    levels: dict[int, Levels] = {}

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = module.model.rotary_emb(torch.empty(1, 0, 0, dtype=torch.bfloat16), positions[None])
        return cos, sin

    layers = dict(enumerate(module.model.layers))
    positions = probe_positions(module.config, module.config.max_position_embeddings)
    fuse_layers(layers, [SPEC] * len(layers), None, rotary, levels, positions)
    fuse_head(module.lm_head, levels)
    return [isinstance(layer.forward, FusedLayer) for layer in layers.values()]


@pytest.mark.parametrize("name", ["llama", "mistral-window", "phi3", "qwen2", "qwen3"])
def test_a_fused_model_is_as_exact_as_its_modules(name: str) -> None:
    module = random_model(name)
    tokens = torch.randint(0, 199, (1, 70), generator=torch.Generator().manual_seed(3))
    arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": False, "attend": attend}
    with torch.no_grad():
        own = module(**arguments).logits.double()
        exact = random_model(name).double()(**arguments).logits
        assert all(fused_layers(module))
        found = module(**arguments).logits.double()
    assert (found - exact).norm() <= 1.5 * (own - exact).norm() and not torch.equal(found, own)


@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_layers_of_another_form_keep_their_own(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "longspan"):
        assert not any(fused_layers(random_model(name)))
    assert "are computed by PyTorch's operators, so a decode step can take twice as long: " in caplog.text


def test_a_layer_that_computes_something_else_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = random_model("llama")
    module.model.layers[1].mlp.act_fn = nn.GELU()
    with caplog.at_level(logging.INFO, "longspan"):
        assert fused_layers(module) == [True, False, True]
    assert "layers [1] are computed" in caplog.text and "would differ at" in caplog.text


FAR = [16383, 16384, 40000]
"""Positions on both sides of a switch, far behind those of short prompts."""


def logits_at(module: Any, positions: list[int]) -> Tensor:
    where, tokens = torch.tensor([positions]), torch.arange(len(positions))[None]
    with torch.no_grad():
        logits: Tensor = module(input_ids=tokens, position_ids=where, use_cache=False, attend=attend).logits[0]
    return logits.double()


def ministral3() -> nn.Module:
    """Makes a tiny model that scales queries by `floor(position / 16384)`."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 2.0}
    config = Ministral3Config(
        **BASE | {"head_dim": SPEC.head_dim, "max_position_embeddings": 1 << 16},
        rope_parameters={**rope, "original_max_position_embeddings": 16384},
    )
    return random_weights(config)


def scaled_far_away(self: Any, hidden_states: Tensor, position_ids: Tensor, **arguments: Any) -> Any:
    """Replace the attention of a model, with other results from position 16,384 on."""
    is_far = (position_ids >= 16384)[..., None]
    return attention_of_llama(self, hidden_states * (1 + is_far), position_ids=position_ids, **arguments)


attention_of_llama = LlamaAttention.forward


@pytest.mark.parametrize("name", ["ministral3", "llama", "phi3", "qwen3"])
def test_fused_layers_agree_with_modules_far_from_the_start(name: str) -> None:
    module = ministral3() if name == "ministral3" else random_model(name, max_position_embeddings=1 << 16)
    own = logits_at(module, FAR)
    is_fused = fused_layers(module)
    found = logits_at(module, FAR)
    assert set(is_fused) == {name != "ministral3"}
    assert (found - own).norm(dim=-1).max() <= MAX_ERROR * own.norm(dim=-1).max()


def test_a_known_class_is_fused_only_if_it_agrees_at_every_switch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LlamaAttention, "forward", scaled_far_away)
    with caplog.at_level(logging.INFO, "longspan"):
        assert not any(fused_layers(random_model("llama", max_position_embeddings=1 << 16)))
    assert "layers [0, 1, 2] are" in caplog.text and "would differ at position 16384" in caplog.text


def test_a_class_that_is_not_known_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    """It has the name and the results of Llama's, but comes from elsewhere: nothing is known of its code."""
    module: Any = random_model("llama")
    attention = module.model.layers[1].self_attn
    attention.__class__ = type("LlamaAttention", (LlamaAttention,), {"__module__": "transformers_modules.hub.model"})
    with caplog.at_level(logging.INFO, "longspan"):
        assert fused_layers(module) == [True, False, True]
    assert caplog.text.count("a decode step can take twice as long: the forward of LlamaAttention") == 1


def test_a_head_that_computes_something_else_keeps_its_forward(caplog: pytest.LogCaptureFixture) -> None:
    module: Any = random_model("llama", vocab_size=208)
    head = module.lm_head
    assert fuse_head(head, {}) is not None
    doubled = head.forward = lambda hidden: 2 * nn.functional.linear(hidden, head.weight)
    with caplog.at_level(logging.INFO, "longspan"):
        assert fuse_head(head, {}) is None and head.forward is doubled
    assert "the output head is computed by PyTorch: results would differ" in caplog.text


@pytest.mark.parametrize("length", [1000, 4096, 16384])
def test_both_sides_of_every_switch_are_checked(length: int) -> None:
    config = LlamaConfig(rope_parameters={"rope_type": "default", "original_max_position_embeddings": length})
    positions = {*probe_positions(config, 1 << 16)}
    assert positions >= {0, (1 << 16) - 1} and max(positions) < 1 << 16
    switches = range(length, 1 << 16, length)
    assert positions.issuperset(n - side for n in (*switches[:16], *switches[-16:]) for side in (0, 1))


@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "head_dim", "words"),
    [(48, 32, 0, "48 inputs"), (32, 24, 0, "24 outputs"), (32, 32, 16, "heads have 16 numbers")],
)
def test_shapes_that_the_kernel_does_not_know_are_refused(
    num_inputs: int, num_outputs: int, head_dim: int, words: str
) -> None:
    weight = torch.zeros(num_outputs, num_inputs).bfloat16()
    with pytest.raises(ValueError, match=words):
        Product([Matrix(weight=weight)], head_dim=head_dim)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(("int8", "int4")), st.sampled_from((1, 5, 40, 300)), st.booleans(), st.integers(0, 9))
def test_levels_give_the_bits_of_the_dequantised_weights(
    quantization: Quantization, num_tokens: int, is_gated: bool, seed: int
) -> None:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 96, generator=numbers).to(torch.bfloat16)
    levels = [quantise("up_proj", torch.randn(48, 96, generator=numbers), quantization) for _ in range(2)]
    weights = [one.weights() for one in levels]
    pairs = zip(weights, levels, strict=True)
    quantised = Product([Matrix(weight=weight, levels=one) for weight, one in pairs], is_gated=is_gated)
    plain = Product([Matrix(weight=weight) for weight in weights], is_gated=is_gated)
    assert all(torch.equal(one, other) for one, other in zip(quantised(x), plain(x), strict=True))


@given(st.sampled_from((("int8", 8), ("int4", 4))), st.integers(0, 9))
def test_a_level_is_the_nearest(kind: tuple[Quantization, int], seed: int) -> None:
    """By half a step, besides roundings of the grid and of the weight to bfloat16."""
    quantization, bits = kind
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
    levels = quantise("up_proj", weight, quantization)
    assert levels.bits == bits and levels.numbers.shape == (16, 64 * bits // 8)
    step = levels.grid[..., 0].float().repeat_interleave(GROUP, 1)
    error = (levels.weights().float() - weight).abs()
    assert (error <= 0.5 * step + (2**bits) * step / 256 + weight.abs().max() / 128).all()
    again = quantise("up_proj", levels.weights(), quantization).weights()
    assert (again.float() - levels.weights().float()).abs().max() <= step.max()
    assert quantise("lm_head", weight, quantization).bits == 8


def test_equal_numbers_of_a_group_are_a_level() -> None:
    levels = quantise("up_proj", torch.full((16, 32), 0.25), "int4")
    assert (levels.weights() == 0.25).all()
