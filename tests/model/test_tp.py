"""Models that cannot be split between ranks are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan import LLM
from longspan.attn.spec import AttnSpec
from longspan.model.sharding import Shard


def test_more_ranks_than_heads_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="tp 7 is too much for layers with 6 query heads and 3 KV heads"):
        LLM(str(folders["llama"]), tp=7, skip_tokenizer_init=True)


@pytest.mark.parametrize(("name", "inputs"), [("self_attn.o_proj", 96), ("mlp.down_proj", 128)])
def test_what_ranks_add_up_is_the_whole_projection_with_its_bias_once(name: str, inputs: int) -> None:
    spec = AttnSpec(num_heads=6, num_kv_heads=3, head_dim=16, scale=1.0, window=None, softcap=None)
    weight, bias, given = torch.randn(96, inputs), torch.randn(96), torch.randn(5, inputs)
    total, first = torch.zeros(5, 96), 0
    for index in range(3):
        shard = Shard(index=index, size=3, specs=(spec,))
        own = shard.cut(f"model.layers.0.{name}.weight", weight)
        last = first + own.shape[1]
        total += torch.nn.functional.linear(given[:, first:last], own, shard.cut(f"model.layers.0.{name}.bias", bias))
        first = last
    torch.testing.assert_close(total, torch.nn.functional.linear(given, weight, bias), rtol=0, atol=1e-4)
