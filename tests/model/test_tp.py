"""Models that cannot be split between ranks are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan import LLM
from longspan.attn.spec import AttnSpec
from longspan.core.splits import split_heads
from longspan.model.files import ModelError
from longspan.model.shard import Shard
from longspan.model.sharding import pieces


def test_more_ranks_than_heads_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="tp 7 is too much for layers with 6 query heads and 3 KV heads"):
        LLM(str(folders["llama"]), tp=7, dtype="float32", skip_tokenizer_init=True)


@pytest.mark.parametrize(("name", "inputs"), [("self_attn.o_proj", 96), ("mlp.down_proj", 128)])
def test_partial_projections_add_up_with_the_bias_once(name: str, inputs: int) -> None:
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


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 1, 16), (8, 2, 4), (4, 4, 32), (32, 2, 16)])
@pytest.mark.parametrize("tp", [2, 4])
def test_projections_are_cut_by_their_own_heads(heads: int, kv_heads: int, dim: int, tp: int) -> None:
    """Also where a KV projection has as many rows as there are query heads."""
    spec = AttnSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=1.0, window=None, softcap=None)
    for index, share in enumerate(split_heads(heads, kv_heads, tp)):
        shard = Shard(index=index, size=tp, specs=(spec,))
        for leaf, number, own in (
            ("q", heads, share.heads),
            ("k", kv_heads, share.kv_heads),
            ("v", kv_heads, share.kv_heads),
        ):
            found = pieces(shard, f"model.layers.0.self_attn.{leaf}_proj.weight", torch.Size([number * dim, 64]))
            assert found == (0, (range(own.start * dim, own.stop * dim),))


def test_ambiguous_rows_of_fused_projections_are_refused() -> None:
    spec = AttnSpec(num_heads=16, num_kv_heads=1, head_dim=16, scale=1.0, window=None, softcap=None)
    with pytest.raises(ModelError, match="it is not known how to cut"):
        pieces(Shard(index=0, size=2, specs=(spec,)), "model.layers.0.self_attn.sinks", torch.Size([16]))
