"""Classes that compute attention themselves: known forms are computed by `Attend`, all other forms are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_checkpoint
from tiny_types import tiny_config
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from longspan.attn.spec import AttnSpec
from longspan.attn.spec_reader import UnsupportedAttentionError
from longspan.model.adapter import Model
from longspan.model.cache_interface import KvInterface, RecordingKv, hand_by_cache
from longspan.model.files import ModelError
from longspan.model.probe import check_supported, gather_info
from longspan.model.source import prepare
from longspan.model.step import Rows
from longspan.model.store import read_info

TOKENS, HEADS, DIM = 5, 4, 16
_numbers = torch.Generator().manual_seed(0)
Q, K, V = torch.randn(3, 1, HEADS, TOKENS, DIM, generator=_numbers)
Form = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(DIM)).softmax(-1) @ v


def three_dimensions(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(HEADS, -1, DIM) for x in (q, k, v))
    weights = functional.dropout(torch.bmm(q, k.transpose(1, 2)).div(4).softmax(dim=-1), 0.5, training=False)
    return torch.bmm(weights.view(1, HEADS, TOKENS, TOKENS).view(HEADS, TOKENS, TOKENS), v)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q.float(), k.to(torch.float32).transpose(2, 3)) * 0.25
    return nn.Softmax(dim=-1)(scores + None).to(v.dtype) @ v


def scaled_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores /= math.sqrt(DIM)
    return functional.softmax(scores, dim=-1, dtype=torch.float32) @ v


def scaled_by_a_method(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    scores.mul_(0.25)
    return scores.softmax(-1) @ v


def onto_zeros(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(HEADS, -1, DIM) for x in (q, k, v))
    zeros = torch.zeros(HEADS, q.shape[1], k.shape[1], dtype=q.dtype, device=k.device)
    return torch.baddbmm(zeros, q, k.transpose(1, 2), beta=1.0, alpha=0.25).softmax(-1) @ v


KNOWN: list[Form] = [plain, three_dimensions, in_float32, scaled_in_place, scaled_by_a_method, onto_zeros]


def causal(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    assert layer == 3
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)


def serve(form: Form, window: int | None = None) -> Tensor:
    """Compute a form with causal attention."""
    spec = AttnSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, scale=0.25, window=window, softcap=None)
    interface = hand_by_cache(causal, [spec] * 4)["past_key_values"]
    assert isinstance(interface, KvInterface)
    return form(Q, *interface.update(K, V, 3))


def record(form: Form) -> AttnSpec:
    """Return the attention that a form computes."""
    specs: dict[int, AttnSpec] = {}
    interface = RecordingKv(specs, stated_kv_heads=None, context_length=CONTEXT)
    assert not form(Q, *interface.update(K, V, 3)).any()
    return specs[3]


@pytest.mark.parametrize("form", KNOWN)
def test_known_forms_are_computed_by_attend(form: Form) -> None:
    spec = AttnSpec(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM, scale=0.25, window=None, softcap=None)
    assert record(form) == spec
    expected = functional.scaled_dot_product_attention(Q, K, V, is_causal=True)
    torch.testing.assert_close(serve(form).view_as(Q), expected)


def of_mask(whole: Tensor, masked: float = -torch.inf) -> Form:
    """Return attention with a mask that is cut from the mask of all positions, or made for these tokens."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = whole[:, :, : q.shape[-2], : k.shape[-2]]
        return torch.where(visible, q @ k.transpose(-1, -2) * 0.25, torch.tensor(masked)).softmax(-1) @ v

    return form


CONTEXT = 40
_causal = torch.ones(1, 1, CONTEXT, CONTEXT, dtype=torch.bool).tril()


@pytest.mark.parametrize("window", [None, 7, 1])
def test_the_window_of_a_mask_of_all_positions_is_read(window: int | None) -> None:
    """Also where these tokens are fewer than the window."""
    form = of_mask(_causal if window is None else _causal.triu(1 - window))
    assert record(form).window == window
    assert serve(form, window).shape == Q.shape


@pytest.mark.parametrize(
    "form",
    [
        of_mask(_causal.triu(-6) | (torch.arange(CONTEXT) < 2) & _causal),  # sinks
        of_mask(torch.ones_like(_causal)),  # looks ahead
        of_mask(_causal[:, :, :TOKENS, :TOKENS].clone()),  # of these tokens
        of_mask(_causal, masked=-1.0),
    ],
    ids=["sinks", "ahead", "short", "small"],
)
def test_other_masks_are_refused(form: Form) -> None:
    with pytest.raises(UnsupportedAttentionError, match="where of its scores"):
        record(form)


def with_bias(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) + torch.arange(TOKENS)).softmax(-1) @ v


def with_bias_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.reshape(HEADS, -1, DIM) for x in (q, k, v))
    return torch.arange(float(TOKENS)).expand(HEADS, 1, -1).baddbmm(q, k.transpose(1, 2)).softmax(-1) @ v


def with_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    far = torch.ones(TOKENS, TOKENS).tril(-2).bool()
    return (q @ k.transpose(-1, -2)).masked_fill(far, -torch.inf).softmax(-1) @ v


def with_softcap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).tanh().softmax(-1) @ v


def with_scales_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * torch.rand(HEADS, 1, 1)).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2)).softmax(-2) @ v


def by_the_function_of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def without_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) @ v


def with_changed_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-1, -2)).softmax(-1) * 0.5) @ v


def with_dropped_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.5) @ v


def with_changed_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ (k * 2).transpose(-1, -2)).softmax(-1) @ v


