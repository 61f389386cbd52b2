"""An attention function that makes an unmodified Hugging Face model context-parallel.

Each member calls the model with its own tokens and with `split=Split(...)`, which transformers' models hand down to
their attention: nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from longspan.attn.library import Members, checked_runs, ring_kv
from longspan.attn.spec import as_output, read_spec, rope_dicts
from longspan.core.runs import SpanShards, num_tokens, positions

_NAME = "longspan_split"


def register() -> str:
    """Makes the attention known to transformers; returns its name, for `from_pretrained(attn_implementation=...)`.

    The model is called with `input_ids [1, tokens]` and `position_ids [1, tokens]` of this member's tokens,
    `use_cache=False`, `split=Split(...)`, and no attention mask, under `torch.no_grad()`. Its logits are those of these
    tokens.

    The model must be causal, with full or sliding-window attention and rotary embeddings on which members agree; all
    its other layers must treat tokens one by one.

    Raises:
        ValueError: by the model's call, when it or an argument asks for what is not computed.
    """
    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, _no_mask)
    return _NAME


@dataclass(frozen=True)
class Split:
    """The split of a model call's tokens between the members of a group.

    Attributes:
        group: what `join` returned.
        runs: for each sequence the positions of every member's tokens. The call's tokens are this member's, one
            sequence after the other.
        exchange: `ring_kv` or another exchange; `functools.partial(gather_kv, dense=True)`, say.

    Raises:
        ValueError: when the runs are not those of whole sequences, or a member has no token at all, since models cannot
            be called without.
    """

    group: Members
    runs: Sequence[SpanShards]
    exchange: Callable[..., Tensor] = ring_kv

    def __post_init__(self) -> None:
        checked_runs(self.runs, self.runs, self.group.size)
        idle = [m for m in range(self.group.size) if not any(num_tokens(shard_span[m]) for shard_span in self.runs)]
        if idle:
            raise ValueError(f"members {idle} have no tokens, but models need some: split between fewer members")

    @property
    def positions(self) -> list[int]:
        """The positions of this member's tokens, for `position_ids`."""
        return [position for shard_span in self.runs for position in positions(shard_span[self.group.rank])]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    split: Split | None = None,
    position_ids: Tensor | None = None,
    **arguments: object,
) -> tuple[Tensor, None]:
    if split is None:
        raise ValueError(f"{type(module).__name__} got no split: call the model with split=longspan.attn.Split(...)")
    spec = read_spec(module, query, key, value, attention_mask, **arguments)  # type: ignore[arg-type]  # checked there
    if query.shape[0] != 1:
        raise ValueError(f"a batch of {query.shape[0]} rows: pack sequences into one, and give Split the runs of each")
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"{key.shape[2]} keys for {query.shape[2]} tokens: call the model with use_cache=False")
    if getattr(module, "layer_idx", 0) == 0:
        _check_rope(module, split.runs)
        _check_positions(position_ids, split.positions)
    options = {"scale": spec.scale, "window": spec.window, "softcap": spec.softcap}
    return as_output(split.exchange(split.group, query[0], key[0], value[0], split.runs, **options))


def _check_rope(module: nn.Module, runs: Sequence[SpanShards]) -> None:
    """Refuses kinds of RoPE that go by the largest position of a call, since each member has another one."""
    for rope in rope_dicts(getattr(module, "config", None)):
        if rope.get("rope_type") == "dynamic":
            raise ValueError("dynamic RoPE differs between members: choose yarn, or none")
        if rope.get("rope_type") == "longrope":
            length = rope["original_max_position_embeddings"]
            tops = [
                max(run.stop for shard_span in runs for run in shard_span[member]) for member in range(len(runs[0]))
            ]
            if min(tops) <= length < max(tops):
                raise ValueError(
                    f"longrope changes after {length} tokens, but the members' tokens end at {tops}: all must lie on "
                    "one side; shard_span('striped', ..., align=16) lets them end closely"
                )


def _check_positions(position_ids: Tensor | None, wanted: Sequence[int]) -> None:
    """Checks positions if the model hands them down, as nearly all do."""
    if position_ids is None:
        return
    if position_ids.shape[-1] != len(wanted) or (position_ids != torch.tensor(wanted).to(position_ids)).any():
        raise ValueError("position_ids are not those of this member's tokens: give torch.tensor([split.positions])")


def _no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: object) -> None:
    """Stands for the function that builds a mask: exchanges know what is seen from the runs."""
    if use_vmap or (attention_mask is not None and not attention_mask.all()):
        raise ValueError("attention masks are not supported: give tokens without padding, and no attention_mask")
