"""What a CUDA device has room for: pools of KV as large as its workers measure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from longspan import LLM, SamplingParams

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
    with LLM(str(shape), device="cuda", load_format="dummy", skip_tokenizer_init=True, parallel=parallel) as llm:
        cluster = llm.engine.config.cluster
        pools = sum(cluster.num_blocks) * llm.service.block_bytes
        left, _ = torch.cuda.mem_get_info(0)
        assert pools > (free - total // 10) // 2
        assert left > total // 20, "a tenth is kept, and activations lie in it and in what the step took"
        num_tokens = llm.engine.config.max_num_batched_tokens * cluster.num_instances
        everything = SamplingParams(temperature=1.0, top_p=0.5, max_tokens=4, ignore_eos=True, logprobs=5, seed=1)
        prompts = [[3 + (i * 7 + j) % 30000 for i in range(num_tokens // 16)] for j in range(64)]
        outputs = llm.generate(prompts, everything, use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == 4 for output in outputs)
        [output] = llm.generate([[3 + i % 30000 for i in range(4 * num_tokens)]], everything, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 4
