"""`longspan.attn.register`: an unmodified Hugging Face model, called by every member with its own tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import SINKS, SWITCH_LENGTH, make_tiny
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transports import MemoryTransport, Wires, run_members

from longspan import attn
from longspan.attn.comm import Transport
from longspan.core.layouts import shard_span
from longspan.core.runs import SpanShards

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., nn.Module]:
    """Loads a tiny model."""
    root = tmp_path_factory.mktemp("tiny")

    def load(name: str, attention: str) -> nn.Module:
        folder = root / name if (root / name).exists() else make_tiny(name, root / name)
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()

    return load


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 199, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def split_logits(
    model: nn.Module, sequences: list[Tensor], runs: list[SpanShards], exchange: Callable[..., Tensor]
) -> Any:
    """`[tokens, vocab]` of each member's tokens, and these tokens' places among all."""

    @torch.no_grad()
    def member(rank: int, transport: Transport) -> tuple[Tensor, list[tuple[int, int]]]:
        with attn.Members(transport, range(len(runs[0])), rank) as group:
            split = attn.Split(group, runs, exchange)
            places = [(index, p) for index, sharded in enumerate(runs) for p in attn.positions(sharded[rank])]
            assert split.positions == [position for _, position in places]
            tokens = torch.stack([sequences[index][position] for index, position in places])
            positions = torch.tensor([split.positions])
            return model(tokens[None], position_ids=positions, use_cache=False, split=split).logits[0], places

    results = run_members(len(runs[0]), member)
    for result in results:
        assert not isinstance(result, Exception), result
    return results


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "mistral-window", "gemma2", "qwen3", "phi3", *SINKS])
@torch.no_grad()
def test_logits_are_those_of_one_process(load: Callable[..., nn.Module], name: str) -> None:
    sequences, one = [ids(150), ids(41, 1)], load(name, "eager")
    wanted = [one(sequence[None]).logits[0] for sequence in sequences]
    cases = [
        ("zigzag", attn.ring_kv, 3),
        ("striped", attn.ring_q, 2),
        ("zigzag", attn.alltoall, 4),
        ("contiguous", attn.gather_kv, 2),
        ("contiguous", attn.chain, 3),
    ]
    many = load(name, attn.register())
    for layout, exchange, size in cases:
        runs = [shard_span(layout, 0, len(sequence), size, align=8) for sequence in sequences]
        for logits, places in split_logits(many, sequences, runs, exchange):
            rows = torch.stack([wanted[index][position] for index, position in places])
            torch.testing.assert_close(logits, rows, rtol=0, atol=3e-5)


def alone(size: int = 1) -> attn.Members:
    """The first member of a group that does not talk."""
    return attn.Members(MemoryTransport(Wires(), 0), range(size), 0)


def refusal(model: nn.Module, **changes: Any) -> str:
    """Return the error of a group of one member that calls the model correctly except for the changes."""
    runs = [shard_span("zigzag", 0, 20, 1)]
    split = attn.Split(alone(), runs)
    arguments = {"input_ids": ids(20)[None], "position_ids": torch.arange(20)[None], "use_cache": False, "split": split}
    with pytest.raises(ValueError) as caught, torch.set_grad_enabled(changes.pop("grad", False)):  # noqa: PT011
        model(**{**arguments, **changes})
    return str(caught.value)


def test_models_and_arguments_with_wrong_results_are_refused(load: Callable[..., nn.Module]) -> None:
    model = load("llama", attn.register())
    padded = torch.ones(1, 20, dtype=torch.int64)
    padded[0, :3] = 0
    assert re.search("got no split", refusal(model, split=None))
    assert re.search("without padding", refusal(model, attention_mask=padded))
    assert re.search(
        "LlamaAttention builds its own attention mask", refusal(model, attention_mask=torch.zeros(1, 1, 20, 20))
    )
    assert re.search(r"split.positions", refusal(model, position_ids=torch.arange(1, 21)[None]))
    assert re.search("a batch of 2 rows", refusal(model, input_ids=ids(40).view(2, 20)))
    assert re.search(r"no_grad", refusal(model, grad=True))
    assert re.search("unknown to longspan .window_size", refusal(model, window_size=3))
    assert re.search("bidirectional", refusal(model, is_causal=False))
    assert re.search("21 keys for 1 tokens: .*use_cache=False", refusal(model, **continued(model)))
    model.model.layers[0].self_attn.config.layer_types = ["chunked_attention"] * 3
    assert re.search("of type chunked_attention", refusal(model))
    model.model.layers[0].self_attn.config.attention_chunk_size = 8  # its code makes no mask of chunks
    assert re.search("of type chunked_attention", refusal(model))
    assert re.search("counts positions by its cache", refusal(load("llama4", attn.register())))


@torch.no_grad()
def continued(model: nn.Module) -> dict[str, Any]:
    """A second call that goes on after a cache."""
    split = attn.Split(alone(), [shard_span("zigzag", 0, 20, 1)])
    first = model(ids(20)[None], position_ids=torch.arange(20)[None], use_cache=True, split=split)
    return {"past_key_values": first.past_key_values, "input_ids": ids(1)[None], "position_ids": torch.tensor([[20]])}


def test_members_disagree_on_some_rope(load: Callable[..., nn.Module]) -> None:
    """Fine as long as all are on one side of the switch."""
    one, many = load("llama-longrope", "eager"), load("llama-longrope", attn.register())
    sequence = ids(2 * SWITCH_LENGTH)
    for runs, length in (
        (shard_span("zigzag", 0, SWITCH_LENGTH, 2), SWITCH_LENGTH),
        (shard_span("zigzag", 0, 128, 2), 128),
    ):
        with torch.no_grad():
            wanted = one(sequence[None, :length]).logits[0]
        for logits, places in split_logits(many, [sequence[:length]], [runs], attn.ring_kv):
            rows = torch.stack([wanted[position] for _, position in places])
            torch.testing.assert_close(logits, rows, rtol=0, atol=3e-5)
    with pytest.raises(AssertionError, match=r"longrope changes after 64 tokens.*\[50, 100\]"):
        split_logits(many, [sequence[:100]], [shard_span("contiguous", 0, 100, 2)], attn.ring_kv)


def test_splits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"\[shard_span\(...\)\]"):
        attn.Split(alone(2), shard_span("zigzag", 0, 20, 2))
    with pytest.raises(ValueError, match="3 members, but the group has 2"):
        attn.Split(alone(2), [shard_span("zigzag", 0, 20, 3)])
    with pytest.raises(ValueError, match=r"members \[1, 2\] have no tokens"):
        attn.Split(alone(3), [shard_span("single", 0, 5, 3)])
