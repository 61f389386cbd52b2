"""Steps of single tokens in one call, against the same model layer by layer, and inside an engine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import ThreadLLM
from kernels import loaded_kernels
from test_fused import SPEC, random_model
from tiny_models import BASE, SWITCH_LENGTH, longrope_parameters, write_checkpoint
from torch import Tensor, nn
from transformers import LlamaConfig

from longspan import SamplingParams, native
from longspan.attn.backends.native import NativeCpu
from longspan.attn.paged import PagedKv, Reads
from longspan.attn.spec_reader import probe_positions
from longspan.model.fused import Matrix, Product, Rotary, fuse_head, fuse_layers
from longspan.model.quantization import quantise
from longspan.model.step import Attend, SingleTokens
from longspan.model.whole_step import RotaryTable, WholeStep, whole_step

BLOCK_SIZE = 32


@pytest.fixture(params=["as_it_is", "without_amx"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "without_amx":
        monkeypatch.setattr(native, "has_amx", lambda: False)
    with loaded_kernels():
        yield


class Tiny:
    """A tiny model, of which the kernels know all parts."""

    def __init__(self, name: str) -> None:
        self.module: Any = random_model(name, vocab_size=208)
        self.num_layers = len(self.module.model.layers)

    def whole_step(self) -> WholeStep | None:
        layers = dict(enumerate(self.module.model.layers))
        positions = probe_positions(self.module.config, self.module.config.max_position_embeddings)
        fused = fuse_layers(layers, [SPEC] * len(layers), None, self.rotary, {}, positions)
        head = fuse_head(self.module.lm_head, {})
        assert head is not None
        own = [fused[layer] for layer in layers]
        return whole_step(self.module, own, head, self.rotary_of_row, self.logits, positions)

    def logits(self, tokens: Tensor, positions: Tensor, _rope_lengths: Tensor, attend: Attend) -> Tensor:
        arguments = {"input_ids": tokens[None], "position_ids": positions[None], "use_cache": False, "attend": attend}
        found: Tensor = self.module(**arguments).logits[0]
        return found

    def rotary_of_row(self, positions: Tensor, rope_lengths: Tensor) -> Rotary:
        assert rope_lengths.shape == positions.shape
        return self.rotary(positions)

    def rotary(self, positions: Tensor) -> Rotary:
        cos, sin = self.module.model.rotary_emb(torch.empty(1, 0, 0, dtype=torch.bfloat16), positions[None])
        return cos, sin


def random_pools(num_layers: int, num_blocks: int) -> tuple[PagedKv, ...]:
    generator = torch.Generator().manual_seed(num_blocks)
    shape = (2, num_blocks, SPEC.num_kv_heads, BLOCK_SIZE, SPEC.head_dim)
    pools = [torch.randn(shape, generator=generator).bfloat16() for _ in range(num_layers)]
    return tuple(PagedKv(keys=keys, values=values) for keys, values in pools)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["llama", "mistral-window", "phi3", "qwen2", "qwen3"])
def test_a_whole_step_equals_the_layers(name: str) -> None:
    """Batches grow and shrink, and pools change: nothing of a step before is left."""
    model = Tiny(name)
    step = model.whole_step()
    assert step is not None
    for num_tokens in (1, 6, 40, 3):
        generator = torch.Generator().manual_seed(num_tokens)
        tokens = torch.randint(0, 208, (num_tokens,), generator=generator)
        positions = torch.randint(0, 3 * BLOCK_SIZE, (num_tokens,), generator=generator)
        tables = torch.randperm(3 * num_tokens, generator=generator).view(num_tokens, 3)
        own_kv, kv = (random_pools(model.num_layers, 3 * num_tokens) for _ in range(2))
        blocks = tables[torch.arange(num_tokens), positions // BLOCK_SIZE].contiguous()
        offsets = positions % BLOCK_SIZE
        starts = [max(0, int(position) - 50) for position in positions]  # as windows do
        reads = [
            Reads(blocks=table, start=start, stop=int(position) + 1)
            for table, start, position in zip(tables.tolist(), starts, positions, strict=True)
        ]
        plan = NativeCpu().plan(reads, kv[0])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            NativeCpu().store(own_kv[layer], blocks, offsets, k, v)  # noqa: B023 - called in this turn
            return NativeCpu().attend_paged(q, own_kv[layer], plan, SPEC)[0]  # noqa: B023

        what = SingleTokens(blocks=blocks, offsets=offsets, kv=kv, plans=[plan] * model.num_layers)
        with torch.no_grad():
            own = model.logits(tokens, positions, positions + 1, attend)
            found = step(tokens, positions, positions + 1, what)
        for one, other in zip(kv, own_kv, strict=True):
            assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)
        torch.testing.assert_close(found, own, atol=0.02 * own.abs().max().item(), rtol=0)


def test_a_table_has_the_bits_of_its_entries() -> None:
    model = Tiny("llama")
    table = RotaryTable(model.rotary)
    for positions in ([3], [9000, 5, 5], [7], [1 << 17, 4], [(1 << 17) - 1]):
        found, wanted = (one(torch.tensor(positions)) for one in (table, model.rotary))
        assert all(torch.equal(a, b) and a.is_contiguous() for a, b in zip(found, wanted, strict=True))


class Doubled(nn.Module):
    """Embeddings that are no longer the rows of a matrix."""

    def __init__(self, inner: nn.Embedding) -> None:
        super().__init__()
        self.weight = inner.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return 2 * nn.functional.embedding(tokens, self.weight)


@pytest.mark.usefixtures("kernels")
def test_a_model_with_more_to_it_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    model = Tiny("llama")
    model.module.set_input_embeddings(Doubled(model.module.get_input_embeddings()))
    with caplog.at_level(logging.INFO, "longspan"):
        assert model.whole_step() is None
    assert "layer by layer" in caplog.text and "results would differ at" in caplog.text


@pytest.mark.usefixtures("kernels")
def test_a_whole_step_replaces_known_classes_only() -> None:
    """The class has the parts of Llama and computes the same, but nothing is known of its code."""
    model = Tiny("llama")
    model.module.__class__ = type("LlamaForCausalLM", (type(model.module),), {"__module__": __name__})
    assert model.whole_step() is None


def longrope(folder: Path) -> str:
    """Writes a tiny model whose rotary embedding depends on how long a request is."""
    config = LlamaConfig(**BASE | {"head_dim": 32, "vocab_size": 208}, rope_parameters=longrope_parameters(16))
    return str(write_checkpoint(config, folder))


@pytest.mark.parametrize("kind", ["smollm2", "int4", "longrope"])
def test_an_engine_decodes_by_whole_steps(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts, recorded times or enforce_eager go layer by layer. The tokens are the same."""
    sizes: list[int] = []
    call = WholeStep.__call__

    def counted(self: WholeStep, tokens: Tensor, *others: Any, **further: Any) -> Tensor | None:
        sizes.append(len(tokens))
        return call(self, tokens, *others, **further)

    monkeypatch.setattr(WholeStep, "__call__", counted)
    options: dict[str, Any] = {"quantization": "int4"} if kind == "int4" else {}
    if kind == "longrope":
        options |= {"model": longrope(tmp_path), "skip_tokenizer_init": True}
    prompts = [[5, 6, 7], [8] * (SWITCH_LENGTH + 10), list(range(30))]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    found = []
    for by_layers in ({}, {"record_times": True}, {"enforce_eager": True}):
        monkeypatch.setattr(native, "_library", None)
        with ThreadLLM(dtype="bfloat16", block_size=16, threads_per_rank=1, **options, **by_layers) as llm:
            if not native.is_loaded():
                pytest.skip("the machine cannot have the kernels")
            sizes.clear()
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, params)])
            assert (sizes.count(3) >= 10) != bool(by_layers) and len(sizes) <= 36
    assert found[0] == found[1] == found[2]


def test_a_gate_has_the_bits_of_its_projection() -> None:
    weight = torch.zeros(32, 32).bfloat16()
    both = [Matrix(weight=weight, levels=quantise("up_proj", weight.float(), kind)) for kind in ("int4", "int8")]
    with pytest.raises(ValueError, match="different bits"):
        Product(both, is_gated=True)
