"""Memory of a CUDA device: KV pools as large as its workers measure, and dummy weights that it draws."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from longspan import LLM, SamplingParams
from longspan.model.adapter import Model
from longspan.model.source import prepare

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here"),
]
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2**20,
}


@pytest.fixture
def shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of a model of a billion weights."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("parallel", ["1", "2", "tp2"])
def test_pools_fill_the_device_and_full_steps_still_fit(shape: Path, parallel: str) -> None:
    """Also where ranks share it."""
    free, total = torch.cuda.mem_get_info(0)
    options = {"device": "cuda", "dtype": "bfloat16", "load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(str(shape), **options, parallel=parallel) as llm:
        cluster = llm.engine.config.cluster
        pools = sum(cluster.num_blocks) * llm.service.block_bytes
        left, _ = torch.cuda.mem_get_info(0)
        assert pools > (free - total // 10) // 2
        assert left > total // 20, "a tenth is kept, and activations lie in it and in the memory of the step"
        num_tokens = llm.engine.config.max_num_batched_tokens * cluster.num_instances
        everything = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=4, ignore_eos=True, logprobs=5, seed=1)
        prompts = [[3 + (i * 7 + j) % 30000 for i in range(num_tokens // 16)] for j in range(64)]
        outputs = llm.generate(prompts, everything, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
        [output] = llm.generate([[3 + i % 30000 for i in range(4 * num_tokens)]], everything, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4


def test_dummy_weights_of_8b_are_there_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file nor the host's memory has them, and shares are slices of the whole on a device, too.

    A file of them is written in minutes. The limit is the time in which a busy machine builds the modules.
    """
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    larger = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config = LlamaConfig(**SIZES | larger | {"num_attention_heads": 32}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path / "model")
    device = torch.device("cuda")
    torch.cuda.init()
    begun_s = time.monotonic()
    files = prepare(str(tmp_path / "model"), dtype="bfloat16", load_format="dummy", device="cuda")
    torch.cuda.reset_peak_memory_stats()
    model = Model(files, device)
    torch.cuda.synchronize()
    assert time.monotonic() - begun_s < 60
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 10 * 2**20
    assert model.weight_bytes > 14 * 2**30
    assert torch.cuda.max_memory_allocated() < 1.01 * model.weight_bytes
    name = "model.layers.31.mlp.down_proj.weight"
    share = Model(files, device, tp_index=1, tp=2, layers=range(31, 32)).module.get_parameter(name)
    assert torch.equal(share, model.module.get_parameter(name)[:, 14336 // 2 :])
