"""Dummy weights that no file holds: every rank draws its own share, and all shares are of the same matrices."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import tiny_types
import torch
from numpy.typing import NDArray
from tiny_models import TINY
from torch import Tensor
from transformers import Llama4TextConfig

from longspan.model.adapter import Model
from longspan.model.files import ModelFiles
from longspan.model.source import prepare
from longspan.model.store import Matrices, StoredTensors, read_info

CPU = torch.device("cpu")
RANDOM = ("sinks", "router.bias")
"""The vectors that transformers initialises at random."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def drawn(name: str, folder: Path, seed: int = 0) -> ModelFiles:
    """Prepares a model as for a device that is none here, where it can be drawn all the same."""
    TINY[name]().save_pretrained(folder)
    return prepare(str(folder), dtype="float32", load_format="dummy", device="cuda", seed=seed)


@pytest.mark.parametrize("name", TINY)
def test_only_the_matrices_are_in_no_file(name: str, tmp_path: Path, cache: Path) -> None:
    """All other tensors, and the facts of the model, are as transformers makes them."""
    files = drawn(name, tmp_path / "model")
    assert sum(file.stat().st_size for file in cache.rglob("*") if file.is_file()) < 50_000
    written = prepare(str(tmp_path / "model"), dtype="float32", load_format="dummy")
    assert read_info(files.weights) == read_info(written.weights)
    found, wanted = (StoredTensors(one, CPU) for one in (files, written))
    assert {*found} == {*wanted}
    for key, tensor in wanted.items():
        assert found.is_drawn(key) == (tensor.ndim > 1), key
        assert found[key].shape == tensor.shape and found[key].dtype == tensor.dtype
        if tensor.ndim < 2:
            assert torch.equal(found[key], tensor) or key.endswith(RANDOM), key
        else:
            assert 0.015 < found[key].std() < 0.025 and abs(found[key].mean()) < 0.1 / found[key].numel() ** 0.5, key


@pytest.mark.parametrize("kind", ["gpt2", "gemma3n_text", "modernbert-decoder", "phi4_multimodal"])
def test_matrices_that_other_modules_initialise_are_in_no_file(kind: str, tmp_path: Path, cache: Path) -> None:
    """A module writes to a matrix of its child, or to a convolution."""
    tiny_types.tiny_config(kind, "", even=True).save_pretrained(tmp_path / "model")
    files, written = (
        prepare(str(tmp_path / "model"), dtype="float32", load_format="dummy", device=device)
        for device in ("cuda", "cpu")
    )
    assert read_info(files.weights) == read_info(written.weights)
    drawn, whole = (sum(path.stat().st_size for path in one.weights.parent.glob("*.bin")) for one in (files, written))
    assert drawn < whole / 2
    assert cache in files.weights.parents


def test_experts_that_a_class_makes_as_zeros_take_no_memory(tmp_path: Path) -> None:
    """Those of this configuration would take 2 TB."""
    folder = tmp_path / "model"
    text = {"hidden_size": 8192, "intermediate_size": 8192, "num_hidden_layers": 4, "num_local_experts": 1024}
    Llama4TextConfig(**text, num_attention_heads=8, num_key_value_heads=8, head_dim=64).save_pretrained(folder)
    files = prepare(str(folder), dtype="bfloat16", load_format="dummy", device="cuda")
    assert read_info(files.weights).num_layers == 4


def test_matrices_follow_their_names_and_the_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    one, same, other = (StoredTensors(drawn("qwen3", tmp_path / "q", seed), CPU) for seed in (0, 0, 1))
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert all(torch.equal(one[name], same[name]) for name in names)
    assert not torch.allclose(one[names[0]], one[names[1]], atol=1e-3)
    assert not torch.allclose(one[names[0]], other[names[0]], atol=1e-3)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_shares_are_slices_of_the_whole(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    files = drawn(name, tmp_path / "model")
    num_layers = read_info(files.weights).num_layers
    layers = [range(num_layers)] if pp == 1 else [range(1), range(1, num_layers)]
    whole = dict(Model(files, CPU).module.named_parameters(remove_duplicate=False))
    seen = set[str]()
    for stage in layers:
        for index in range(tp):
            model = Model(files, CPU, tp_index=index, tp=tp, layers=stage)
            for key, share in model.module.named_parameters(remove_duplicate=False):
                assert torch.equal(share, model.shard.cut(key, whole[key])), key
                seen.add(key)
    assert seen == {*whole}


def test_tied_weights_are_drawn_once(tmp_path: Path) -> None:
    module = Model(drawn("llama", tmp_path / "model"), CPU).module
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


@pytest.mark.parametrize("layers", [range(3), range(1, 3), range(2, 3)])
def test_one_matrix_at_a_time_is_there_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: range
) -> None:
    """Only slices of sharded matrices stay in memory, and matrices of other stages are never drawn."""
    made: dict[str, weakref.ref[NDArray[np.float32]]] = {}
    draw, kept = Matrices.draw, ("embed_tokens.weight", "lm_head.weight", ".gate.weight")

    def alive() -> set[str]:
        return {name for name, memory in made.items() if memory() is not None}

    def counting(self: Matrices, name: str, device: torch.device) -> Tensor:
        assert name not in made and all(other.endswith(kept) for other in alive())
        memory = draw(self, name, device).numpy().copy()  # this array lives as long as any tensor of its memory
        made[name] = weakref.ref(memory)
        return torch.from_numpy(memory)

    monkeypatch.setattr(Matrices, "draw", counting)
    model = Model(drawn("mixtral", tmp_path / "model"), CPU, tp=2, layers=layers)
    assert {*made} == {key for key, weight in model.module.named_parameters() if weight.ndim > 1}
    assert alive() == {key for key in made if key.endswith(kept)}


def test_unsharded_attention_is_drawn_again(tmp_path: Path) -> None:
    """It is asked for a layer at a time, by exchanges that use it."""
    files = drawn("qwen2", tmp_path / "model")
    whole, share = Model(files, CPU), Model(files, CPU, tp_index=1, tp=2)
    found = share.stored_attention(2)
    wanted = dict(whole.module.get_submodule("model.layers.2.self_attn").named_parameters())
    assert found.keys() == wanted.keys() and len(found) >= 4
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
