"""Roles of matrices are found by a run with marked outputs, and they decide how tensor parallelism cuts a layer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_types
import torch
from engines import ThreadLLM
from refusals import refused
from tiny_models import BASE, write_checkpoint
from torch import Tensor
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from longspan.attn.spec import AttnSpec
from longspan.core.splits import split_heads
from longspan.model.probe import PROBE, gather_info
from longspan.model.roles import LayerRoles, Role
from longspan.model.skeleton import build_skeleton
from longspan.model.trace import find_roles

HEADS, KV_HEADS = 6, 3
GATHER_HIDDEN: dict[str, Any] = {
    "instances": 2,
    "policy": "context",
    "policy_options": {"exchange": "gather_hidden", "threshold": "20"},
}


def roles_of(kind: str, **extra: Any) -> LayerRoles:
    """Return the roles in the first layer of a small model with 6 query heads, and 3 KV heads if there may be fewer."""
    config = AutoConfig.for_model(kind, **BASE | extra)
    model = build_skeleton(config, trust_remote_code=False, device="cpu", attn_implementation=PROBE)
    return gather_info(model, Path()).roles[0]


def joined(num_kv_heads: int) -> tuple[int, ...]:
    return tuple(range(HEADS + 2 * num_kv_heads))


MIXED = tuple(kind * HEADS + head for head in range(HEADS) for kind in range(3))
"""The query, key and value of one head after another."""


@pytest.mark.parametrize(
    ("kind", "extra", "attention", "projections", "output"),
    [
        ("phi3", {}, "self_attn", {"qkv_proj": joined(KV_HEADS)}, "o_proj"),
        ("gpt2", {}, "attn", {"c_attn": joined(HEADS)}, "c_proj"),
        ("gpt_neox", {}, "attention", {"query_key_value": MIXED}, "dense"),
        ("persimmon", {}, "self_attn", {"query_key_value": MIXED}, "dense"),
        ("gpt_bigcode", {"multi_query": True}, "attn", {"c_attn": joined(1)}, "c_proj"),
        ("gpt_bigcode", {"multi_query": False}, "attn", {"c_attn": MIXED}, "c_proj"),
        (
            "olmo2",
            {},
            "self_attn",
            {"q_proj": tuple(range(6)), "k_proj": tuple(range(6, 9)), "v_proj": tuple(range(9, 12))},
            "o_proj",
        ),
    ],
)
def test_outputs_of_projections_are_found_in_their_heads(
    kind: str, extra: dict[str, Any], attention: str, projections: dict[str, tuple[int, ...]], output: str
) -> None:
    roles, is_transposed = roles_of(kind, **extra), kind == "gpt2"
    assert roles.attention == attention
    own = {path: role for path, role in roles.matrices.items() if path.startswith(f"{attention}.")}
    wanted = {name: Role(heads=heads, is_transposed=is_transposed) for name, heads in projections.items()}
    wanted[output] = Role(sums="heads", is_transposed=is_transposed)
    assert own == {f"{attention}.{name}": role for name, role in wanted.items()}


@pytest.mark.parametrize(
    ("kind", "parts", "first", "second"),
    [
        ("llama", 1, ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj"),
        ("phi3", 2, ("mlp.gate_up_proj",), "mlp.down_proj"),
        ("phi", 1, ("mlp.fc1",), "mlp.fc2"),
        ("opt", 1, ("fc1",), "fc2"),
        ("starcoder2", 1, ("mlp.c_fc",), "mlp.c_proj"),
        ("modernbert-decoder", 2, ("mlp.Wi",), "mlp.Wo"),
    ],
)
def test_the_inner_dimension_is_found_by_its_readers(
    kind: str, parts: int, first: tuple[str, ...], second: str
) -> None:
    """Also where the inner dimension is as wide as the hidden states."""
    for inner in (128, BASE["hidden_size"]):
        matrices = roles_of(kind, intermediate_size=inner, ffn_dim=inner).matrices
        assert {path: matrices[path].parts for path in first} == dict.fromkeys(first, parts)
        assert matrices[second] == Role(sums="inner")


@pytest.mark.parametrize("num_members", [2, 3, 4, 6])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_shares_have_all_blocks_of_their_heads_in_order(num_members: int, *, is_mixed: bool) -> None:
    """And the role of a share numbers its heads as a layer with only these heads does."""
    spec = AttnSpec(num_heads=6, num_kv_heads=3, head_dim=16, scale=1.0, window=None, softcap=None)
    order = [0, 1, 6, 9, 2, 3, 7, 10, 4, 5, 8, 11] if is_mixed else [*range(12)]
    role = Role(heads=tuple(order))
    for share in split_heads(6, 3, num_members):
        own = [*share.heads, *(6 + head for head in share.kv_heads), *(9 + head for head in share.kv_heads)]
        ranges = role.blocks(spec, share)
        blocks = [block for blocks in ranges for block in blocks]
        assert [order[block] for block in blocks] == [head for head in order if head in own]
        assert is_mixed or len(ranges) == 3
        assert [own[head] for head in role.of_share(spec, share).heads] == [order[block] for block in blocks]


def test_a_gate_a_router_and_shifted_inner_dimensions_have_no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_types.tiny_config("afmoe")
    model = build_skeleton(config, trust_remote_code=False, device="cpu", attn_implementation=PROBE)
    for roles in gather_info(model, Path()).roles:
        assert not {"self_attn.gate_proj", "mlp.router.gate"} & roles.matrices.keys()
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x).flip(-1)))
    assert not {"mlp.up_proj", "mlp.down_proj"} & roles_of("llama").matrices.keys()


def _mixed_heads(self: Any, hidden_states: Tensor, **arguments: Any) -> Any:
    """As Llama's attention, but each query head is also added to its neighbour."""
    own = self.q_proj.forward
    self.q_proj.forward = lambda x: own(x) + own(x).roll(self.head_dim, -1)
    try:
        return _llama(self, hidden_states, **arguments)
    finally:
        self.q_proj.forward = own


_llama = LlamaAttention.forward


@pytest.mark.parametrize("split", ["heads", "inner", "names"])
def test_an_unknown_structure_is_refused(split: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))
    if split == "heads":
        monkeypatch.setattr(LlamaAttention, "forward", _mixed_heads)
    elif split == "inner":
        monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: self.down_proj(torch.cumsum(self.up_proj(x), -1)))
    kind = "jetmoe" if split == "names" else "llama"
    folder = write_checkpoint(AutoConfig.for_model(kind, **BASE), tmp_path / "model")
    with refused("tp"):
        ThreadLLM(str(folder), tp=2, skip_tokenizer_init=True, dtype="float32")


@pytest.mark.parametrize(("kind", "heads"), [("gpt_neox", joined(HEADS)), ("gpt2", MIXED)])
def test_a_wrong_role_is_refused(
    kind: str, heads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The trial on a small copy notices heads in another order."""
    monkeypatch.setenv("LONGSPAN_CACHE", str(tmp_path / "cache"))

    def wrong(*args: Any) -> tuple[LayerRoles, ...]:
        return tuple(
            replace(
                own,
                matrices={
                    path: replace(role, heads=heads) if role.heads else role for path, role in own.matrices.items()
                },
            )
            for own in find_roles(*args)
        )

    monkeypatch.setattr("longspan.model.probe.find_roles", wrong)
    folder = write_checkpoint(AutoConfig.for_model(kind, **BASE), tmp_path / "model")
    for split, parameter in (({"tp": 2}, "tp"), (GATHER_HIDDEN, "exchange")):
        with refused(parameter):
            ThreadLLM(str(folder), skip_tokenizer_init=True, dtype="float32", **split)