def with_keys_changed_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k.transpose_(-1, -2)
    return (q @ k).softmax(-1) @ v


def with_repeated_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k[:, :1].expand_as(q).transpose(-1, -2)).softmax(-1) @ v


def with_values_as_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ v.transpose(-1, -2)).softmax(-1) @ k


def with_keys_as_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (k @ q.transpose(-1, -2)).softmax(-1) @ v


UNKNOWN: list[Form] = [
    *(with_bias, with_bias_before, with_mask, with_softcap, with_scales_of_heads, over_queries),
    *(by_the_function_of_torch, without_softmax, with_changed_weights, with_dropped_weights, with_changed_keys),
    *(with_repeated_keys, with_keys_changed_in_place, with_values_as_keys, with_keys_as_queries),
]


@pytest.mark.parametrize("form", UNKNOWN)
def test_unknown_forms_are_refused(form: Form) -> None:
    for ways in (serve, record):
        with pytest.raises(UnsupportedAttentionError, match="in a form unknown to longspan"):
            ways(form)


def test_a_scale_that_changes_is_refused() -> None:
    with pytest.raises(UnsupportedAttentionError, match=r"layer 3 computes .*scale=1\.0"):
        serve(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v)


# ---------------------------------------------------------------- models


def built(kind: str, variant: str = "", **changes: object) -> PreTrainedModel:
    config = tiny_config(kind, variant)
    for name, value in changes.items():
        setattr(config, name, value)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return model


@pytest.mark.parametrize(
    ("kind", "variant", "num_kv_heads"),
    [("falcon", "", 1), ("falcon", "several KV heads", 2), ("falcon", "sequential", 4), ("stablelm", "", 2)],
)
def test_pools_hold_the_kv_heads_that_differ(kind: str, variant: str, num_kv_heads: int, tmp_path: Path) -> None:
    info = gather_info(built(kind, variant), tmp_path)
    assert info.attends_by_cache
    assert {(spec.num_heads, spec.num_kv_heads) for spec in info.specs} == {(4, num_kv_heads)}


def test_other_classes_are_called_as_before(tmp_path: Path) -> None:
    assert not gather_info(built("llama"), tmp_path).attends_by_cache


@pytest.mark.parametrize(("kind", "variant"), [("bloom", ""), ("mpt", ""), ("falcon", "ALiBi"), ("cpmant", "")])
def test_other_attention_is_refused_before_weights_are_read(kind: str, variant: str, tmp_path: Path) -> None:
    tiny_config(kind, variant).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="attention interface") as refusal:
        check_supported(tmp_path, trust_remote_code=False)
    assert "\n" not in str(refusal.value)


def test_attention_that_changes_with_the_length_is_refused(tmp_path: Path) -> None:
    """Big Bird has full attention for prompts of at most 704 tokens, and sparse attention for longer ones."""
    gather_info(built("big_bird", attention_type="original_full", max_position_embeddings=1024), tmp_path)
    gather_info(built("big_bird", attention_type="block_sparse", max_position_embeddings=704), tmp_path)
    sparse = built("big_bird", attention_type="block_sparse", max_position_embeddings=1024)
    with pytest.raises(ModelError, match="BigBirdForCausalLM computes other attention for long prompts"):
        gather_info(sparse, tmp_path)


def test_attention_without_a_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="0 of its 4 layers use transformers' attention interface"):
        gather_info(built("openai-gpt"), tmp_path)


def skips_its_cache(model: PreTrainedModel) -> None:
    layer = model.transformer.h[1].self_attention
    inner = layer.forward
    layer.forward = lambda *args, **arguments: inner(*args, **arguments | {"layer_past": None, "attention_mask": 0.0})


def repeats_a_number(model: PreTrainedModel) -> None:
    model.transformer.h[1].self_attention.layer_idx = 0


@pytest.mark.parametrize(
    ("change", "reason"), [(skips_its_cache, "of its 4 layers"), (repeats_a_number, "without a number of their own")]
)
def test_layers_that_are_not_reached_are_refused(
    change: Callable[[PreTrainedModel], None], reason: str, tmp_path: Path
) -> None:
    model = built("falcon")
    change(model)
    with pytest.raises(ModelError, match=reason):
        gather_info(model, tmp_path)


class _Largest(TorchDispatchMode):
    """Notes the elements of the largest tensor that an operator returns. Tensors on the meta device have no memory."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta:
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("kind", ["falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "rembert", "stablelm", "xglm"])
def test_no_tensor_is_quadratic_in_the_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither masks nor scores."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    folder, num_tokens, layers = write_checkpoint(tiny_config(kind), tmp_path / "model"), 1200, []

    def attend(layer: int, q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        layers.append((layer, q.shape[1], k.shape[1]))
        return torch.zeros_like(q)

    model = Model(prepare(str(folder), dtype="float32"), torch.device("cpu"))
    numbers = {name: torch.arange(num_tokens) % 190 for name in ("tokens", "positions", "rope_lengths")}
    with _Largest() as largest:
        model.trunk.run(Rows(keep=torch.tensor([3]), **numbers), attend)
    assert layers == [(layer, num_tokens, num_tokens) for layer in range(4)]
    assert largest.elements < num_tokens**2 / 2


def test_random_matrices_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The facts of a model whose matrices are drawn by the ranks are the facts of a stored one."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    folder = write_checkpoint(tiny_config("falcon", "several KV heads"), tmp_path / "model")
    stored = read_info(prepare(str(folder), dtype="float32").weights)
    drawn = read_info(prepare(str(folder), dtype="float32", load_format="dummy", device="cuda").weights)
    assert drawn == stored
