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
        pieces(Shard(index=0, size=2, specs=(spec,)), "model.layers.0.self_attn.gates", torch.Size([16]))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 1, 16), (6, 3, 6), (5, 5, 8)])
def test_sinks_are_cut_by_query_heads(heads: int, kv_heads: int, dim: int) -> None:
    """Also where a projection of keys has as many rows."""
    spec = AttnSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=1.0, window=None, softcap=None)
    shards = [Shard(index=index, size=3, specs=(spec,)) for index in range(3)]
    own = [shard.cut("model.layers.0.self_attn.sinks", torch.arange(heads)).tolist() for shard in shards]
    assert own == [[*shard.share(spec).heads] for shard in shards]


def test_narrow_values_are_cut_by_their_own_size() -> None:
    spec = AttnSpec(num_heads=6, num_kv_heads=3, head_dim=16, scale=1.0, window=None, softcap=None)
    for index in range(2):
        shard = Shard(index=index, size=2, specs=(spec,))
        share = shard.share(spec)
        values, output = (f"model.layers.0.self_attn.{name}.weight" for name in ("v_proj", "o_proj"))
        kv_heads, heads = share.kv_heads, share.heads
        assert pieces(shard, values, torch.Size([3 * 10, 64])) == (0, (range(kv_heads.start * 10, kv_heads.stop * 10),))
        assert pieces(shard, output, torch.Size([64, 6 * 10])) == (1, (range(heads.start * 10, heads.stop * 10),))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_shares_of_transposed_experts_add_up(size: int, is_interleaved: bool) -> None:
    """Widths of matrices are equal, so that no shape tells the inner dimension."""
    experts, width, inner = 2, 48, 24
    torch.manual_seed(0)
    weights = {
        "gate_up_proj": torch.randn(experts, width, 2 * inner),
        "gate_up_proj_bias": torch.randn(experts, 2 * inner),
        "down_proj": torch.randn(experts, inner, width),
        "down_proj_bias": torch.randn(experts, width),
    }
    given = torch.randn(experts, 5, width)

    def outputs(own: dict[str, torch.Tensor]) -> torch.Tensor:
        both = given @ own["gate_up_proj"] + own["gate_up_proj_bias"][:, None]
        gate, up = (both[..., ::2], both[..., 1::2]) if is_interleaved else both.chunk(2, dim=-1)
        return (gate.sigmoid() * up) @ own["down_proj"] + own["down_proj_bias"][:, None]

    spec = AttnSpec(num_heads=6, num_kv_heads=6, head_dim=16, scale=1.0, window=None, softcap=None)
    path = "model.layers.0.mlp.experts"
    forms = {"transposed": frozenset({path}), "interleaved": frozenset({path} if is_interleaved else ())}
    shards = [Shard(index=index, size=size, specs=(spec,), **forms) for index in range(size)]
    shares = [{name: shard.cut(f"{path}.{name}", weight) for name, weight in weights.items()} for shard in shards]
    torch.testing.assert_close(sum(map(outputs, shares)), outputs(weights), rtol=0, atol=1e-3)
